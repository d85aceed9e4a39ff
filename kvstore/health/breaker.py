"""A breaker: a tier that errs or stalls is left alone, and tried again later.

               failures in a row, or a job that hangs
      CLOSED ────────────────────────────────────────▶ OPEN ◀──┐
         ▲                                               │     │ it failed, or hangs too:
         │ the probe came back                 pause over│     │ a longer pause
         └──────────────────────────────── PROBING ◀─────┘─────┘

A job hangs when nothing came back for `stall_s`, and as long besides as the bytes of the largest one under way take at the least
speed that is acceptable. The time runs from when a thread, or a request, really begins a job. One that hangs while others come
back is *late* after half a stall: no job is begun behind it, so that nothing comes back any more.

There is one for the loads of a tier and one for its stores: a disk that cannot be written
is still read. While it is not closed only a probe uses the tier in that direction;
what waits is answered at the trip. A trip costs those who wait one `stall_s` at most, and
those who come later nothing.

A job that hangs keeps its thread, and its memory, until it comes back. Nothing is probed
before every job from before the trip is back: until then the tier is as sick as it was.
Pauses double from trip to trip, up to a limit, and start small again after a calm time.

Called from the engine's thread, but for `start`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.constants import BREAKER_PAUSE_JITTER, require
from kvstore.ledger.latencies import Histogram
from kvstore.protocol import answers

# Of a disk that works: the time for a job's bytes, before it counts as hanging.
NVME_LEAST_BYTES_PER_S = 32e6
LATE_SHARE = 0.5  # of the stall: nothing is begun behind what takes so long
BREAKER_FAILURES_MAX = 3  # in a row: then it trips
BREAKER_PAUSE_S_MIN = 1.0  # before the first probe; doubles with each trip or failed probe
BREAKER_PAUSE_S_MAX = 60.0  # between two probes
BREAKER_CALM_S = 60.0  # closed for so long: the next pause is the shortest one again
require(BREAKER_PAUSE_S_MIN <= BREAKER_PAUSE_S_MAX, "pauses grow")

CLOSED, OPEN, PROBING = "closed", "open", "probing"


@dataclass(slots=True, eq=False)
class Job:
    """One piece of I/O: submitted, started by a thread, ended."""

    size_bytes: int
    begun_s: float
    started_s: float | None = None  # a job that waits for a thread does not hang


class Breaker:
    """`changed` is called after every change of state. stall_s: how long a job without bytes may take. directory: where the
    tier lies, "" for a bucket."""

    def __init__(
        self,
        name: str,
        stall_s: float,
        clock: Callable[[], float],
        changed: Callable[[], None],
        chance: random.Random | None = None,
        least_bytes_per_s: float = NVME_LEAST_BYTES_PER_S,
        directory: str = "",
    ) -> None:
        self.name = name
        self._directory = directory
        self.state = CLOSED
        self.trips = 0
        self.reason = ""  # of the last trip
        self.times = Histogram()  # of every job that came back, from when it was submitted
        self._stall_s = stall_s
        self._least_bytes_per_s = least_bytes_per_s
        self._clock = clock
        self._changed = changed
        self._chance = chance or random.Random()
        self._jobs: dict[Job, None] = {}
        self._came_back_s = clock()  # the last one that did
        self._probe: Job | None = None
        self._failures = 0  # in a row
        self._pauses = 0  # since the last calm time
        self._retry_at_s = 0.0
        self._closed_at_s = clock()

    @property
    def closed(self) -> bool:
        return self.state == CLOSED

    @property
    def jobs(self) -> int:
        """How many are under way."""
        return len(self._jobs)

    def begin(self, size_bytes: int, probe: bool = False) -> Job:
        """A job is submitted; exactly one `end` must follow. A probe needs `may_probe`."""
        job = Job(size_bytes, self._clock())
        self._jobs[job] = None
        if probe:
            assert self.state == OPEN, "a probe of a breaker that is not open"
            self._probe = job
            self._become(PROBING)
        return job

    def start(self, job: Job) -> None:
        """Its thread begins now; called by that thread. What starts again has not been away."""
        if job.started_s is None:
            job.started_s = self._clock()

    def end(self, job: Job, is_well: bool) -> bool:
        """It came back. is_well: the tier did what it was asked. True if it came back in time."""
        del self._jobs[job]
        now_s = self._clock()
        self.times.add(now_s - job.begun_s)
        self._came_back_s = now_s
        in_time = self.state == CLOSED or job is self._probe
        if job is self._probe:
            self._probe = None
            if is_well:
                self._close()
            else:
                self._open("a probe failed")
        elif self.state == CLOSED:
            self._failures = 0 if is_well else self._failures + 1
            if self._failures >= BREAKER_FAILURES_MAX:
                self._trip(f"{self._failures} failures in a row")
        return in_time

    def look(self) -> None:
        """Trip if a job hangs."""
        if not self._jobs or self.state == OPEN:
            return
        age_s = min(self.oldest_s(), self._clock() - self._came_back_s)
        if age_s < self._stall_s + max(job.size_bytes for job in self._jobs) / self._least_bytes_per_s:
            return
        if self.state == PROBING:
            self._probe = None  # its end says nothing any more
            self._open(f"a probe did not come back for {age_s:.1f} s")
        else:
            self._trip(f"a job did not come back for {age_s:.1f} s")

    @property
    def is_late(self) -> bool:
        """Whether the job that was begun first takes long: it may hang, or is overtaken by others."""
        first = next(iter(self._jobs), None)
        if first is None or first.started_s is None:
            return False
        return self._clock() - first.started_s > LATE_SHARE * self._stall_s

    def oldest_s(self) -> float:
        """How long the oldest job has been with its thread."""
        now_s = self._clock()
        return max((now_s - job.started_s for job in self._jobs if job.started_s is not None), default=0.0)

    def may_probe(self) -> bool:
        """Whether the pause is over, and no job from before hangs."""
        return self.state == OPEN and not self._jobs and self._clock() >= self._retry_at_s

    def close(self) -> None:
        """There is nothing left to probe with: the next job will show."""
        if self.state == OPEN:
            self._close()

    def retry_in_s(self) -> float:
        return max(0.0, self._retry_at_s - self._clock()) if self.state == OPEN else 0.0

    def status(self) -> answers.Breaker:
        """The fields are documented in docs/cli.md."""
        return {
            "name": self.name,
            "directory": self._directory,
            "state": self.state,
            "trips": self.trips,
            "reason": self.reason,
            "retry_in_s": round(self.retry_in_s(), 3),
            "jobs": self.jobs,
            "oldest_job_s": round(self.oldest_s(), 3),
        }

    # -- changes of state --

    def _trip(self, reason: str) -> None:
        if self._clock() - self._closed_at_s > BREAKER_CALM_S:
            self._pauses = 0
        self.trips += 1
        self._open(reason)

    def _open(self, reason: str) -> None:
        self.reason = reason
        self._failures = 0
        pause_s = min(BREAKER_PAUSE_S_MAX, BREAKER_PAUSE_S_MIN * 2.0**self._pauses)
        self._pauses = min(self._pauses + 1, 30)
        self._retry_at_s = self._clock() + pause_s * (1 + self._chance.random() * BREAKER_PAUSE_JITTER)
        self._become(OPEN)

    def _close(self) -> None:
        self._failures = 0
        self._closed_at_s = self._clock()
        self._become(CLOSED)

    def _become(self, state: str) -> None:
        self.state = state
        self._changed()
