"""Records smaller than the smallest slot of NVMe: what they take is what their slots take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from tests.engine.fakes import SteppedIo, granted
from tiers.checksum import digest, pack_columns
from tiers.constants import SLOT_BYTES_MIN
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec
from tiers.nvme.device import Device, capacity_for

MIB = 1 << 20
SLABS = 2  # of NVMe, of 2 MiB: 256 of the smallest slots
SLOTS = SLABS * 2 * MIB // SLOT_BYTES_MIN


class Node:
    """A real arena over a real NVMe tier, and a namespace for each of some record sizes."""

    def __init__(self, directory: Path, *record_bytes: int, columns: bytes = b"") -> None:
        self.nvme = Device(directory / "nvme", capacity_for(SLABS, 2 * MIB), 2 * MIB)
        self.arena = open_arena(directory / "arena", 8 * MIB, 2 * MIB)
        self.io = SteppedIo()
        self.engine = Engine(
            self.arena, [Drive(self.nvme, self.io)], NamespaceRegistry(), self.io, clock=lambda: 0.0
        )
        self.specs = [
            NamespaceSpec(bytes([n]) * 16, size, 8, 1, {"tenant": "acme"}, columns)
            for n, size in enumerate(record_bytes)
        ]
        self.spaces = [self.engine.register(spec) for spec in self.specs]
        self.engine.adopt()
        self.io.run()
        self.session = self.engine.open_session(0)

    def put(self, count: int, space: int = 0, first: int = 0) -> None:
        """Prompts of one block."""
        for number in range(first, first + count):
            answer = self.engine.reserve(self.session, self.spaces[space], number.to_bytes(8, "big"), b"")
            (slot,) = granted(answer)
            size = self.specs[space].record_bytes
            checksum = digest(self.arena.mapping[slot.offset : slot.offset + size], self.specs[space].columns)
            self.engine.commit(self.session, answer.lease, [0], checksum)
            self.io.run()

    def on_nvme(self, space: int = 0) -> int:
        namespace = self.engine.namespaces.get(self.spaces[space])
        return sum(bool(block.where & IN_NVME) for block in namespace.blocks.values())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, 4096, 8192)
    yield node
    assert node.engine.check() == []
    node.arena.close(unlink=True)
    node.nvme.close()


def test_a_quota_counts_what_the_disk_does(node: Node) -> None:
    """A quota of 40 slots is reached with 40 records of a quarter of a slot."""
    errors: list[object] = []
    node.engine.retention.quota(
        "", "acme", None, 40 * SLOT_BYTES_MIN, lambda error, rules: errors.append(error)
    )
    node.io.run()
    node.put(100)
    assert errors == [None]
    assert node.on_nvme() == 40
    holder = node.engine.blocks.quotas.holder("", "acme")
    assert holder.used[IN_NVME] == node.nvme.stats().used_bytes == 40 * SLOT_BYTES_MIN


def test_record_sizes_that_share_a_slot_size_make_room_for_each_other(node: Node) -> None:
    """NVMe full of one of them takes in the other: they are in one order of eviction."""
    node.put(2 * SLOTS)
    assert node.on_nvme() == SLOTS
    node.put(50, space=1)
    assert node.on_nvme(1) == 50 and node.on_nvme(0) <= SLOTS - 50
    assert node.engine.counters.demote_failed == 0
    (member,) = node.engine.nvme.members
    policies = [node.engine.blocks.nvme_policy(member, node.engine.namespaces.get(n)) for n in node.spaces]
    assert policies[0] is policies[1]
    assert (
        node.engine.blocks.slot_bytes(node.engine.namespaces.get(node.spaces[0]), IN_DRAM) == SLOT_BYTES_MIN
    )


@pytest.mark.parametrize("columns", [pack_columns([1024] * 4), pack_columns([4000, 96]), b""])
def test_rows_of_other_columns_are_dropped(tmp_path: Path, columns: bytes) -> None:
    """What an earlier daemon kept is adopted where its columns are those of the namespace now, else it goes."""
    held = pack_columns([1024] * 4)
    first = Node(tmp_path, 4096, columns=held)
    first.put(10)
    assert first.on_nvme() == 10
    first.arena.close()
    first.nvme.close()
    node = Node(tmp_path, 4096, columns=columns)
    for _ in range(3):
        node.engine.tick()
        node.io.run()
    counters, kept = node.engine.counters, 10 if columns == held else 0
    assert (counters.adopted, counters.verified, counters.corrupt_dram) == (kept, kept, 0)
    assert node.on_nvme() == node.nvme.stats().records == node.arena.stats().records == kept
    node.put(10 - kept)  # room and names are as free as ever
    assert node.on_nvme() == 10 and node.engine.check() == []
    node.arena.close(unlink=True)
    node.nvme.close()
