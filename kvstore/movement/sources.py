"""Sources: what blocks are loaded from. A device of NVMe and a shared level look alike from here.

Loader ─▶ source.queue ─▶ source.read(batch) ─▶ thread of a device, or requests to a bucket
                                     done ◀── [(Get, checksum), …] on the engine's thread
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from kvstore.constants import LOAD_BATCH_RECORDS, PROBE_TARGETS_MAX
from kvstore.health.breaker import Breaker, Job
from kvstore.health.measuring import Measuring
from kvstore.health.speed import TierSpeed
from kvstore.index.block import Block
from kvstore.index.slots import Places
from kvstore.ledger.counters import Counters
from kvstore.movement.shared import Fetched, SharedLevel, Wanted
from kvstore.residency.levels import Member
from tiers.base import NAMESPACE_BYTES, Get

Slotted = tuple[Block, int]  # a block, and the arena slot in state WRITING that its bytes go into
Read = tuple[Get, bytes]  # what happened, and the checksum of a HIT


class Source(ABC):
    """One place to load from: what waits there, how much may be under way, and its health."""

    name: str
    jobs_max: int
    batch_records: int
    loads: Breaker
    speed: TierSpeed

    def __init__(self) -> None:
        self.jobs = 0
        self.urgent: dict[Block, None] = {}  # somebody waits for them
        self.ahead: dict[Block, None] = {}  # prefetched, when nothing is urgent
        self.slotted: deque[Slotted] = deque()  # waited for room, and have it now

    @property
    def idle(self) -> bool:
        """Whether one more job may be begun, and something waits for it."""
        waits = self.slotted or self.urgent or self.ahead
        return bool(waits) and self.jobs < self.jobs_max and self.loads.closed

    def load_s(self, records: int, size_bytes: int) -> float:
        """Predicted seconds from now until so much is there: what waits, latency and bytes."""
        return self.speed.load_s(size_bytes)

    def began(self, block: Block) -> None:  # noqa: B027 only who is probed remembers it
        """A load that a request asked for begins with this block."""

    @abstractmethod
    def count_corrupt(self, counters: Counters) -> None:
        """A record came from here with other bytes than were stored."""

    def breakers(self) -> Sequence[Breaker]:
        return (self.loads,)

    def speed_status(self) -> dict[str, object]:
        """Its speed; the fields are documented in docs/cli.md."""
        return {
            "name": self.name,
            "latency_s": round(self.speed.latency_s, 6),
            "bytes_per_s": round(self.speed.bytes_per_s),
            "waiting_bytes": self.speed.waiting_bytes,
            "samples": self.speed.samples,
        }

    @abstractmethod
    def read(self, batch: Sequence[Slotted], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        """Fill these slots; `done` is called once on the engine's thread, with one answer each."""


class DeviceSource(Source):
    """A member of the NVMe level. `targets`: keys that somebody wanted from it lately, the last one last: records
    to probe it with. `refused`: since the last load, a lookup found it too slow."""

    def __init__(self, member: Member, arena: Places, jobs_max: int) -> None:
        super().__init__()
        self.member = member
        self.name, self.loads, self.speed = member.name, member.loads, member.speed
        self.jobs_max, self.batch_records = jobs_max, LOAD_BATCH_RECORDS
        self.targets: OrderedDict[bytes, None] = OrderedDict()
        self.refused = False
        self.begun = 0  # loads that requests asked for
        self._arena = arena

    def count_corrupt(self, counters: Counters) -> None:
        counters.corrupt_nvme += 1

    def breakers(self) -> Sequence[Breaker]:
        return self.loads, self.member.stores

    def wanted(self, key: bytes) -> None:
        """Somebody wants this record from here."""
        self.targets.pop(key, None)
        self.targets[key] = None
        if len(self.targets) > PROBE_TARGETS_MAX:
            self.targets.popitem(last=False)

    def began(self, block: Block) -> None:
        self.refused = False  # this load measures
        self.begun += 1
        self.wanted(block.key)

    def read(self, batch: Sequence[Slotted], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        items = [(block.place[1], block.key, self._arena.view(slot)) for block, slot in batch]

        def work() -> list[Read]:
            self.loads.start(job)
            return self.member.device.read(items)

        self.member.io.submit(work, done, failed=[(Get.FAILED, b"")] * len(batch), urgent=True)


class SharedSource(Source):
    """A shared level. `parents`: of blocks on their way, as the request said. `stored_s`: when those that arrived were
    stored, 0 if that is not known. A lookup that found it too slow says so to `refuse`: one record is fetched now and then
    for nobody, to see whether it still is."""

    def __init__(
        self,
        level: SharedLevel,
        arena: Places,
        clock: Callable[[], float],
        changed: Callable[[], None],
        chance: random.Random | None = None,
    ) -> None:
        super().__init__()
        self.level, self.name = level, level.name
        chance = chance or random.Random()
        self.loads = Breaker(f"{level.name} loads", level.limits.stall_s, clock, changed, chance)
        self.speed = TierSpeed(clock)
        self.jobs_max, self.batch_records = level.limits.jobs_max, level.limits.batch_records
        self.parents: dict[Block, bytes] = {}
        self.stored_s: dict[Block, int] = {}
        self._arena = arena
        self._measuring = Measuring(clock, chance)
        self._begun = 0  # loads that requests asked for
        self._refused: tuple[bytes, int] | None = None  # a record and its bytes

    def count_corrupt(self, counters: Counters) -> None:
        counters.corrupt_shared += 1

    def refuse(self, key: bytes, size_bytes: int) -> None:
        """Somebody would have loaded this record, if it did not take longer than computing."""
        self._refused = key, size_bytes

    def began(self, block: Block) -> None:
        self._refused = None  # this load measures
        self._begun += 1

    def load_s(self, records: int, size_bytes: int) -> float:
        return max(self.speed.load_s(size_bytes), self.level.load_s(records, size_bytes))

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
        wanted = Wanted(key, memoryview(bytearray(size_bytes)))
        self.level.fetch([wanted], lambda answers: self._measured(job, answers[0][0]))

    def _measured(self, job: Job, result: Get) -> None:
        if result is Get.HIT:
            self.speed.end(job, job.size_bytes, probe=True)
        else:
            self.speed.drop()
        self.loads.end(job, result is not Get.FAILED)
        self._measuring.ended(self.speed.bytes_per_s)

    def read(self, batch: Sequence[Slotted], job: Job, done: Callable[[Sequence[Read]], None]) -> None:
        self.loads.start(job)
        wanted = [Wanted(block.key, self._arena.view(slot)) for block, slot in batch]
        self.level.fetch(wanted, lambda answers: done(list(map(self._checked, batch, answers))))

    def _checked(self, asked: Slotted, answer: Fetched) -> Read:
        """A record that hangs on another parent than the request said, or has other columns than its namespace, is
        not what was asked for."""
        result, record = answer
        if result is not Get.HIT or record is None:
            return result, b""
        block = asked[0]
        is_asked = (record.key, record.columns) == (block.key, block.namespace.columns)
        if not is_asked or record.parent[NAMESPACE_BYTES:] != self.parents[block]:
            return Get.MISS, b""
        self.stored_s[block] = record.stored_s
        return result, record.checksum
