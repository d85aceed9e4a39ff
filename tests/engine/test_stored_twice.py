"""A block that comes to DRAM by two ways at once has one slot, and whoever reads it keeps its bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.frames import Acquired, Reserved
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SIZE = 4096
SPACE = NamespaceSpec(b"s" * 16, SIZE, 8, 16)
HASHES = [n.to_bytes(8, "big") for n in range(6)]


class Node:
    """An engine over a device that outlives it."""

    def __init__(self, arena_path: Path, nvme: FaultyDevice) -> None:
        self.io = SteppedIo()
        nvme.ready = False
        arena = open_arena(arena_path, 2 * MIB, 2 * MIB, SIZE)
        self.engine = Engine(arena, [Drive(nvme, self.io)], NamespaceRegistry(), self.io)
        self.engine.adopt()
        self.space = self.engine.register(SPACE)
        self.session: Session = self.engine.open_session(0, "test")

    def reserve(self, hashes: list[bytes]) -> Reserved:
        answer = self.engine.reserve(self.session, self.space, b"".join(hashes), b"")
        assert len(granted(answer)) == len(hashes)
        return answer

    def commit(self, lease: int, count: int) -> None:
        sums = digest(memoryview(bytes(SIZE))) * count
        assert self.engine.commit(self.session, lease, list(range(count)), sums) == count
        self.io.run()


@pytest.mark.parametrize("known", [6, 3], ids=["all of them", "half of them"])
@pytest.mark.parametrize("first", ["loaded", "stored"])
def test_a_block_is_loaded_while_it_is_stored_again(tmp_path: Path, known: int, first: str) -> None:
    """An engine reserves before a start has read its rows; they are read, another one loads them, and it commits
    before or after they are in DRAM."""
    nvme = FaultyDevice(50)
    before = Node(tmp_path / "before", nvme)
    before.io.run()
    before.commit(before.reserve(HASHES[:known]).lease, known)
    assert len(nvme.records) == known
    node = Node(tmp_path / "now", nvme)
    engine, asked = node.engine, b"".join(HASHES[:known])
    writing = node.reserve(HASHES)
    node.io.run()
    answers: list[Acquired] = []
    engine.acquire(node.session, node.space, asked, answers.append)
    if first == "loaded":
        node.io.run()
    node.commit(writing.lease, len(HASHES))
    assert engine.check() == []
    engine.acquire(node.session, node.space, asked, answers.append)
    read, again = (held(answer) for answer in answers)
    assert read == [slot and slot._replace(tier=IN_NVME) for slot in again] and None not in read
    assert all(
        block is not None and block.where & IN_DRAM
        for block in map(engine.namespaces.get(node.space).blocks.get, HASHES)
    )
    assert engine.arena.stats().used_bytes == len(HASHES) * SIZE
    for answer in answers:
        engine.release(node.session, answer.lease)
    assert engine.check() == []
