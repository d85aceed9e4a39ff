"""LFU with a full history: every key that was ever used is counted for ever. For comparison only."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvstore.index.block import Block
from kvstore.policies.base import Policy


class Lfu(Policy):
    """A reference without bound of memory; of equals, the one used longest ago leaves."""

    def __init__(self, bit: int) -> None:
        self._uses: dict[bytes, int] = {}
        self._latest: dict[Block, int] = {}  # resident: number of its valid entry
        self._heap: list[tuple[int, int, Block]] = []
        self._sequence = 0

    def touched(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            key = block.key
            self._uses[key] = self._uses.get(key, 0) + 1
            self._push(block)

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            self._latest.pop(block, None)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        passed: list[Block] = []
        try:
            while self._heap:
                _, number, block = heapq.heappop(self._heap)
                if self._latest.get(block) != number:
                    continue
                passed.append(block)
                if not block.pins:
                    yield block
        finally:
            for block in passed:
                if block in self._latest:
                    self._push(block)

    def _push(self, block: Block) -> None:
        self._sequence += 1
        self._latest[block] = self._sequence
        heapq.heappush(self._heap, (self._uses[block.key], self._sequence, block))
