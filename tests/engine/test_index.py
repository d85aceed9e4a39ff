"""The forest of blocks: what a block costs, and that blocks which nobody knows any more are gone."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import cast
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.engine import Engine
from kvstore.index import block as block_module
from kvstore.index import forest
from kvstore.index.block import Block, Children, Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.index.stretch import Stretch
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from kvstore.tools.replay.cell import NoIo
from kvstore.tools.replay.slots import CountedSlots
from tests.engine.fakes import FaultyDevice
from tiers.namespace_spec import NamespaceSpec

NAMES = [b"%08d" % number for number in range(6)]


class Mark:
    """Hangs on a block and tells when it is gone: blocks themselves cannot be watched."""


def a_namespace() -> Namespace:
    return Namespace(0, NamespaceSpec(bytes(16), 1, 8))


def watched(block: Block) -> weakref.ref[Mark]:
    mark = Mark()
    block.stretch = cast("Stretch", mark)
    return weakref.ref(mark)


def test_a_block_costs_64_bytes_that_no_collection_walks() -> None:
    """Millions of blocks must neither fill the memory nor stop the daemon for a full collection."""
    space = a_namespace()
    block = forest.arrived(space, NAMES[0], b"", IN_DRAM)
    assert sys.getsizeof(block) <= 64
    assert not gc.is_tracked(block)
    assert not any(map(gc.is_tracked, space.blocks.dicts()))


def test_blocks_that_left_are_freed_without_a_collection() -> None:
    """Parents and children know each other; leaving opens the circle, from either end."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        space = a_namespace()
        blocks = [
            forest.arrived(space, NAMES[depth], NAMES[depth - 1] if depth else b"", IN_DRAM)
            for depth in range(4)
        ]
        marks = [watched(block) for block in blocks]
        for depth in order:
            forest.left([blocks[depth]], IN_DRAM)
        del blocks
        assert not space.blocks
        assert not any(mark() for mark in marks)


def test_no_parent_that_is_made_up_closes_a_circle() -> None:
    """A block that hangs below itself is told of: the one that would close the circle stands alone."""
    for length in (1, 2, 5):
        space = a_namespace()
        for depth in range(length):
            forest.arrived(space, NAMES[depth], NAMES[(depth + 1) % length], IN_DRAM)
        blocks = list(space.blocks.values())
        assert [forest.check_block(space, block.hash, block) for block in blocks] == [[]] * length
        assert [block.parent for block in blocks].count(None) == 1
        for block in blocks:
            forest.left([block], IN_DRAM)
        assert not space.blocks


def test_a_namespace_that_is_given_up_lets_go_of_its_blocks() -> None:
    """`forget` opens all circles: chains and forks alike."""
    space = a_namespace()
    marks = [watched(forest.arrived(space, NAMES[0], b"", IN_DRAM))]
    marks += [watched(forest.arrived(space, name, NAMES[0], IN_DRAM)) for name in NAMES[1:4]]
    marks += [watched(forest.arrived(space, name, NAMES[1], IN_NVME)) for name in NAMES[4:]]
    forest.forget(space)
    assert not space.blocks
    assert not any(mark() for mark in marks)


def test_children_are_counted_by_tier_however_many_there_are() -> None:
    """None, one, several and none again: a parent is a leaf in a tier exactly when no child is there."""
    space = a_namespace()
    parent = forest.arrived(space, NAMES[0], b"", IN_DRAM)
    assert not parent.has_child_in(IN_DRAM)
    first, second = (forest.arrived(space, name, NAMES[0], IN_DRAM) for name in NAMES[1:3])
    forest.arrived(space, NAMES[2], NAMES[0], IN_NVME)
    assert isinstance(parent.children, Children)
    assert parent.has_child_in(IN_DRAM)
    assert parent.has_child_in(IN_NVME)
    forest.left([first], IN_DRAM)
    forest.left([second], IN_DRAM)
    assert not parent.has_child_in(IN_DRAM)
    assert parent.has_child_in(IN_NVME)
    assert problems_of(space) == []
    forest.left([second], IN_NVME)
    assert parent.children is None
    assert problems_of(space) == []


