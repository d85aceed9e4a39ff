"""Demotion: DRAM → NVMe in the background, so that what is in DRAM outlives it.

    commit ─▶ queue (oldest first) ─▶ I/O thread: delete victims' rows, write records ─▶ on NVMe too

A committed block is copied down as soon as the pool has nothing more urgent to do; when
it later leaves DRAM nothing has to be written. The queue holds blocks of the arena, so
the arena bounds it. A block that could not be written stays in DRAM, may be evicted, and
is tried again after DEMOTE_RETRY_S.

While the breaker of loads or that of stores is open (`kvstore.nvme_watch`) nothing is written:
what waits, and what comes, is `undemoted`, may be evicted, and is queued when both are closed
again. One store every now and then finds out when that is. While loads wait, one store is
under way at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

from kvstore.accounts import Accounts
from kvstore.blocks import IN_NVME, PIN, Block
from kvstore.breaker import Job
from kvstore.constants import (
    DEMOTE_ATTEMPTS_MAX,
    DEMOTE_BATCH_BYTES,
    DEMOTE_BATCH_RECORDS,
    DEMOTE_RETRY_S,
    EVICT_AHEAD_RECORDS,
    EVICT_AHEAD_SHARE,
    QUOTA_LOOKS_MAX,
)
from kvstore.counters import Counters
from kvstore.iopool import Io
from kvstore.nvme_watch import NvmeWatch
from kvstore.room import Room
from kvstore.totals import DEMOTED
from tiers.base import Put, Record
from tiers.errors import TierError

log = logging.getLogger("kvstore.demotion")


class Demoter:
    """Writes queued blocks to NVMe with at most `jobs_max` writes under way; `wrote` is called after each."""

    def __init__(
        self,
        room: Room,
        io: Io,
        clock: Callable[[], float],
        counters: Counters,
        accounts: Accounts,
        jobs_max: int,
        wrote: Callable[[], None],
        watch: NvmeWatch,
    ) -> None:
        self._room = room
        self._watch = watch
        self._io = io
        self._clock = clock
        self._wrote = wrote
        self._counters = counters
        self._accounts = accounts
        self._jobs_max = jobs_max
        self._jobs = 0
        self._retry_at_s = 0.0
        self._writing: set[Block] = set()

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._room.demoting

    def blocks_underway(self) -> list[Block]:
        """Each is pinned once by this object."""
        return list(self._writing)

    def retry(self) -> None:
        """Queue again what NVMe refused, if it had time to recover."""
        if not self._room.storing:
            self._try_one()
        elif self._room.undemoted and self._clock() >= self._retry_at_s:
            self.resume()
        self.pump()

    def pause(self) -> None:
        """Nothing is written for now: what waits may leave DRAM."""
        self._room.put_off([block for block in self._room.demoting if block not in self._writing])

    def resume(self) -> None:
        """Queue everything that was refused or had to wait."""
        self._room.requeue()
        self.pump()

    def _try_one(self) -> None:
        """One store, to see whether they work again."""
        if not (self._room.nvme_ready and self._watch.loads.closed and self._watch.stores.may_probe()):
            return
        for block in list(islice(self._room.undemoted, QUOTA_LOOKS_MAX)):  # a quota may refuse some
            if block not in self._writing and block.key not in self._room.deleting:
                del self._room.undemoted[block]
                self._room.demoting[block] = None
                if self._start(self._hold([block]), 1, probe=True):
                    return
        if not self._room.undemoted:
            self._watch.stores.close()  # there is nothing to try: the next block will show

    def pump(self) -> None:
        """Start as many writes as may be under way."""
        while self._room.nvme_ready and self._room.storing and self._jobs < self._allowed():
            batch = self._next_batch()
            if not batch:
                return
            self._start(batch, DEMOTE_ATTEMPTS_MAX)

    def _start(self, batch: list[Block], attempts: int, probe: bool = False) -> bool:
        """Write those of these blocks that their quotas let in; False if none."""
        admitted, victims = self._room.admit_to_nvme(batch)
        for block in batch[admitted:]:
            self._put_off(block)
        if not admitted:
            self._room.not_deleted(victims)
            return False
        for block in batch[:admitted]:
            self._room.doomed.pop(block.key, None)  # its row is about to be replaced
        self._jobs += 1
        self._submit(batch[:admitted], victims, attempts, probe)
        return True

    def _allowed(self) -> int:
        return 1 if self._watch.pressing else self._jobs_max

    def _next_batch(self) -> list[Block]:
        """A few blocks of one namespace, pinned, out of the queue's front."""
        batch: list[Block] = []
        for block in self._room.demoting:
            if block in self._writing or block.key in self._room.deleting:
                continue
            if batch and block.namespace is not batch[0].namespace:
                break
            batch.append(block)
            size_bytes = block.namespace.record_bytes
            if len(batch) >= DEMOTE_BATCH_RECORDS or len(batch) * size_bytes >= DEMOTE_BATCH_BYTES:
                break
        return self._hold(batch)

    def _hold(self, batch: list[Block]) -> list[Block]:
        for block in batch:
            block.where += PIN
            self._writing.add(block)
        return batch

    def _submit(self, batch: list[Block], victims: list[bytes], attempts: int, probe: bool = False) -> None:
        arena = self._room.arena
        items = [(arena.record(block.slot), arena.view(block.slot)) for block in batch]
        job = self._watch.stores.begin(sum(block.namespace.record_bytes for block in batch), probe)
        self._io.submit(
            lambda: self._write(items, victims, job),
            lambda results: self._written(batch, victims, results, attempts, job),
            failed=[Put.FAILED] * len(batch),
        )

    def _write(self, items: list[tuple[Record, memoryview]], victims: list[bytes], job: Job) -> list[Put]:
        """In an I/O thread. A refused delete raises: then nothing is written."""
        nvme = self._room.nvme
        assert nvme is not None
        self._watch.stores.start(job)
        if victims:
            try:
                nvme.delete(victims)
            except TierError as error:
                log.warning("NVMe refuses to delete: %s", error)
                return [Put.FAILED] * len(items)
        return nvme.put(items)

    def _written(
        self, batch: list[Block], deleted: list[bytes], results: list[Put], attempts: int, job: Job
    ) -> None:
        if deleted:
            self._room.deleted(deleted, done=any(result is not Put.FAILED for result in results))
        again = [block for block, result in zip(batch, results, strict=True) if result is Put.NO_ROOM]
        victims: list[bytes] = []
        if again and attempts > 1 and self._room.storing:
            ahead = min(EVICT_AHEAD_RECORDS, self._room.nvme_records() // EVICT_AHEAD_SHARE)
            victims = self._room.nvme_victims(again[0].namespace, len(again) + ahead)
        for block, result in zip(batch, results, strict=True):
            if result is Put.NO_ROOM and victims:
                continue
            self._finish(block, result)
        self._watch.stores.end(job, any(result is not Put.FAILED for result in results))
        if victims:
            self._submit(again, victims, attempts - 1)
            return
        self._jobs -= 1
        self._wrote()
        self.pump()

    def _finish(self, block: Block, result: Put) -> None:
        self._writing.discard(block)
        self._room.demoting.pop(block, None)
        if result is Put.STORED:
            self._counters.demoted += 1
            self._room.wrote(block)
            self._accounts.moved(block.namespace, DEMOTED, block.namespace.record_bytes)
            self._room.arrived_in_nvme(block)
        else:
            self._counters.demote_failed += 1
            self._room.quotas.used(block.namespace, IN_NVME, -1)
            self._room.doom(block)
            self._room.put_off([block])
            self._retry_at_s = self._clock() + DEMOTE_RETRY_S
        self._room.unpin(block)

    def _put_off(self, block: Block) -> None:
        """Its quota has no room for it on NVMe now: it stays in DRAM, and may be evicted there."""
        self._writing.discard(block)
        self._room.over_quota(block)
        self._retry_at_s = self._clock() + DEMOTE_RETRY_S
        self._room.unpin(block)
