"""Retention at its limits: nothing is forgotten, nobody is shut out."""

from __future__ import annotations

import pytest

from kvstore import expiry, retention, room
from kvstore.namespaces import NamespaceSpec
from tests.engine.test_retention import MIB, Node, chain, joined
from tiers.checksum import digest


def test_a_record_size_with_pinned_blocks_only_finds_room() -> None:
    """Its own slab is all pinned, and there are pins in every other: new blocks come all the same."""
    node = Node(share=0.75)
    other = node.engine.register(NamespaceSpec(b"o" * 16, MIB, 8))
    node.spaces.append(other)
    node.put(*chain("a", 8))
    answer = node.engine.reserve(node.session, other, joined("x0", "x1"), b"")
    sums = b"".join(digest(node.arena.mapping[s.offset : s.offset + MIB]) for s in answer.slots)
    assert node.engine.commit(node.session, answer.lease, [0, 1], sums) == 2
    assert node.pin("a02") is None and node.pin("x1", space=3) is None
    assert len(node.engine.reserve(node.session, other, joined("y"), b"").slots) == 1
    assert node.engine.check() == []
    node.close()


def test_no_more_expires_than_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow NVMe deletes, no row of what was dropped is forgotten there."""
    monkeypatch.setattr(room, "DOOMED_MAX", 12)
    monkeypatch.setattr(retention, "RETENTION_ROWS_BEHIND_MAX", 6)
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS_PER_TICK", 4)
    node = Node(nvme_slots=60)
    node.ttl(60)
    for first in range(0, 40, 8):
        node.put(*chain("a", first + 8, first), parent=f"a{first - 1:02d}" if first else "")
        node.settle(1)
    node.clock_s += 100
    for _ in range(20):
        node.engine.tick()
        assert len(node.engine.room.doomed) <= 12
    for _ in range(20):
        node.settle(1)
    assert node.nvme is not None and not node.nvme.rows
    assert node.engine.counters.dooms_dropped == 0
    assert node.engine.check() == []
    node.close()
