"""Promotion: NVMe → DRAM for blocks somebody waits for, and proof of adopted ones.

    acquire ─▶ want(block) ─▶ on NVMe?   slot ─▶ queue ─▶ I/O thread reads and verifies ─┐
                          └─▶ adopted?  ─────────▶ queue ─▶ I/O thread verifies ─────────┤
                                                                waiters are told ◀───────┘

The bytes go from disk straight into the arena slot. One load serves all who wait for the
block. Bytes adopted from a dead daemon are believed only after their checksum matched;
one that does not match is dropped, and loaded from NVMe if it is there.

A breaker watches the loads (`kvstore.nvme_watch`). When it trips, everybody who waits is told
at once that nothing will come, and until it closes no load is begun. What hangs in a thread
keeps its slot until it comes back, and is used if it is true. A read that failed is tried once
more when the block is asked for again; a second failure drops the record.

When DRAM is full of what is leased or not yet written to NVMe, a load waits for room; who
asked for it has a deadline. A block on its way is pinned once by this object, so that no policy evicts it meanwhile.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from kvstore import outcomes
from kvstore.accounts import Accounts
from kvstore.blocks import IN_ANY, IN_DRAM, IN_NVME, PIN, Block
from kvstore.breaker import Job
from kvstore.constants import (
    LOAD_BATCH_RECORDS,
    LOAD_WAITERS_MAX,
    LOADS_WAITING_MAX,
    SUSPECTS_MAX,
    VERIFY_JOBS_MAX,
)
from kvstore.counters import Counters
from kvstore.iopool import Io
from kvstore.nvme_watch import NvmeWatch
from kvstore.room import Line, Room
from kvstore.totals import PROMOTED
from tiers.base import Get
from tiers.constants import OWNER_DAEMON


class Waiter(Protocol):
    """Somebody who wants a block."""

    def __call__(self, block: Block | None, /) -> None:
        """Told once: the block, which is in DRAM, or None if it will not come."""

    def is_waiting(self) -> bool:
        """Whether the answer still matters; if not, no room is made for the block."""


class Promoter:
    """Brings blocks into DRAM, verified; answers each waiter exactly once."""

    def __init__(
        self,
        room: Room,
        io: Io,
        counters: Counters,
        accounts: Accounts,
        jobs_max: int,
        watch: NvmeWatch,
    ) -> None:
        self._room = room
        self._watch = watch
        self._io = io
        self._counters = counters
        self._accounts = accounts
        self._jobs_max = jobs_max
        self._jobs = 0
        self._proofs = 0  # verifications nobody waits for
        self._waiters: dict[Block, list[Waiter]] = {}
        self._waiting = 0  # all of them together
        self._filling: dict[Block, None] = {}  # those that have a slot, queued or being read
        self._queue: deque[tuple[Block, int]] = deque()  # (block, arena slot in state WRITING)
        self._starved: dict[Line, deque[Block]] = {}  # DRAM was full, or a quota, when they were asked for
        self._suspects: dict[bytes, None] = {}  # keys whose last read failed

    @property
    def underway(self) -> int:
        """Blocks being loaded or verified."""
        return len(self._waiters)

    @property
    def waiting(self) -> int:
        """Requests for single blocks that wait for them."""
        return self._waiting

    @property
    def starved(self) -> int:
        """Blocks that wait for room in DRAM."""
        return sum(map(len, self._starved.values()))

    @property
    def suspects(self) -> int:
        """Blocks whose last read failed."""
        return len(self._suspects)

    def blocks_underway(self) -> list[Block]:
        """Each is pinned once by this object."""
        return list(self._waiters)

    def blocks_with_slots(self) -> list[Block]:
        """Each has a slot that the index does not know of yet."""
        return list(self._filling)

    def is_ready(self, block: Block) -> bool:
        """Whether a client may read the block from its arena slot now."""
        return bool(block.where & IN_DRAM) and block not in self._room.unverified

    def want(self, block: Block, waiter: Waiter) -> None:
        """Tell `waiter` when the block is in DRAM and true. May answer before returning.

        When DRAM has no room for it, who is still waiting then waits for room.
        """
        if self.is_ready(block):
            waiter(block)
        elif not block.where & IN_DRAM and not self._watch.loads.closed:
            waiter(None)
        elif len(self._waiters) >= LOADS_WAITING_MAX or self._waiting >= LOAD_WAITERS_MAX:
            self._counters.loads_refused += 1
            waiter(None)
        elif block in self._waiters:
            self._waiters[block].append(waiter)
            self._waiting += 1
        elif block.where & IN_DRAM:
            self._start(block, waiter)
            self._verify(block, urgent=True)
        else:
            self._load(block, waiter)

    def prefetch(self, block: Block) -> bool:
        """Start bringing a block into DRAM for nobody in particular; False if there is no room."""
        if block not in self._waiters:
            self.want(block, NOBODY)
        return self.is_ready(block) or (block in self._waiters and self._watch.loads.closed)

    def feed(self) -> None:
        """Something may have left DRAM: start the loads that waited for room, in order."""
        for line, starved in list(self._starved.items()):
            while starved:
                block = starved[0]
                if not any(waiter.is_waiting() for waiter in self._waiters[block]):
                    starved.popleft()
                    self._finish(block, False)
                    continue
                slot = self._slot(block)
                if slot is None:
                    break
                self._enqueue(starved.popleft(), slot)
            if not starved and self._starved.get(line) is starved:
                del self._starved[line]
        self._pump()

    def give_up(self) -> None:
        """The breaker of loads tripped: nothing comes any more, and all who wait are told."""
        queued, self._queue = self._queue, deque()
        starved, self._starved = self._starved, {}
        self._suspects.clear()
        for block, slot in queued:
            del self._filling[block]
            self._room.give_up(block.namespace, [slot])
            self._watch.speed.arrive(block.namespace.record_bytes)
        waiters: list[Waiter] = []
        for block in [*(block for block, _ in queued), *(b for run in starved.values() for b in run)]:
            waiters += self._waiters.pop(block)
            self._room.unpin(block)
        for block, waiting in self._waiters.items():
            if not block.where & IN_DRAM:  # it hangs in a thread; else it is being verified
                waiters += waiting
                waiting.clear()
        self._waiting -= len(waiters)
        for waiter in waiters:
            waiter(None)

    def verify_next(self) -> None:
        """Keep proving adopted blocks that nobody asked for yet, a few at a time."""
        wanted = [b for b in islice(self._room.unverified, VERIFY_JOBS_MAX * 2) if b not in self._waiters]
        for block in wanted[: VERIFY_JOBS_MAX - self._proofs]:
            self._proofs += 1
            self._start(block, _Proof(self))
            self._verify(block, urgent=False)

    def proven(self) -> None:
        """One of them is through."""
        self._proofs -= 1
        self.verify_next()

    def _verify(self, block: Block, urgent: bool) -> None:
        verify = self._room.arena.verify
        self._io.submit(lambda: verify(block.slot), lambda ok: self._verified(block, ok), False, urgent)

    def _start(self, block: Block, waiter: Waiter) -> None:
        block.where += PIN
        self._waiters[block] = [waiter]
        self._waiting += 1

    def _pop(self, block: Block) -> list[Waiter]:
        waiters = self._waiters.pop(block)
        self._waiting -= len(waiters)
        return waiters

    def _finish(self, block: Block, ready: bool) -> None:
        for waiter in self._pop(block):
            waiter(block if ready else None)
        self._room.unpin(block)

    # -- verification of adopted blocks --

    def _verified(self, block: Block, matches: bool) -> None:
        self._room.unverified.pop(block, None)
        if matches:
            self._counters.verified += 1
            self._room.queue_demotion(block)
            self._finish(block, True)
            return
        self._counters.corrupt_dram += 1
        waiters = self._pop(block)
        self._room.left_dram(block, why=outcomes.CORRUPT)
        self._room.unpin(block)
        for waiter in waiters:
            self._load_or_miss(block, waiter)

    # -- loads --

    def _load_or_miss(self, block: Block, waiter: Waiter) -> None:
        if block in self._waiters or block.where & IN_ANY:
            self.want(block, waiter)
        else:
            waiter(None)

    def _load(self, block: Block, waiter: Waiter) -> None:
        if not block.where & IN_NVME:
            waiter(None)
            return
        line = self._room.line(block.namespace)
        starved = self._starved.get(line)
        self._start(block, waiter)
        slot = None if starved else self._slot(block)
        if slot is not None:
            self._enqueue(block, slot)
            self._pump()
            return
        self._counters.promote_no_room += 1
        if waiter.is_waiting():
            self._starved.setdefault(line, deque()).append(block)
        else:
            self._finish(block, False)

    def _slot(self, block: Block) -> int | None:
        parent = block.parent.hash if block.parent is not None else b""
        for slot in self._room.slots(block.namespace, [block.hash], parent, OWNER_DAEMON):
            self._filling[block] = None
            return slot
        return None

    def _enqueue(self, block: Block, slot: int) -> None:
        self._queue.append((block, slot))
        self._watch.speed.wait(block.namespace.record_bytes)

    def _pump(self) -> None:
        while self._queue and self._jobs < self._jobs_max and self._watch.loads.closed:
            count = min(LOAD_BATCH_RECORDS, -(-len(self._queue) // self._jobs_max))
            batch = [self._queue.popleft() for _ in range(count)]
            self._jobs += 1
            self._submit(batch)

    def _submit(self, batch: list[tuple[Block, int]]) -> None:
        job = self._watch.load_begins(sum(block.namespace.record_bytes for block, _ in batch))
        self._watch.remember(batch[0][0].key)
        self._io.submit(
            lambda: self._read(batch, job),
            lambda results: self._loaded(batch, job, results),
            failed=[(Get.FAILED, b"")] * len(batch),
            urgent=True,
        )

    def _read(self, batch: list[tuple[Block, int]], job: Job) -> list[tuple[Get, bytes]]:
        """In an I/O thread: fill the slots."""
        assert self._room.nvme is not None
        self._watch.loads.start(job)
        return self._room.nvme.get([(block.key, self._room.arena.view(slot)) for block, slot in batch])

    def _loaded(self, batch: list[tuple[Block, int]], job: Job, results: list[tuple[Get, bytes]]) -> None:
        self._jobs -= 1
        loaded_bytes = 0
        for (block, slot), (result, checksum) in zip(batch, results, strict=True):
            self._watch.speed.arrive(block.namespace.record_bytes)
            del self._filling[block]
            if result is Get.HIT:
                loaded_bytes += block.namespace.record_bytes
                self._suspects.pop(block.key, None)
                self._counters.promoted += 1
                self._accounts.moved(block.namespace, PROMOTED, block.namespace.record_bytes)
                self._room.arena.commit(slot, checksum)
                self._room.promoted(block, slot)
            else:
                self._room.give_up(block.namespace, [slot])
                self.missed(block, result)
            self._finish(block, result is Get.HIT)
        self._watch.load_ended(job, loaded_bytes, any(result is not Get.FAILED for result, _ in results))
        self.feed()

    def missed(self, block: Block, result: Get) -> None:
        """The one place where a tier's failure becomes a miss: it is counted here."""
        why = outcomes.UNAVAILABLE  # its row is gone
        if result is Get.CORRUPT:
            why = outcomes.CORRUPT
            self._counters.corrupt_nvme += 1
        elif result is Get.FAILED:
            self._counters.promote_failed += 1
            if block.key not in self._suspects:  # the tier may be to blame, and not the record
                self._suspects[block.key] = None
                if len(self._suspects) > SUSPECTS_MAX:
                    del self._suspects[next(iter(self._suspects))]
                return
            del self._suspects[block.key]
            self._room.doom(block)
        if block.where & IN_NVME:
            self._room.left_nvme(block, why=why)


class _Nobody:
    def __call__(self, block: Block | None, /) -> None:
        pass

    def is_waiting(self) -> bool:
        return False


class _Proof(_Nobody):
    """Waits for a verification only to have the next one started."""

    def __init__(self, promoter: Promoter) -> None:
        self._promoter = promoter

    def __call__(self, block: Block | None, /) -> None:
        self._promoter.proven()


NOBODY = _Nobody()
