"""The watch over NVMe: whether it may be used, how fast it is, and what that means for a lookup.

    promoter ── loads ──▶ breaker of loads  ──┐
             └─────────▶ speed ─▶ break-even ─┼─▶ find: how much of a prefix is worth loading
    demoter ── stores ──▶ breaker of stores ──┘─▶ room.storing: whether blocks are written down
    tick ── probe: reads real records in the background, when nothing else can show how it is

A user's request is never the probe: while the breaker of loads is open, and when loading was
refused because it is slow, records that were wanted lately are read into memory of their own
and thrown away. Stores are probed with one store, which nobody waits for.

Invariants: blocks being probed are pinned once by this object; no more than one round of
probes is under way.
"""

from __future__ import annotations

import mmap
import random
from collections import OrderedDict
from collections.abc import Callable

from kvstore import outcomes
from kvstore.accounts import Asking, Found
from kvstore.blocks import IN_DRAM, IN_NVME, PIN, Block
from kvstore.breaker import Breaker, Job
from kvstore.breakeven import BreakEven, slow_blocks
from kvstore.constants import (
    BREAKER_PAUSE_JITTER,
    PROBE_GAIN,
    PROBE_PAUSE_S_MAX,
    PROBE_PAUSE_S_MIN,
    PROBE_READS_MAX,
    PROBE_TARGETS_MAX,
)
from kvstore.counters import Counters
from kvstore.iopool import Io
from kvstore.namespaces import Namespace
from kvstore.room import Room
from kvstore.speed import TierSpeed
from tiers.base import Get


