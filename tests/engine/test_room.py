"""Room: who leaves, who stays, and that a full arena answers at once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.constants import STEP_SLOW_BLOCKS
from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.errors import BadRequest
from kvstore.index import forest
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.io_pool import IoPool
from kvstore.policies.base import Policies
from kvstore.policies.learned import Learned
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.base import CHECKSUM_BYTES
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.errors import OpenError
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
RECORD_BYTES = MIB // 2  # four slots a slab of 2 MiB


class Absent(FaultyDevice):
    """A directory that cannot be opened."""

    def open(self) -> None:
        raise OpenError("is empty now")


class Node:
    """An engine of `slabs` × 4 slots with one attached client."""

    def __init__(
        self, path: Path, slabs: int, nvme: FaultyDevice | None, policies: Policies | None = None
    ) -> None:
        self.arena = open_arena(path, slabs * 2 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        self.clock_s = 0.0
        self.device = nvme
        devices = [Drive(nvme, self.io)] if nvme is not None else []
        self.engine = Engine(self.arena, devices, NamespaceRegistry(), self.io, policies, clock=self.tick)
        self.engine.adopt()
        self.io.run()
        self.session: Session = self.engine.open_session(0)
        self.space = self.engine.register(NamespaceSpec(b"a" * 16, RECORD_BYTES, 8))

    def tick(self) -> float:
        self.clock_s += 1.0
        return self.clock_s

    def put(self, *names: str, parent: str = "", space: int | None = None) -> int:
        """Store a run of blocks; answers how many found room."""
        number = self.space if space is None else space
        hashes = b"".join(name.encode().ljust(8) for name in names)
        answer = self.engine.reserve(
            self.session, number, hashes, parent.encode().ljust(8) if parent else b""
        )
        sums = b"".join(
            digest(self.arena.mapping[s.offset : s.offset + self.size(number)]) for s in granted(answer)
        )
        if granted(answer):
            self.engine.commit(self.session, answer.lease, [s.position for s in granted(answer)], sums)
        return len(granted(answer))

    def size(self, number: int) -> int:
        return self.engine.namespaces.get(number).record_bytes

    def where(self, *names: str) -> list[int]:
        return list(
            finish(
                self.engine.residency_steps(self.space, b"".join(name.encode().ljust(8) for name in names))
            )
        )

    def acquire(self, *names: str) -> Acquired:
        answers: list[Acquired] = []
        hashes = b"".join(name.encode().ljust(8) for name in names)
        self.engine.acquire(self.session, self.space, hashes, answers.append)
        self.io.run()
        return answers[0]


@pytest.fixture
def dram_only(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "arena", 1, None)
    yield node
    assert node.engine.check() == []
    node.arena.close(unlink=True)


@pytest.fixture
def two_tiers(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "arena", 1, FaultyDevice(6))
    yield node
    node.io.run()
    assert node.engine.check() == []
    node.arena.close(unlink=True)


def test_leaves_go_before_their_parents(dram_only: Node) -> None:
    """A chain that fills the arena loses its tail, never its head, when room is needed."""
    dram_only.put("a0", "a1", "a2", "a3")
    assert dram_only.put("b0", "b1") == 2
    assert dram_only.where("a0", "a1", "a2", "a3") == [IN_DRAM, IN_DRAM, 0, 0]


def test_the_longest_unused_leaf_goes_first(dram_only: Node) -> None:
    """Of two chains, the one that was read later stays."""
    dram_only.put("a0", "a1")
    dram_only.put("b0", "b1")
    lease = dram_only.acquire("a0", "a1").lease
    dram_only.engine.release(dram_only.session, lease)
    dram_only.put("c0")
    assert dram_only.where("a0", "a1", "b0", "b1") == [IN_DRAM, IN_DRAM, IN_DRAM, 0]


def test_what_is_leased_stays_and_full_is_answered_at_once(dram_only: Node) -> None:
    """With every slot pinned there is no room, and room again after the release."""
    dram_only.put("a0", "a1", "a2", "a3")
    lease = dram_only.acquire("a0", "a1", "a2", "a3").lease
    assert dram_only.put("b0") == 0
    assert dram_only.engine.counters.reserve_no_room == 1
    dram_only.engine.release(dram_only.session, lease)
    assert dram_only.put("b0") == 1


def test_a_block_on_its_way_to_nvme_is_not_dropped(two_tiers: Node) -> None:
    """Until the write is done a new block is refused; afterwards the old one leaves DRAM only."""
    two_tiers.put("a0", "a1", "a2", "a3")
    assert two_tiers.put("b0") == 0
    two_tiers.io.run()
    assert two_tiers.put("b0") == 1
    assert two_tiers.where("a0", "a1", "a2", "a3") == [3, 3, 3, IN_NVME]
    assert two_tiers.engine.counters.lost_before_demote == 0


def test_a_full_nvme_tier_makes_room_leaf_first(two_tiers: Node) -> None:
    """Six places for eight blocks: the first chain loses its tail on NVMe, its head stays."""
    for name in ("a", "b"):
        two_tiers.put(*(f"{name}{depth}" for depth in range(4)))
        two_tiers.io.run()
    places = two_tiers.where("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3")
    assert two_tiers.engine.counters.evicted_nvme >= 2
    assert places[0] & IN_NVME and not places[3] & IN_NVME
    assert all(place for place in places[4:])


def test_nvme_failures_are_counted_and_lose_nothing_else(tmp_path: Path) -> None:
    """With every write failing, blocks stay in DRAM, and later ones replace them."""
    node = Node(tmp_path / "arena", 1, FaultyDevice(6, fault_rate=1.0))
    node.put("a0", "a1", "a2", "a3")
    node.io.run()
    assert node.engine.counters.demote_failed == 4
    assert node.where("a0", "a1", "a2", "a3") == [IN_DRAM] * 4
    assert node.put("b0") == 1
    assert node.engine.counters.lost_before_demote == 1
    assert node.engine.check() == []
    node.arena.close(unlink=True)


def test_a_corrupt_record_is_a_miss_and_is_counted(two_tiers: Node) -> None:
    """One flipped byte on NVMe costs that block; its neighbours are handed out."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0", "b1")
    two_tiers.io.run()
    assert two_tiers.where("a2", "a3") == [IN_NVME, IN_NVME]
    nvme = two_tiers.device
    assert isinstance(nvme, FaultyDevice)
    nvme.flip(b"a" * 16 + b"a2".ljust(8))
    answer = two_tiers.acquire("a2", "a3")
    assert held(answer)[0] is None and held(answer)[1] is not None
    assert held(answer)[1].tier == IN_NVME
    assert two_tiers.engine.counters.corrupt_nvme == 1
    assert two_tiers.where("a2") == [0]


