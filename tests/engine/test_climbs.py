"""Climbs along very long chains take a bounded number of steps in one turn, and go on where the last one stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index import climbs, forest
from kvstore.index.block import ROOTED, Block, Namespace
from kvstore.index.climbs import CLIMB_LOOKS, CLIMB_NOTE_EVERY, Climbs
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.retention.expiry import Expiry
from kvstore.steps import finish
from tiers.namespace_spec import NamespaceSpec

LONG = 5 * CLIMB_LOOKS


class Counted:
    """looks: of all climbs."""

    looks = 0


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    climb = Climbs.climb

    def count(
        of: Climbs[Block], start: Block, is_end: Callable[[Block], bool], looks: int = CLIMB_LOOKS
    ) -> tuple[Block, int]:
        at, left = climb(of, start, is_end, looks)
        Counted.looks += looks - left
        return at, left

    monkeypatch.setattr(Climbs, "climb", count)
    Counted.looks = 0


def name(number: int) -> bytes:
    return b"%08d" % number


def a_chain(blocks: int, first: bytes = b"") -> Namespace:
    """Blocks 0, 1, 2 …, each behind the one before. first: what is before them, and is not there."""
    space = Namespace(0, NamespaceSpec(bytes(16), 1, 8))
    for number in range(blocks):
        forest.arrived(space, name(number), name(number - 1) if number else first, IN_DRAM)
    return space


def turns(space: Namespace) -> Iterator[int]:
    """The looks of each turn until the namespace is up to date."""
    while space.is_behind:
        before = Counted.looks
        forest.spread(space, 1000)
        yield Counted.looks - before


def problems(space: Namespace) -> list[str]:
    return [p for block in space.blocks.walk() for p in forest.check_block(space, block.hash, block)]


def test_a_ghost_below_a_long_chain_that_is_not_rooted_finds_its_place_in_many_turns() -> None:
    """It is not rooted meanwhile, and those behind it know when it is: nothing between is looked at in one turn."""
    space = a_chain(LONG, b"not here")
    forest.arrived(space, b"child..1", b"ghost..1", IN_DRAM)
    Counted.looks = 0
    ghost = forest.arrived(space, b"ghost..1", name(LONG - 1), IN_DRAM)
    assert Counted.looks <= forest.ARRIVED_LOOKS
    assert ghost.parent is None and not ghost.where & ROOTED
    assert problems(space) == []
    forest.arrived(space, ghost.hash, b"", IN_DRAM)
    assert not ghost.where & ROOTED, "it is nobody's first block because its place is not known"
    assert max(turns(space)) <= 1000
    assert ghost.parent is space.blocks.get(name(LONG - 1))
    forest.arrived(space, b"not here", b"", IN_DRAM)
    finish(forest.spread_steps(space))
    assert ghost.where & ROOTED and space.blocks[b"child..1"].where & ROOTED
    assert problems(space) == []


def test_the_next_climb_of_a_long_chain_is_short() -> None:
    """From anywhere in the chain, to the same end."""
    space = a_chain(LONG, b"not here")
    end = space.blocks[b"not here"]
    while space.climbs.climb(space.blocks[name(LONG - 1)], lambda _: False)[0] is not end:
        pass
    for number in (0, 1, LONG // 3, LONG - 2, LONG - 1):
        at, left = space.climbs.climb(space.blocks[name(number)], lambda _: False)
        assert at is end and CLIMB_LOOKS - left <= 2 * CLIMB_NOTE_EVERY


def test_a_made_up_parent_far_below_closes_no_circle() -> None:
    """The first block of a long chain comes, behind the last one."""
    space = a_chain(LONG, b"ghost..1")
    first = forest.arrived(space, b"ghost..1", name(LONG - 1), IN_DRAM)
    assert max(turns(space)) <= 1000
    assert first.parent is None and first.where & ROOTED
    assert problems(space) == []


def test_two_ghosts_that_come_below_each_other_close_no_circle() -> None:
    """Each is at the end of what hangs on the other one: one of them stands alone."""
    space = Namespace(0, NamespaceSpec(bytes(16), 1, 8))
    for ghost in (b"a", b"b"):
        for number in range(100):
            above = ghost + b"%07d" % (number - 1) if number else ghost + b" ghost.."[:7]
            forest.arrived(space, ghost + b"%07d" % number, above, IN_DRAM)
    ghosts = [
        forest.arrived(space, ghost + b" ghost.."[:7], other + b"%07d" % 99, IN_DRAM)
        for ghost, other in ((b"a", b"b"), (b"b", b"a"))
    ]
    assert len(space.hanging) == 2
    finish(forest.spread_steps(space))
    assert [block.parent is None for block in ghosts].count(True) == 1
    assert problems(space) == []


def test_one_that_leaves_before_its_place_is_known_is_a_ghost_again() -> None:
    """And finds its place when it comes again."""
    space = a_chain(1000, b"not here")
    forest.arrived(space, b"child..1", b"ghost..1", IN_DRAM)
    ghost = forest.arrived(space, b"ghost..1", name(999), IN_DRAM)
    forest.left([ghost], IN_DRAM)
    assert not space.is_behind
    assert problems(space) == []
    forest.arrived(space, b"ghost..1", name(999), IN_DRAM)
    for number in reversed(range(1000)):
        forest.left([space.blocks[name(number)]], IN_DRAM)
    finish(forest.spread_steps(space))
    above = ghost.parent
    assert above is not None and above.hash == name(999), "known by name, as a parent that was never here"
    assert problems(space) == []


def test_a_long_chain_of_ghosts_is_forgotten_in_many_turns() -> None:
    """The last block of a chain goes, when all before it are gone."""
    space = a_chain(5000)
    for number in range(4999):
        forest.left([space.blocks[name(number)]], IN_DRAM)
    finish(forest.spread_steps(space))
    forest.left([space.blocks[name(4999)]], IN_DRAM)
    assert 5000 - len(space.blocks) <= forest.LEFT_GHOSTS
    assert problems(space) == []
    counts = [len(space.blocks)]
    while space.is_behind:
        forest.spread(space, 1000)
        counts.append(len(space.blocks))
    assert counts[-1] == 0
    assert max(before - after for before, after in pairwise(counts)) <= 1000


def test_what_is_far_below_counts_as_hidden_until_it_is_known() -> None:
    """While something else is being erased; each look goes on where the last one stopped."""
    space = a_chain(LONG)
    space.hide(b"other...")
    asked = [name(number) for number in range(LONG - 8, LONG)]
    answers = []
    while (count := forest.shown(space, asked)) == 0:
        answers.append(Counted.looks)
        Counted.looks = 0
    assert count == 8 and len(answers) == LONG // CLIMB_LOOKS - 1
    assert max(answers) <= CLIMB_LOOKS
    space.hide(name(10))
    assert forest.shown(space, asked) == 0
    while space.hidden_climbs.climb(space.blocks[name(LONG - 8)], lambda b: b.hash in space.hidden)[1] == 0:
        pass
    assert forest.shown(space, asked) == 0, "it is below what is hidden"


def test_a_ttl_far_above_is_found_in_many_turns() -> None:
    """Until it is known, the block is not handed out, and not dropped either."""
    space = a_chain(LONG)
    expiry = Expiry()
    expiry.start(expiry.clock, lambda _: space, lambda _: True)
    expiry.set_prefix(space.digest, b"other...", 5.0, 0.0, is_set=True)
    run = [space.blocks[name(number)] for number in range(LONG - 512, LONG)]
    expiry.clock.move_to(100.0)
    for _ in range(LONG // CLIMB_LOOKS):
        Counted.looks = 0
        assert expiry.over(run[::-1], in_doubt=False) == set()
        assert Counted.looks <= CLIMB_LOOKS
    assert expiry.over(run) == set()
    expiry.set_prefix(space.digest, name(3), 5.0, 0.0, is_set=True)
    assert expiry.over(run) == set(run) and expiry.over(run, in_doubt=False) == set()
    while not expiry.over(run, in_doubt=False):
        pass
    assert expiry.over(run, in_doubt=False) == set(run)


class Thing:
    def __init__(self, parent: Thing | None) -> None:
        self.parent = parent


@given(
    st.lists(st.tuples(st.integers(0, 199), st.integers(2, 60)), max_size=30), st.sets(st.integers(0, 199))
)
def test_climbs_with_notes_end_where_climbs_without_them_would(
    asked: list[tuple[int, int]], ends: set[int]
) -> None:
    """Wherever they begin, and however few looks each has."""
    things: list[Thing] = []
    for number in range(200):
        things.append(Thing(things[number - 1 - number % 3] if number > 2 else None))
    marked = {things[number] for number in ends}
    notes = Climbs[Thing]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(climbs, "CLIMB_NOTE_EVERY", 8)
        for number, looks in asked:
            plain: Thing = things[number]
            while plain not in marked and plain.parent is not None:
                plain = plain.parent
            at, left = notes.climb(things[number], marked.__contains__, looks)
            assert not left or at is plain
            for _ in range(200):
                at, left = notes.climb(things[number], marked.__contains__, looks)
            assert at is plain