def test_an_engine_that_is_given_up_is_freed() -> None:
    """Reading the rows of NVMe leaves the collector as it was: what is dropped later is found."""
    frozen = gc.get_freeze_count()
    engine = Engine(CountedSlots(4, 24), [Drive(FaultyDevice(4), NoIo())], NamespaceRegistry(), NoIo())
    engine.adopt()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


@given(
    parents=st.lists(st.integers(0, 7), min_size=8, max_size=8),
    held=st.sets(st.integers(0, 7)),
    asked=st.lists(st.integers(0, 9), max_size=12),
)
def test_blocks_found_along_a_chain_are_those_of_their_hashes(
    parents: list[int], held: set[int], asked: list[int]
) -> None:
    """Whatever is asked for: along a chain, with gaps, across two chains, twice, or never seen."""
    names = [b"%08d" % number for number in range(10)]
    space = a_namespace()
    for number in sorted(held):
        forest.arrived(space, names[number], names[parents[number] % number] if number else b"", IN_DRAM)
    hashes = [names[number] for number in asked]
    assert forest.chain(space, hashes) == [space.blocks.get(h) for h in hashes]
    up = [names[max(asked, default=0)]]  # and a true chain, downwards
    while len(up) < 5 and (block := space.blocks.get(up[-1])) is not None and block.parent is not None:
        up.append(block.parent.hash)
    down = up[::-1]
    assert forest.chain(space, down) == [space.blocks.get(h) for h in down]
    for start in range(len(down) + 1):
        assert forest.not_held(space, down[start:]) == [h for h in down[start:] if not space.holds(h)]
    forest.forget(space)


@given(
    tree=st.lists(st.integers(0, 9), min_size=10, max_size=10),
    known=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([IN_DRAM, IN_NVME])), max_size=10),
    last=st.integers(0, 9),
    length=st.integers(1, 10),
    gone=st.integers(0, 9),
)
def test_a_run_comes_and_goes_as_its_blocks_would_one_by_one(
    tree: list[int], known: list[tuple[int, int]], last: int, length: int, gone: int
) -> None:
    """Onto any forest: blocks, ghosts and forks that were there before, in either tier."""
    names = [b"%08d" % number for number in range(10)]
    parents = [b"", *(names[number - 1 - tree[number] % number] for number in range(1, 10))]
    chain = [names[last]]
    while len(chain) < length and parents[names.index(chain[0])]:
        chain.insert(0, parents[names.index(chain[0])])
    above = parents[names.index(chain[0])]
    at_once, one_by_one = a_namespace(), a_namespace()
    for space in (at_once, one_by_one):
        for number, bit in known:
            forest.arrived(space, names[number], parents[number], bit)
    run, spare = forest.arrived_in_turn(at_once, chain, above, range(len(chain)))
    assert [block.hash for block in run] == chain
    for before, block_hash, slot in zip([above, *chain], chain, range(len(chain)), strict=False):
        known_before = one_by_one.blocks.get(block_hash)
        if known_before is not None and known_before.where & IN_DRAM:
            assert slot in spare
        else:
            forest.arrived(one_by_one, block_hash, before, IN_DRAM).put_in(slot)
    assert forest_of(at_once) == forest_of(one_by_one)
    assert problems_of(at_once) == []
    leaving = run[::-1][: gone + 1]
    forest.left(leaving, IN_DRAM)
    for block in leaving:
        forest.left([one_by_one.blocks[block.hash]], IN_DRAM)
    assert forest_of(at_once) == forest_of(one_by_one)
    assert problems_of(at_once) == []
    forest.forget(at_once)
    forest.forget(one_by_one)


def forest_of(space: Namespace) -> dict[bytes, tuple[int, bytes, set[bytes]]]:
    """Of every block: where it is, its parent, its children."""
    finish(forest.spread_steps(space))
    return {
        name: (
            block.where,
            block.parent.hash if block.parent is not None else b"",
            {child.hash for child in block.each_child()},
        )
        for name, block in space.blocks.walk_items()
    }


