"""How fast a tier is, measured from its own work.

    jobs    ├────┤├──────┤         ├──┤
    busy    ├────────────┤         ├──┤     stretches: so many bytes took so long

    predicted time to load n bytes = wait for what is queued + latency + n / throughput

Latency and throughput are those that fit the stretches best: least squares of the relative
errors, so that small loads count as much as large ones, newer ones more than older ones. What
was seen before a sudden change is scaled towards what is seen now instead of being averaged
with it. A stretch that goes on is cut every now and then; what follows a cut has no latency.
Before anything is measured every load is predicted to take no time: the first loads are the
measurement.

A job that is late makes those behind it wait at least as long again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvstore.constants import require
from kvstore.health.breaker import Job

SPEED_KEPT = 0.8  # weight of earlier stretches with each new one
SPEED_SUDDEN = 2.0  # times longer or shorter than predicted: then the tier has changed
SPEED_SHARE = 0.5  # of a sudden change, in its logarithm, that is believed at once
SPEED_SHARE_PROBE = 0.8  # the same, where the speed was measured on purpose
SPEED_SIMILAR = 1e-3  # stretches whose sizes differ less than this do not separate latency from flow
SPEED_FLOW_LEAST = 0.05  # of the time per byte of a typical stretch: bytes never flow for nothing
SPEED_STRETCH_JOBS_MAX = 16  # jobs after which a busy stretch counts, even if it goes on
# That such a stretch takes at least: jobs that end together came in all of the time before.
SPEED_STRETCH_S_MIN = 0.05
require(0 < SPEED_SHARE <= SPEED_SHARE_PROBE <= 1, "a probe counts at least as much as a load")


class TierSpeed:
    """Latency and throughput of one tier. Called from the engine's thread only; clock in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.latency_s = 0.0
        self.bytes_per_s = 0.0  # 0: not known
        self.waiting_bytes = 0  # asked for and not there yet
        self.samples = 0
        self._clock = clock
        self._fit = _Fit()
        self._jobs: dict[Job, None] = {}
        self._begun_s = 0.0  # of the stretch
        self._from_idle = True  # it began on an idle tier
        self._stretch_bytes = 0
        self._stretch_jobs = 0

    def wait(self, size_bytes: int) -> None:
        """So many more bytes are to be loaded; `arrive` takes them off again."""
        self.waiting_bytes += size_bytes

    def arrive(self, size_bytes: int) -> None:
        self.waiting_bytes -= size_bytes

    def begin(self, job: Job) -> None:
        """A load was submitted; `end` or `drop` must follow."""
        if not self._jobs:
            self._new_stretch(job.begun_s, from_idle=True)
        self._jobs[job] = None

    def end(self, job: Job, size_bytes: int, probe: bool = False) -> None:
        """It brought so many bytes."""
        if job not in self._jobs:
            return
        del self._jobs[job]
        self._stretch_bytes += size_bytes
        self._stretch_jobs += 1
        now_s = self._clock()
        taken_s = now_s - self._begun_s
        if self._jobs and (self._stretch_jobs < SPEED_STRETCH_JOBS_MAX or taken_s < SPEED_STRETCH_S_MIN):
            return
        if taken_s > 0 and self._stretch_bytes:
            self._note(taken_s, SPEED_SHARE_PROBE if probe else SPEED_SHARE)
        self._new_stretch(now_s, from_idle=False)

    def drop(self) -> None:
        """What is under way says nothing about the speed: a job hangs, or failed."""
        self._jobs.clear()

    def ahead_s(self, behind_bytes: int = 0) -> float:
        """How long a load that is asked for now takes until its bytes flow: queue and latency. behind_bytes: of the
        queue, what comes later."""
        return max(self.flow_s(self.waiting_bytes - behind_bytes), self._late_s()) + self.latency_s

    def flow_s(self, size_bytes: int) -> float:
        """How long so many bytes flow; 0 while nothing is known."""
        return size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def load_s(self, size_bytes: int, behind_bytes: int = 0) -> float:
        """Predicted time from now until so many bytes are there."""
        return self.ahead_s(behind_bytes) + self.flow_s(size_bytes)

    def reach_bytes(self, within_s: float, behind_bytes: int = 0) -> float:
        """How many bytes that are asked for now are there within so long; any number while nothing is known."""
        if not self.bytes_per_s:
            return math.inf
        return max(0.0, within_s - self.ahead_s(behind_bytes)) * self.bytes_per_s

    def _late_s(self) -> float:
        """How much longer than predicted the oldest job has taken."""
        if not self._jobs:
            return 0.0
        oldest = next(iter(self._jobs))
        expected_s = self.latency_s + self.flow_s(sum(job.size_bytes for job in self._jobs))
        return max(0.0, self._clock() - oldest.begun_s - expected_s)

    def _new_stretch(self, begun_s: float, from_idle: bool) -> None:
        self._begun_s, self._from_idle = begun_s, from_idle
        self._stretch_bytes = self._stretch_jobs = 0

    def _note(self, taken_s: float, share: float) -> None:
        size_bytes = self._stretch_bytes
        if self.bytes_per_s:
            predicted_s = self.flow_s(size_bytes) + (self.latency_s if self._from_idle else 0.0)
            off = taken_s / predicted_s
            if not 1 / SPEED_SUDDEN < off < SPEED_SUDDEN:
                self._fit.scale(off**share)
        self._fit.add(size_bytes, taken_s, self._from_idle)
        self.latency_s, s_per_byte = self._fit.solve()
        self.bytes_per_s = 1 / s_per_byte
        self.samples += 1


class _Fit:
    """Sums of the normal equations for: 1 = latency / taken + seconds per byte × bytes / taken."""

    def __init__(self) -> None:
        self._ll = self._lb = self._bb = self._l = self._b = 0.0

    def scale(self, factor: float) -> None:
        """As if everything so far had taken so many times as long."""
        self._ll, self._lb, self._bb = (x / factor**2 for x in (self._ll, self._lb, self._bb))
        self._l, self._b = self._l / factor, self._b / factor

    def add(self, size_bytes: int, taken_s: float, with_latency: bool) -> None:
        latency, flow = (1 / taken_s if with_latency else 0.0), size_bytes / taken_s
        self._ll = self._ll * SPEED_KEPT + latency * latency
        self._lb = self._lb * SPEED_KEPT + latency * flow
        self._bb = self._bb * SPEED_KEPT + flow * flow
        self._l = self._l * SPEED_KEPT + latency
        self._b = self._b * SPEED_KEPT + flow

    def solve(self) -> tuple[float, float]:
        """(latency in seconds, seconds per byte), neither negative."""
        alone = self._b / self._bb  # seconds per byte, were there no latency
        apart = self._ll * self._bb - self._lb**2
        if apart <= SPEED_SIMILAR * self._ll * self._bb:
            return 0.0, alone  # all of one size: nothing says how much of it is latency
        s_per_byte = max((self._ll * self._b - self._lb * self._l) / apart, SPEED_FLOW_LEAST * alone)
        latency_s = (self._l - s_per_byte * self._lb) / self._ll
        return (latency_s, s_per_byte) if latency_s > 0 else (0.0, alone)
