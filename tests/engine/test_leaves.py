"""A queue of leaves gives the oldest first, in whatever order they came."""

from __future__ import annotations

import heapq

from hypothesis import given
from hypothesis import strategies as st

from kvstore.policies.leaves import Entry, Queue


@given(st.lists(st.one_of(st.integers(0, 30), st.none()), max_size=80), st.booleans())
def test_the_oldest_comes_first(steps: list[int | None], rebuilt: bool) -> None:
    """Pushed (a last use) and popped (None) like a heap: the same come out, and what is inside is the same."""
    queue: Queue[int] = Queue()
    model: list[Entry[int]] = []
    for number, touched in enumerate(steps):
        if touched is not None:
            queue.push(Entry(touched, number, number, None))
            heapq.heappush(model, Entry(touched, number, number, None))
        elif model:
            assert queue.front[-1] == model[0]
            assert queue.pop() == heapq.heappop(model).item
        assert sorted(queue) == sorted(model)
        assert bool(queue.front) == bool(model)
    if rebuilt:
        queue.put(list(queue))
    while model:
        assert queue.pop() == heapq.heappop(model).item
    assert not queue.front and not list(queue)
