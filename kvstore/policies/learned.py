"""Ours: the block that promises the fewest hits per second of staying leaves first.

    kind 3 │ oldest … youngest │      Of each kind the oldest leaf is compared (see
    kind 7 │ oldest … │              `kvstore.policies.reuse` for what a kind is worth at
    kind 9 │ oldest … youngest │      which age); the cheapest one leaves.

Within a kind the oldest goes first; which kind has to give is what is learned. Leaves go
before their parents. A new block that promises less than the cheapest one held is not let
in. An entry of a queue is put right, or thrown away, when it surfaces; queues that are
mostly outdated are rebuilt, so that memory stays in proportion to what is held.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from kvstore.blocks import Block
from kvstore.constants import REUSE_PICK_EVERY, REUSE_STALE_ENTRIES_MIN
from kvstore.namespaces import Namespace
from kvstore.policies.base import Policies, Policy
from kvstore.policies.reuse import LAST_BLOCK, Reuse, Stretch
from kvstore.prompts import Prompt

Entry = tuple[float, int, Block, Stretch | None]


class Learned(Policies):
    """The family that shares one experience."""

    def __init__(self) -> None:
        self.reuse = Reuse()
        super().__init__(lambda bit: HitDensity(bit, self.reuse))

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        self.reuse.observe(run, prompt, now_s)

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        self.reuse.refused(namespace, hashes, prompt, now_s)

    def forgotten(self, block: Block) -> None:
        self.reuse.forgotten(block)


class HitDensity(Policy):
    """One tier's leaves in queues by kind; `bit` names the tier as in `Block.where`."""

    def __init__(self, bit: int, reuse: Reuse) -> None:
        self._bit = bit
        self._reuse = reuse
        self._queues: dict[int, list[Entry]] = {}
        self._sequence = 0
        self._entries = 0
        self._queued = 0  # blocks that have a valid entry
        self._pick: list[Entry] | None = None  # the queue that gives, while it is the cheapest
        self._pick_limit = 0.0  # density of the next cheapest queue
        self._pick_left = 0

    def touched(self, run: Sequence[Block]) -> None:
        for block in run:
            if block.queued & self._bit:
                block.queued &= ~self._bit  # its entry names the stretch of an earlier use
                self._queued -= 1

    def may_leave(self, block: Block) -> None:
        if block.queued & self._bit or not self._is_candidate(block):
            return
        stretch = block.stretch
        kind = stretch.kind if stretch is not None else LAST_BLOCK
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = []
        self._sequence += 1
        self._entries += 1
        self._queued += 1
        block.queued |= self._bit
        heapq.heappush(queue, (block.touched_s, self._sequence, block, stretch))
        if queue is not self._pick and self._pick_left and queue[0][2] is block:
            self._pick_limit = min(self._pick_limit, self._reuse.density(kind, block.touched_s))
        if self._entries > 2 * self._queued + REUSE_STALE_ENTRIES_MIN:
            self._rebuild()

    def left(self, block: Block) -> None:
        if block.queued & self._bit:
            block.queued &= ~self._bit
            self._queued -= 1

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        while (queue := self._cheapest()) is not None:
            block = self._pop(queue)
            if block.queued & self._bit:
                block.queued &= ~self._bit
                self._queued -= 1
            yield block

    def admits(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> bool:
        queue = self._cheapest()
        return queue is None or self._density(queue) <= self._reuse.density_of_new(
            namespace, block_hash, prompt
        )

    def coldest_s(self) -> float | None:
        queue = self._cheapest()
        return queue[0][0] if queue is not None else None

    def _cheapest(self) -> list[Entry] | None:
        """The queue whose oldest entry is the next victim; that entry is valid."""
        queue = self._pick
        if queue is not None and self._pick_left > 0 and self._settle_top(queue):
            self._pick_left -= 1
            if self._density(queue) <= self._pick_limit:
                return queue
        return self._compare()

    def _compare(self) -> list[Entry] | None:
        best, next_best, self._pick = float("inf"), float("inf"), None
        for queue in self._queues.values():
            if not self._settle_top(queue):
                continue
            density = self._density(queue)
            if density < best:
                best, next_best, self._pick = density, best, queue
            elif density < next_best:
                next_best = density
        self._pick_limit, self._pick_left = next_best, REUSE_PICK_EVERY
        return self._pick

    def _density(self, queue: list[Entry]) -> float:
        touched_s, _, _, stretch = queue[0]
        return self._reuse.density(stretch.kind if stretch is not None else LAST_BLOCK, touched_s)

    def _settle_top(self, queue: list[Entry]) -> bool:
        """Throw away what is outdated on top; False if nothing is left."""
        while queue:
            block = queue[0][2]
            if block.stretch is queue[0][3] and block.queued & self._bit:
                if self._is_candidate(block):
                    return True
                block.queued &= ~self._bit
                self._queued -= 1
            self._pop(queue)
        return False

    def _pop(self, queue: list[Entry]) -> Block:
        self._entries -= 1
        return heapq.heappop(queue)[2]

    def _rebuild(self) -> None:
        """Keep the valid entries only. In place: the pick stays a queue of ours."""
        for queue in self._queues.values():
            queue[:] = [e for e in queue if e[2].queued & self._bit and e[2].stretch is e[3]]
            heapq.heapify(queue)
        self._entries = sum(map(len, self._queues.values()))

    def _is_candidate(self, block: Block) -> bool:
        return bool(block.where & self._bit) and not block.pins and not block.has_child_in(self._bit)
