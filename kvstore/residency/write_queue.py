"""The write queue: blocks that are in DRAM only and are to be written to NVMe, oldest first.

    committed ─▶ within the write budget? ─▶ waiting ─▶ being written ─▶ on NVMe too
                                               ▲  ╰ no device takes it ─▶ refused ─╮
                                               ╰───────── offered again ◀──────────╯

A block that waits is not evicted from DRAM while a device can take it: refusing a new block
costs a recompute later, dropping this one costs the same and the write besides. A refused
block may be evicted. The arena bounds both queues, and each has a limit of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from typing import Protocol

from kvstore.constants import DEMOTING_MAX, STEP_SLOW_BLOCKS, UNDEMOTED_MAX
from kvstore.health.write_budget import WriteBudget
from kvstore.index.block import Block, Namespace
from kvstore.ledger.counters import Counters
from kvstore.policies.base import Policies
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.levels import Nvme
from kvstore.retention.quotas import Quotas
from kvstore.steps import Steps

QUOTA_REQUEUE_BLOCKS = 1000  # blocks of namespaces under a quota that are offered to NVMe again at once


class Blocks(Protocol):
    """What the queue asks of `Residency`."""

    nvme: Nvme
    counters: Counters
    policies: Policies
    quotas: Quotas
    unverified: OrderedDict[Block, None]

    def settle(self, *run: Block) -> None: ...


class WriteQueue:
    """Blocks on their way to NVMe."""

    def __init__(self, blocks: Blocks, write_budget: WriteBudget) -> None:
        self.write_budget = write_budget
        self.waiting: OrderedDict[Block, None] = OrderedDict()
        self.refused: OrderedDict[Block, None] = OrderedDict()
        self.accepting = False  # some device can be written to
        self._blocks = blocks
        self._promised: set[Block] = set()  # of the write budget: to be written, or given back

    def offer(self, *run: Block) -> None:
        """Queue those of these blocks that are in DRAM only, known to be true, and within the write budget."""
        blocks = self._blocks
        if not blocks.nvme:
            return
        queue = self.waiting if self.accepting else self.refused
        for block in run:
            if block.where & IN_ANY != IN_DRAM or block in blocks.unverified:
                continue
            if block in self.waiting or block in self.refused:
                continue
            if self.write_budget.admits(blocks.policies.worth(block), block.namespace.slot_bytes):
                queue[block] = None
                if self.write_budget.limited:
                    self._promised.add(block)
            else:
                blocks.counters.demote_not_admitted += 1
        self._shorten()

    def offer_again(self, run: Sequence[Block]) -> None:
        """These blocks were used: those that the write budget kept out may be let in now."""
        if self.write_budget.limited:
            self.offer(*run)

    def keeps(self, block: Block) -> bool:
        """Whether only DRAM has the block and it will be written as soon as it can be."""
        if block.where & IN_NVME or not self._blocks.nvme:
            return False
        return block in self.waiting or block in self._blocks.unverified

    def put_off(self, blocks: Sequence[Block]) -> None:
        """No device takes these blocks now: they may leave DRAM, and are offered again later."""
        for block in blocks:
            self.waiting.pop(block, None)
            self.refused[block] = None
        self._shorten()
        for block in blocks:
            self._blocks.settle(block)

    def over_quota(self, block: Block) -> None:
        """Its quotas do not let it in to NVMe. Where writes have a budget, which others can use now, it is
        offered again when it is used again."""
        self.waiting.pop(block, None)
        if self.write_budget.limited:
            self._waive(block)
            self._blocks.settle(block)
        else:
            self.put_off([block])

    def pause_steps(self, being_written: Container[Block]) -> Steps[None]:
        """No device can be written to: whatever waits may leave DRAM."""
        self.accepting = False
        for some in _all_of(self.waiting):
            for block in some:
                if block in being_written:
                    self.waiting[block] = None
            self.put_off([block for block in some if block not in being_written])
            yield
            if self.accepting:
                return

    def resume_steps(self) -> Steps[None]:
        """Queue again what was refused; of namespaces whose quota may refuse them all, only some."""
        self.accepting = True
        left = QUOTA_REQUEUE_BLOCKS
        limited: dict[Namespace, bool] = {}
        for some in _all_of(self.refused):
            for block in some:
                space = block.namespace
                if space not in limited:
                    holders = self._blocks.quotas.holders(space)
                    limited[space] = any(h.limits[IN_NVME] is not None for h in holders)
                left -= limited[space]
                (self.waiting if left >= 0 or not limited[space] else self.refused)[block] = None
            self._shorten()
            yield
            if not self.accepting:
                return

    def wrote(self, block: Block) -> None:
        """The block is on NVMe: it waits in no queue, and what was promised of the budget is spent."""
        self.waiting.pop(block, None)
        self.refused.pop(block, None)  # dropped from the other one during its write, and offered again
        self.write_budget.wrote(block.namespace.slot_bytes, block in self._promised)
        self._promised.discard(block)

    def failed(self, block: Block) -> bool:
        """A write of it failed, which may have worn the disk as much as any other: it is spent. Returns whether the budget lets it
        be tried again; if not, it waits in no queue, and is offered when it is used again."""
        budget, size_bytes = self.write_budget, block.namespace.slot_bytes
        if not budget.limited:
            return True
        budget.wrote(size_bytes, block in self._promised)
        self._promised.discard(block)
        if budget.admits(self._blocks.policies.worth(block), size_bytes):
            self._promised.add(block)
            return True
        self.waiting.pop(block, None)
        self.refused.pop(block, None)
        self._blocks.counters.demote_not_admitted += 1
        return False

    def forget(self, run: Sequence[Block]) -> None:
        """These blocks leave DRAM."""
        for queue in (self.waiting, self.refused):
            if queue:
                for block in run:
                    queue.pop(block, None)
        if self._promised:
            for block in run:
                self._waive(block)

    def forget_written_steps(self) -> Steps[None]:
        """Rows came into the index: what they show to be on NVMe need not be written there."""
        for queue in (self.waiting, self.refused):
            for some in _all_of(queue):
                for block in some:
                    if block.where & IN_NVME:
                        self._waive(block)
                        self._blocks.settle(block)
                    else:
                        queue[block] = None
                yield

    def _shorten(self) -> None:
        """Beyond their limits the oldest of these blocks stay in DRAM only, and may be evicted."""
        while len(self.waiting) > DEMOTING_MAX:
            block, _ = self.waiting.popitem(last=False)
            self._waive(block)
            self._blocks.counters.demotions_dropped += 1
            self._blocks.settle(block)
        while len(self.refused) > UNDEMOTED_MAX:
            block, _ = self.refused.popitem(last=False)
            self._waive(block)
            self._blocks.counters.demotions_dropped += 1

    def _waive(self, block: Block) -> None:
        if block in self._promised:
            self._promised.discard(block)
            self.write_budget.waive(block.namespace.slot_bytes)


def _all_of(queue: OrderedDict[Block, None]) -> Iterator[list[Block]]:
    """Take out what is here now, a few at a time, oldest first."""
    left = len(queue)
    while left > 0 and queue:
        some = [queue.popitem(last=False)[0] for _ in range(min(left, len(queue), STEP_SLOW_BLOCKS))]
        left -= len(some)
        yield some
