"""Sources: what blocks are loaded from. A device of NVMe and a shared level look alike from here.

Loader ─▶ urgent ─┬▶ source.read(batch) ─▶ thread of a device, or requests to a bucket
          ahead ──┘  ▲          done ◀── [(Get, checksum), …] on the engine's thread
                     ╰── the window: so many bytes may be under way

The window (`kvstore.health.window`) is what the source brings in about a second, and a batch is a part of it, but never less
than one record. So what is under way is over in a second or so, whatever the size of records; the rest waits here, where no
clock runs, in turns. While a read takes very long nothing is begun behind it: whatever the order in which a source answers, a
large record is not overtaken for ever by small ones. Prefetches leave a part of the window to what engines wait for.
"""

from __future__ import annotations

import mmap
import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.constants import LOAD_BATCH_RECORDS, MIB, PROBE_TARGETS_MAX, STEP_BLOCKS, require
from kvstore.health.breaker import Breaker, Job
from kvstore.health.measuring import Measuring
from kvstore.health.speed import TierSpeed
from kvstore.health.window import Window
from kvstore.index.block import NO_SLOT, Block, Namespace
from kvstore.index.forest import split_hashes
from kvstore.index.slots import Slots
from kvstore.ledger.counters import Counters
from kvstore.movement.load_queue import LoadQueue
from kvstore.movement.shared import Fetched, SharedLevel, Wanted
from kvstore.protocol import answers
from kvstore.residency.levels import Member
from kvstore.steps import Steps, finish
from tiers.base import NAMESPACE_BYTES, Get
from tiers.nvme.device_table import Row

LOAD_BATCH_BYTES = 8 * MIB  # bytes that one job reads at most
LOAD_BATCH_SHARE = 0.25  # of what may be under way, in one job
TOO_OLD_S = 3600.0  # for which what a bucket has and its TTL is over for is not asked for again
TOO_OLD_BLOCKS_MAX = 65_536  # remembered, of one bucket; beyond it all are forgotten
PREFETCH_SHARE = 0.75  # of what may be under way, for loads that no request waits for yet
require(
    0 < LOAD_BATCH_SHARE < PREFETCH_SHARE < 1, "prefetches leave room for a load that a request waits for"
)

Read = tuple[Get, bytes]  # what happened, and the checksum of a HIT


@dataclass(slots=True, eq=False)
class Load:
    """A block on its way into DRAM. parent: of one that the index does not know, as the request said. slot: of the arena, in
    state WRITING, that its bytes go into. stored_s: when one that arrived was stored, 0 if that is not known. erasures: of its
    namespace when it was asked for."""

    block: Block
    source: Source
    parent: bytes = b""
    slot: int = NO_SLOT
    stored_s: int = 0
    erasures: int = field(init=False)

    def __post_init__(self) -> None:
        self.erasures = self.block.namespace.erasures


