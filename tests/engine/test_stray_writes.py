"""A stray write into a block of DRAM: a sample of what is handed out finds it; the block goes, and somebody is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.frames import Acquired
from kvstore.residency.levels import Drive
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SIZE = 4096
HASHES = [n.to_bytes(8, "big") for n in range(4)]


class Node:
    """An engine that holds a prompt of four blocks. has_disk: on NVMe, too."""

    def __init__(self, directory: Path, share: float, has_disk: bool) -> None:
        self.io = SteppedIo()
        devices = [Drive(FaultyDevice(50), self.io)] if has_disk else []
        self.arena = open_arena(directory / "arena", 2 * MIB, 2 * MIB, SIZE)
        self.engine = Engine(self.arena, devices, NamespaceRegistry(), self.io)
        self.engine.verifier.share = share
        self.engine.adopt()
        self.io.run()
        self.space = self.engine.register(NamespaceSpec(b"s" * 16, SIZE, 8, 16))
        self.session = self.engine.open_session(0, "test")
        answer = self.engine.reserve(self.session, self.space, b"".join(HASHES), b"")
        self.offsets = [slot.offset for slot in granted(answer)]
        for number, at in enumerate(self.offsets):
            self.arena.mapping[at : at + SIZE] = bytes([number]) * SIZE
        sums = b"".join(digest(memoryview(bytes([number]) * SIZE)) for number in range(4))
        self.engine.commit(self.session, answer.lease, list(range(4)), sums)
        self.io.run()

    def acquire(self) -> Acquired:
        answers: list[Acquired] = []
        self.engine.acquire(self.session, self.space, b"".join(HASHES), answers.append)
        self.io.run()
        return answers[0]

    def read(self) -> int:
        """Acquire all and give it back: how many came."""
        answer = self.acquire()
        if answer.lease:
            self.engine.release(self.session, answer.lease)
        return sum(slot is not None for slot in held(answer))

    def scribble(self, number: int) -> None:
        self.arena.mapping[self.offsets[number] + 5] ^= 1


@pytest.mark.parametrize("has_disk", [False, True])
def test_what_was_overwritten_is_dropped_and_told(
    tmp_path: Path, has_disk: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a miss from then on, or comes from NVMe as it was stored."""
    node = Node(tmp_path, 1.0, has_disk)
    node.scribble(2)
    with caplog.at_level(logging.ERROR):
        for _ in range(40):
            node.read()
            if node.engine.counters.corrupt_dram:
                break
    assert node.engine.counters.corrupt_dram == 1
    assert [record.block for record in caplog.records] == [HASHES[2].hex()]  # type: ignore[attr-defined]
    assert node.engine.check() == []
    answer = node.acquire()
    assert [slot is not None for slot in held(answer)] == [True, True, has_disk, True]
    assert node.engine.counters.promoted == has_disk
    for number, slot in enumerate(held(answer)):
        if slot is not None:
            assert node.arena.mapping[slot.offset : slot.offset + SIZE] == bytes([number]) * SIZE


def test_it_stays_as_long_as_somebody_reads_it_and_nobody_else_gets_it(tmp_path: Path) -> None:
    """Its slot is not given to another block under a reader; a second reader has a miss, at once."""
    node = Node(tmp_path, 1.0, has_disk=True)
    node.scribble(2)
    reading = node.acquire()
    for _ in range(40):
        node.read()
    assert node.engine.counters.corrupt_dram == 0 and len(node.engine.blocks.unverified) == 1
    second = node.acquire()
    assert [slot is not None for slot in held(second)] == [True, True, False, True]
    node.engine.tick()
    assert not node.io.waiting, "it is compared again and again"
    for answer in (reading, second):
        node.engine.release(node.session, answer.lease)
    assert node.engine.check() == []
    node.engine.tick()
    node.io.run()
    assert node.engine.counters.corrupt_dram == 1 and node.read() == 4
    assert node.engine.check() == []


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_as_many_are_compared_as_the_share_says(tmp_path: Path, share: float) -> None:
    """Of what is handed out from DRAM, whatever the size of the requests."""
    node = Node(tmp_path, share, has_disk=False)
    for _ in range(100):
        for part in (HASHES[:1], HASHES[:1], HASHES[:2]):
            node.engine.acquire(node.session, node.space, b"".join(part), lambda _: None)
            node.io.run()
    assert abs(node.engine.counters.verified - 400 * share) <= 400 * share * 0.3 + 1
    assert not node.engine.counters.corrupt_dram


def test_busy_threads_compare_fewer(tmp_path: Path) -> None:
    """What is behind is not caught up with: a bounded number of jobs, and of pins."""
    node = Node(tmp_path, 1.0, has_disk=False)
    for _ in range(1000):
        node.engine.acquire(node.session, node.space, b"".join(HASHES), lambda _: None)
    assert 0 < len(node.io.waiting) <= 4
    assert node.engine.check() == []
