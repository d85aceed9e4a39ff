"""Leaves: what may leave a cache, in queues by kind, and the cheapest of it. Leaves go before their parents.

    kind 3 │ oldest … youngest │      Within a kind the oldest goes first, for every judge;
    kind 7 │ oldest … │               which kind has to give is the judge's opinion: only
    kind 9 │ oldest … youngest │      the oldest of each kind are compared.

An entry names the *stretch* of the block's last use: after another use it is outdated, and
thrown away when it surfaces. Using a block therefore costs nothing here. When outdated
entries may be the half of all, the queues are swept, a few entries with each that comes: memory
stays in proportion to what is held, and no request ever waits until all of them were looked at.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from kvstore.index.block import PIN, Block
from kvstore.index.stretch import Stretch
from kvstore.policies.base import Policy
from kvstore.policies.learned.experts import Judge
from kvstore.policies.learned.hazard import UNKNOWN

REUSE_PICK_EVERY = 32  # victims taken from one kind before others are compared again, at least
REUSE_STALE_ENTRIES_MIN = 256  # outdated entries of a queue that are not worth a clean-up
REUSE_SWEEP_LOOKS = 4  # entries looked at with each that comes, while there is a clean-up
REUSE_SWEEP_SEEN_MAX = 4096  # items of one use that are counted one by one meanwhile
REUSE_FRONT_MAX = 64  # entries at the front of a queue that are older than all others
# Outdated entries thrown away at the front of a queue before the next queue is asked.
REUSE_STALE_LOOKS = 256
REUSE_STALE_ROUNDS = 16  # times that all queues are asked when none has an answer

T = TypeVar("T")


class Entry(msgspec.Struct, Generic[T], order=True, gc=False):
    """Orders by last use. number: no two have the same, so that items are never compared. Half of a tuple's size,
    as the garbage collector need not know of it."""

    touched: float
    number: int
    item: T
    stretch: Stretch | None


class Queue(Generic[T]):
    """Entries of one kind. Heaps that are hardly ever needed: with millions of entries one step of them is slow.

        front         the oldest is last. What is older still follows it: the parent of a leaf that just left
        swept, back   what came in the order of its age, leaves that were just used: the older ones in `swept`
        heaps         all others

    Where anything is, something is in front. While entries are swept, they go from `back` to `swept`, and from
    the first heap to the second.
    """

    __slots__ = ("back", "front", "heap", "heaps", "swept")

    def __init__(self) -> None:
        self.front: list[Entry[T]] = []
        self.swept: deque[Entry[T]] = deque()
        self.back: deque[Entry[T]] = deque()
        self.heap: list[Entry[T]] = []  # the one of the heaps that others come to
        self.heaps: tuple[list[Entry[T]], list[Entry[T]]] = self.heap, []

    def push(self, entry: Entry[T]) -> None:
        front, youngest = self.front, self.back or self.swept
        if not front or entry < front[-1]:
            front.append(entry)
            if len(front) > REUSE_FRONT_MAX:
                heapq.heappush(self.heap, front.pop(0))
        elif not youngest or entry > youngest[-1]:
            self.back.append(entry)
        else:
            heapq.heappush(self.heap, entry)

    def pop(self) -> T:
        """Take the oldest out."""
        front, oldest = self.front, self.swept or self.back
        heap = min(filter(None, self.heaps), default=None, key=_first)
        item = front.pop().item
        if oldest and (heap is None or oldest[0] < heap[0]):
            if not front or oldest[0] < front[-1]:
                front.append(oldest.popleft())
        elif heap is not None and (not front or heap[0] < front[-1]):
            front.append(heapq.heappop(heap))
        return item

    def sweep(self, is_true: Callable[[Entry[T]], bool]) -> Iterator[bool]:
        """Throw away what is not true, or is here twice, but for the few in front. One entry at a time, oldest
        first; yields whether it went. Anything may be pushed and popped in between."""
        seen: set[T] = set()  # items of one age: of these the entry is kept, and no second one
        age = -1.0

        def is_kept(entry: Entry[T]) -> bool:
            nonlocal age
            if entry.touched != age or len(seen) >= REUSE_SWEEP_SEEN_MAX:
                seen.clear()
                age = entry.touched
            if entry.item in seen or not is_true(entry):
                return False
            seen.add(entry.item)
            return True

        first, second = self.heaps
        self.heap = second
        while first:
            entry = heapq.heappop(first)
            if kept := is_kept(entry):
                heapq.heappush(second, entry)
            yield not kept
        self.heaps = second, first
        while self.back:
            entry = self.back.popleft()
            if kept := is_kept(entry):
                self.swept.append(entry)
            yield not kept
        self.back, self.swept = self.swept, self.back

    def __iter__(self) -> Iterator[Entry[T]]:
        return chain(self.front, self.swept, self.back, *self.heaps)


def _first(heap: list[Entry[T]]) -> Entry[T]:
    return heap[0]


class Leaves(Generic[T]):
    """Items that nothing hangs on. `is_leaf` says whether an entry of one is true still. by_kind: in a queue for
    each kind; else in one, for a judge that does not look at kinds."""

    def __init__(self, is_leaf: Callable[[T, Stretch | None], bool], by_kind: bool = True) -> None:
        self._is_leaf = is_leaf
        self._by_kind = by_kind
        self._queues: dict[int, Queue[T]] = {}
        self._number = 0
        self._entries = 0
        self._entries_max = REUSE_STALE_ENTRIES_MIN
        self._judge: Judge | None = None
        self._pick: Queue[T] | None = None  # the queue that gives, while it is the cheapest
        self._pick_limit = 0.0  # worth of the next cheapest queue
        self._pick_left = 0
        self._sweep: Iterator[None] | None = None
        self._is_cut = False  # a queue had more outdated entries in front than are looked at in one go

    def push(self, item: T, stretch: Stretch | None) -> None:
        """The item is a leaf now."""
        kind, touched = (stretch.kind, stretch.touched) if stretch is not None else (UNKNOWN, 0)
        group = kind if self._by_kind else UNKNOWN
        queue = self._queues.get(group)
        if queue is None:
            queue = self._queues[group] = Queue()
        self._number += 1
        self._entries += 1
        queue.push(Entry(touched, self._number, item, stretch))
        if self._judge is not None and queue.front[-1].item is item and queue is not self._pick:
            self._pick_limit = min(self._pick_limit, self._judge.worth(kind, touched))
        if self._sweep is not None or self._entries > self._entries_max:
            self._sweep_on()

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

    def __len__(self) -> int:
        return self._entries

    def _compare(self, judge: Judge) -> float | None:
        for _ in range(REUSE_STALE_ROUNDS):
            worth = self._compare_once(judge)
            if worth is not None or not self._is_cut:
                return worth
        return None

    def _compare_once(self, judge: Judge) -> float | None:
        self._is_cut = False
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
        """Throws away what is outdated on top, so much and no more at once; None if nothing is left."""
        is_leaf, front = self._is_leaf, queue.front
        for _ in range(REUSE_STALE_LOOKS):
            if not front:
                return None
            entry = front[-1]
            stretch = entry.stretch
            if is_leaf(entry.item, stretch):
                return judge.worth(stretch.kind, stretch.touched) if stretch else judge.worth(UNKNOWN, 0)
            queue.pop()
            self._entries -= 1
        self._is_cut = True
        return None

    def _sweep_on(self) -> None:
        """Look at a few more entries. A sweep ends when it has seen all of them."""
        if self._sweep is None:
            self._sweep = self._sweep_all()
        for _ in range(REUSE_SWEEP_LOOKS):
            if next(self._sweep, self) is self:
                self._sweep = None
                self._entries_max = 2 * self._entries + REUSE_STALE_ENTRIES_MIN
                return

    def _sweep_all(self) -> Iterator[None]:
        for queue in list(self._queues.values()):
            for is_gone in queue.sweep(lambda entry: self._is_leaf(entry.item, entry.stretch)):
                self._entries -= is_gone
                yield


class LeafFirst(Policy):
    """The leaves of one tier; `bit` names the tier as in `Block.where`."""

    def __init__(self, bit: int, by_kind: bool) -> None:
        self._bit = bit
        self.leaves: Leaves[Block] = Leaves(self.is_leaf, by_kind)

    @property
    @abstractmethod
    def judge(self) -> Judge:
        """Whose opinion counts now."""

    def may_leave(self, block: Block) -> None:
        self.leaves.push(block, block.stretch)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        while self.leaves.cheapest(self.judge) is not None:
            yield self.leaves.pop()

    def together(self, victim: Block, count: int) -> Sequence[Block]:
        """Those above it that are worth no more, as blocks of one use are: as far as nothing else hangs on them."""
        run, stretch, bit = [victim], victim.stretch, self._bit
        block = victim.parent
        while len(run) < count and block is not None:
            if block.stretch is not stretch and not self._is_worth_no_more(block.stretch, victim.stretch):
                break
            if block.children is not run[-1] or not block.where & bit or block.where >= PIN:
                break
            stretch = block.stretch
            run.append(block)
            block = block.parent
        return run

    def _is_worth_no_more(self, stretch: Stretch | None, than: Stretch | None) -> bool:
        if stretch is None or than is None:
            return False
        worth = self.judge.worth
        return worth(stretch.kind, stretch.touched) <= worth(than.kind, than.touched)

    def coldest_s(self) -> float | None:
        return self.leaves.first().touched_s if self.leaves.cheapest(self.judge) is not None else None

    def is_leaf(self, block: Block, stretch: Stretch | None) -> bool:
        """Whether the block may leave, and was not used since it had this stretch."""
        if block.stretch is not stretch or block.where >= PIN:
            return False
        return bool(block.where & self._bit) and not block.has_child_in(self._bit)
