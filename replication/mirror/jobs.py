"""Jobs: the packs that a mirror has to copy, and in which order.

    add ─▶ waiting, by rule ─▶ take: highest priority, oldest first ─▶ done
               ▲   the rate of its rule allows it │
               ╰──── pause ◀──── failing ◀────────┴ retry
    add ─▶ renewals ─▶ take_renewal: before all of these, at no rate

A renewal copies nothing: home has the pack, and the source says that it lives longer. Behind copies it would come when the
life at home is over. A job stays until it is done, and a pack has one at most. Nothing here waits or asks anybody; times are
given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from replication.formats.rules import Rule
from replication.mirror.watermark import Hold

DONE_KEPT_MAX: Final = 1024  # behind one that is older and fails

_Entry = tuple[float, int, "Job"]  # what it is ordered by, a number that no other job has, the job


@dataclass(slots=True, eq=False)
class Job:
    """A pack to copy. since_s: unix seconds, before which it was not announced, 0: not known. holds: what waits for it. is_renewal: home has it,
    and knows a shorter life. is_put: it is at home, and not announced there. missing_since_s: loop's time since when the source
    does not have it."""

    pack_id: bytes
    size_bytes: int
    rule: Rule
    since_s: float
    is_renewal: bool = False
    number: int = 0
    holds: list[Hold] = field(default_factory=list)
    is_put: bool = False
    is_done: bool = False
    attempts: int = 0
    missing_since_s: float | None = None
    failure: str = ""


class Jobs:
    """The jobs of one source. paces: by rule, when the next copy may begin by its rate; shared with other sources."""

    def __init__(self, paces: dict[Rule, float]) -> None:
        self._paces = paces
        self._all: dict[bytes, Job] = {}
        self._waiting: dict[Rule, list[_Entry]] = {}
        self._renewals: deque[Job] = deque()
        self._resting: list[_Entry] = []  # by the time at which they are due
        self._by_age: list[_Entry] = []
        self._failing: dict[bytes, Job] = {}  # in the order in which they began to
        self._longer: dict[bytes, Job] = {}  # whose packs are at home, with shorter lives than they have
        self._count = 0
        self.left_bytes = 0  # of all of them

    def __len__(self) -> int:
        return len(self._all)

    def get(self, pack_id: bytes) -> Job | None:
        return self._all.get(pack_id)

    def add(self, job: Job) -> None:
        assert job.pack_id not in self._all
        self._count += 1
        job.number = self._count
        self._all[job.pack_id] = job
        self.left_bytes += job.size_bytes
        heappush(self._by_age, (job.since_s, job.number, job))
        self._wait(job)

    def hasten(self, jobs: Iterable[Job], rule: Rule) -> None:
        """Have those of these jobs done by this rule whose own has a lower priority. Takes 60 ms where JOBS_MAX wait."""
        hastened = {job for job in jobs if job.rule.priority < rule.priority}
        for own in {job.rule for job in hastened}:
            waiting = self._waiting.get(own, [])
            left = [entry for entry in waiting if entry[2] not in hastened]
            moved = [entry[2] for entry in waiting if entry[2] in hastened]
            heapify(left)
            self._waiting[own] = left
            for job in moved:  # the others are under way, or rest after a failure
                job.rule = rule
                self._wait(job)
        for job in hastened:
            job.rule = rule

    def heard(self, job: Job, since_s: float, is_here: bool = False) -> None:
        """A job's pack was announced, perhaps earlier than was known. is_here: home has it, and lacks a longer life only."""
        if is_here:
            self._longer[job.pack_id] = job
        if since_s < job.since_s:
            job.since_s = since_s
            heappush(self._by_age, (since_s, job.number, job))

    def gone(self, job: Job) -> None:
        """Home has its pack no more: it is copied."""
        job.is_renewal = False
        self._longer.pop(job.pack_id, None)

    def rouse(self, now_s: float) -> None:
        """Those that have rested long enough wait again."""
        while self._resting and self._resting[0][0] <= now_s:
            self._wait(heappop(self._resting)[2])

    def take(self, now_s: float, room_bytes: int) -> Job | None:
        """The job to begin now; None if none can, or the one whose turn it is has more bytes than there is room for.

        now_s: loop's time.
        """
        self.rouse(now_s)
        rule = self._next_rule(now_s)
        if rule is None:
            return None
        job = self._waiting[rule][0][2]
        if job.size_bytes > room_bytes and not job.is_put:
            return None
        heappop(self._waiting[rule])
        if rule.bytes_per_s and not job.is_put:
            self._paces[rule] = max(now_s, self._ready_s(rule)) + job.size_bytes / rule.bytes_per_s
        return job

    def take_renewal(self) -> Job | None:
        """The next one; None without any."""
        return self._renewals.popleft() if self._renewals else None

    def due_s(self) -> float | None:
        """When time alone brings the next job, by the loop's clock; None: never."""
        times = [self._ready_s(rule) for rule, jobs in self._waiting.items() if jobs]
        if self._resting:
            times.append(self._resting[0][0])
        return min(times, default=None)

    def retry(self, job: Job, due_s: float, failure: str) -> None:
        """A job that was taken has failed; it waits until then."""
        job.attempts += 1
        job.failure = failure
        self._failing[job.pack_id] = job
        heappush(self._resting, (due_s, job.number, job))

    def done(self, job: Job) -> None:
        job.is_done = True
        del self._all[job.pack_id]
        self.left_bytes -= job.size_bytes
        self._failing.pop(job.pack_id, None)
        self._longer.pop(job.pack_id, None)
        if len(self._by_age) > 2 * len(self._all) + DONE_KEPT_MAX:
            self._by_age = [(job.since_s, job.number, job) for job in self._all.values()]
            heapify(self._by_age)

    @property
    def failing(self) -> int:
        """How many failed at their last attempt."""
        return len(self._failing)

    def oldest_failing(self, limit: int) -> Iterable[Job]:
        return islice(self._failing.values(), limit)

    def oldest_s(self) -> float | None:
        """Since when the oldest one is announced, unix seconds; None without any."""
        while self._by_age and self._by_age[0][2].is_done:
            heappop(self._by_age)
        return self._by_age[0][0] if self._by_age else None

    def longer_s(self) -> float | None:
        """The same of those whose packs are at home, and live longer than is known there."""
        return min((job.since_s for job in self._longer.values()), default=None)

    def _wait(self, job: Job) -> None:
        if job.is_renewal:
            self._renewals.append(job)
            return
        heappush(self._waiting.setdefault(job.rule, []), (job.since_s, job.number, job))

    def _next_rule(self, now_s: float) -> Rule | None:
        """Whose turn it is."""
        rules = [rule for rule, jobs in self._waiting.items() if jobs and self._ready_s(rule) <= now_s]
        return min(rules, key=lambda rule: (-rule.priority, self._waiting[rule][0][:2]), default=None)

    def _ready_s(self, rule: Rule) -> float:
        return self._paces.get(rule, 0.0)