def test_a_new_size_class_takes_over_a_slab(dram_only: Node) -> None:
    """A namespace with other records finds room in an arena that another one filled."""
    dram_only.put("a0", "a1", "a2", "a3")
    other = dram_only.engine.register(NamespaceSpec(b"b" * 16, 100_000, 8))
    assert dram_only.put("x0", "x1", space=other) == 2
    assert dram_only.where("a0", "a1", "a2", "a3") == [0, 0, 0, 0]


def test_a_pinned_slab_is_not_taken_over(dram_only: Node) -> None:
    """One leased block keeps its slab; the other namespace is told that there is no room."""
    dram_only.put("a0", "a1", "a2", "a3")
    dram_only.acquire("a0")
    other = dram_only.engine.register(NamespaceSpec(b"b" * 16, 100_000, 8))
    assert dram_only.put("x0", space=other) == 0
    assert dram_only.where("a0") == [IN_DRAM]


def test_many_waiters_share_one_load(two_tiers: Node) -> None:
    """Two acquires of one block on NVMe read it once and both get it."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0", "b1")
    two_tiers.io.run()
    answers: list[Acquired] = []
    for _ in range(2):
        two_tiers.engine.acquire(two_tiers.session, two_tiers.space, b"a3".ljust(8), answers.append)
    two_tiers.io.run()
    assert two_tiers.engine.counters.promoted == 1
    assert [held(answer)[0] is not None for answer in answers] == [True, True]


def test_a_load_waits_for_room(two_tiers: Node) -> None:
    """While every slot is leased a load waits; the release of one lets it come."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0")
    two_tiers.io.run()
    assert two_tiers.where("a3") == [IN_NVME]
    lease = two_tiers.acquire("a0", "a1", "a2").lease
    two_tiers.acquire("b0")
    answers: list[Acquired] = []
    two_tiers.engine.acquire(two_tiers.session, two_tiers.space, b"a3".ljust(8), answers.append)
    two_tiers.io.run()
    assert answers == []
    two_tiers.engine.release(two_tiers.session, lease)
    two_tiers.io.run()
    assert held(answers[0])[0] is not None


