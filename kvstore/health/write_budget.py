"""What may be written to NVMe, within so many bytes a day.

    offered ──▶ worth enough? ──▶ allowance left? ──▶ promised ──▶ written: spent
                    ▲                  ▲                  └──▶ never written: given back
                    │                  └ fills at the budget's rate, holds WRITE_BUDGET_BURST_S of it
                    └ the emptier the allowance, the more a block must be worth

Flash wears out by writing. Most blocks are used once (three of four, on recorded
conversations), so a budget is best spent on those most likely to be used again. What that is
worth says the policy (`Policies.worth`, up to 1); where the line is drawn follows from the
traffic: a full allowance lets in everything, an empty one only what is sure to be used again, and
between them it settles where just as much is let in as the budget pays for. A fixed rule, such as
"on second sight", helps one trace and ruins another. A histogram of the worths offered lately was
tried too: it spends the budget no better.

Between its admission and its write a block waits, for long while a breaker is open; it may leave
before. So bytes are promised first, and spent when they are written.

A block that is refused stays in DRAM and is offered again when it is used again.

Invariants: within any 24 hours at most the budget is spent, restarts and kills included: what was
spent is remembered by the hour, and nothing is promised that is not on disk as spent
already (`kvstore.health.write_budget_file`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvstore.constants import DAY_S, HOUR_S

WRITE_BUDGET_BURST_S = 3600.0  # an unused allowance is saved up this long
WRITE_BUDGET_STRETCH_SHARE = 0.5  # of the burst: so much is written down as spent before it is spent
# So many of the largest records are saved up at least: half of the stretch, and each of them fits into that.
WRITE_BUDGET_RECORDS_MIN = 2 / WRITE_BUDGET_STRETCH_SHARE
# Of the used share of the allowance: with half of it used, a sixteenth of a hit is enough.
WRITE_BUDGET_LINE_POWER = 4

Spent = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Ledger(msgspec.Struct):
    """spent: (when at the latest, bytes). ahead_bytes: to be spent later, at most. written_bytes: spent by
    this daemon until now. On disk times are of the wall clock, which was so far ahead of the machine's own in that boot."""

    spent: list[tuple[float, Spent]]
    ahead_bytes: Spent
    written_bytes: int = 0
    boot_id: str = ""
    wall_ahead_s: float = 0.0


class WriteBudget:
    """Admission to NVMe. `bytes_per_day` 0: everything is let in. Times are those of `clock`.

    record_bytes_max: of what may be offered. spent: what an earlier daemon spent, as (when at the latest, bytes). is_kept: its owner writes
    a `ledger` whenever `wants_keeping`, and calls `kept`; nothing is let in before.
    """

    def __init__(
        self,
        bytes_per_day: int,
        clock: Callable[[], float],
        spent: Sequence[tuple[float, int]] = (),
        is_kept: bool = False,
        record_bytes_max: int = 0,
    ) -> None:
        self._clock = clock
        self._least_bytes = WRITE_BUDGET_RECORDS_MIN * record_bytes_max
        self._set(bytes_per_day)
        self._allowance_bytes = self._burst_bytes
        self._spent = deque(sorted(spent))  # by the hour, oldest first
        self._spent_bytes = sum(size_bytes for _, size_bytes in spent)
        self._promised_bytes = 0  # let in and not written yet
        self._written_bytes = 0  # by this daemon
        self._ahead_bytes: float = 0 if is_kept else math.inf  # on disk as spent, and not spent
        self._then_s = clock()

    def _set(self, bytes_per_day: int) -> None:
        self.bytes_per_day = bytes_per_day
        self._rate = bytes_per_day / (DAY_S + HOUR_S)  # an hour is forgotten as a whole, so late
        self._burst_bytes = max(self._rate * WRITE_BUDGET_BURST_S, self._least_bytes)
        self._stretch_bytes = math.ceil(self._burst_bytes * WRITE_BUDGET_STRETCH_SHARE)

    def set_budget(self, bytes_per_day: int) -> None:
        """Another budget from now on, of a daemon that had one: what it spent counts in this one."""
        self._refill(self._clock())
        self._set(bytes_per_day)
        self._allowance_bytes = min(self._allowance_bytes, self._burst_bytes)

    @property
    def limited(self) -> bool:
        return self.bytes_per_day > 0

    def admits(self, worth: float, size_bytes: int) -> bool:
        """Whether this block is to be written; its bytes are promised then: `wrote` or `waive` must follow."""
        if not self.limited:
            return True
        now_s = self._clock()
        self._refill(now_s)
        if self.allowance_bytes(now_s) < size_bytes or min(worth, 1.0) < self._line():
            return False
        self._promised_bytes += size_bytes
        return True

    def waive(self, size_bytes: int) -> None:
        """So many promised bytes will not be written."""
        self._promised_bytes -= size_bytes

    def wrote(self, size_bytes: int, was_promised: bool = True) -> None:
        """So many bytes were written to NVMe, or may have been."""
        if self.limited:
            self._promised_bytes -= size_bytes * was_promised
            now_s = self._clock()
            self._refill(now_s)
            self._spend(size_bytes, now_s)

    def allowance_bytes(self, now_s: float) -> float:
        """What may be promised now."""
        while self._spent and self._spent[0][0] <= now_s - DAY_S:
            self._spent_bytes -= self._spent.popleft()[1]
        left_bytes = min(self._allowance_bytes, self.bytes_per_day - self._spent_bytes, self._ahead_bytes)
        return left_bytes - self._promised_bytes

    # -- on disk --

    @property
    def wants_keeping(self) -> bool:
        """Whether little is left of what was written ahead."""
        return self.limited and self._ahead_bytes - self._promised_bytes < self._stretch_bytes / 2

    def ledger(self, is_last: bool = False) -> Ledger:
        """What is to be on disk before more is let in. is_last: nothing more will be."""
        ahead_bytes = self._promised_bytes + (0 if is_last else self._stretch_bytes)
        return Ledger(list(self._spent), ahead_bytes, self._written_bytes)

    def kept(self, ledger: Ledger) -> None:
        """It is on disk."""
        self._ahead_bytes = ledger.ahead_bytes - (self._written_bytes - ledger.written_bytes)

    @property
    def spent_bytes(self) -> int:
        """In the last 24 hours, or up to one more."""
        return self._spent_bytes

    @property
    def threshold(self) -> float:
        """The worth from which blocks are let in: hits to be expected of one."""
        self._refill(self._clock())
        return self._line()

    def _line(self) -> float:
        unused_bytes = max(0.0, self._allowance_bytes - self._promised_bytes)
        return (1.0 - unused_bytes / self._burst_bytes) ** WRITE_BUDGET_LINE_POWER

    def _spend(self, size_bytes: int, now_s: float) -> None:
        self._allowance_bytes -= size_bytes
        self._spent_bytes += size_bytes
        self._written_bytes += size_bytes
        self._ahead_bytes -= size_bytes
        if not self._spent or now_s > self._spent[-1][0]:
            self._spent.append((now_s + HOUR_S, 0))  # for all that is spent until then
        until_s, hour_bytes = self._spent[-1]
        self._spent[-1] = (until_s, hour_bytes + size_bytes)

    def _refill(self, now_s: float) -> None:
        elapsed_s, self._then_s = max(0.0, now_s - self._then_s), now_s
        self._allowance_bytes = min(self._burst_bytes, self._allowance_bytes + elapsed_s * self._rate)
