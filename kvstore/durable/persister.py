"""Persisting: blocks of prefixes that deserve to last are packed and put into the region's bucket.

    lookup ─▶ asked ─▶ demand, by granules ─▶ worth it? ─▶ candidate ─▶ after a while: its blocks are read
                                                              ▲             │ (DRAM or NVMe, into own memory)
                                                              └─ next part ─┴─▶ pack put ─▶ announced

Demand is counted for every granule of a prompt: 256 tokens, or one block if that is more. A prefix is persisted in
whole granules, from where the durable set ends, so that the set stays closed under prefixes: a part of a chain is begun
when the part before it is announced. A prompt's blocks are stored after its lookup, so a candidate waits a little, and
is looked at again a few times before it is given up.

Serving comes first: packs are built at a bounded rate, few at once, and one at a time while engines wait for loads.
Of prompts that begin alike, the next one waits for the pack under way: what they share is packed once. Nothing else
waits for a pack, and what cannot be put is tried again when it is asked for again.

Blocks under a TTL are not persisted, also where it was set while they waited: a bucket does not forget them in time.

Invariant: blocks being read are pinned once by this object, and by nothing longer than the read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count as numbers
from typing import NamedTuple, Protocol

from kvstore.constants import PERSIST_CANDIDATES_MAX, PERSIST_JOBS_MAX
from kvstore.durable import worth
from kvstore.durable.asks import Asks, Worthy, granule_blocks
from kvstore.durable.demand import Demand
from kvstore.durable.reading import Records, read_records
from kvstore.durable.traffic import Traffic
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.io_pool import Io
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from tiers.packs.pack_memory import PackMemory, PackRoom
from tiers.packs.packs import PACK_RECORDS_MAX, PackHeader

PERSIST_STEP_GRANULES = 400  # counted between two yields: about a millisecond
PERSIST_DELAY_S = 2.0  # from a lookup until its blocks are looked for; doubles with each try
PERSIST_TRIES_MAX = 5  # of the same part of a prefix
PERSIST_LOOKS_MAX = 16  # candidates looked at in one go


class Life(NamedTuple):
    """Of a pack, in unix seconds. stored_s: when its oldest record was stored, 0: not known; kept_until_s: it is worth
    keeping until then, if nobody asks for it."""

    stored_s: int
    kept_until_s: int


class Bucket(Protocol):
    """What persisting needs of `kvstore.durable.level.ObjectLevel`."""

    @property
    def is_open(self) -> bool: ...
    def held_steps(self, namespace: Namespace, hashes: bytes, start: int) -> Steps[int]: ...
    def persist(
        self,
        header: PackHeader,
        records: Sequence[memoryview],
        life: Life,
        done: Callable[[bool], None],
        prefix: bytes = b"",
    ) -> None:
        """Put a pack and announce it; `done` is called once on the engine's thread: whether it is durable now. prefix: the hashes
        of all blocks before it: of one that is erased, nothing is put."""

    def renew(self, namespace: Namespace, kept_until_s: Mapping[bytes, int]) -> None:
        """By block hash, until when the packs with these blocks are worth keeping."""


class Persisting(NamedTuple):
    """What persisting is set up with. bytes_per_s: of packs, on average. clock: of the store, unix seconds; the engine's own if
    none is given."""

    bucket: Bucket
    demand: Demand
    rule: worth.Worth
    bytes_per_s: int
    pack_bytes: int
    clock: Callable[[], float] | None = None


@dataclass(slots=True, eq=False)
class Candidate:
    """A prefix that deserves to last: all of `hashes`, each granule until that second."""

    namespace: Namespace
    hashes: bytes
    kept_until_s: Sequence[int]
    due_s: float
    tries: int = 0
    start: int = 0  # of the part that is put next, in blocks

    @property
    def name(self) -> tuple[int, bytes]:
        return self.namespace.id, self.hashes[-self.namespace.hash_bytes :]

    @property
    def first(self) -> tuple[int, bytes]:
        """Its block that is put next."""
        size = self.namespace.hash_bytes
        return self.namespace.id, self.hashes[self.start * size : (self.start + 1) * size]


class Persister:
    """Called from the engine's thread only; nothing here blocks."""

    def __init__(
        self,
        residency: Residency,
        persisting: Persisting,
        prefill_rate: Callable[[Namespace], float],
        loads_waiting: Callable[[], int],
        io: Io,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """prefill_rate: tokens per second of a namespace's engines, 0 if not known. loads_waiting: of engines."""
        self._residency = residency
        self._counters = residency.counters
        self._bucket = persisting.bucket
        self._bytes_per_s = persisting.bytes_per_s
        self._pack_bytes = persisting.pack_bytes
        self._prefill_rate = prefill_rate
        self._loads_waiting = loads_waiting
        self._io = io
        self._clock = clock
        self._wall_clock = wall_clock = persisting.clock or wall_clock
        self.asks = Asks(persisting.demand, persisting.rule, self._durable, self._weight, Traffic(wall_clock))
        self._candidates: dict[tuple[int, bytes], Candidate] = {}
        self._due: list[
            tuple[float, int, Candidate]
        ] = []  # a heap: when each of them is, in the order in which they came
        self._numbers = numbers()
        self._jobs: dict[Candidate, Sequence[Block]] = {}  # under way, and what each has pinned
        self._next_s = 0.0
        self._is_looking = False
        self._room = PackRoom()

    # -- figures --

    @property
    def candidates(self) -> int:
        """Prefixes that wait to be persisted, or are being."""
        return len(self._candidates) + len(self._jobs)

    def pinned(self) -> list[Block]:
        """Each is pinned once by this object."""
        return [block for run in self._jobs.values() for block in run]

    # -- demand --

    def asked(self, namespaces: Sequence[Namespace], hashes: bytes, ticket: int) -> None:
        """A prompt was looked up. A ticket counts once in each namespace."""
        self.asks.add(namespaces, hashes, ticket)

    @property
    def is_late(self) -> bool:
        """Whether there is more to count. What is asked for before the region is joined is counted then."""
        return self._bucket.is_open and self.asks.waiting

    def steps(self) -> Steps[None]:
        """Count some of what was asked for, begin what may begin."""
        if self.is_late:
            yield from self._count(self._keep)
        self.pump()

    def count_all(self) -> Steps[None]:
        """Count what was asked for and begin nothing: the daemon stops."""
        while self.asks.waiting:
            yield from self._count(lambda prefix: None)
            yield

    def _count(self, keep: Callable[[Worthy], None]) -> Steps[None]:
        for prefix in self.asks.count(PERSIST_STEP_GRANULES, int(self._wall_clock())):
            if prefix is None:
                yield
            else:
                keep(prefix)

    def _keep(self, prefix: Worthy) -> None:
        """A prefix deserves to last: what is durable already is told to be kept, the rest is proposed."""
        namespace = prefix.namespace
        if self._residency.expiry.covers(namespace):
            return
        if prefix.news:
            self._bucket.renew(namespace, prefix.news)
        if len(prefix.kept_until_s) > prefix.durable:
            self._propose(namespace, prefix.hashes, prefix.kept_until_s)

    def _propose(self, namespace: Namespace, hashes: bytes, kept_until_s: Sequence[int]) -> None:
        candidate = Candidate(namespace, hashes, kept_until_s, self._clock() + PERSIST_DELAY_S)
        if candidate.name in self._candidates:
            return
        if len(self._candidates) >= PERSIST_CANDIDATES_MAX:
            self._take_first()
            self._counters.persist_given_up += 1
        self._wait(candidate)

    def _wait(self, candidate: Candidate) -> None:
        self._candidates[candidate.name] = candidate
        heappush(self._due, (candidate.due_s, next(self._numbers), candidate))

    def _first(self) -> Candidate:
        """The one that is due first."""
        while self._candidates.get(self._due[0][2].name) is not self._due[0][2]:
            heappop(self._due)  # it waits no more
        return self._due[0][2]

    def _take_first(self) -> None:
        del self._candidates[self._first().name]
        heappop(self._due)

    def _durable(self, namespace: Namespace, hashes: bytes) -> Steps[int]:
        return self._bucket.held_steps(namespace, hashes, 0)

    def _weight(self, namespace: Namespace) -> worth.Block:
        rate = self._prefill_rate(namespace)
        prefill_s = namespace.spec.block_tokens / rate if rate else 0.0
        return worth.Block(namespace.record_bytes, prefill_s, namespace.column_count)

    # -- packs --

    def pump(self) -> None:
        """Begin as many packs as may be under way, in turn with requests."""
        if not self._is_looking:
            self._is_looking = True
            self._residency.background.begin(self._look_steps())

    def _look_steps(self) -> Steps[None]:
        try:
            yield from self._begin_steps()
        finally:
            self._is_looking = False

    def _begin_steps(self) -> Steps[None]:
        for looks in range(PERSIST_LOOKS_MAX):
            if looks:
                yield
            if not self._candidates or not self._bucket.is_open:
                return
            now_s = self._clock()
            jobs_max = 1 if self._loads_waiting() else PERSIST_JOBS_MAX
            candidate = self._first()
            if len(self._jobs) >= jobs_max or now_s < max(self._next_s, candidate.due_s):
                return
            self._take_first()
            if self._residency.expiry.covers(candidate.namespace):
                continue  # it has a TTL by now
            candidate.start = yield from self._durable(candidate.namespace, candidate.hashes)
            if any(job.first == candidate.first for job in self._jobs):
                candidate.due_s = now_s  # behind all that are: a prompt that begins alike brings this part
                self._wait(candidate)
            elif run := self._next_run(candidate):
                size_bytes = len(run) * candidate.namespace.record_bytes
                self._next_s = max(now_s, self._next_s) + size_bytes / self._bytes_per_s
                self._read(candidate, run)

    def _next_run(self, candidate: Candidate) -> list[Block]:
        """The blocks of its next pack, none if there is nothing to pack now."""
        namespace, size = candidate.namespace, candidate.namespace.hash_bytes
        start, count, granule = candidate.start, len(candidate.hashes) // size, granule_blocks(namespace)
        if namespace.is_ended or start == count:
            return []  # the latter: somebody else has done it
        most = min(PACK_RECORDS_MAX, max(1, self._pack_bytes // namespace.record_bytes))
        if most > granule:
            most -= most % granule
        asked = candidate.hashes[start * size : (start + most) * size]
        run: list[Block] = []
        for block in forest.chain(namespace, forest.split_hashes(asked, size)):
            if block is None or not self._is_readable(block):
                break
            run.append(block)
        if len(run) < min(granule, count - start, most):
            self._again(candidate)
            return []
        return run if len(run) < granule else run[: len(run) - len(run) % granule]

    def _is_readable(self, block: Block) -> bool:
        if block.where & IN_DRAM:
            return block not in self._residency.unverified
        return bool(block.where & IN_ANY) and self._residency.nvme.members[block.device].loads.closed

    def _again(self, candidate: Candidate) -> None:
        """Its blocks are not all here yet, or the bucket failed: later, a few times."""
        candidate.tries += 1
        if candidate.tries > PERSIST_TRIES_MAX:
            self._counters.persist_given_up += 1
            return
        candidate.due_s = self._clock() + PERSIST_DELAY_S * 2**candidate.tries
        self._wait(candidate)

    def _read(self, candidate: Candidate, run: Sequence[Block]) -> None:
        self._jobs[candidate] = run
        self._residency.pin(*run)
        memory = self._room.take(len(run), candidate.namespace.record_bytes)
        read_records(
            self._residency, self._io, run, memory,
            lambda records: self._have_read(candidate, run, memory, records),
        )  # fmt: skip

    def _have_read(
        self, candidate: Candidate, run: Sequence[Block], memory: PackMemory, records: Records | None
    ) -> None:
        """records: None if one of them could not be read."""
        self._jobs[candidate] = ()
        self._residency.unpin(*run)
        namespace, above = candidate.namespace, run[0].parent
        if self._residency.expiry.covers(namespace):
            del self._jobs[candidate]
            self._room.give_back(memory)
            self.pump()
            return
        if records is None:
            self._put(candidate, memory, False)
            return
        hashes = b"".join(block.hash for block in run)
        header = PackHeader(
            namespace.spec, above.hash if above is not None else b"", hashes, b"".join(records.checksums)
        )
        last = -(-(candidate.start + len(run)) // granule_blocks(namespace)) - 1
        self._bucket.persist(
            header,
            memory,
            Life(records.stored_s, candidate.kept_until_s[last]),
            lambda is_durable: self._put(candidate, memory, is_durable),
            candidate.hashes[: candidate.start * namespace.hash_bytes],
        )

    def _put(self, candidate: Candidate, memory: PackMemory, is_durable: bool) -> None:
        """A pack ended: on with the rest of its prefix."""
        del self._jobs[candidate]
        size_bytes = len(memory) * candidate.namespace.record_bytes
        self._room.give_back(memory)
        if is_durable:
            self._counters.packs_persisted += 1
            self._counters.persisted_bytes += size_bytes
            candidate.tries, candidate.due_s = 0, 0.0
            self._wait(candidate)
        else:
            self._counters.persist_failed += 1
            self._again(candidate)
        self.pump()
