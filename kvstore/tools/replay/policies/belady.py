"""Belady's bound, approximately: the block whose next use is latest leaves, known from the trace. For replay only.

Approximate, as every bound is that keeps prefixes whole: a new block whose next use is later
than that of everything held is not let in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.policies.base import Policies, Policy

NEVER = 1 << 62


class Oracle(Policies):
    """Knows the future. `uses`: for each block hash the numbers of the requests that name it, ascending."""

    def __init__(self, uses: Mapping[bytes, Sequence[int]]) -> None:
        super().__init__(lambda bit: Belady(bit, self))
        self._uses = uses
        self._passed: dict[bytes, int] = {}

    def next_use(self, block_hash: bytes) -> int:
        """Number of the next request for a block, after those that were observed."""
        uses = self._uses[block_hash]
        at = self._passed.get(block_hash, 0)
        return uses[at] if at < len(uses) else NEVER

    def next_but_one(self, block_hash: bytes) -> int:
        """The same for a block that the request under way brings: its own use is no reason to keep it."""
        uses = self._uses[block_hash]
        at = self._passed.get(block_hash, 0) + 1
        return uses[at] if at < len(uses) else NEVER

    def request(self, hashes: Sequence[bytes]) -> None:
        """A request for these blocks is over."""
        for block_hash in hashes:
            self._passed[block_hash] = self._passed.get(block_hash, 0) + 1


class Belady(Policy):
    """A heap by next use, latest first; entries are put right when they surface."""

    def __init__(self, bit: int, oracle: Oracle) -> None:
        self._oracle = oracle
        self._heap: list[tuple[int, int, Block]] = []
        self._valid: dict[Block, int] = {}
        self._sequence = 0

    def touched(self, run: Sequence[Block]) -> None:
        for block in run:
            self._push(block, self._oracle.next_but_one(block.hash))

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            self._valid.pop(block, None)

    def is_choosy(self) -> bool:
        return True

    def admits(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> bool:
        self._settle()
        return not self._heap or self._oracle.next_but_one(block_hash) < -self._heap[0][0]

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        passed: list[Block] = []
        try:
            while self._settle():
                block = heapq.heappop(self._heap)[2]
                passed.append(block)
                if not block.pins:
                    yield block
        finally:
            for block in passed:
                if block in self._valid:
                    next_use = self._oracle.next_but_one if block.pins else self._oracle.next_use
                    self._push(block, next_use(block.hash))

    def _push(self, block: Block, next_use: int) -> None:
        self._sequence += 1
        self._valid[block] = self._sequence
        heapq.heappush(self._heap, (-next_use, -self._sequence, block))

    def _settle(self) -> bool:
        while self._heap and self._valid.get(self._heap[0][2]) != -self._heap[0][1]:
            heapq.heappop(self._heap)
        return bool(self._heap)
