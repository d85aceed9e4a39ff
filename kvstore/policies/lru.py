"""Leaf-first LRU: of the blocks nothing hangs on, the one used longest ago leaves first.

A heap of (last use, arrival, block). Using a block does not move it: its entry is put
right when it surfaces, so a use costs nothing here and an eviction O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvstore.index.block import PIN, Block
from kvstore.policies.base import Policy


class LeafLru(Policy):
    """LRU over the leaves of one tier; `bit` names the tier as in `Block.where`."""

    def __init__(self, bit: int) -> None:
        self._bit = bit
        self._heap: list[tuple[float, int, Block]] = []
        self._queued: set[Block] = set()  # those in the heap
        self._sequence = 0

    def may_leave(self, block: Block) -> None:
        if block not in self._queued:
            self._push(block)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        while self._settle_top():
            block = heapq.heappop(self._heap)[2]
            self._queued.discard(block)
            yield block

    def coldest_s(self) -> float | None:
        return self._heap[0][0] if self._settle_top() else None

    def _settle_top(self) -> bool:
        """Make the top of the heap a true victim; False if there is none."""
        while self._heap:
            touched_s, _, block = self._heap[0]
            if self._is_candidate(block) and block.touched_s == touched_s:
                return True
            heapq.heappop(self._heap)
            self._queued.discard(block)
            if self._is_candidate(block):
                self._push(block)
        return False

    def _push(self, block: Block) -> None:
        self._sequence += 1
        self._queued.add(block)
        heapq.heappush(self._heap, (block.touched_s, self._sequence, block))

    def _is_candidate(self, block: Block) -> bool:
        return bool(block.where & self._bit) and block.where < PIN and not block.has_child_in(self._bit)
