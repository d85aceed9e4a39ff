"""Ghosts: what left is remembered, the newest and a bounded number, and none of their dicts ever grows large."""

from __future__ import annotations

import random
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.constants import REUSE_GHOSTS_MIN
from kvstore.index.stretch import Stretch
from kvstore.policies.learned.ghosts import REUSE_GHOSTS_PARTS, Ghosts

NAMES = 1 << 63


def count(ghosts: Ghosts) -> int:
    return sum(map(len, ghosts._parts))


def names(many: int, seed: int = 0) -> list[int]:
    """Of blocks: as random as hashes are."""
    draw = random.Random(seed)
    return [draw.randrange(-NAMES, NAMES) for _ in range(many)]


@given(st.integers(0, 1 << 30), st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=10))
@settings(max_examples=50, deadline=None)
def test_below_its_bound_it_is_a_dict(seed: int, steps: list[tuple[bool, int]]) -> None:
    """Blocks leave and come back in any order; of one that leaves twice, the last use counts."""
    ghosts, model, draw = Ghosts(), dict[int, Stretch](), random.Random(seed)
    known = names(600, seed)
    for leave, some in steps:
        asked = draw.sample(known, some)
        if leave:
            stretch = Stretch()
            ghosts.add((name, stretch) for name in asked)
            model.update(dict.fromkeys(asked, stretch))
        else:
            assert ghosts.pop_run(asked) == [model.pop(name, None) for name in asked]
        assert [ghosts.get(name) for name in known] == [model.get(name) for name in known]
        assert count(ghosts) == len(model)


def test_the_oldest_are_forgotten_first() -> None:
    """Of twice as many as fit, about the newer half is remembered; who is forgotten is counted no more."""
    gone = names(2 * REUSE_GHOSTS_MIN)
    ghosts, stretch = Ghosts(), Stretch(alive=len(gone))
    ghosts.add((name, stretch) for name in gone)
    kept = [ghosts.get(name) is not None for name in gone]
    assert REUSE_GHOSTS_MIN <= sum(kept) == count(ghosts) == stretch.alive <= 1.2 * REUSE_GHOSTS_MIN
    assert sum(kept[REUSE_GHOSTS_MIN:]) >= 0.9 * REUSE_GHOSTS_MIN
    assert not any(kept[: REUSE_GHOSTS_MIN // 2])


def test_it_grows_and_shrinks_with_its_bound() -> None:
    """As the node holds more or fewer blocks."""
    ghosts = Ghosts()
    ghosts.bound(4 * REUSE_GHOSTS_MIN)
    ghosts.add((name, Stretch()) for name in names(5 * REUSE_GHOSTS_MIN))
    assert 4 * REUSE_GHOSTS_MIN <= count(ghosts) <= 1.2 * 4 * REUSE_GHOSTS_MIN
    ghosts.bound(REUSE_GHOSTS_MIN)
    ghosts.add((name, Stretch()) for name in names(REUSE_GHOSTS_MIN, seed=1))
    assert count(ghosts) <= 1.2 * REUSE_GHOSTS_MIN


def test_no_dict_of_it_is_large() -> None:
    """At the ghosts of ten million blocks, the largest is as small as a part of the index: it moves in no time."""
    ghosts, many = Ghosts(), 10_000_000 // 16
    ghosts.bound(many)
    stretch = Stretch()
    ghosts.add((name, stretch) for name in names(2 * many))
    assert count(ghosts) >= many
    largest = max(map(sys.getsizeof, ghosts._parts))
    assert largest <= sys.getsizeof(dict.fromkeys(range(3 * many // REUSE_GHOSTS_PARTS)))