def test_a_prefetch_looks_at_a_few_hashes_at_a_time(two_tiers: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking 65,536 hashes apart in one go held everybody up for 4 ms."""
    split, sizes = forest.split_hashes, []

    def split_hashes(hashes: bytes, hash_bytes: int) -> list[bytes]:
        sizes.append(len(hashes) // hash_bytes)
        return split(hashes, hash_bytes)

    monkeypatch.setattr(forest, "split_hashes", split_hashes)
    steps = two_tiers.engine.prefetch_steps(two_tiers.space, bytes(8 * 65_536))
    assert sum(1 for _ in steps) == len(sizes) == -(-65_536 // STEP_SLOW_BLOCKS)
    assert max(sizes) == STEP_SLOW_BLOCKS


def test_a_prefetch_does_not_wait_for_room(two_tiers: Node) -> None:
    """Nobody waits for a prefetch, so it leaves nothing behind when DRAM is full."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0")
    two_tiers.io.run()
    two_tiers.acquire("a0", "a1", "a2")
    two_tiers.acquire("b0")
    assert finish(two_tiers.engine.prefetch_steps(two_tiers.space, b"a3".ljust(8))) == 0
    assert two_tiers.engine.loader.underway == 0


def test_a_load_nobody_waits_for_holds_up_no_other(two_tiers: Node) -> None:
    """A lease that expired while its load waited for room gives way to one that still waits."""
    two_tiers.put("a0", "a1", "a2", "a3")
    two_tiers.io.run()
    two_tiers.put("b0", "b1")
    two_tiers.io.run()
    leases = [two_tiers.acquire(name).lease for name in ("a0", "a1", "b0", "b1")]
    answers: list[Acquired] = []
    hashes = [name.encode().ljust(8) for name in ("a2", "a3")]
    gone = two_tiers.engine.acquire(two_tiers.session, two_tiers.space, hashes[0], answers.append)
    two_tiers.engine.acquire(two_tiers.session, two_tiers.space, hashes[1], answers.append)
    gone.expire()
    two_tiers.engine.release(two_tiers.session, leases[3])
    two_tiers.io.run()
    assert [held(answer)[0] is not None for answer in answers] == [False, True]
    assert two_tiers.engine.counters.promoted == 1


def test_blocks_that_are_their_own_ancestors_are_refused(dram_only: Node) -> None:
    """A client that lies about parents cannot make a circle that no eviction would ever open."""
    dram_only.put("a1", parent="a0")
    with pytest.raises(BadRequest):
        dram_only.put("a0", parent="a1")


def test_two_leases_that_name_each_other_as_parents_close_no_circle(dram_only: Node) -> None:
    """What reserve cannot see, as neither block is there yet. A circle would hold the next reserve for ever."""
    engine, session, space = dram_only.engine, dram_only.session, dram_only.space
    a0, a1 = b"a0".ljust(8), b"a1".ljust(8)
    leases = [
        engine.reserve(session, space, block_hash, parent).lease
        for block_hash, parent in ((a0, a1), (a1, a0))
    ]
    for lease in leases:
        engine.commit(session, lease, [0], bytes(CHECKSUM_BYTES))
    dram_only.put("b0", "b1", parent="a0")
    assert dram_only.put("b0", "b1", parent="a1") == 0
    assert engine.check() == []


def test_work_that_raises_ends_its_job(tmp_path: Path) -> None:
    """A tier that raises out of a put counts as one that failed: pins and jobs are given back."""
    nvme = FaultyDevice(6)
    node = Node(tmp_path / "arena", 1, nvme)
    nvme.raises = True
    node.put("a0", "a1")
    node.io.run()
    assert node.engine.counters.demote_failed == 2
    assert node.engine.check() == []
    node.arena.close(unlink=True)


