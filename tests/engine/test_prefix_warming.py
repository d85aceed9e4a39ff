"""Warming a prefix by its name while namespaces and blocks come and go: nothing is brought for nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.engine import prefix_warming
from kvstore.engine.engine import Engine
from kvstore.engine.prefix_warming import PrefixWarming, chain_steps
from kvstore.errors import NotFound
from kvstore.index import namespaces as namespaces_module
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tests.engine.test_warming import SIZE, SPACE, Node, make, name
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20

__all__ = ["make"]  # a fixture; it ends with a check of the books


def warming_of(node: Node, block: int) -> PrefixWarming:
    return PrefixWarming(node.engine, "", name(block), lambda: node.timers.now_s)


def asked(node: Node, warming: PrefixWarming) -> dict[str, object]:
    """Asked every 10 ms until all is over."""
    for _ in range(500):
        told = finish(warming.go_on())
        if told["is_over"]:
            return told
        node.go_on(0.01)
    raise AssertionError(told)


def test_a_prefix_of_the_bucket_is_brought(make: Callable[..., Node]) -> None:
    """All of it, in every namespace that has it, and it is found in DRAM."""
    node = make(40)
    told = asked(node, warming_of(node, 39))
    assert (told["loaded"], told["gone"], told["failed"]) == (40, 0, 0)
    assert node.where(0, 40) == [IN_DRAM] * 40


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.05])
@pytest.mark.parametrize("how", ["ended", "cleared"])
def test_a_namespace_that_goes_takes_what_comes_with_it(
    make: Callable[..., Node], how: str, after_s: float
) -> None:
    """Before the bucket has answered, between its answer and the first load, or with loads under way: no slot is lost."""
    node = make(40)
    warming = warming_of(node, 39)
    finish(warming.go_on())
    node.go_on(after_s)
    if after_s > 0.02:
        finish(warming.go_on())
    if how == "ended":
        node.engine.end_namespace(node.space)
    else:
        node.engine.clear("", b"", None, True, False, lambda _: None)
    with contextlib.suppress(NotFound):  # its only namespace was gone when the bucket answered
        assert asked(node, warming)["under_way"] == 0
    for _ in range(50):
        node.go_on(0.1)
        while node.engine.drop_ended():
            pass
    assert node.engine.check() == []
    known = node.engine.namespaces.of_key(SPACE.digest)
    held = 0 if known is None else len(known.blocks)
    assert node.arena.stats().used_bytes == held * SIZE and (how == "cleared" or known is None)


def test_what_comes_keeps_its_namespace(make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """A full registry gives up none to which blocks are on their way."""
    node = make(40)
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", len(node.engine.namespaces))
    warming = warming_of(node, 39)
    finish(warming.go_on())
    node.go_on(0.03)
    finish(warming.go_on())
    with pytest.raises(namespaces_module.NamespaceConflict, match="too many namespaces"):
        node.engine.register(NamespaceSpec(b"x" * 16, SIZE, 8, 16, {}))
    assert asked(node, warming)["loaded"] == 40


def test_a_chain_whose_blocks_leave_is_none(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps the beginning leaves: what is left is not told as if it were a prefix."""
    monkeypatch.setattr(prefix_warming, "STEP_BLOCKS", 4)
    node = make(0)
    node.store(0, 20)
    blocks = node.namespace.blocks
    last = blocks.get(name(19))
    assert [block.hash for block in finish(chain_steps(last))] == list(map(name, range(20)))
    steps = chain_steps(last)
    next(steps)
    for number in range(19, -1, -1):
        block = blocks.get(name(number))
        assert block is not None and node.engine.blocks.drop(block, outcomes.CLEARED)
    assert finish(steps) == []
    assert finish(chain_steps(last)) == [], "it was looked up before, and has left since"


def test_records_that_no_slab_holds_any_more_are_not_loaded(tmp_path: Path) -> None:
    """NVMe has them from when `dram.slab_bytes` was larger: that they do not come is told, and nothing is left under way."""
    nvme, spec = FaultyDevice(4), NamespaceSpec(b"l" * 16, 3 * MIB, 8, 16)
    for slab_bytes in (4 * MIB, 2 * MIB):
        arena, io = open_arena(tmp_path / f"{slab_bytes}", 16 * MIB, slab_bytes), SteppedIo()
        engine = Engine(arena, [Drive(nvme, io)], namespaces_module.NamespaceRegistry(), io)
        engine.adopt()
        io.run()
        if slab_bytes > spec.record_bytes:
            session, space = engine.open_session(0), engine.register(spec)
            answer = engine.reserve(session, space, name(0) + name(1), b"")
            views = [arena.mapping[slot.offset : slot.offset + spec.record_bytes] for slot in granted(answer)]
            engine.commit(session, answer.lease, [0, 1], b"".join(map(digest, views)))
            io.run()
        else:
            told = finish(PrefixWarming(engine, "", name(1), engine.clock).go_on())
            assert (told["failed"], told["under_way"], told["is_over"]) == (2, 0, True)
            engine.tick()
        assert engine.loader.underway == 0 and engine.check() == []
        arena.close(unlink=True)
