"""Writing: DRAM → NVMe in the background, so that what is in DRAM outlives it.

    committed ─▶ WriteQueue ─▶ a device that can take it ─▶ slot, evicting there if it is full
                                                        ─▶ its thread writes ─▶ on NVMe too

A committed block is written as soon as its device has nothing more urgent to do; when it
later leaves DRAM nothing has to be written. A block goes to the device with the most free
room among those that can be written to now; once they are full, in turn. A block that could
not be written stays in DRAM, may be evicted, and is offered again after DEMOTE_RETRY_S.

While loads of a device wait, one write to it is under way at most. When no device can be
written to, whatever waits is refused, and may be evicted from DRAM. One store every now and then
finds out whether a device works again.

A block being written is pinned once by this object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from kvstore.constants import DEMOTE_BATCH_RECORDS, MIB, QUOTA_LOOKS_MAX, RETENTION_DELETE_ROWS
from kvstore.health.breaker import Job
from kvstore.index.block import Block, Namespace
from kvstore.ledger.accounts import Accounts
from kvstore.ledger.sums import DEMOTED
from kvstore.protocol.residency_bits import IN_NVME
from kvstore.residency.eviction import Eviction
from kvstore.residency.levels import Member
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from tiers.base import Put
from tiers.nvme.device_table import Row

DEMOTE_BATCH_BYTES = 16 * MIB  # one ordinary job must not keep an I/O thread from urgent ones
PUMP_IN_VAIN_MAX = 16  # batches that NVMe has no room for, tried before the next commit or tick
DEMOTE_RETRY_S = 12.0  # before blocks that NVMe refused are offered again; it rests for 10 s itself

Placed = tuple[Block, int]  # a block, and the slot of a device it is written to


class Writer:
    """Writes queued blocks to NVMe, with at most `Member.jobs_max` writes under way on each device."""

    def __init__(
        self,
        residency: Residency,
        eviction: Eviction,
        accounts: Accounts,
        clock: Callable[[], float],
        wrote: Callable[[], None],
    ) -> None:
        """`wrote` is called after each write: blocks may leave DRAM now."""
        self._residency = residency
        self._queue = residency.writes
        self._eviction = eviction
        self._counters = residency.counters
        self._accounts = accounts
        self._clock = clock
        self._wrote = wrote
        self._background = residency.background
        self._resuming = False
        self._retry_at_s = 0.0
        self._turn = 0
        self.writing: dict[Block, Member] = {}

    @property
    def idle(self) -> bool:
        return not self.writing and not self._queue.waiting and not self._resuming

    # -- when --

    def changed(self) -> None:
        """A breaker changed its state, or a device became ready."""
        accepting = self._residency.nvme.writable
        if accepting and not self._queue.accepting:
            self._resume()
        elif self._queue.accepting and not accepting:
            self._background.begin(self._queue.pause_steps(self.writing))
        self.pump()

    def _resume(self) -> None:
        """Offer again what was refused."""
        self._queue.accepting = True
        if not self._resuming:
            self._resuming = True
            self._background.begin(self._resume_steps())

    def _resume_steps(self) -> Steps[None]:
        try:
            for _ in self._queue.resume_steps():
                self.pump()
                yield
        finally:
            self._resuming = False
        self.pump()

    def tick(self) -> None:
        """Offer again what was refused, if devices had time to recover; see to their slots."""
        for member in self._residency.nvme.members:
            member.tend(RETENTION_DELETE_ROWS)
            if member.ready and member.loads.closed and member.stores.may_probe():
                self._probe(member)
        if self._queue.accepting and self._queue.refused and self._clock() >= self._retry_at_s:
            self._resume()
        self.pump()

    def _probe(self, member: Member) -> None:
        """One store, to see whether they work again."""
        for block in list(islice(self._queue.refused, QUOTA_LOOKS_MAX)):  # a quota may refuse some
            if block not in self.writing:
                del self._queue.refused[block]
                self._queue.waiting[block] = None
                if self._start(member, [block], probe=True):
                    return
        if not self._queue.refused:
            member.stores.close()  # there is nothing to try: the next block will show

    def pump(self) -> None:
        """Begin as many writes as may be under way."""
        in_vain = 0  # batches in a row that found no room; a full device must not take the loop's time
        while in_vain < PUMP_IN_VAIN_MAX and self._queue.accepting and (batch := self._next_batch()):
            member = self._member_for(batch[0].namespace)
            if member is None:
                return
            in_vain = 0 if self._start(member, batch) else in_vain + 1

    def _next_batch(self) -> list[Block]:
        """A few blocks of one namespace, out of the queue's front."""
        batch: list[Block] = []
        for block in self._queue.waiting:
            if block in self.writing:
                continue
            if batch and block.namespace is not batch[0].namespace:
                break
            batch.append(block)
            size_bytes = block.namespace.record_bytes
            if len(batch) >= DEMOTE_BATCH_RECORDS or len(batch) * size_bytes >= DEMOTE_BATCH_BYTES:
                break
        return batch

    # -- where --

    def _member_for(self, namespace: Namespace) -> Member | None:
        """The device to write to next; None while all that may be written to are busy."""
        members = self._residency.nvme.members
        able = [m for m in members if m.writable and m.store_jobs < self._allowed(m) and not m.stores.is_late]
        if not able:
            return None
        with_room = [m for m in able if m.has_room(namespace.record_bytes)]
        if with_room:
            return max(with_room, key=lambda m: m.device.stats().free_bytes)
        self._turn += 1
        return able[self._turn % len(able)]

    def _allowed(self, member: Member) -> int:
        return 1 if member.speed.waiting_bytes > 0 else member.jobs_max

    def _start(self, member: Member, batch: Sequence[Block], probe: bool = False) -> bool:
        """Write those of these blocks that find room and that their quotas let in; False if none."""
        placed: list[Placed] = []
        for at, block in enumerate(batch):
            if not self._eviction.admit_to_nvme(block.namespace, block.parent):
                self._queue.over_quota(block)
                self._retry_at_s = self._clock() + DEMOTE_RETRY_S
                continue
            self._residency.pin(block)
            slot = self._eviction.slot_on(member, block.namespace, len(batch) - at)
            if slot is None:
                self._no_room(member, block)
            else:
                self.writing[block] = member
                placed.append((block, slot))
        if placed:
            self._submit(member, placed, probe)
        return bool(placed)

    def _no_room(self, member: Member, block: Block) -> None:
        self._residency.quotas.used(block.namespace, IN_NVME, -1)
        self._put_off(block)
        self._empty_a_slab(member, block.namespace)

    def _empty_a_slab(self, member: Member, namespace: Namespace) -> None:
        """Make room out of another size class: what lies in its cheapest slab is known to its rows only."""
        takeovers = self._eviction.takeovers
        slab = takeovers.of_device(member, namespace)
        if slab is None:
            return

        def read(rows: Sequence[Row | None]) -> None:
            slab.rows = rows
            if rows:
                takeovers.empty(slab, self._emptied)
            else:
                takeovers.give_up(slab)

        nothing: Sequence[Row | None] = []
        member.io.submit(lambda: member.device.rows(slab.slots), read, failed=nothing)

    def _emptied(self) -> None:
        """A device has a slab for records that found no room."""
        self._resume()
        self.pump()

    # -- what --

    def _submit(self, member: Member, placed: Sequence[Placed], probe: bool) -> None:
        arena = self._residency.arena
        items = [(slot, arena.record(block.slot), arena.view(block.slot)) for block, slot in placed]
        job = member.stores.begin(sum(block.namespace.record_bytes for block, _ in placed), probe)
        member.store_jobs += 1

        def work() -> list[Put]:
            member.stores.start(job)
            return member.device.write(items)

        member.io.submit(
            work,
            lambda results: self._written(member, placed, job, results),
            failed=[Put.FAILED] * len(placed),
        )

    def _written(self, member: Member, placed: Sequence[Placed], job: Job, results: Sequence[Put]) -> None:
        member.store_jobs -= 1
        for (block, slot), result in zip(placed, results, strict=True):
            del self.writing[block]
            if result is Put.STORED:
                self._stored(member, block, slot)
            else:
                self._failed(member, block, slot, result)
        member.stores.end(job, any(result is not Put.FAILED for result in results))
        self._wrote()
        self.pump()

    def _stored(self, member: Member, block: Block, slot: int) -> None:
        self._counters.demoted += 1
        self._queue.wrote(block)
        if block.where & IN_NVME:  # a row that was read at the start had it already
            member.give(slot)
            self._residency.quotas.used(block.namespace, IN_NVME, -1)
            self._residency.unpin(block)
            return
        self._accounts.moved(block.namespace, DEMOTED, block.namespace.record_bytes)
        self._residency.arrived_on_nvme(block, member, slot)
        self._residency.unpin(block)

    def _failed(self, member: Member, block: Block, slot: int, result: Put) -> None:
        """Whatever its row says now: a row that lies is caught by its checksum."""
        self._counters.demote_failed += 1
        member.device.set_aside(slot)
        self._residency.quotas.used(block.namespace, IN_NVME, -1)
        if result is Put.NO_ROOM or self._queue.failed(block):
            self._put_off(block)
        else:
            self._residency.unpin(block)

    def _put_off(self, block: Block) -> None:
        self._queue.put_off([block])
        self._retry_at_s = self._clock() + DEMOTE_RETRY_S
        self._residency.unpin(block)
