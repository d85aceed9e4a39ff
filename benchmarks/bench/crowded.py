"""How long the event loop is held by a node with everything: the slowest turn of each kind of work.

    two devices │ index of as many blocks as are measured │ pins, quotas, leases │ slabs of two size classes

    what begins ─▶ background ─▶ step │ step │ step …         the first piece counts, and so does each that follows

Devices are counted: they have slots and rows, and no bytes. DRAM is a small arena. Chains of 500 blocks hang on one
first block, as prompts hang on a system prompt; a quarter of the rows lies on the second device, with the first
block, and is read last. Times are of the processor, as in `benchmarks.bench.holds`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.daemon import heap
from kvstore.residency.levels import Drive
from kvstore.steps import Steps
from tiers.base import NAMESPACE_BYTES, Get, Put, TierStats
from tiers.nvme.device_table import Piece, Row
from tiers.slots import SlotPool

if TYPE_CHECKING:
    from kvstore.engine.engine import Engine
    from kvstore.engine.sessions import Session
    from kvstore.index.block import Namespace
    from kvstore.residency.levels import Member

MIB = 1 << 20
SLAB_BYTES, RECORD_BYTES, LARGE_BYTES = 64 * MIB, 16 << 10, 1 * MIB
ARENA_SLABS = 5
CHAIN_BLOCKS, PIECE_ROWS = 500, 512
HASH_BYTES = 16
PINNED_PREFIXES, PINNED_LONG = 400, 40
LEASES, LEASE_BLOCKS = 64, 512
PROMPT_BLOCKS = 65_536
TENANTS = 8
ROUNDS = 2
BURST = 20_000  # blocks that wait for a device, or for room


def block_hash(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


class Held:
    """The slowest turn of each kind of work, in s of the processor."""

    def __init__(self) -> None:
        self.slowest_s: dict[str, float] = {}
        self._aged_s = time.process_time()

    @contextmanager
    def turn(self, work: str) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        took_s = time.process_time() - begun_s
        self.slowest_s[work] = max(took_s, self.slowest_s.get(work, 0.0))

    def call(self, work: str, call: Callable[..., Any], *arguments: object) -> Any:
        with self.turn(work):
            return call(*arguments)

    def steps(self, work: str, steps: Steps[Any]) -> Any:
        """Each piece is a turn. Returns the answer."""
        while True:
            self.age()
            try:
                with self.turn(work):
                    next(steps)
            except StopIteration as end:
                return end.value

    def age(self) -> None:
        """As a daemon does now and then: what was made lately counts as old."""
        if time.process_time() - self._aged_s >= heap.AGE_INTERVAL_S:
            self.call("age", heap.age)
            self._aged_s = time.process_time()

    def background(self, work: str, engine: Engine) -> None:
        """What is left to do for it."""
        while len(engine.background):
            self.call(work, engine.background.step)
            self.age()


class LaterIo:
    """Work of I/O threads, done when the measurement says so: only its end is a turn of the loop."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Any, urgent: bool = False
    ) -> None:
        self.waiting.append((work, done))

    def lengths(self) -> tuple[int, int]:
        return len(self.waiting), 0

    def ends(self) -> Iterator[Callable[[], None]]:
        """The end of each job that waits, as the loop sees it."""
        while self.waiting:
            work, done = self.waiting.pop(0)
            result = work()
            yield lambda result=result, done=done: done(result)  # type: ignore[misc]


