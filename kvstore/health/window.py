"""The window of a source: how many bytes may be under way to it, so that each job is back in about a second.

    job was away  │ shorter than wanted, and there was more to ask for ─▶ grows by what it brought, several times
                  │ longer ─▶ shrinks to what would have been back in time; once for all that were under way then
                  ╰ wanted: a second, and as long as the quickest job lately: what cannot be helped

So the window grows with each round trip as far as there is time left, and stays where jobs take as long as they may. Nothing is known
before the first job: it is alone, and one at a time may be begun always. How a source shares its bandwidth does not matter: a job
that others overtake counts as well as those.

The stall bounds both parts of what is wanted, so that a source which goes on as it did is never slow enough to hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.constants import GIB, require
from kvstore.health.breaker import LATE_SHARE, Job

FLIGHT_S = 1.0  # what comes in within this time, and within that of the quickest job, may be under way
FLIGHT_STALL_SHARE = 0.25  # of the stall: the most that either of the two times counts for
WINDOW_GROWTH_MAX = 8.0  # times of what came back: so fast it grows while jobs are much quicker
QUICKEST_SHARE = 0.01  # of a slower job in what the quickest one takes: an old one does not count for ever
LOADS_UNDER_WAY_BYTES_MAX = 1 * GIB  # however fast the tier is
require(
    2 * FLIGHT_STALL_SHARE <= LATE_SHARE < 1,
    "what is under way is over before anything is late, let alone hangs",
)


class Window:
    """Called from the engine's thread only; clock in seconds."""

    def __init__(self, stall_s: float, clock: Callable[[], float]) -> None:
        self.size_bytes = 0.0  # so much may be under way, and one job more
        self.under_way_bytes = 0
        self._stall_share_s = FLIGHT_STALL_SHARE * stall_s
        self._clock = clock
        self._quickest_s = math.inf
        self._jobs: dict[Job, int] = {}  # with what was under way when it began, its own bytes included
        self._shrunk_s = -math.inf
        self._is_full = False

    def has_room(self, share: float = 1.0) -> bool:
        """Whether one more job may be begun, for which something waits. share: of the window that it may use."""
        self._is_full = bool(self._jobs) and self.under_way_bytes >= share * self.size_bytes
        return not self._is_full

    def begin(self, job: Job) -> None:
        """Exactly one `end` must follow."""
        self.under_way_bytes += job.size_bytes
        self._jobs[job] = self.under_way_bytes

    def end(self, job: Job, came_bytes: int) -> None:
        """It came back, and brought so much."""
        before_bytes = self._jobs.pop(job)
        self.under_way_bytes -= job.size_bytes
        if not came_bytes:
            return
        now_s = self._clock()
        taken_s = now_s - job.begun_s
        self._quickest_s = min(taken_s, self._quickest_s + QUICKEST_SHARE * (taken_s - self._quickest_s))
        wanted_s = min(FLIGHT_S, self._stall_share_s) + min(self._quickest_s, self._stall_share_s)
        oldest = next(iter(self._jobs), job)
        if now_s - oldest.begun_s > taken_s:  # overtaken by this one
            job, taken_s, before_bytes = oldest, now_s - oldest.begun_s, self._jobs[oldest]
        if taken_s <= wanted_s:
            growth = self._is_full * min(WINDOW_GROWTH_MAX, wanted_s / taken_s - 1) if taken_s else 0.0
            grown_bytes = self.size_bytes + growth * came_bytes
            self.size_bytes = min(LOADS_UNDER_WAY_BYTES_MAX, max(before_bytes, grown_bytes))
        elif job.begun_s >= self._shrunk_s:
            self._shrunk_s = now_s
            self.size_bytes = min(self.size_bytes, before_bytes * wanted_s / taken_s)