class Source(ABC):
    """One place to load from: what waits there, how much may be under way, and its health."""

    name: str
    jobs_max: int
    batch_records: int
    loads: Breaker
    speed: TierSpeed
    window: Window

    def __init__(self) -> None:
        self.jobs = 0
        self.urgent = LoadQueue()  # requests wait for them
        self.ahead = LoadQueue()  # prefetched, when nothing is urgent
        self.slotted: deque[Load] = deque()  # waited for room, and have it now
        self.slotted_bytes = 0

    # -- how much may be under way --

    @property
    def idle(self) -> bool:
        """Whether one more job may be begun, and something waits for it."""
        if not (self.slotted or self.urgent or self.ahead) or not self.loads.closed:
            return False
        if self.slotted or self.urgent:
            has_room = self.window.has_room() and self.jobs < self.jobs_max  # it learns that it is full
        else:  # with the batch that would be begun now
            share = PREFETCH_SHARE
            has_room = self.window.has_room(share - LOAD_BATCH_SHARE) and self.jobs < share * self.jobs_max
        return has_room and not self.loads.is_late

    @property
    def batch_bytes(self) -> float:
        """Of the next job, if that is not a single record: what waits is spread over the jobs that may be begun."""
        waits_bytes = self.urgent.size_bytes + self.ahead.size_bytes + self.slotted_bytes
        spread_bytes = waits_bytes / max(1, self.jobs_max - self.jobs)
        return min(LOAD_BATCH_BYTES, spread_bytes, LOAD_BATCH_SHARE * self.window.size_bytes)

    # -- how long it takes --

    def load_s(self, size_bytes: int) -> float:
        """Predicted seconds from now until so much is there: what waits, latency and bytes."""
        return self.speed.load_s(size_bytes, self._behind_bytes(size_bytes))

    def _behind_bytes(self, size_bytes: int) -> int:
        """Of all that waits: what comes later than so much that is asked for now, as others take turns with it."""
        others_bytes = self.urgent.size_bytes
        before_bytes = min(others_bytes, self.urgent.lines * size_bytes)
        return self.ahead.size_bytes + others_bytes - before_bytes

    def reach_bytes(self, within_s: float) -> float:
        """How much that is asked for now comes within so many seconds, as far as is known."""
        queued_bytes = self.urgent.size_bytes
        reach_bytes = self.speed.reach_bytes(within_s, self.ahead.size_bytes + queued_bytes)
        return max(reach_bytes / (1 + self.urgent.lines), reach_bytes - queued_bytes)

    def began(self, block: Block) -> None:  # noqa: B027 only who is probed remembers it
        """A load that a request asked for begins with this block."""

    @abstractmethod
    def count_corrupt(self, counters: Counters) -> None:
        """A record came from here with other bytes than were stored."""

    def breakers(self) -> Sequence[Breaker]:
        return (self.loads,)

    def speed_status(self) -> answers.Speed:
        """Its speed; the fields are documented in docs/cli.md."""
        return {
            "name": self.name,
            "latency_s": round(self.speed.latency_s, 6),
            "bytes_per_s": round(self.speed.bytes_per_s),
            "waiting_bytes": self.speed.waiting_bytes,
            "samples": self.speed.samples,
        }

    @abstractmethod
    def read(self, batch: Sequence[Load], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        """Fill these slots; `done` is called once on the engine's thread, with one answer each."""


class Reach:
    """How much each source brings within a request's patience, as predicted when it asks."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._left_bytes: dict[Source, float] = {}

    def has(self, source: Source, size_bytes: int) -> bool:
        """Whether so much more from this source comes in time. It counts as asked for."""
        left_bytes = self._left_bytes.get(source)
        if left_bytes is None:
            left_bytes = source.reach_bytes(self._patience_s)
        self._left_bytes[source] = left_bytes - size_bytes
        return left_bytes >= size_bytes


class DeviceSource(Source):
    """A member of the NVMe level. `targets`: keys that were wanted from it lately, the last one last: records
    to probe it with. `refused`: since the last load, a lookup found it too slow."""

    def __init__(self, member: Member, arena: Slots, clock: Callable[[], float]) -> None:
        super().__init__()
        self.member = member
        self.name, self.loads, self.speed = member.name, member.loads, member.speed
        self.window = Window(member.stall_s, clock)
        self.jobs_max, self.batch_records = member.jobs_max, LOAD_BATCH_RECORDS
        self.targets: OrderedDict[bytes, None] = OrderedDict()
        self.refused = False
        self.begun = 0  # loads that requests asked for
        self._arena = arena

    def count_corrupt(self, counters: Counters) -> None:
        counters.corrupt_nvme += 1

    def breakers(self) -> Sequence[Breaker]:
        return self.loads, self.member.stores

    def wanted(self, key: bytes) -> None:
        """This record was wanted from here."""
        self.targets.pop(key, None)
        self.targets[key] = None
        if len(self.targets) > PROBE_TARGETS_MAX:
            self.targets.popitem(last=False)

    def began(self, block: Block) -> None:
        self.refused = False  # this load measures
        self.begun += 1
        self.wanted(block.key)

    def read(self, batch: Sequence[Load], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        items = [(load.block.place[1], load.block.key, self._arena.view(load.slot)) for load in batch]

        def work() -> list[tuple[Get, Row | None]]:
            self.loads.start(job)
            return self.member.device.read_rows(items)

        def have_read(answers: Sequence[tuple[Get, Row | None]]) -> None:
            done(list(map(self._known, batch, answers)))

        failed: list[tuple[Get, Row | None]] = [(Get.FAILED, None)] * len(batch)
        self.member.io.submit(work, have_read, failed, urgent=True)

    def _known(self, load: Load, answer: tuple[Get, Row | None]) -> Read:
        """What is promoted is as old as its row says: a TTL that is set later counts from then."""
        result, row = answer
        if row is None:
            return result, b""
        load.stored_s = row.stored_s
        return result, row.checksum


class SharedSource(Source):
    """A shared level. A lookup that found it too slow says so to `refuse`: one record is fetched now and then, and thrown away,
    to see whether it still is. What came and was over its TTL is not promised again for TOO_OLD_S, or until a TTL changes: only
    its record says how old it is."""

    def __init__(
        self, level: SharedLevel, arena: Slots, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        super().__init__()
        self.level, self.name = level, level.name
        chance = random.Random()
        limits = level.limits
        self.loads = Breaker(
            f"{level.name} loads", limits.stall_s, clock, changed, chance, limits.least_bytes_per_s
        )
        self.speed, self.window = TierSpeed(clock), Window(limits.stall_s, clock)
        self.jobs_max, self.batch_records = limits.jobs_max, limits.batch_records
        self._arena = arena
        self._clock = clock
        self._too_old: dict[
            bytes, dict[bytes, float]
        ] = {}  # by namespace and block: until when it counts as gone
        self._measuring = Measuring(clock, chance)
        self._begun = 0  # loads that requests asked for
        self._refused: tuple[bytes, int] | None = None  # a record and its bytes

    def count_corrupt(self, counters: Counters) -> None:
        counters.corrupt_shared += 1

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        """As `SharedLevel.held`, up to the first block that is known to be over its TTL there."""
        return finish(self.held_steps(namespace, hashes, start))

    def held_steps(self, namespace: Namespace, hashes: bytes, start: int) -> Steps[int]:
        """The same in pieces, of a prompt of any length."""
        end = yield from self.level.held_steps(namespace, hashes, start)
        size, known = namespace.hash_bytes, self._too_old.get(namespace.digest)
        for at in range(start, end if known else start, STEP_BLOCKS):
            if at > start:
                yield
            run = split_hashes(hashes[at * size : min(end, at + STEP_BLOCKS) * size], size)
            over = (position for position, one in enumerate(run, at) if self.is_too_old(namespace, one))
            if known and not known.keys().isdisjoint(run) and (first := next(over, None)) is not None:
                return first
        return end

    def is_too_old(self, namespace: Namespace, block_hash: bytes) -> bool:
        """Whether a block came from here lately and was over its TTL."""
        return self._clock() < self._too_old.get(namespace.digest, {}).get(block_hash, 0.0)

    def was_too_old(self, block: Block) -> None:
        """It came, and was over its TTL."""
        if sum(map(len, self._too_old.values())) >= TOO_OLD_BLOCKS_MAX:
            self._too_old.clear()
        self._too_old.setdefault(block.namespace.digest, {})[block.hash] = self._clock() + TOO_OLD_S

    def forget_too_old(self) -> None:
        """A TTL changed."""
        self._too_old.clear()

    def refuse(self, key: bytes, size_bytes: int) -> None:
        """A lookup would have used this record, if loading did not take longer than computing."""
        self._refused = key, size_bytes

    def began(self, block: Block) -> None:
        self._refused = None  # this load measures
        self._begun += 1

    def look(self) -> None:
        """Several times a stall: trip where a request hangs; probe or measure when it is time."""
        self.loads.look()
        if self.loads.may_probe():
            job = self.loads.begin(0, probe=True)
            self.loads.start(job)
            self.level.probe(lambda is_well: self._probed(job, is_well))
        elif self._refused is not None and self.loads.closed and not self.loads.jobs:
            if self._measuring.may_begin(self._begun, self.speed.bytes_per_s):
                self._measure(*self._refused)

    def _probed(self, job: Job, is_well: bool) -> None:
        self.loads.end(job, is_well)

    def _measure(self, key: bytes, size_bytes: int) -> None:
        """Fetch a record into memory of its own."""
        self._refused = None  # until the next one is
        job = self.loads.begin(size_bytes)
        self.speed.begin(job)
        self.loads.start(job)
        # Not a bytearray, which is zeroed here, with all engines waiting.
        wanted = Wanted(key, memoryview(mmap.mmap(-1, size_bytes)))
        self.level.fetch([wanted], lambda answers: self._measured(job, answers[0][0]))

    def _measured(self, job: Job, result: Get) -> None:
        if result is Get.HIT:
            self.speed.end(job, job.size_bytes, probe=True)
        else:
            self.speed.drop()
        self.loads.end(job, result is not Get.FAILED)
        self._measuring.ended(self.speed.bytes_per_s)

    def read(self, batch: Sequence[Load], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        self.loads.start(job)
        wanted = [Wanted(load.block.key, self._arena.view(load.slot)) for load in batch]
        self.level.fetch(wanted, lambda answers: done(list(map(self._checked, batch, answers))))

    def _checked(self, load: Load, answer: Fetched) -> Read:
        """A record that hangs on another parent than the request said, or has other columns than its namespace, is
        not what was asked for."""
        result, record = answer
        if result is not Get.HIT or record is None:
            return result, b""
        block = load.block
        is_asked = (record.key, record.columns) == (block.key, block.namespace.columns)
        if not is_asked or record.parent[NAMESPACE_BYTES:] != load.parent:
            return Get.MISS, b""
        load.stored_s = record.stored_s
        return result, record.checksum