def test_a_pool_answers_for_work_that_raises() -> None:
    """The submitter hears of the end of its job even when the job raised."""
    posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    pool = IoPool(1, posted.put)
    heard: list[str] = []

    def work() -> str:
        raise OSError("no")

    pool.submit(work, heard.append, failed="failed")
    posted.get(timeout=5)()
    pool.close()
    assert heard == ["failed"]


def test_a_reserve_that_takes_the_place_of_its_own_blocks(tmp_path: Path) -> None:
    """Held blocks that leave for the others of their run are not used any more: no policy counts them."""
    node = Node(tmp_path / "arena", 1, None, Learned())
    family = node.engine.blocks.policies
    assert isinstance(family, Learned)
    node.put("a0", "a1", "a2", "a3")
    for number in range(20):
        node.put("a0", "a1", "a2", "a3", f"b{number}", f"c{number}")
        blocks = node.engine.namespaces.get(node.space).blocks.values()
        assert family.reuse.held == sum(block.stretch is not None for block in blocks)
    assert node.engine.check() == []
    node.arena.close(unlink=True)


def test_a_breaker_of_stores_with_nothing_to_store_closes(two_tiers: Node) -> None:
    """What could be tried has left DRAM: the disk is not called sick for ever."""
    tier = two_tiers.device
    assert isinstance(tier, FaultyDevice)
    tier.fault_rate = 1.0
    for name in ("a0", "b0", "c0"):
        two_tiers.put(name)
        two_tiers.io.run()
    assert not two_tiers.engine.nvme.members[0].stores.closed
    tier.fault_rate = 0.0
    for block in list(two_tiers.engine.blocks.writes.refused):
        two_tiers.engine.blocks.drop(block, outcomes.EXPIRED)
    two_tiers.clock_s += 10
    two_tiers.engine.tick()
    assert two_tiers.engine.nvme.members[0].stores.closed


def test_what_is_stored_again_while_its_row_is_cleared_is_written_elsewhere(two_tiers: Node) -> None:
    """A block that was dropped, and comes back before its old row is cleared, gets another slot and is kept."""
    two_tiers.put("a0")
    two_tiers.io.run()
    blocks, (member,) = two_tiers.engine.blocks, two_tiers.engine.nvme.members
    block = blocks.block_of(b"a" * 16 + b"a0".ljust(8))
    assert block is not None
    assert blocks.drop(block, outcomes.EXPIRED)
    assert member.dropped == 1
    two_tiers.put("a0")
    assert two_tiers.where("a0") == [IN_DRAM] and member.dropped == 1
    two_tiers.io.run()
    two_tiers.engine.tick()
    two_tiers.io.run()
    assert two_tiers.where("a0") == [IN_DRAM | IN_NVME]


def test_names_are_saved_by_one_job_at_a_time(dram_only: Node) -> None:
    """A disk that is slow to save the names gets no second job; what came meanwhile is saved next."""
    dram_only.engine.namespaces._path = Path(str(dram_only.arena.path) + ".names")
    dram_only.engine.register(NamespaceSpec(b"b" * 16, RECORD_BYTES, 8))
    dram_only.engine.tick()
    jobs = len(dram_only.io.waiting)
    dram_only.engine.register(NamespaceSpec(b"c" * 16, RECORD_BYTES, 8))
    dram_only.engine.tick()
    assert len(dram_only.io.waiting) == jobs > 0
    dram_only.io.run()
    dram_only.engine.tick()
    dram_only.io.run()
    assert b"c" * 16 in {space.digest for space in NamespaceRegistry(dram_only.engine.namespaces._path)}


def test_nothing_waits_for_a_disk_that_is_left_alone(tmp_path: Path) -> None:
    """A stop waits for what can be written; a directory that was never opened takes nothing."""
    node = Node(tmp_path / "arena", 2, Absent(8))
    assert node.put("a", "b") == 2
    node.engine.tick()
    node.io.run()
    assert node.engine.nvme.members[0].left_alone == "is empty now"
    assert node.engine.writer.idle
