"""Loading: brings blocks into DRAM, for requests that wait for them or ahead of any request.

    acquire ─▶ want ─▶ queue of its source ─▶ room in DRAM ─▶ read and verified ─▶ waiters are called
    lookup ──▶ prefetch ─▶ behind what is urgent

Who asked for blocks take turns (`LoadQueue`), and what is begun is bounded by bytes and by the speed of the source
(`kvstore.movement.sources`).

The bytes go from the source straight into an arena slot. The slot is taken when a read is
submitted, and not when a block is queued: what waits evicts nothing. One load serves all who
wait for the block.

Each source has a breaker (`kvstore.movement.watch`). When it trips, all who wait for that
source are answered at once, with a miss, and until it closes no load of it is begun; the
other sources go on. What hangs in a thread keeps its slot until it comes back, and is used if
it is true. A read that failed is tried once more when the block is asked for again; a second
failure drops the record.

When DRAM is full of what is leased or not yet written to NVMe, a load waits for room, in a
line with others of its size; who asked for it has a deadline. A block of the index that is on
its way is pinned once by this object, so that no policy evicts it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.constants import STEP_BLOCKS, SUSPECTS_MAX
from kvstore.health.breaker import Job
from kvstore.index.block import NO_SLOT, Block, Namespace
from kvstore.ledger.accounts import Accounts
from kvstore.ledger.sums import PROMOTED
from kvstore.movement.load_queue import Fifo
from kvstore.movement.sources import DeviceSource, Load, Reach, Read, SharedSource, Source
from kvstore.movement.verification import Verifier
from kvstore.movement.waiting import Prefetch, Waiter, Waiting
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.eviction import Eviction, Line
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from tiers.base import Get
from tiers.constants import OWNER_DAEMON

LOOKS_PER_ANSWER = 10  # what an answer takes of the time of a piece
LOAD_LOOKS = 300  # blocks that wait for a load, looked at between two yields
LOAD_LOOKS_EVICTING = 5  # the same, where other blocks have to be evicted for each


class Loader:
    """Brings blocks into DRAM; calls each waiter exactly once."""

    def __init__(
        self,
        residency: Residency,
        eviction: Eviction,
        accounts: Accounts,
        verifier: Verifier,
        devices: Sequence[DeviceSource],
        shared: Sequence[SharedSource] = (),
    ) -> None:
        """devices: by member number. shared: asked in this order."""
        self._residency = residency
        self._eviction = eviction
        self._counters = residency.counters
        self._accounts = accounts
        self._verifier = verifier
        self.devices = devices
        self.shared = shared
        self.waiting = Waiting()
        self._loads: dict[Block, Load] = {}  # of every block on its way
        self._incoming: dict[
            tuple[int, bytes], Block
        ] = {}  # of these, those from shared levels, not in the index
        self._starved: dict[Line, Fifo] = {}  # DRAM, or a quota, had no room for them
        self._suspects: dict[bytes, None] = {}  # keys whose last read failed
        self._looks = 0  # blocks that may still be looked at in this piece
        self._goes_on = False  # more of them are looked at in the background
        residency.expiry.changed = self._ttl_changed

    def _ttl_changed(self) -> None:
        for source in self.shared:
            source.forget_too_old()

    # -- figures --

    @property
    def underway(self) -> int:
        """Blocks being loaded or waiting for it."""
        return len(self.waiting)

    @property
    def starved(self) -> int:
        """Blocks that wait for room in DRAM."""
        return sum(map(len, self._starved.values()))

    @property
    def is_urgent(self) -> bool:
        """Whether a request waits for a load that is not begun."""
        return bool(self._starved) or any(source.urgent for source in (*self.devices, *self.shared))

    @property
    def suspects(self) -> int:
        """Blocks whose last read failed."""
        return len(self._suspects)

    def pinned(self) -> Iterator[Block]:
        """Each is pinned once by this object."""
        return (load.block for load in self._loads.values() if not isinstance(load.source, SharedSource))

    def blocks_with_slots(self) -> list[Block]:
        """Each has a slot that the index does not know of yet."""
        return [load.block for load in self._loads.values() if load.slot != NO_SLOT]

    # -- asking --

    def is_ready(self, block: Block) -> bool:
        """Whether a client may read the block from its arena slot now."""
        return bool(block.where & IN_DRAM) and block not in self._residency.unverified

    def comes(self, block: Block, reach: Reach) -> bool:
        """Whether a block that an owned level has will be in DRAM in time."""
        if block.where & IN_DRAM or not block.where & IN_NVME or block in self.waiting:
            return True
        return reach.has(self.devices[block.device], block.namespace.record_bytes)

    def coming(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        """How many of these blocks are on their way into DRAM."""
        known = zip(hashes, namespace.blocks.get_run(hashes), strict=True)
        return sum(
            (block is not None and block in self.waiting) or (namespace.id, block_hash) in self._incoming
            for block_hash, block in known
        )

    def may_come(self, namespace: Namespace) -> bool:
        """Whether this is a namespace still that blocks may be brought for."""
        return self._residency.namespaces.of_key(namespace.digest) is namespace and not namespace.is_ended

    def _may_load(self, namespace: Namespace, source: Source) -> bool:
        """Whether a source works, and DRAM could hold what it has: slabs may have been larger when it was stored."""
        return source.loads.closed and namespace.record_bytes <= self._residency.arena.layout.slab_bytes

    def want(self, block: Block, waiter: Waiter) -> None:
        """Call `waiter` when the block is in DRAM and true, which may be before this returns."""
        if self.is_ready(block):
            waiter(block)
        elif block.where & IN_DRAM:
            self._verifier.want(block, _AfterProof(self, waiter))
        elif not block.where & IN_NVME:
            waiter(None)
        else:
            self._queue(block, self.devices[block.device], waiter)

    def fetch(
        self, namespace: Namespace, block_hash: bytes, parent: bytes, source: SharedSource, waiter: Waiter
    ) -> None:
        """The same of a block that no owned level has, but a shared one claims to have."""
        name = namespace.id, block_hash
        block = self._incoming.get(name)
        if block is None:
            block = Block(namespace, block_hash)
            if not self._may_load(namespace, source) or self.waiting.full:
                waiter(None)
                return
            self._incoming[name] = block
            namespace.incoming += 1
        self._queue(block, source, waiter, parent)

    def prefetch(self, block: Block, waiter: Prefetch) -> None:
        """Start bringing a block of an owned level into DRAM ahead of any request."""
        if block not in self.waiting and not self.is_ready(block):
            self.want(block, waiter)

    def _queue(self, block: Block, source: Source, waiter: Waiter, parent: bytes = b"") -> None:
        load = self._loads.get(block)
        if load is not None:
            source = load.source
        if not self._may_load(block.namespace, source):
            waiter(None)
        elif self.waiting.full:
            self._counters.loads_refused += 1
            waiter(None)
        else:
            self.waiting.add(block, waiter)
            if load is None:
                self._loads[block] = Load(block, source, parent)
                if not isinstance(source, SharedSource):
                    self._residency.pin(block)
                source.speed.wait(block.namespace.record_bytes)
                (source.ahead if isinstance(waiter, Prefetch) else source.urgent).add(block, waiter.asker)
            elif not isinstance(waiter, Prefetch) and (block in source.ahead or block in source.urgent):
                source.ahead.discard(block)
                source.urgent.add(block, waiter.asker)

    def pump(self) -> None:
        """Begin as many reads as may be under way; where many that wait are not wanted any more, in pieces."""
        self._looks = LOAD_LOOKS
        if self._pump():
            self._go_on()

    def feed(self) -> None:
        """Something may have left DRAM: give room to the loads that wait for it, in order; many in pieces."""
        self._looks = LOAD_LOOKS
        if self._feed() or self._pump():
            self._go_on()

    def _go_on(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            self._residency.background.begin(self._rest_steps())

    def _rest_steps(self) -> Steps[None]:
        """What one piece of feeding did not get to."""
        yield
        self._goes_on = False
        self.feed()

    def _pump(self) -> bool:
        """Begin reads. Returns whether there is more to look at."""
        for source in (*self.devices, *self.shared):
            while source.idle:
                batch = self._next_batch(source)
                if batch:
                    self._submit(source, batch)
                if self._looks <= 0:
                    return source.idle
        return False

    def _feed(self) -> bool:
        """Give room. Returns whether there is more to look at."""
        for line, starved in list(self._starved.items()):
            while starved:
                if self._looks <= 0:
                    return True
                block = starved.first()
                self._looks -= self._price(block)
                load = self._loads[block]
                source = load.source
                is_over = not self.waiting.is_wanted(block) or not self.waiting.waits_for_room(block)
                if is_over or not source.loads.closed:
                    starved.popleft()
                    self._finish(load, None)
                    continue
                if source.slotted and source.slotted_bytes >= source.window.size_bytes:
                    break
                if not self._get_slot(load):
                    break
                starved.popleft()
                source.slotted.append(load)
                source.slotted_bytes += block.namespace.record_bytes
            if not starved and self._starved.get(line) is starved:
                del self._starved[line]
        return False

    # -- reading --

    def _next_batch(self, source: Source) -> list[Load]:
        """Blocks out of its queue that have room in DRAM now. What finds none waits in its line, or is over."""
        batch: list[Load] = []
        left_bytes = source.batch_bytes
        queue = source.urgent if source.slotted or source.urgent else source.ahead
        while len(batch) < source.batch_records and self._looks > 0:
            block = source.slotted[0].block if source.slotted else queue.first()
            if block is None or (batch and block.namespace.record_bytes > left_bytes):
                break
            if source.slotted:
                batch.append(source.slotted.popleft())
                source.slotted_bytes -= block.namespace.record_bytes
            else:
                queue.take()
                self._looks -= self._price(block)
                load = self._loads[block]
                if not self._may_join(load):
                    continue
                batch.append(load)
            left_bytes -= block.namespace.record_bytes
        queue.end_turn()
        return batch

    def _may_join(self, load: Load) -> bool:
        """Whether a block that is not queued any more has a slot, so that it may be read. Else it waits in its line, or is over."""
        block = load.block
        if not self.waiting.is_wanted(block) or not self._is_there(load):
            self._finish(load, None)
        elif self._get_slot_in_turn(load):
            return True
        elif self.waiting.waits_for_room(block):
            self._starved.setdefault(self._eviction.line(block.namespace), Fifo()).append(block)
        else:
            self._finish(load, None)
        return False

    def _price(self, block: Block) -> int:
        """Looks that go for giving it a slot: others leave one by one where there is none."""
        return 1 if self._residency.arena.has_room(block.namespace.record_bytes) else LOAD_LOOKS_EVICTING

    def _is_there(self, load: Load) -> bool:
        """Whether its source has it still: a probe may have found it damaged meanwhile."""
        return isinstance(load.source, SharedSource) or bool(load.block.where & IN_NVME)

    def _get_slot_in_turn(self, load: Load) -> bool:
        """Room for it, unless others of its line wait for room already."""
        is_first = not self._starved or self._eviction.line(load.block.namespace) not in self._starved
        has_slot = is_first and self._get_slot(load)
        self._counters.promote_no_room += not has_slot
        return has_slot

    def has_free_slot(self, namespace: Namespace) -> bool:
        """Whether one more record of a namespace finds room in DRAM, and nothing has to leave for it."""
        quotas = self._residency.quotas
        is_over_quota = bool(quotas) and quotas.excess(namespace, IN_DRAM)
        return not is_over_quota and self._residency.arena.has_room(namespace.record_bytes)

    def _get_slot(self, load: Load) -> bool:
        block = load.block
        if not self.waiting.displaces(block) and not self.has_free_slot(block.namespace):
            return False
        parent = block.parent.hash if block.parent is not None else load.parent
        for slot in self._eviction.slots(block.namespace, [block.hash], parent, OWNER_DAEMON):
            load.slot = slot
        return load.slot != NO_SLOT

    def _submit(self, source: Source, batch: list[Load]) -> None:
        job = source.loads.begin(sum(load.block.namespace.record_bytes for load in batch))
        source.speed.begin(job)
        source.jobs += 1
        source.window.begin(job)
        source.began(batch[0].block)
        source.read(batch, job, lambda results: self._loaded(source, batch, job, results))

    def _loaded(self, source: Source, batch: list[Load], job: Job, results: Sequence[Read]) -> None:
        source.jobs -= 1
        loaded_bytes = 0
        for load, (result, checksum) in zip(batch, results, strict=True):
            block, slot = load.block, load.slot
            load.slot = NO_SLOT
            if result is Get.HIT:
                loaded_bytes += block.namespace.record_bytes
                self._suspects.pop(block.key, None)
                self._counters.promoted += 1
                self._accounts.moved(block.namespace, PROMOTED, block.namespace.record_bytes)
                self._residency.arena.commit_run([slot], checksum, self._time_of(load))
                self._finish(load, self._arrived(load, slot))
            else:
                self._residency.give_up(block.namespace, [slot])
                self.missed(source, block, result)
                self._finish(load, None)
        source.window.end(job, loaded_bytes)
        if loaded_bytes:
            source.speed.end(job, loaded_bytes)
        else:
            source.speed.drop()
        source.loads.end(job, any(result is not Get.FAILED for result, _ in results))
        self.feed()

    def _time_of(self, load: Load) -> int:
        """When a record that arrived was stored, for its row. Whoever wrote a bucket is not believed that it was in the future."""
        expiry = self._residency.expiry
        if not isinstance(load.source, SharedSource):
            return expiry.stored_s(load.block) or load.stored_s
        load.stored_s = min(load.stored_s, int(expiry.now_s()))
        return load.stored_s

    def _arrived(self, load: Load, slot: int) -> Block | None:
        """The block in DRAM; None if its time is over, or it was erased since it was asked for."""
        block = load.block
        known = block.namespace.blocks.get(block.hash)
        if known is not None and known.where & IN_DRAM:  # it was stored meanwhile
            self._residency.give_up(block.namespace, [slot])
            return known
        if load.erasures != block.namespace.erasures:
            self._residency.give_up(block.namespace, [slot])
            return None
        if not isinstance(load.source, SharedSource):
            self._residency.promoted(block, slot)
            return block
        run = self._residency.arrived_in_dram(block.namespace, [block.hash], load.parent, [slot])
        expiry = self._residency.expiry
        if expiry.covers(block.namespace):
            expiry.adopted(run[0], load.stored_s)  # it is as old as when it was stored first
            if expiry.over(run):
                load.source.was_too_old(run[0])
                if self._residency.drop(run[0], outcomes.EXPIRED):
                    return None
        self._residency.writes.offer(*run)  # to NVMe, as any block that is new here
        self._residency.settle(*run)
        return run[0]

    def _finish(self, load: Load, ready: Block | None) -> int:
        """The block is not on its way any more; its waiters are called, and pin it if they want it. Returns how many."""
        block: Block = load.block
        held: Block | None = block
        load.source.speed.arrive(block.namespace.record_bytes)
        waiters = self.waiting.pop(block)
        del self._loads[block]
        if isinstance(load.source, SharedSource):
            del self._incoming[block.namespace.id, block.hash]
            block.namespace.incoming -= 1
            held = ready
            if held is not None:
                self._residency.pin(held)
        for waiter in waiters:
            waiter(ready)
        if held is not None:
            self._residency.unpin(held)
        return len(waiters)

    # -- trouble --

    def give_up(self, source: Source) -> None:
        """The breaker of a source tripped: all who wait for it are answered, with a miss; many of them in pieces."""
        self._suspects.clear()
        self._residency.background.begin(self._give_up_steps(source))

    def _give_up_steps(self, source: Source) -> Steps[None]:
        looks = 0
        for took in chain(self._miss_hanging(source), self._miss_waiting(source)):
            looks += took
            if looks >= STEP_BLOCKS:
                looks = 0
                yield
                if source.loads.closed:
                    break  # it works again: what still waits for it is loaded
        self.pump()

    def _miss_hanging(self, source: Source) -> Iterator[int]:
        """Who waits for what is read now is answered; what is read may never come back. Each is so many looks."""
        for load in list(self._loads.values()):
            looks = 1
            if load.source is source and load.slot != NO_SLOT and self._loads.get(load.block) is load:
                for waiter in self.waiting.drain(load.block):
                    waiter(None)
                    looks += LOOKS_PER_ANSWER
            yield looks

    def _miss_waiting(self, source: Source) -> Iterator[int]:
        for block in self._given_up(source):
            yield LOOKS_PER_ANSWER * (1 + self._finish(self._loads[block], None)) if block is not None else 1

    def _given_up(self, source: Source) -> Iterator[Block | None]:
        """What waits for a source, out of its queues: what requests wait for goes first. None: it was another one's."""
        while source.slotted:
            load = source.slotted.popleft()
            source.slotted_bytes -= load.block.namespace.record_bytes
            self._residency.give_up(load.block.namespace, [load.slot])
            load.slot = NO_SLOT
            yield load.block
        for queue in (source.urgent, source.ahead):
            while queue.first() is not None:
                yield queue.take()
        for line, starved in list(self._starved.items()):
            for _ in range(len(starved)):
                if not starved:
                    break
                block = starved.popleft()
                if self._loads[block].source is source:
                    yield block
                else:
                    starved.append(block)
                    yield None
            if not starved and self._starved.get(line) is starved:
                del self._starved[line]

    def missed(self, source: Source, block: Block, result: Get) -> None:
        """The one place where a failed read becomes a miss: it is counted here, for the level that it came from."""
        why = outcomes.UNAVAILABLE  # its row is gone
        if result is Get.CORRUPT:
            why = outcomes.CORRUPT
            source.count_corrupt(self._counters)
        elif result is Get.FAILED:
            self._counters.promote_failed += 1
            if block.key not in self._suspects:  # the source may be to blame, and not the record
                self._suspects[block.key] = None
                if len(self._suspects) > SUSPECTS_MAX:
                    del self._suspects[next(iter(self._suspects))]
                return
            del self._suspects[block.key]
        if block.where & IN_NVME:
            self._residency.left_nvme(block, why=why, for_good=result is not Get.MISS)


class _AfterProof:
    """Waits for a verification; if the bytes in DRAM are not true, for a load."""

    def __init__(self, loader: Loader, waiter: Waiter) -> None:
        self._loader = loader
        self._waiter = waiter

    def __call__(self, block: Block | None, /) -> None:
        if block is None or self._loader.is_ready(block):
            self._waiter(block)
        elif block.where & IN_DRAM:  # not true, and still being read
            self._waiter(None)
        else:
            self._loader.want(block, self._waiter)
            self._loader.pump()

    def is_waiting(self) -> bool:
        return self._waiter.is_waiting()

    @property
    def asker(self) -> object:
        return self._waiter.asker

    def waits_for_room(self) -> bool:
        return self._waiter.waits_for_room()
