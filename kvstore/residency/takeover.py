"""Takeovers: a whole slab of another size class is emptied for records that find no room in their own.

    no room ─▶ emptiest slab of another class ─▶ drained: it hands out no more slots ─▶ is any of it in use?
           ─▶ its blocks leave, the last ones first ─▶ nothing is in it: cut for the class that wanted it

A slab may have tens of thousands of slots, so this is done in steps; a small one is empty before `begin` returns.
In between its blocks are what they always are: looked up, read, dropped. One that is in use when its turn comes,
or a slot that is being written, ends the takeover, and the slab stays what it is: the next who finds no room
tries again. One at a time for the arena and for each device: who else wants a slab there is refused meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.index.block import Block, Namespace
from kvstore.index.slots import Slots
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Member
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from tiers.base import SizeClass
from tiers.nvme.device_table import Row

TAKEOVER_SLOTS = 100  # slots of a slab that is taken over, looked at or emptied between two yields
ARENA = -1  # the place of slabs of DRAM
FOR_MODELS = -2  # of those that models want


class Slab:
    """One that is to be taken over for records of a namespace, or (None) for a model: of DRAM, or of a device. slots: those
    in use, when it was chosen. place: of whose slabs one is taken over at a time. rows: what the table of a device says of the
    slots, once it was read."""

    def __init__(
        self,
        residency: Residency,
        namespace: Namespace | None,
        slots: Sequence[int],
        member: Member | None = None,
    ) -> None:
        self._residency = residency
        self._member = member
        self.home: Slots | Member = residency.arena if member is None else member
        self.bit, self.place = (IN_DRAM, ARENA) if member is None else (IN_NVME, member.number)
        self.size_bytes = residency.arena.layout.slab_bytes
        if namespace is not None:
            self.size_bytes = namespace.record_bytes
        else:
            self.place = FOR_MODELS
        self.namespace = namespace
        self.slots = slots
        self.rows: Sequence[Row | None] = ()

    def block_at(self, at: int) -> Block | None:
        """The block in the slot of this position, None where there is none."""
        slot, member = self.slots[at], self._member
        row = self._residency.arena.record(slot) if member is None else self.rows[at]
        block = self._residency.block_of(row.key) if row is not None else None
        if block is None or not block.where & self.bit:
            return None
        is_there = block.slot == slot if member is None else block.place == (member.number, slot)
        return block if is_there else None

    def classes(self) -> Sequence[SizeClass]:
        """Of the level."""
        return (self._residency.arena if self._member is None else self._member.device).stats().classes

    def is_in_use(self, block: Block) -> bool:
        """Whether the block must stay for now."""
        return block.pins > 0 or (self.bit == IN_DRAM and self._residency.writes.keeps(block))


class Takeovers:
    """Those under way. `leave`: lets a block leave a level. freed: called when the arena has room that was not there
    when it was asked for."""

    def __init__(self, residency: Residency, leave: Callable[[Block, int], None]) -> None:
        self._residency = residency
        self._leave = leave
        self._under_way: set[int] = set()
        self.freed: Callable[[], None] = lambda: None

    def of_arena(self, namespace: Namespace) -> None:
        """Begin to empty a slab of DRAM, if there is one; it may be over when this returns."""
        residency = self._residency
        if ARENA in self._under_way:
            return
        slots = residency.arena.reclaim(namespace.record_bytes)
        if not slots:
            return
        at_once = True

        def emptied() -> None:
            if not at_once:
                self.freed()

        slab = Slab(residency, namespace, slots)
        self._begin(slab)
        self.empty(slab, emptied)
        at_once = False

    def for_models(self, wanted: Callable[[], bool]) -> Steps[None]:
        """Empty slabs of DRAM, those with the fewest bytes first, as long as more are wanted: asked after each, so that what is
        empty is taken at once. A slab of which something is in use, or pinned, is passed over."""
        slabs = self._residency.arena.slabs
        if slabs is None or FOR_MODELS in self._under_way:
            return
        for number in slabs.slabs_by_use():
            if not wanted():
                return
            slots = slabs.slots_in(number)
            if slots and FOR_MODELS not in self._under_way:
                slab = Slab(self._residency, None, slots)
                self._begin(slab)
                yield from self._steps(slab, lambda: None)
            yield
        wanted()

    def of_device(self, member: Member, namespace: Namespace) -> Slab | None:
        """A slab of a device, to be emptied when its rows were read (`empty`); or to be left as it is (`give_up`)."""
        if member.number in self._under_way:
            return None
        slots = member.reclaim(namespace.record_bytes)
        if not slots:
            return None
        slab = Slab(self._residency, namespace, slots, member)
        self._begin(slab)
        return slab

    def empty(self, slab: Slab, done: Callable[[], None]) -> None:
        """Let everything leave it. `done` is called if it was emptied, which may be before this returns."""
        self._residency.background.begin(self._steps(slab, done))

    def give_up(self, slab: Slab) -> bool:
        """Leave a slab what it is; False where it is empty."""
        self._under_way.discard(slab.place)
        return slab.home.stop_draining(slab.slots[0])

    def _begin(self, slab: Slab) -> None:
        self._under_way.add(slab.place)
        slab.home.drain(slab.slots[0], slab.size_bytes)

    def _steps(self, slab: Slab, done: Callable[[], None]) -> Steps[None]:
        is_empty = False
        try:
            blocks = yield from self._look(slab)
            if blocks:
                yield from self._empty(slab, blocks)
        finally:
            is_empty = not self.give_up(slab)
        if is_empty:
            done()

    def _look(self, slab: Slab) -> Steps[list[Block | None]]:
        """Its blocks by position, None where one left meanwhile; [] if some may not leave."""
        blocks: list[Block | None] = []
        guards, is_guarded = self._residency.guards, False
        for at in range(len(slab.slots)):
            if at and at % TAKEOVER_SLOTS == 0:
                yield
            block = slab.block_at(at)
            if block is not None:
                if slab.is_in_use(block):
                    return []
                is_guarded |= guards.guards(block, slab.bit)
            blocks.append(block)
        return [] if is_guarded and self._must_spare(slab) else blocks

    def _must_spare(self, slab: Slab) -> bool:
        """Whether a pin keeps some of this slab: always from models. Not for a record size without a slab of its own, or with
        pinned blocks only: it would find no room for ever, and pins must not stop all new blocks."""
        if slab.namespace is None:
            return True
        size = self._residency.slot_bytes(slab.namespace, slab.bit)
        own = self._residency.guards.records(slab.namespace, slab.bit)
        return any(c.slot_bytes == size and c.total > own for c in slab.classes())

    def _empty(self, slab: Slab, blocks: Sequence[Block | None]) -> Steps[None]:
        """Let its blocks leave, the last ones first: they hang on the others."""
        guards, counters = self._residency.guards, self._residency.counters
        for count, at in enumerate(reversed(range(len(blocks)))):
            if count and count % TAKEOVER_SLOTS == 0:
                yield
            block = blocks[at]
            if block is None or slab.block_at(at) is not block:
                continue  # it left meanwhile
            if slab.is_in_use(block):
                return
            counters.evicted_pinned += guards.guards(block, slab.bit)
            self._leave(block, slab.bit)
