"""Leaves: what may leave a cache, in queues by kind, and the cheapest of it.

    kind 3 │ oldest … youngest │      Within a kind the oldest goes first, whoever judges;
    kind 7 │ oldest … │               which kind has to give is the judge's opinion: only
    kind 9 │ oldest … youngest │      the oldest of each kind are compared.

An entry names the *stretch* of the block's last use: after another use it is outdated, and
thrown away when it surfaces. Using a block therefore costs nothing here. When outdated
entries may be the half of all, the queues are rebuilt: memory stays in proportion to what
is held.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from kvstore.constants import REUSE_PICK_EVERY, REUSE_STALE_ENTRIES_MIN
from kvstore.policies.judges import Judge
from kvstore.policies.reuse import UNKNOWN, Stretch

T = TypeVar("T")


class Entry(msgspec.Struct, Generic[T], order=True, gc=False):
    """Orders by last use. number: no two have the same, so that items are never compared. Half of a tuple's size,
    as the garbage collector need not know of it."""

    touched: int
    number: int
    item: T
    stretch: Stretch | None


class Queue(Generic[T]):
    """Entries of one kind. A heap that is hardly ever needed: with millions of entries one step of it is slow.

        front  the oldest is last. What is older still follows it: the parent of a leaf that just left
        back   what came in the order of its age: leaves that were just used
        heap   all others

    Where anything is, something is in front.
    """

    __slots__ = ("back", "front", "heap")

    def __init__(self) -> None:
        self.front: list[Entry[T]] = []
        self.back: deque[Entry[T]] = deque()
        self.heap: list[Entry[T]] = []

    def push(self, entry: Entry[T]) -> None:
        front, back = self.front, self.back
        if not front or entry < front[-1]:
            front.append(entry)
        elif not back or entry > back[-1]:
            back.append(entry)
        else:
            heapq.heappush(self.heap, entry)

    def pop(self) -> T:
        """Take the oldest out."""
        front, back, heap = self.front, self.back, self.heap
        item = front.pop().item
        if back and (not heap or back[0] < heap[0]):
            if not front or back[0] < front[-1]:
                front.append(back.popleft())
        elif heap and (not front or heap[0] < front[-1]):
            front.append(heapq.heappop(heap))
        return item

    def put(self, entries: list[Entry[T]]) -> None:
        """These instead of all others."""
        entries.sort()
        self.front = entries[:1]
        self.back = deque(entries[1:])
        self.heap = []

    def __iter__(self) -> Iterator[Entry[T]]:
        return chain(self.front, self.back, self.heap)


class Leaves(Generic[T]):
    """Items that nothing hangs on. `is_leaf` says whether an entry of one is true still."""

    def __init__(self, is_leaf: Callable[[T, Stretch | None], bool]) -> None:
        self._is_leaf = is_leaf
        self._queues: dict[int, Queue[T]] = {}
        self._number = 0
        self._entries = 0
        self._entries_max = REUSE_STALE_ENTRIES_MIN
        self._judge: Judge | None = None
        self._pick: Queue[T] | None = None  # the queue that gives, while it is the cheapest
        self._pick_limit = 0.0  # worth of the next cheapest queue
        self._pick_left = 0

    def push(self, item: T, stretch: Stretch | None) -> None:
        """The item is a leaf now."""
        kind, touched = (stretch.kind, stretch.touched) if stretch is not None else (UNKNOWN, 0)
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = Queue()
        self._number += 1
        self._entries += 1
        queue.push(Entry(touched, self._number, item, stretch))
        if self._judge is not None and queue.front[-1].item is item and queue is not self._pick:
            self._pick_limit = min(self._pick_limit, self._judge.worth(kind, touched))
        if self._entries > self._entries_max:
            self._rebuild()

    def cheapest(self, judge: Judge) -> float | None:
        """What the next victim is worth, None if there is none. `first` and `pop` name it then."""
        queue = self._pick
        if queue is not None and self._pick_left > 0 and judge is self._judge:
            worth = self._worth_of_first(queue, judge)
            if worth is not None:
                self._pick_left -= 1
                if worth <= self._pick_limit:
                    return worth
        return self._compare(judge)

    def first(self) -> T:
        """The next victim. Only after `cheapest` found one."""
        assert self._pick is not None, "nothing may leave"
        return self._pick.front[-1].item

    def pop(self) -> T:
        """Take the next victim out. Only after `cheapest` found one."""
        assert self._pick is not None, "nothing may leave"
        self._entries -= 1
        return self._pick.pop()

    def clear(self) -> None:
        self._queues.clear()
        self._entries, self._pick = 0, None

    def __len__(self) -> int:
        return self._entries

    def _compare(self, judge: Judge) -> float | None:
        best, next_best, pick = float("inf"), float("inf"), None
        for queue in self._queues.values():
            worth = self._worth_of_first(queue, judge)
            if worth is None:
                continue
            if worth < best or pick is None:
                best, next_best, pick = worth, best, queue
            elif worth < next_best:
                next_best = worth
        self._judge, self._pick, self._pick_limit = judge, pick, next_best
        self._pick_left = max(REUSE_PICK_EVERY, len(self._queues))  # so that comparing costs O(1) a victim
        return best if pick is not None else None

    def _worth_of_first(self, queue: Queue[T], judge: Judge) -> float | None:
        """Throws away what is outdated on top; None if nothing is left."""
        is_leaf, front = self._is_leaf, queue.front
        while front:
            entry = front[-1]
            stretch = entry.stretch
            if is_leaf(entry.item, stretch):
                return judge.worth(stretch.kind if stretch is not None else UNKNOWN, entry.touched)
            queue.pop()
            self._entries -= 1
        return None

    def _rebuild(self) -> None:
        """Keep each true entry once. In place: the pick stays a queue of ours."""
        known: set[int] = set()
        for queue in self._queues.values():
            true = []
            for entry in queue:
                if id(entry.item) not in known and self._is_leaf(entry.item, entry.stretch):
                    known.add(id(entry.item))
                    true.append(entry)
            queue.put(true)
        self._entries = len(known)
        self._entries_max = 2 * self._entries + REUSE_STALE_ENTRIES_MIN