class NvmeWatch:
    """Health of the NVMe tier of one engine; see the module's head.

    stall_s: how long one read or write may take. prefill_tokens_per_s: where engines do not say
    it; 0 if it is not known. `on_change` and `on_missed` are set by the engine.
    """

    def __init__(
        self,
        room: Room,
        io: Io,
        clock: Callable[[], float],
        counters: Counters,
        stall_s: float,
        prefill_tokens_per_s: float,
        chance: random.Random | None = None,
    ) -> None:
        self._room = room
        self._io = io
        self._clock = clock
        self._counters = counters
        self._chance = chance or random.Random()
        self.loads = Breaker("nvme loads", stall_s, clock, self._changed, self._chance)
        self.stores = Breaker("nvme stores", stall_s, clock, self._changed, self._chance)
        self.speed = TierSpeed(clock)
        self.break_even = BreakEven(self.speed, prefill_tokens_per_s)
        self.on_change: Callable[[], None] = lambda: None
        self.on_missed: Callable[[Block, Get], None] = lambda block, result: None
        self._targets: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # keys of records wanted lately, last one last
        self._probed: list[Block] = []
        self._refused = False  # as too slow, since the last load
        self._measure_at_s = 0.0
        self._measure_pause_s = PROBE_PAUSE_S_MIN
        self._probed_at_bytes_per_s = 0.0

    # -- lookups --

    def find(self, namespaces: list[Namespace], hashes: bytes, count: int, asking: Asking) -> Found:
        """What to use of the first `count` blocks, all of them held. Changes no block."""
        if not count or self._room.nvme is None:
            return Found(count, count)
        if not self.loads.closed:
            skip = asking.local_tokens // max(1, namespaces[0].spec.block_tokens)
            slow = slow_blocks(namespaces, hashes, count, skip)
            return Found(slow[0][0] if slow else count, count, outcomes.UNAVAILABLE)
        return Found(self.break_even.usable(namespaces, hashes, count, asking), count, outcomes.SLOWER)

    def note(self, namespaces: list[Namespace], hashes: bytes, found: Found, asking: Asking) -> None:
        """A client was told of it: learn its prefill rate, and remember what was refused."""
        if asking.prefill_tokens_per_s:
            for namespace in namespaces:
                self.break_even.learn(namespace, asking.prefill_tokens_per_s)
        if found.usable == found.held:
            return
        if found.why == outcomes.OVER_QUOTA:
            self._counters.refused_over_quota += 1
            return
        if found.why == outcomes.SLOWER:
            self._counters.refused_slower += 1
            self._refused = True
        else:
            self._counters.refused_unavailable += 1
        size = namespaces[0].hash_bytes
        wanted = hashes[found.usable * size : (found.usable + 1) * size]
        slow = (n for n in namespaces if (b := n.blocks.get(wanted)) is not None and not b.where & IN_DRAM)
        self.remember(next(slow, namespaces[0]).digest + wanted)

    def remember(self, key: bytes) -> None:
        """A record that somebody wants from NVMe: one to probe with."""
        self._targets.pop(key, None)
        self._targets[key] = None
        if len(self._targets) > PROBE_TARGETS_MAX:
            self._targets.popitem(last=False)

    # -- loads --

    def load_begins(self, size_bytes: int) -> Job:
        """A load that a request asked for."""
        job = self.loads.begin(size_bytes)
        self.speed.begin(job)
        self._refused = False
        self._measure_pause_s = PROBE_PAUSE_S_MIN
        return job

    def load_ended(self, job: Job, size_bytes: int, is_well: bool, probe: bool = False) -> None:
        """It is over and brought so many bytes. What was late, or failed, says nothing about the speed."""
        if size_bytes:
            self.speed.end(job, size_bytes, probe)
        else:
            self.speed.drop()
        self.loads.end(job, is_well)

    # -- upkeep --

    @property
    def pressing(self) -> bool:
        """Whether loads are waiting or under way: stores step back."""
        return self.speed.waiting_bytes > 0

    @property
    def targets(self) -> int:
        """Records remembered to probe with."""
        return len(self._targets)

    def blocks_underway(self) -> list[Block]:
        """Each is pinned once by this object."""
        return list(self._probed)

    def look(self) -> None:
        """Several times a stall: trip where something hangs, probe where it is time."""
        if self._room.nvme is None:
            return
        self.loads.look()
        self.stores.look()
        if self._probed:
            return
        if self.loads.may_probe():
            if not self._probe(1):
                self.loads.close()  # of what was wanted nothing is left
        elif self.loads.closed and self._refused and not self.loads.jobs:
            now_s = self._clock()
            if now_s >= self._measure_at_s:
                pause_s = self._measure_pause_s * (1 + self._chance.random() * BREAKER_PAUSE_JITTER)
                self._measure_at_s = now_s + pause_s
                self._measure_pause_s = min(PROBE_PAUSE_S_MAX, 2 * self._measure_pause_s)
                self._refused = False  # until the next one is
                self._probed_at_bytes_per_s = self.speed.bytes_per_s
                self._probe(PROBE_READS_MAX)

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        return {
            "breakers": [
                {
                    "name": breaker.name,
                    "state": breaker.state,
                    "trips": breaker.trips,
                    "reason": breaker.reason,
                    "retry_in_s": round(breaker.retry_in_s(), 3),
                    "jobs": breaker.jobs,
                    "oldest_job_s": round(breaker.oldest_s(), 3),
                }
                for breaker in (self.loads, self.stores)
                if self._room.nvme is not None
            ],
            "speeds": [
                {
                    "name": "nvme",
                    "latency_s": round(self.speed.latency_s, 6),
                    "bytes_per_s": round(self.speed.bytes_per_s),
                    "waiting_bytes": self.speed.waiting_bytes,
                    "samples": self.speed.samples,
                }
                for _ in range(self._room.nvme is not None)
            ],
        }

    def _changed(self) -> None:
        if not self.loads.closed:
            self.speed.drop()
        self.on_change()

    # -- probes --

    def _probe(self, count: int) -> bool:
        """Read up to so many records that were wanted lately, at once. False if none of them is left."""
        blocks: list[Block] = []
        for key in reversed(list(self._targets)):
            block = self._room.block_of(key)
            if block is None or not block.where & IN_NVME:
                del self._targets[key]
            elif len(blocks) < count:
                blocks.append(block)
        breaker_was_open = not self.loads.closed
        for block in blocks:
            block.where += PIN
            self._probed.append(block)
        for block in blocks:
            job = self.loads.begin(block.namespace.record_bytes, probe=breaker_was_open)
            self.speed.begin(job)
            self._submit(block, job)
        return bool(blocks)

    def _submit(self, block: Block, job: Job) -> None:
        self._counters.nvme_probes += 1
        self._io.submit(
            lambda: self._read(block.key, job),
            lambda result: self._read_ended(block, job, result),
            failed=Get.FAILED,
            urgent=True,
        )

    def _read(self, key: bytes, job: Job) -> Get:
        """In an I/O thread, into memory of its own."""
        nvme = self._room.nvme
        assert nvme is not None
        self.loads.start(job)
        return nvme.get([(key, memoryview(mmap.mmap(-1, job.size_bytes)))])[0][0]

    def _read_ended(self, block: Block, job: Job, result: Get) -> None:
        self._probed.remove(block)
        if result in (Get.MISS, Get.CORRUPT):
            self._targets.pop(block.key, None)
            self.on_missed(block, result)
        self._room.unpin(block)
        size_bytes = block.namespace.record_bytes if result is Get.HIT else 0
        self.load_ended(job, size_bytes, result is not Get.FAILED, probe=True)
        if self.speed.bytes_per_s > PROBE_GAIN * self._probed_at_bytes_per_s:
            self._measure_pause_s = PROBE_PAUSE_S_MIN  # it recovers: look again soon
