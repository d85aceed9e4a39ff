"""Retention at its limits: nothing is forgotten, nobody is shut out."""

from __future__ import annotations

import pytest

from kvstore.commands import retention_commands
from kvstore.ledger.accounts import Asking
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.retention import expiry, pins
from kvstore.steps import finish
from tests.engine.fakes import granted, held
from tests.engine.test_retention import MIB, SLOT_BYTES, Node, chain, flood, joined
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec


def test_a_record_size_with_pinned_blocks_only_finds_room() -> None:
    """Its own slab is all pinned, and there are pins in every other: new blocks come all the same."""
    node = Node(share=0.75)
    other = node.engine.register(NamespaceSpec(b"o" * 16, MIB, 8))
    node.spaces.append(other)
    node.put(*chain("a", 8))
    answer = node.engine.reserve(node.session, other, joined("x0", "x1"), b"")
    sums = b"".join(digest(node.arena.mapping[s.offset : s.offset + MIB]) for s in granted(answer))
    assert node.engine.commit(node.session, answer.lease, [0, 1], sums) == 2
    assert node.pin("a02") is None and node.pin("x1", space=3) is None
    assert len(granted(node.engine.reserve(node.session, other, joined("y"), b""))) == 1
    assert node.engine.check() == []
    node.close()


def test_no_more_expires_than_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow NVMe deletes, no row of what was dropped is forgotten there."""
    monkeypatch.setattr(retention_commands, "RETENTION_ROWS_BEHIND_MAX", 6)
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS", 4)
    node = Node(nvme_slots=60)
    node.ttl(60)
    for first in range(0, 40, 8):
        node.put(*chain("a", first + 8, first), parent=f"a{first - 1:02d}" if first else "")
        node.settle(1)
    node.clock_s += 100
    for _ in range(20):
        node.engine.tick()
        assert node.engine.nvme.members[0].dropped <= 12
    for _ in range(20):
        node.settle(1)
    assert node.nvme is not None and not node.nvme.records
    assert node.engine.check() == []
    node.close()


@pytest.mark.parametrize("spaces", [[0], [0, 1]])
@pytest.mark.parametrize("quota", [0, 1, 5, 6, 11, 12, 40])
@pytest.mark.parametrize("warm", [0, 1])
def test_no_more_is_promised_than_a_quota_lets_into_dram(quota: int, spaces: list[int], warm: int) -> None:
    """All that a lookup promises comes, at once, into a quota smaller than the prefix; the rest says why it does not."""
    node = Node(nvme_slots=48, slabs=4)
    names = chain("a", 12)
    for space in spaces:
        node.put(*names, space=space)
        node.settle()
    node.quota("acme", 0)
    node.settle(1)
    assert node.used("acme") == 0
    node.quota("acme", quota)
    if warm and quota:
        finish(node.engine.prefetch_steps(node.spaces[0], joined(names[0])))
        node.io.run()
    numbers = [node.spaces[space] for space in spaces]
    usable = node.engine.find(numbers, joined(*names)).usable
    assert usable == min(12, quota // len(spaces))
    assert finish(node.engine.explain_steps(numbers, joined(*names)))[1][usable:] == [outcomes.OVER_QUOTA] * (
        12 - usable
    )
    for number in numbers if usable else ():
        answers: list[Acquired] = []
        node.engine.acquire(node.session, number, joined(*names[:usable]), answers.append)
        node.io.run()
        assert answers and None not in held(answers[0])
    assert usable * len(spaces) <= node.used("acme") <= quota
    assert node.engine.counters.refused_over_quota == (usable < 12)
    assert node.engine.check() == []
    node.close()


def test_what_the_engine_has_itself_needs_no_room_in_a_quota() -> None:
    """Of a prompt that goes on behind the engine's own blocks, as many as there is room for."""
    node = Node(nvme_slots=48)
    names = chain("a", 12)
    node.put(*names)
    node.settle()
    node.quota("acme", 3)
    node.settle(1)
    found = node.engine.find(node.spaces[:1], joined(*names), Asking(local_tokens=5))
    assert (found.usable, found.held, found.why) == (8, 12, outcomes.OVER_QUOTA)
    node.quota("acme", 0)
    node.settle(1)
    assert node.engine.find(node.spaces[:1], joined(*names), Asking(local_tokens=5)).usable == 5
    assert node.engine.find(node.spaces[:1], joined(*names), Asking(local_tokens=12)).usable == 12
    node.close()


def test_what_waited_for_a_larger_share_is_guarded_at_once() -> None:
    """`retention.pinned_share_max` is raised while a pinned prefix is beyond it: no new block has to come first."""
    node = Node()
    node.pin("a15")
    node.put(*chain("a", 16))
    node.engine.retention.set_share(0.75)
    assert node.engine.blocks.guards.guarded_bytes[IN_DRAM] == 12 * SLOT_BYTES
    flood(node)
    assert node.held(*chain("a", 16)) == 12
    node.close()


def test_what_waited_is_guarded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A share has room again, and a block that waits for it comes once more before its turn: its bytes count once."""
    node = Node()
    monkeypatch.setattr(pins, "PIN_STEP_BLOCKS", 1)
    background = node.engine.blocks.background
    node.pin("a09")
    node.put(*chain("a", 10))
    while background.step():
        pass
    node.engine.retention.set_share(0.75)
    for block in list(node.space(0).blocks.values()):
        node.engine.blocks.guards.came(block)
    while background.step():
        pass
    assert node.engine.blocks.guards.guarded_bytes[IN_DRAM] == 10 * SLOT_BYTES
    assert node.engine.check() == []
    node.close()


@pytest.mark.parametrize(("nvme_slots", "is_evicted"), [(0, False), (24, False), (24, True)])
def test_what_was_stored_again_is_as_young_after_a_kill(nvme_slots: int, is_evicted: bool) -> None:
    """Its rows say so, in DRAM and on NVMe: without that it would be over with the next start. So it would be by a row that is
    left of it on NVMe from before."""
    node = Node(nvme_slots)
    node.ttl(60)
    node.put(*chain("a", 3))
    node.settle()
    for block in list(node.space(0).blocks.values())[::-1] if is_evicted else ():
        node.engine.blocks.left_nvme(block)
    node.clock_s += 70
    assert node.put(*chain("a", 3)) == 0, "held, and over"
    node.settle(30)
    node.kill()
    assert node.held(*chain("a", 3)) == 3
    node.settle(29)
    assert node.held(*chain("a", 3)) == 3
    node.settle(1)
    assert node.held(*chain("a", 3)) == 0 and node.engine.check() == []
    node.close()
