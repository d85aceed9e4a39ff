"""A queue of leaves gives the oldest first, in whatever order they came."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.stretch import Stretch
from kvstore.policies.learned.leaves import REUSE_STALE_ENTRIES_MIN, REUSE_SWEEP_LOOKS, Entry, Leaves, Queue


@given(st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=80), st.integers(0, 3))
def test_the_oldest_comes_first(steps: list[int | None], looks: int) -> None:
    """Pushed (a last use) and popped (None) like a heap, and swept between: the same come out in the same order."""
    queue: Queue[int] = Queue()
    model: list[Entry[int]] = []
    sweep = queue.sweep(lambda entry: True)
    for number, touched in enumerate(steps):
        if touched is not None:
            queue.push(Entry(touched, number, number, None))
            heapq.heappush(model, Entry(touched, number, number, None))
        elif model:
            assert queue.front[-1] == model[0]
            assert queue.pop() == heapq.heappop(model).item
        for _ in range(looks):
            if next(sweep, None) is None:
                sweep = queue.sweep(lambda entry: True)
        assert sorted(queue) == sorted(model)
        assert bool(queue.front) == bool(model)
    while model:
        assert queue.pop() == heapq.heappop(model).item
    assert not queue.front and not list(queue)


def test_no_push_looks_at_more_than_a_few_entries() -> None:
    """However many entries are outdated, each push looks at a bounded number, and all of them are gone in the end."""
    looks = 0
    last: dict[int, Stretch] = {}

    def is_leaf(item: int, stretch: Stretch | None) -> bool:
        nonlocal looks
        looks += 1
        return last[item] is stretch

    leaves: Leaves[int] = Leaves(is_leaf)
    for use in range(10_000):
        last[use % 100] = Stretch(touched=use)
        before = looks
        leaves.push(use % 100, last[use % 100])
        assert looks - before <= REUSE_SWEEP_LOOKS
        assert len(leaves) <= 2 * (2 * 100 + REUSE_STALE_ENTRIES_MIN)


def test_an_item_that_is_pushed_again_and_again_has_few_entries() -> None:
    """Telling twice is harmless: of entries that are all true, one for each item is kept."""
    leaves: Leaves[int] = Leaves(lambda item, stretch: True)
    uses = [Stretch(touched=number) for number in range(100)]
    for number in range(10_000):
        leaves.push(number % 100, uses[number % 100])
    assert len(leaves) <= 2000
