"""The watch: whether each source may be used, how fast it is, and what that means for a lookup.

    loads of a source ──▶ its breaker, its speed ──▶ break-even ──▶ find: how much is worth loading
    stores of a device ─▶ its breaker ─────────────▶ whether blocks are written to it
    tick ── probe: reads real records in the background, when nothing else can show how it is

A user's request is never the probe: while the breaker of loads is open, and when loading was
refused because it is slow, records that were wanted lately are read into memory of their own
and thrown away. Stores are probed with one store, which no request waits for. Each source is
watched alone.

Invariants: blocks being probed are pinned once by this object; no more than one round of
probes of a source is under way.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable

from kvstore.constants import PROBE_READS_MAX
from kvstore.health.breaker import Job
from kvstore.health.measuring import Measuring
from kvstore.index.block import Block
from kvstore.movement.sources import DeviceSource
from kvstore.protocol.residency_bits import IN_NVME
from kvstore.residency.residency import Residency
from tiers.base import Get


class Watch:
    """Over one device: probes it when nothing else shows how it is."""

    def __init__(
        self,
        source: DeviceSource,
        residency: Residency,
        clock: Callable[[], float],
        missed: Callable[[DeviceSource, Block, Get], None],
    ) -> None:
        """`missed` is called with a block that a probe did not find, or found corrupt."""
        self.member = source.member
        self.measuring = Measuring(clock, random.Random())
        self._source = source
        self._residency = residency
        self._missed = missed
        self._probed: list[Block] = []

    def pinned(self) -> list[Block]:
        """Each is pinned once by this object."""
        return list(self._probed)

    def look(self) -> None:
        """Several times a stall: trip where something hangs, probe where it is time."""
        loads = self.member.loads
        loads.look()
        self.member.stores.look()
        if self._probed:
            return
        if loads.may_probe():
            if not self._probe(1):
                loads.close()  # of what was wanted nothing is left
        elif loads.closed and self._source.refused and not loads.jobs:
            if self.measuring.may_begin(self._source.begun, self.member.speed.bytes_per_s):
                self._source.refused = False  # until the next one is
                self._probe(PROBE_READS_MAX)

    def _probe(self, count: int) -> bool:
        """Read up to so many records that were wanted lately, at once. False if none of them is left."""
        blocks: list[Block] = []
        for key in reversed(list(self._source.targets)):
            block = self._residency.block_of(key)
            if block is None or not block.where & IN_NVME or block.device != self.member.number:
                del self._source.targets[key]
            elif len(blocks) < count:
                blocks.append(block)
        breaker_was_open = not self.member.loads.closed
        self._residency.pin(*blocks)
        self._probed += blocks
        for block in blocks:
            job = self.member.loads.begin(block.namespace.record_bytes, probe=breaker_was_open)
            self.member.speed.begin(job)
            self._submit(block, job)
        return bool(blocks)

    def _submit(self, block: Block, job: Job) -> None:
        self._residency.counters.nvme_probes += 1
        slot, key = block.place[1], block.key

        def work() -> Get:  # into memory of its own
            self.member.loads.start(job)
            return self.member.device.read([(slot, key, memoryview(mmap.mmap(-1, job.size_bytes)))])[0][0]

        self.member.io.submit(
            work, lambda result: self._ended(block, job, result), failed=Get.FAILED, urgent=True
        )

    def _ended(self, block: Block, job: Job, result: Get) -> None:
        self._probed.remove(block)
        if result in (Get.MISS, Get.CORRUPT):
            self._source.targets.pop(block.key, None)
            self._missed(self._source, block, result)
        self._residency.unpin(block)
        speed = self.member.speed
        if result is Get.HIT:
            speed.end(job, block.namespace.record_bytes, probe=True)
        else:
            speed.drop()
        self.member.loads.end(job, result is not Get.FAILED)
        self.measuring.ended(speed.bytes_per_s)
