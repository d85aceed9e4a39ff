"""SIEVE (Zhang et al. 2024): one queue by arrival, and a hand that spares what was used since it passed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.index.block import Block
from kvstore.policies.base import Policy


class _Node:
    """A place in the queue; `newer` and `older` are its neighbours."""

    __slots__ = ("block", "newer", "older", "visited")

    def __init__(self, block: Block | None) -> None:
        self.block = block
        self.visited = False
        self.newer: _Node = self
        self.older: _Node = self


class Sieve(Policy):
    """A reference: it knows nothing of prefixes. A ring whose `end` has no block."""

    def __init__(self, bit: int) -> None:
        self._nodes: dict[Block, _Node] = {}
        self._end = _Node(None)
        self._hand = self._end

    def touched(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            node = self._nodes.get(block)
            if node is not None:
                node.visited = True
                continue
            node = self._nodes[block] = _Node(block)
            node.newer, node.older = self._end, self._end.older
            node.older.newer = node
            self._end.older = node

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            node = self._nodes.pop(block, None)
            if node is None:
                continue
            if self._hand is node:
                self._hand = node.newer
            node.newer.older, node.older.newer = node.older, node.newer

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        for _ in range(2 * len(self._nodes) + 2):
            node = self._hand if self._hand.block is not None else self._end.newer
            block = node.block
            if block is None:
                return
            if node.visited or block.pins:
                node.visited = False
                self._hand = node.newer
            else:
                self._hand = node
                yield block
                if self._hand is node:  # it was not taken
                    self._hand = node.newer