def problems_of(space: Namespace) -> list[str]:
    """Of what is told already, and of all when everything is."""
    told_later = [
        line for name, block in space.blocks.walk_items() for line in forest.check_block(space, name, block)
    ]
    finish(forest.spread_steps(space))
    return told_later + [
        line
        for block_hash, block in space.blocks.walk_items()
        for line in forest.check_block(space, block_hash, block) + finish(forest.check_children(block))
    ]


STEPS = st.tuples(
    st.sampled_from(["comes", "goes", "is asked for", "tells"]),
    st.integers(0, 11),
    st.sampled_from([IN_DRAM, IN_NVME]),
)


@given(tree=st.lists(st.integers(0, 11), min_size=12, max_size=12), steps=st.lists(STEPS, max_size=60))
@mock.patch.object(block_module, "CHILDREN_FEW_MAX", 2)
def test_what_hangs_on_a_block_may_hear_of_it_later(
    tree: list[int], steps: list[tuple[str, int, int]]
) -> None:
    """However blocks come and go while others are still to be told: a lookup never finds what is not there, and
    finds all of it when everybody knows."""
    names = [b"%08d" % number for number in range(12)]
    parents = [b"", *(names[number - 1 - tree[number] % number] for number in range(1, 12))]
    space, held = a_namespace(), dict.fromkeys(names, 0)

    def chain_of(number: int) -> list[bytes]:
        above = parents[number]
        return [*(chain_of(names.index(above)) if above else []), names[number]]

    def agrees(number: int, is_settled: bool) -> bool:
        chain = chain_of(number)
        there = next((at for at, name in enumerate(chain) if not held[name]), len(chain))
        found = forest.rooted_prefix(space, b"".join(chain), len(chain))
        return found == there if is_settled else found <= there

    for what, number, bit in steps:
        name = names[number]
        if what == "comes":
            forest.arrived(space, name, parents[number], bit)
            held[name] |= bit
        elif what == "goes" and held[name] & bit:
            forest.left([space.blocks[name]], bit)
            held[name] &= ~bit
        elif what == "tells":
            forest.spread(space, 1 + number % 3)
        assert all(agrees(each, not space.stale) for each in range(12))
        assert [p for h, b in space.blocks.walk_items() for p in forest.check_block(space, h, b)] == []
    assert problems_of(space) == []
    assert all(agrees(each, True) for each in range(12))
    assert set(space.stale) <= {name for name, _ in space.blocks.walk_items()}
    forest.forget(space)


@given(
    parents=st.lists(st.integers(-1, 5), min_size=6, max_size=6),
    order=st.lists(st.integers(0, 5), max_size=12),
    in_dram=st.sets(st.integers(0, 5)),
)
def test_rows_of_a_device_are_filed_as_if_they_came_one_by_one(
    parents: list[int], order: list[int], in_dram: set[int]
) -> None:
    """In any order, with doubles and parents that nobody has, and where DRAM holds some of the blocks."""
    above = {n: NAMES[p] if 0 <= p < n else b"" for n, p in enumerate(parents)}
    at_once, in_turn = a_namespace(), a_namespace()
    for space in (at_once, in_turn):
        for number in sorted(in_dram):
            forest.arrived(space, NAMES[number], above[number], IN_DRAM)
    rows = [(NAMES[number], above[number], slot, 0) for slot, number in enumerate(order)]
    filed, ends = forest.load(at_once, rows, 3)
    for block_hash, parent, slot, _ in rows:
        known = in_turn.blocks.get(block_hash)
        if known is None or not known.where & IN_NVME:
            forest.arrived(in_turn, block_hash, parent, IN_NVME).put_on(3, slot)
    assert forest_of(at_once) == forest_of(in_turn)
    assert problems_of(at_once) == []
    firsts = [NAMES[number] not in (row[0] for row in rows[:at]) for at, number in enumerate(order)]
    assert [block is not None for block in filed] == firsts
    assert all(block.place == (3, row[2]) for block, row in zip(filed, rows, strict=True) if block)
    leaves = {block.hash for block in filed if block and not block.has_child_in(IN_NVME)}
    assert leaves <= {block.hash for block in ends} <= {row[0] for row in rows}
