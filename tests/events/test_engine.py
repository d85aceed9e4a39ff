"""The hook: whatever the engine does, the journal says the same as the index."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvstore.engine.engine import Engine
from kvstore.events.journal import Change, Journal, held
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from replication.formats.tombstones import Tombstone
from tests.engine import test_engine_model
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tests.engine.test_engine_model import CHAINS, DEPTH, EngineMachine
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

Told = set[tuple[bytes, int, bytes]]  # digest, tier, hash
MIB = 1 << 20


def apply(told: Told, changes: Iterable[Change]) -> None:
    """Each change is one: nothing comes that is there, nothing leaves that is not."""
    for change in changes:
        names = {(change.namespace.digest, change.bit, block_hash) for block_hash in change.hashes}
        assert len(names) == len(change.hashes)
        if change.is_stored:
            assert not names & told
            told |= names
        else:
            assert names <= told
            told -= names


def follow(told: Told, journal: Journal) -> None:
    if (taken := journal.take()) is not None:
        assert not taken.is_after_gap
        apply(told, taken.changes)


def in_index(namespaces: NamespaceRegistry) -> Told:
    return {
        (namespace.digest, bit, block_hash)
        for namespace in namespaces
        for block_hash, block in namespace.blocks.walk_items()
        for bit in (IN_DRAM, IN_NVME)
        if block.where & bit
    }


class Machine(EngineMachine):
    """The machine that tries everything on an engine, with a journal; moved by a seed, which gets further than
    a search for the shortest way."""

    def boot(self) -> None:
        self.journal = Journal()
        self.told: Told = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(test_engine_model, "Engine", self.make_engine)
            super().boot()

    def make_engine(self, *arguments: Any, **named: Any) -> Engine:
        engine = Engine(*arguments, **named)
        engine.blocks.journal = self.journal
        return engine

    def move(self, chance: random.Random) -> None:
        who, ns, chain = chance.randrange(2), chance.randrange(2), chance.randrange(CHAINS)
        moves: list[tuple[int, Callable[[], object]]] = [
            (20, lambda: self.reserve(who, ns, chain, chance.randint(0, 6), chance.randint(1, 8))),
            (20, lambda: self.commit(chance.randrange(99), chance.choice((255, 255, 85)))),
            (12, lambda: self.acquire(who, ns, chain, chance.randint(1, DEPTH), chance.random() < 0.5)),
            (12, lambda: self.release(chance.randrange(99))),
            (25, lambda: self.step(chance.randrange(99))),
            (8, lambda: self.half_step(chance.randrange(99))),
            (4, self.tick),
            (1, lambda: self.client_dies(who)),
            (1, lambda: self.disk_changes(chance.choice(("fails", "hangs", "well", "well")))),
            (2, self.corrupt_one_on_nvme),
            (1, lambda: self.daemon_is_killed(chance.random() < 0.5)),
        ]
        (move,) = chance.choices([move for _, move in moves], [weight for weight, _ in moves])
        move()


@pytest.mark.parametrize("seed", range(6))
def test_the_journal_tells_what_the_index_holds(seed: int) -> None:
    """After every move of clients, disks, faults and restarts, what was told is what is held, each change once."""
    chance = random.Random(seed)
    machine = Machine()
    machine.start(seed, (0.0, 0.2)[seed % 2], 30, ("lru", "kvstore")[seed % 2])
    most = Counter[int]()
    for _ in range(600):
        machine.move(chance)
        follow(machine.told, machine.journal)
        assert machine.told == in_index(machine.namespaces)
        for bit in (IN_DRAM, IN_NVME):
            most[bit] = max(most[bit], sum(told[1] == bit for told in machine.told))
    machine.teardown()
    assert most[IN_DRAM] > 10 and most[IN_NVME] > 10


class Node:
    """An engine with a device, whose journal is followed."""

    def __init__(self, directory: Path) -> None:
        self.io = SteppedIo()
        self.nvme = FaultyDevice(200)
        self.namespaces = NamespaceRegistry()
        self.journal = Journal()
        self.told: Told = set()
        self.arena = open_arena(directory / "arena", 2 * MIB, 2 * MIB, 4096)
        self.now_s = 1000.0
        self.engine = Engine(
            self.arena,
            [Drive(self.nvme, self.io)],
            self.namespaces,
            self.io,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
        )
        self.engine.blocks.journal = self.journal
        self.engine.adopt()
        self.io.run()
        self.session = self.engine.open_session(0, "test")

    def space(self, number: int, **fields: str) -> int:
        return self.engine.register(NamespaceSpec(bytes([number]) * 16, 4096, 8, 16, fields))

    def store(self, space: int, hashes: list[bytes], parent: bytes = b"") -> None:
        answer = self.engine.reserve(self.session, space, b"".join(hashes), parent)
        sums = b"".join(digest(memoryview(bytes(4096))) for _ in granted(answer))
        self.engine.commit(self.session, answer.lease, [slot.position for slot in granted(answer)], sums)
        self.io.run()

    def until_gone(self) -> None:
        for _ in range(100):
            self.engine.drop_ended()
            self.engine.erasing.step()
            self.now_s += 10.0
            self.engine.tick()
            self.engine.retention.step()
            self.io.run()
            follow(self.told, self.journal)
            assert self.told == in_index(self.namespaces)
            if not self.told:
                return
        raise AssertionError("something stays for ever")


def names(count: int) -> list[bytes]:
    return [n.to_bytes(8, "big") for n in range(count)]


@pytest.mark.parametrize("how", ["ended", "erased", "erased behind a block", "expired"])
def test_what_goes_as_a_whole_is_told_block_by_block(tmp_path: Path, how: str) -> None:
    """A namespace that ends, a tombstone and a TTL take every block out of both tiers of a subscriber."""
    node = Node(tmp_path)
    space = node.space(1, model="m")
    node.store(space, names(60))
    follow(node.told, node.journal)
    assert len(node.told) == 120
    match how:
        case "ended":
            node.engine.end_namespace(space)
        case "erased":
            node.engine.erasing.erase(Tombstone(namespaces=(bytes([1]) * 16,), watched_until_s=1 << 40))
        case "erased behind a block":
            behind = Tombstone(namespaces=(bytes([1]) * 16,), block_hash=names(1)[0], watched_until_s=1 << 40)
            node.engine.erasing.erase(behind)
        case "expired":
            node.engine.retention.ttl("01" * 16, b"", None, 5.0, True, lambda *_: None)
            node.io.run()
    node.until_gone()
    node.arena.close(unlink=True)


def test_a_corrupt_block_is_told_to_be_gone(tmp_path: Path) -> None:
    """What is found damaged at a read is no longer held by NVMe, and subscribers are told."""
    node = Node(tmp_path)
    space = node.space(1)
    node.store(space, names(3))
    block = next(iter(node.namespaces)).blocks[names(3)[2]]
    node.engine.blocks.left_dram(block)
    node.nvme.flip(block.key)
    node.engine.acquire(node.session, space, b"".join(names(3)), lambda _: None)
    node.io.run()
    follow(node.told, node.journal)
    assert node.told == in_index(node.namespaces)
    assert (bytes([1]) * 16, IN_NVME, names(3)[2]) not in node.told
    node.arena.close(unlink=True)


def test_slices_of_what_is_held_are_small_and_complete(tmp_path: Path) -> None:
    """Read in slices, all that is held is told once; blocks that come and go meanwhile spoil none of the others."""
    node = Node(tmp_path)
    space = node.space(1)
    node.store(space, names(100))
    node.store(node.space(2), names(50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.events.journal.EVENTS_SLICE_BLOCKS", 7)
        told: Told = set()
        for count, changes in enumerate(held(node.namespaces)):
            assert sum(len(change.hashes) for change in changes) <= 2 * 7
            told |= {(c.namespace.digest, c.bit, h) for c in changes for h in c.hashes}
            node.store(space, [(1000 + count).to_bytes(8, "big")])
    assert len(told & {(d, b, h) for d, b, h in in_index(node.namespaces) if h in names(100)}) == 300
    node.arena.close(unlink=True)
