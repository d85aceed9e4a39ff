"""What is wrong with a daemon now: one list, for status, page, metrics, doctor and log alike.

    its own parts, looked at every second ──▶ Problems ──╮
    its regions: buckets, feeds, tasks ──────────────────┴─▶ told: kind, subject, text, since when, how often, what to do

docs/operations.md has every kind. What comes and goes is held back: a queue must be near its limit, or the loop late, for a
while before it is told, and be well for a while before it is not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.constants import MEMORIES, NAMESPACES_MAX
from kvstore.daemon.config.settings import Settings
from kvstore.daemon.config.sizing import enough_slabs
from kvstore.daemon.telling import facts_of
from kvstore.daemon.traffic import Traffic
from kvstore.engine.engine import Engine
from kvstore.engine.queues import queues
from kvstore.ledger.latencies import BOUNDS_S, Histogram
from kvstore.protocol import answers
from kvstore.units import count, exact_bytes, format_bytes, format_duration, percent, plural
from replication.problems import Problem, Problems

QUEUE_NEAR: Final = 0.8  # of its limit
QUEUE_LOOKS: Final = 5  # near it, or away from it
BUDGET_SPENT, BUDGET_CALM = 0.95, 0.9  # of a day's writes: told from here on, until below
LOOP_LOOKS: Final = 60
LOOP_SLOW_S: Final = 0.05  # a turn that is later than this, as far as a histogram knows it
LOOP_SHARE, LOOP_CALM_SHARE = 0.01, 0.005  # of the turns of a minute: told from here on, until below
CLOCK_JUMP_S: Final = 30.0  # by which somebody set the clock, or this machine slept
CLOCK_TOLD_S: Final = 600.0
CLOCK: Final = "system clock"

_FIXES: Final = {
    "web": "who else listens there: ss -ltnp; web.listen chooses another address",
    "grpc": "who else listens there: ss -ltnp; grpc.listen chooses another address",
    "events": "the log has the reason; restart the daemon once that is mended",
    "traces": "look at the collector, or leave traces.endpoint empty",
    "unsaved": "make room in data_dir, or see why it cannot be written: it is tried again by itself",
}


class Parts(NamedTuple):
    """What is looked at. All of it is asked on the engine's thread, and touches no disk. beside: of each process and thread beside
    the daemon, and each file of its state (kind, subject, what is wrong with it, "" for nothing)."""

    engine: Engine
    settings: Settings
    books: Callable[[], Sequence[str]]
    missing: Callable[[], Mapping[str, str]]
    disks: Callable[[], Iterable[Problem]]
    around: Callable[[], Iterable[Problem]]
    beside: Callable[[], Iterable[tuple[str, str, str]]]
    preloads: Callable[[], Sequence[answers.Preload]]
    regions: Callable[[], Sequence[Problem]]


class Attention:
    """Of one daemon."""

    def __init__(
        self,
        parts: Parts,
        loop_delay: Histogram,
        wall_clock: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wall_clock: unix seconds. clock: never jumps."""
        self._parts = parts
        self._seen, self._noted = Problems(clock=clock), Problems(clock=clock)
        self._clock, self._wall_clock = clock, wall_clock
        self._shift_s = self._true_shift_s = wall_clock() - clock()
        self._traffic = Traffic(parts.engine, clock)
        self._near: dict[str, _Held] = {}  # by queue
        self._is_spent = False
        self._loop = _Loop(loop_delay)

    def look(self) -> None:
        """Once a tick."""
        self._traffic.look()
        self._seen.only(self._found())
        self._look_at_clock()

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with this daemon itself, on its machine."""
        return not any(one.kind in answers.OF_HEALTH and one.level == "problem" for one in self._seen.all())

    def told(self) -> list[answers.Problem]:
        """For status and page."""
        found = [*self._seen.all(), *self._noted.all(), *self._parts.regions()]
        return facts_of(found, self._wall_clock())

    # -- looking --

    def _found(self) -> Iterator[Problem]:
        parts = self._parts
        if books := parts.books():
            fix = "stop it, then kvstore fsck --repair; please report the problem"
            yield Problem("books", "books", "; ".join(books[:3]), fix, count=len(books), is_logged=True)
        yield from parts.disks()
        yield from parts.around()
        yield from self._traffic.wrong()
        for name, text in parts.missing().items():
            fix = "put it back, or restart the daemon when it suits"
            yield Problem("missing", name, text.removeprefix(f"{name} "), fix)
        yield from self._slabs()
        yield from (_of_breaker(each) for each in parts.engine.breakers() if each["state"] != "closed")
        yield from self._queues()
        yield from self._budget()
        yield from self._loop.look()
        for kind, name, text in parts.beside():
            if text:
                yield Problem(kind, name, text, _FIXES[kind], is_logged=True)
        yield from map(_of_preload, filter(lambda each: each["problem"], parts.preloads()))
        yield from _of_settings(parts.settings)

    def _queues(self) -> Iterator[Problem]:
        for queue in queues(self._parts.engine):
            name, length, limit = queue["name"], queue["length"], queue["limit"]
            is_near = limit > 0 and length >= QUEUE_NEAR * limit and name not in MEMORIES
            if self._near.setdefault(name, _Held(QUEUE_LOOKS)).look(is_near):
                fix = "docs/operations.md#queues-and-their-limits says what is refused or waits"
                yield Problem("queue", name, f"{count(length)} of {count(limit)}", fix, "warning")

    def _slabs(self) -> Iterator[Problem]:
        """Too few for records of so many sizes: each size needs slabs of its own."""
        engine, dram = self._parts.engine, self._parts.settings.config.dram
        capacity_bytes, slab_bytes = engine.arena.stats().capacity_bytes, engine.arena.layout.slab_bytes
        if (slabs := capacity_bytes // slab_bytes) >= NAMESPACES_MAX:
            return
        sizes = {one.slot_bytes for one in engine.namespaces if one.users or not one.is_empty}
        if slabs >= len(sizes):
            return
        text = f"{plural(slabs, 'slab')} of {format_bytes(slab_bytes)} for records of {len(sizes)} sizes, which drive each other out"
        fix, smaller_bytes = "a larger dram.capacity_bytes", enough_slabs(dram, capacity_bytes, sizes)
        if smaller_bytes < slab_bytes:
            fix += f'; or dram.slab_bytes = "{exact_bytes(smaller_bytes)}"'
        yield Problem("slabs", "arena", text, fix, "warning")

    def _budget(self) -> Iterator[Problem]:
        budget = self._parts.engine.write_budget_status()
        if budget is None:
            return
        spent_bytes, daily_bytes = budget["spent_bytes"], budget["write_bytes_per_day"]
        self._is_spent = spent_bytes >= (BUDGET_CALM if self._is_spent else BUDGET_SPENT) * daily_bytes
        if self._is_spent:
            share = f"{format_bytes(spent_bytes)} of {format_bytes(daily_bytes)} a day ({percent(spent_bytes / daily_bytes)})"
            text = f"{share} are spent; little is written to NVMe"
            fix = "raise nvme.write_bytes_per_day if the disks may take it"
            yield Problem("write_budget", "nvme", text, fix, "warning")

    def _look_at_clock(self) -> None:
        """One that is set wrong, and right again, is right."""
        shift_s = self._wall_clock() - self._clock()
        jump_s, before_s, self._shift_s = shift_s - self._shift_s, self._shift_s, shift_s
        if abs(jump_s) < CLOCK_JUMP_S:
            return
        known = {problem.subject for problem in self._noted.all()}
        if CLOCK in known and abs(shift_s - self._true_shift_s) < CLOCK_JUMP_S:
            self._noted.over(CLOCK, "clock")
            return
        if CLOCK not in known:
            self._true_shift_s = before_s
        where = "forward" if jump_s > 0 else "back"
        text = f"it was set {format_duration(abs(jump_s))} {where} while the daemon ran"
        fix = "chronyc tracking; minutes of reports are off, and buckets refuse a clock that is minutes wrong"
        self._noted.note(CLOCK, text, "clock", fix, "warning", CLOCK_TOLD_S)


class _Held:
    """What must be so for some looks before it counts, and not be so for as many before it does not."""

    def __init__(self, looks: int) -> None:
        self._looks, self._seen, self._is_on = looks, 0, False

    def look(self, is_so: bool) -> bool:
        self._seen = 0 if is_so == self._is_on else self._seen + 1
        if self._seen >= self._looks:
            self._is_on, self._seen = is_so, 0
        return self._is_on


class _Loop:
    """How late the event loop was in the last minute."""

    def __init__(self, delays: Histogram) -> None:
        self._delays = delays
        self._counted: deque[tuple[int, int]] = deque(maxlen=LOOP_LOOKS)  # turns, slow turns
        self._is_late = False

    def look(self) -> Iterator[Problem]:
        buckets = self._delays.buckets
        slow = sum(n for n, begin_s in zip(buckets[1:], BOUNDS_S, strict=True) if begin_s >= LOOP_SLOW_S)
        self._counted.append((sum(buckets), slow))
        turns, late = (new - old for new, old in zip(self._counted[-1], self._counted[0], strict=True))
        limit = LOOP_CALM_SHARE if self._is_late else LOOP_SHARE
        self._is_late = len(self._counted) == LOOP_LOOKS and turns > 0 and late > limit * turns
        if self._is_late:
            bound_s = next(bound_s for bound_s in BOUNDS_S if bound_s >= LOOP_SLOW_S)
            text = f"{percent(late / turns)} of its turns in the last minute came {1e3 * bound_s:.0f} ms late or later"
            fix = "engines wait that long for answers: give the daemon a core of its own, or look for what takes the CPU"
            yield Problem("loop", "event loop", text, fix, "warning")


def _of_breaker(breaker: answers.Breaker) -> Problem:
    fix = "look at dmesg and smartctl -a of the disk, at the network of a bucket; it is tried again by itself"
    where = f"{breaker['directory']}: " if breaker["directory"] else ""
    text = f"{where}{breaker['reason']}; {when_tried(breaker)}"
    return Problem("breaker", breaker["name"], text, fix, count=breaker["trips"])


def when_tried(breaker: answers.Breaker) -> str:
    """Again, of one that is not closed."""
    if breaker["state"] == "probing":
        return "being tried with one job now"
    if breaker["jobs"]:
        age = format_duration(breaker["oldest_job_s"])
        return (
            f"tried again when {plural(breaker['jobs'], 'job')} from before came back, which hang for {age}"
        )
    if breaker["retry_in_s"] < 1.0:
        return "tried again with the next job"
    return f"tried again in {breaker['retry_in_s']:.0f} s"


def _of_preload(preload: answers.Preload) -> Problem:
    fix = "kvstore model ls shows what is published; it is tried again"
    text, tries = preload["problem"], max(1, preload["attempts"])
    return Problem("preload", preload["model"], text, fix, "warning", count=tries, is_logged=True)


def _of_settings(settings: Settings) -> Iterator[Problem]:
    if settings.refusal:
        text = f"read again, and nothing was changed: {settings.refusal}"
        yield Problem("settings", "configuration", text, "mend it, then send SIGHUP again", is_logged=True)
    for key, wanted, now in settings.waiting():
        text = f"the configuration says {wanted}, in force is {now}"
        fix = "restart the daemon, or write the old value back and send SIGHUP"
        yield Problem("settings", key, text, fix, "warning", is_logged=True)