class CountedDevice:
    """A device without bytes. rows: of its slots, as a scan finds them."""

    slot_bytes_min = RECORD_BYTES
    aside = 0
    disk = "counted"
    has_growth_due = False

    def __init__(self, slabs: int, pieces: Iterator[Piece]) -> None:
        self.pool = SlotPool(slabs, SLAB_BYTES)
        self.pieces = pieces
        self.keys: dict[int, bytes] = {}  # of slots of the last slab

    def slot_bytes(self, size_bytes: int) -> int:
        return max(RECORD_BYTES, -(-size_bytes // RECORD_BYTES) * RECORD_BYTES)

    def open(self) -> None: ...
    def grow(self) -> None: ...
    def close(self) -> None: ...
    def set_aside(self, slot: int) -> None:
        self.pool.give(slot)

    def check(self) -> list[str]:
        return self.pool.check()

    def scan(self) -> Iterator[Piece]:
        for piece in self.pieces:
            self.pool.mark_run(piece.slots, RECORD_BYTES)
            self.keys.update(zip(piece.slots, piece.keys, strict=True) if len(self.keys) < 5000 else ())
            yield piece
        self.pool.settle()

    def write(self, items: Sequence[Any]) -> list[Put]:
        return [Put.STORED] * len(items)

    def read_rows(self, items: Sequence[Any]) -> list[tuple[Get, Row | None]]:
        return [(Get.MISS, None)] * len(items)

    def rows(self, slots: Sequence[int]) -> list[Row | None]:
        return [
            Row(slot, self.keys[slot], b"", RECORD_BYTES, bytes(16), 0) if slot in self.keys else None
            for slot in slots
        ]

    def rows_of(self, is_meant: Callable[[bytes], bool]) -> Iterator[list[Row]]:
        slots = list(self.keys)
        for at in range(0, len(slots), PIECE_ROWS):
            rows = self.rows(slots[at : at + PIECE_ROWS])
            yield [row for row in rows if row is not None and is_meant(row.key[:NAMESPACE_BYTES])]

    def clear_rows(self, rows: Sequence[Row]) -> bool:
        return True

    def clear(self, slots: Sequence[int]) -> bool:
        return True

    def stats(self) -> TierStats:
        used = sum(each.used for each in self.pool.classes())
        size_bytes = self.pool.slab_count * SLAB_BYTES
        return TierStats("nvme", size_bytes, used * RECORD_BYTES, used, self.pool.classes())


def pieces_of(digest: bytes, numbers: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Rows of these blocks and what each hangs on, from the first slot on."""
    per_slab = SLAB_BYTES // RECORD_BYTES
    for slab, first in enumerate(range(0, len(numbers), per_slab)):
        of_slab = numbers[first : first + per_slab]
        for at in range(0, len(of_slab), PIECE_ROWS):
            some = of_slab[at : at + PIECE_ROWS]
            count = len(some)
            yield Piece(
                range((slab << 16) + at, (slab << 16) + at + count),
                [digest + block_hash(number) for number, _ in some],
                [digest + block_hash(above) if above else b"" for _, above in some],
                [RECORD_BYTES] * count,
                [bytes(16)] * count,
                [0] * count,
                [b""] * count,
            )


class Lazy(Sequence[tuple[int, int]]):
    """Chains of CHAIN_BLOCKS that hang on block 1, from block `first` on, without a list of millions."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count = first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(self._count))]
        number = self._first + at
        return number, (number - 1 if at % CHAIN_BLOCKS else 1)


class Crowd:
    """One node. blocks: in the index, once its rows are read."""

    def __init__(self, blocks: int, arena_path: Path, held: Held) -> None:
        from kvstore.engine.engine import Engine
        from kvstore.index.namespaces import NamespaceRegistry
        from kvstore.policies.names import OURS, SELECTABLE
        from tiers.dram.arena import open_arena
        from tiers.namespace_spec import NamespaceSpec

        self.held, self.io = held, LaterIo()
        self.blocks = blocks - blocks % (4 * CHAIN_BLOCKS)
        self.arena = open_arena(arena_path, ARENA_SLABS * SLAB_BYTES, SLAB_BYTES, RECORD_BYTES)
        self.arena.back(threading.Event(), False)
        digest, near = b"a" * 16, self.blocks * 3 // 4
        slabs = [count * RECORD_BYTES // SLAB_BYTES + 12 for count in (near, self.blocks // 4 + 1)]
        devices = [
            CountedDevice(slabs[0], pieces_of(digest, Lazy(2, near))),
            CountedDevice(slabs[1], pieces_of(digest, _With(Lazy(2 + near, self.blocks // 4)))),
        ]
        self.lessons: list[Steps[None]] = []
        self.engine = Engine(
            self.arena,
            [Drive(device, self.io) for device in devices],  # type: ignore[arg-type]  # they have what is asked of them
            NamespaceRegistry(),
            self.io,
            SELECTABLE[OURS](self.lessons.append),
        )
        self.engine.retention.set_share(0.9)
        self.session = self.engine.open_session(0)
        spec = NamespaceSpec(digest, RECORD_BYTES, HASH_BYTES, 16, {"tenant": "t0"})
        self.number = self.engine.register(spec)
        self.space = self.engine.namespaces.get(self.number)

    def ends(self, work: str) -> None:
        """End the I/O that is done, and do what follows from it."""
        for end in self.io.ends():
            self.held.call(work, end)
            self.held.background(work, self.engine)
        while self.lessons:
            self.held.steps("lesson", self.lessons.pop(0))

    def store(self, number: int, first: int, count: int, session: Session | None = None) -> None:
        """Blocks of one chain, LEASE_BLOCKS at a time."""
        engine, session = self.engine, session or self.session
        for at in range(first, first + count, LEASE_BLOCKS):
            self.held.age()
            hashes = b"".join(map(block_hash, range(at, min(at + LEASE_BLOCKS, first + count))))
            reserved = engine.reserve(session, number, hashes, block_hash(at - 1) if at > first else b"")
            granted = [position for position, is_granted in enumerate(reserved.granted) if is_granted]
            if granted:
                engine.commit(session, reserved.lease, granted, bytes(16 * len(granted)))

    def close(self) -> None:
        from kvstore.index import forest

        for namespace in self.engine.namespaces:
            forest.forget(namespace)
        self.arena.close(unlink=True)


class _With(Lazy):
    """The same, and the first block behind them."""

    def __init__(self, chains: Lazy) -> None:
        super().__init__(chains._first, chains._count + 1)

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, slice) and at == self._count - 1:
            return 1, 0
        return super().__getitem__(at)


def crowded_turns(blocks: int, arena_path: Path) -> dict[str, float]:
    """The slowest turn of each kind of work, in ms: the lesser one of ROUNDS nodes. There are ten thousand turns of a kind, and what
    a hypervisor takes away meets one of them in most rounds, but another one in each."""
    rounds = []
    for _ in range(ROUNDS):
        held = Held()
        heap.freeze()  # as a daemon does
        work_through(blocks, arena_path, held)
        rounds.append(held.slowest_s)
    return {work: round(1e3 * min(slowest_s[work] for slowest_s in rounds), 2) for work in rounds[0]}


def work_through(blocks: int, arena_path: Path, held: Held) -> None:
    """Every kind of work, in a node of so many blocks."""
    crowd = Crowd(blocks, arena_path, held)
    try:
        for work in (
            _adoption,
            _lookups,
            _gap,
            _pins,
            _dying,
            _takeover,
            _device_takeover,
            _quotas,
            _trips,
            _ticks,
            _erasing,
        ):
            work(crowd)
    finally:
        crowd.close()


def _adoption(crowd: Crowd) -> None:
    """Two devices, and the first block of all chains is read last."""
    crowd.held.call("adoption", crowd.engine.adopt)
    crowd.ends("adoption")


def _lookups(crowd: Crowd) -> None:
    """Of a prompt that DRAM does not have, of the longest there may be: used, and refused."""
    from kvstore.ledger.accounts import Asking

    engine = crowd.engine
    tips = [1 + CHAIN_BLOCKS * number for number in range(1, 3)]
    long = 10 * crowd.blocks
    rows = [
        (block_hash(long + n), block_hash(long + n - 1) if n else b"", n, 0) for n in range(PROMPT_BLOCKS)
    ]
    for at in range(0, PROMPT_BLOCKS, PIECE_ROWS):
        piece = rows[at : at + PIECE_ROWS]
        member = engine.nvme.members[at // PIECE_ROWS % 2]
        slots = member.device.pool.take_run(RECORD_BYTES, len(piece))
        piece = [(h, above, slot, 0) for (h, above, _, _), slot in zip(piece, slots, strict=False)]
        engine.blocks.adopted_on_nvme(member, crowd.space, piece)
    for source in engine.loader.devices:
        source.speed.latency_s, source.speed.bytes_per_s = 0.002, 4e9
    hashes = b"".join(row[0] for row in rows)
    for rate in (20_000.0, 5e6):
        asking = Asking(0, False, PROMPT_BLOCKS * 16, 0, rate)
        found = crowd.held.steps("nvme_lookup", engine.find_steps([crowd.number], hashes, asking))
        crowd.held.call("nvme_booking", engine.book, [crowd.number], hashes, found, asking)
    for source in engine.loader.devices:
        source.speed.latency_s = source.speed.bytes_per_s = 0.0
    assert all(crowd.space.blocks.get(block_hash(tip)) for tip in tips)


def _gap(crowd: Crowd) -> None:
    """The first block of all chains is found corrupt, and comes back."""
    from kvstore.protocol import outcomes

    root, member = crowd.space.blocks[block_hash(1)], crowd.engine.nvme.members[1]
    with crowd.held.turn("gap"):
        crowd.engine.blocks.left_nvme(root, why=outcomes.CORRUPT)
    crowd.held.background("gap", crowd.engine)
    slot = member.device.pool.take(RECORD_BYTES)
    crowd.held.call("gap", crowd.engine.blocks.arrived_on_nvme, root, member, slot)
    crowd.held.background("gap", crowd.engine)


def _pins(crowd: Crowd) -> None:
    """Of hundreds of prefixes, one of them of the longest prompt; reported, lifted, and found again after a start."""
    retention, held = crowd.engine.retention, crowd.held
    tips = [1 + CHAIN_BLOCKS * number for number in range(1, 1 + min(PINNED_PREFIXES, crowd.blocks // 1000))]
    tips.append(10 * crowd.blocks + PROMPT_BLOCKS - 1)
    for is_pinned in (True, False, True):
        for tip in tips:
            held.call("pin", retention.pin, "", block_hash(tip), is_pinned, lambda error, rules: None)
            crowd.ends("pin")
        held.steps("retention", retention.report_steps())
    held.call("pins_after_start", retention.adopted, True)
    held.background("pins_after_start", crowd.engine)
    for tip in tips:
        retention.pin("", block_hash(tip), False, lambda error, rules: None)
    crowd.ends("pin")


def _dying(crowd: Crowd) -> None:
    """A client with as many leases as fit dies."""
    engine, held = crowd.engine, crowd.held
    first = 20 * crowd.blocks
    crowd.store(crowd.number, first, 16 * LEASE_BLOCKS)
    crowd.ends("write")
    reader, writer = engine.open_session(0), engine.open_session(0)
    for lease in range(LEASES):
        at = first + lease % 16 * LEASE_BLOCKS
        hashes = b"".join(map(block_hash, range(at, at + LEASE_BLOCKS)))
        held.call("acquire", engine.acquire, reader, crowd.number, hashes, lambda acquired: None)
    for lease in range(12):
        at = 21 * crowd.blocks + lease * LEASE_BLOCKS
        hashes = b"".join(map(block_hash, range(at, at + LEASE_BLOCKS)))
        held.call("reserve", engine.reserve, writer, crowd.number, hashes, b"")
    for session in (reader, writer):
        held.call("dying_session", engine.close_session, session)
        held.background("dying_session", engine)


def _other_class(crowd: Crowd) -> int:
    from tiers.namespace_spec import NamespaceSpec

    return crowd.engine.register(NamespaceSpec(b"b" * 16, LARGE_BYTES, HASH_BYTES, 16, {}))


def _takeover(crowd: Crowd) -> None:
    """DRAM is full of small records, and a large one comes."""
    engine, held = crowd.engine, crowd.held
    for round_ in range(ARENA_SLABS * SLAB_BYTES // RECORD_BYTES // 4096 + 1):
        crowd.store(crowd.number, (30 + round_) * crowd.blocks, 4096)
        crowd.ends("write")
    large = _other_class(crowd)
    for number in range(20):
        held.call("slab_takeover", engine.reserve, crowd.session, large, block_hash(10**12 + number), b"")
        held.background("slab_takeover", engine)
    for lease in list(crowd.session.leases):
        engine.release(crowd.session, lease)


def _device_takeover(crowd: Crowd) -> None:
    """The same of a device: its slab's rows are read, and its blocks leave."""
    engine, held = crowd.engine, crowd.held
    member: Member = engine.nvme.members[0]
    space: Namespace = engine.namespaces.get(_other_class(crowd))
    while member.device.pool.take(RECORD_BYTES) is not None:
        pass  # it is full
    slab = held.call("device_takeover", engine.eviction.takeovers.of_device, member, space)
    if slab is not None:
        slab.rows = member.device.rows(slab.slots)
        held.call("device_takeover", engine.eviction.takeovers.empty, slab, lambda: None)
        held.background("device_takeover", engine)


def _quotas(crowd: Crowd) -> None:
    """Tenants whose quota is lowered below what they hold."""
    from tiers.namespace_spec import NamespaceSpec

    engine, held = crowd.engine, crowd.held
    for tenant in range(TENANTS):
        spec = NamespaceSpec(
            bytes([65 + tenant]) * 16, RECORD_BYTES, HASH_BYTES, 16, {"tenant": f"q{tenant}"}
        )
        crowd.store(engine.register(spec), 50 * crowd.blocks, 4 * LEASE_BLOCKS)
        crowd.ends("write")
    for tenant in range(TENANTS):
        size_bytes = 4 * RECORD_BYTES
        held.call("quota", engine.retention.quota, "", f"q{tenant}", size_bytes, size_bytes, lambda *_: None)
    held.call("quota", engine.retention.quota, "", "t0", 1 << 60, 1 << 60, lambda *_: None)
    crowd.ends("quota")
    for name in [*(f"q{n}" for n in range(TENANTS)), "t0"]:
        engine.retention.quota("", name, None, None, lambda *_: None)
    crowd.ends("quota")


def _trips(crowd: Crowd) -> None:
    """A device hangs, with as many loads waiting as there may be; and it works again."""
    engine, held = crowd.engine, crowd.held
    count = min(BURST, crowd.blocks // 4)
    hashes = b"".join(map(block_hash, range(2, 2 + count)))
    held.steps("prefetch", engine.prefetch_steps(crowd.number, hashes))
    reader = engine.open_session(0)
    for at in range(2, 2 + count, LEASE_BLOCKS):
        run = b"".join(map(block_hash, range(at, at + LEASE_BLOCKS)))
        held.call("acquire", engine.acquire, reader, crowd.number, run, lambda acquired: None)
    for member in engine.nvme.members:
        held.call("trip", member.loads._trip, "the bench says so")
        held.background("trip", engine)
    crowd.store(crowd.number, 60 * crowd.blocks, 4096)
    for member in engine.nvme.members:
        held.call("recovery", member.loads.close)
        held.background("recovery", engine)
    crowd.ends("load")
    engine.close_session(reader)
    held.background("dying_session", engine)


def _ticks(crowd: Crowd) -> None:
    for _ in range(10):
        crowd.held.call("full_tick", crowd.engine.tick)
        crowd.held.background("full_tick", crowd.engine)
        crowd.ends("full_tick")


def _erasing(crowd: Crowd) -> None:
    """Everything is dropped: by an order, by a TTL, by the end of its namespace."""
    engine, held = crowd.engine, crowd.held
    held.call("clear", engine.clear, "", b"", "q0", False, False, lambda cleared: None)
    for _ in range(200):
        if not held.call("clear", engine.clearing.step):
            break
    engine.retention.ttl("", b"", "t0", 1e-3, True, lambda *_: None)
    crowd.ends("ttl")
    for _ in range(300):
        held.call("ttl", engine.retention.step)
        crowd.ends("ttl")
    engine.end_namespace(crowd.number)
    for _ in range(300):
        held.call("ended_namespace", engine.drop_ended)
        for member in engine.nvme.members:
            member.tend(1000)
        crowd.ends("ended_namespace")
