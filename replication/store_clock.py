"""The store's clock: the one that all processes of a region share, as far as one of them knows it.

    put, then its time read ─▶ it was put between two moments of ours ─╮
    news: not there yet, then there ─▶ the same, for nothing ──────────┴▶ bounds ─▶ our own clock, held within them

Lives, watches and leases are in it. Where this machine's clock is right, nothing changes; where it is wrong, ahead or behind, or is set
while this runs, what is asked here is right all the same. Bounds are kept against a clock that nobody sets and that counts while a
machine sleeps. They widen slowly, as clocks drift; what contradicts them makes them anew: the store's clock was set, or this machine
stood still and does not know it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from replication.waits import passed_s

RESOLUTION_S: Final = 1.0  # in which stores say when something was put, cut off
DRIFT: Final = 2e-4  # of a machine's clock
SETTLE_S: Final = 3600.0  # after the store's clock was set nothing is judged by it: it may be set back

log = logging.getLogger("replication.store_clock")


class StoreClock:
    """Called, it says unix seconds by the store's clock; by our own while nothing is known. From any thread; `learn` from its loop's."""

    def __init__(self, own: Callable[[], float] = time.time, skew_s: float = float("inf")) -> None:
        """own: this machine's, unix seconds. skew_s: by which they may differ."""
        self._own = own
        self._skew_s = skew_s
        self._loop = asyncio.get_running_loop()
        # How far the store is ahead of `passed_s` at least and at most, and when that was learned.
        self._bounds = (float("-inf"), float("inf"), 0.0)
        self._settled_s = float("-inf")

    def __call__(self) -> float:
        low, high, passed = self._now()
        return min(max(self._own(), passed + low), passed + high)

    @property
    def is_known(self) -> bool:
        low, high, _ = self._bounds
        return high - low < float("inf")

    @property
    def over_s(self) -> float:
        """What has ended by then is over: now. 0.0 while nothing is known, when nothing is over yet: what is passed by is lacked for good."""
        return self() if self.is_known else 0.0

    @property
    def off_s(self) -> float:
        """By how much this machine's clock is ahead of it, at least; negative: behind."""
        return self._own() - self()

    @property
    def is_off(self) -> bool:
        """Whether that is more than it may be."""
        return abs(self.off_s) > self._skew_s

    @property
    def is_sure(self) -> bool:
        """Whether something may be deleted by it."""
        return self.is_known and not self.is_off and self.settles_in_s == 0.0

    @property
    def settles_in_s(self) -> float:
        """Nothing is judged by it for so long: it was set."""
        return max(0.0, self._settled_s - passed_s(self._loop))

    def theirs(self, at_s: int) -> int:
        """A moment of our own clock by the store's; 0, which is none, stays."""
        return max(1, round(at_s - self.off_s)) if at_s else 0

    def ours(self, at_s: int) -> int:
        """A moment of the store's clock by our own."""
        return max(1, round(at_s + self.off_s)) if at_s else 0

    def learn(self, modified_s: float, after_s: float, before_s: float | None = None) -> None:
        """Something was put at this time of the store, between these moments, as `passed_s`; the latter is now if it is not said."""
        low, high, now_s = self._now()
        at_least = modified_s - (now_s if before_s is None else before_s)
        at_most = modified_s + RESOLUTION_S - after_s
        if at_least > high or at_most < low:
            step_s = max(at_least - high, low - at_most)
            if step_s > self._skew_s:
                log.warning("the store's clock was set by %.0f s: nothing is deleted for an hour", step_s)
                self._settled_s = now_s + SETTLE_S
            low, high = float("-inf"), float("inf")
        self._bounds = max(low, at_least), min(high, at_most), now_s

    def _now(self) -> tuple[float, float, float]:
        """Bounds, and the moment at which they are these."""
        low, high, learned_s = self._bounds
        now_s = passed_s(self._loop)
        drift_s = DRIFT * (now_s - learned_s)
        return low - drift_s, high + drift_s, now_s


def over_by(clock: Callable[[], float]) -> Callable[[], float]:
    """`over_s` of a clock of a store; any other is always known."""
    return (lambda: clock.over_s) if isinstance(clock, StoreClock) else clock
