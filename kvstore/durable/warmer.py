"""The warmer: brings blocks of durable packs into this node's tiers ahead of any request, because somebody ordered it.

    bring(run) ─▶ waits its turn ─▶ block by block ─▶ held: skipped │ on NVMe, in the bucket: loaded as a prefetch
                                                              ▼
    to dram: into free slots only, nothing leaves for it      to nvme: through DRAM, written, and out of DRAM again

Serving goes first. Nothing is begun while a load of an engine waits for its turn, WARM_RECORDS_MAX records are under way at most, and
each is behind what is urgent. Break-even is not asked: nobody waits. What DRAM holds stays; of NVMe, only free slots are used.

Runs are carried out in the order in which they came, so that a prefix is there before what hangs on it; the first block
that finds no room ends its run, and is told: `refused`.

Called from the engine's thread only; nothing here blocks. It pins nothing: blocks on their way are the loader's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.constants import WARM_BYTES_MAX, WARM_DRAM_SHARE, WARM_RECORDS_MAX, WARM_STEP_BLOCKS
from kvstore.durable.traffic import Traffic
from kvstore.errors import RequestError
from kvstore.index.block import Block, Namespace
from kvstore.movement.loading import Loader
from kvstore.movement.sources import SharedSource
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from replication.orders import To
from tiers.namespace_spec import NamespaceSpec

log = logging.getLogger("kvstore.durable.warmer")


class Brought(NamedTuple):
    """What became of the blocks of a run. held: were there. loaded: are there now. failed: could not be had this time. refused: no room
    in the tier for it, and for those behind it. problem: why nothing of it can be here, "" otherwise."""

    held: int = 0
    loaded: int = 0
    failed: int = 0
    refused: int = 0
    problem: str = ""


Done = Callable[[Brought], None]


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of one namespace; the first one follows `parent`. next: position of the one to look at. under_way: begun, and not ended."""

    namespace: Namespace
    hashes: Sequence[bytes]
    parent: bytes
    to: To
    done: Done
    next: int = 0
    under_way: int = 0
    held: int = 0
    loaded: int = 0
    failed: int = 0
    refused: int = 0

    @property
    def is_over(self) -> bool:
        return not self.under_way and (self.next == len(self.hashes) or self.refused > 0)


class Warmer:
    """Of one engine. traffic: what was asked for, None where nothing is persisted and so nobody counts."""

    def __init__(
        self,
        residency: Residency,
        loader: Loader,
        register: Callable[[NamespaceSpec], int],
        source: SharedSource,
        traffic: Traffic | None,
    ) -> None:
        """register: a namespace, as clients do; may raise RequestError. source: the region's own bucket."""
        self.traffic = traffic
        self._residency = residency
        self._loader = loader
        self._register = register
        self._source = source
        self._runs: deque[Run] = deque()  # in their order; a run stays until it is over
        self._writing: dict[Block, Run] = {}  # in DRAM, on their way to NVMe
        self._records = self._bytes = 0  # under way
        # What waits to be written to NVMe takes the room of others in DRAM meanwhile.
        self._bytes_max = min(WARM_BYTES_MAX, self.capacity_bytes("dram") // WARM_DRAM_SHARE)

    # -- figures --

    def capacity_bytes(self, to: To) -> int:
        """Of the tier; 0 without it."""
        residency = self._residency
        if to == "dram":
            return residency.arena.stats().capacity_bytes
        return residency.nvme.stats().capacity_bytes if residency.nvme else 0

    @property
    def bytes_per_s(self) -> float:
        """From the bucket, as measured; 0 while nothing was loaded."""
        return self._source.speed.bytes_per_s

    @property
    def is_idle(self) -> bool:
        return not self._runs

    # -- asking --

    def bring(self, spec: NamespaceSpec, parent: bytes, hashes: Sequence[bytes], to: To, done: Done) -> None:
        """Have these blocks in a tier; `done` is called once, later."""
        try:
            namespace = self._residency.namespaces.get(self._register(spec))
        except RequestError as error:
            done(Brought(problem=str(error)))
            return
        self._residency.namespaces.used(namespace)  # empty or not, it stays known until the run is over
        self._runs.append(Run(namespace, hashes, parent, to, done))

    def step(self) -> bool:
        """Begin what may begin, end what is over; whether there is anything left to do."""
        self._look_at_writes()
        begun = 0
        for run in self._runs:
            while (
                begun < WARM_STEP_BLOCKS
                and run.next < len(run.hashes)
                and not run.refused
                and self._may_begin()
            ):
                begun += 1
                self._begin(run)
            if run.next < len(run.hashes) and not run.refused:
                break  # its turn goes on
        self._loader.pump()
        over = [run for run in self._runs if run.is_over]
        self._runs = deque(run for run in self._runs if not run.is_over)
        for run in over:
            self._residency.namespaces.let_go(run.namespace)
            run.done(Brought(run.held, run.loaded, run.failed, run.refused))
        return bool(self._runs)

    # -- blocks --

    def _may_begin(self) -> bool:
        loader = self._loader
        if loader.starved or not self._source.loads.closed:
            return False
        if any(source.urgent for source in (*loader.devices, *loader.shared)):
            return False
        return self._records < WARM_RECORDS_MAX and (self._bytes < self._bytes_max or not self._records)

    def _begin(self, run: Run) -> None:
        namespace, at = run.namespace, run.next
        block_hash = run.hashes[at]
        parent = run.hashes[at - 1] if at else run.parent
        block = namespace.blocks.get(block_hash)
        where = block.where & IN_ANY if block is not None else 0
        if where & IN_DRAM or (where and run.to == "nvme"):
            run.held += 1
            run.next += 1
            return
        if namespace.is_ended or not self._has_room(run):
            run.refused += 1
            return
        run.next += 1
        run.under_way += 1
        self._records += 1
        self._bytes += namespace.record_bytes
        waiter = Prefetch(lambda arrived: self._arrived(run, arrived), run.to == "nvme", asker=run)
        if block is not None and where:
            self._loader.want(block, waiter)
        else:
            self._loader.fetch(namespace, block_hash, parent, self._source, waiter)

    def _has_room(self, run: Run) -> bool:
        """Whether one more finds room in the tier that it is for, and nothing has to leave."""
        namespace, residency = run.namespace, self._residency
        if run.to == "dram":
            return self._loader.has_free_slot(namespace)
        members = residency.nvme.members
        is_over_quota = bool(residency.quotas) and residency.quotas.excess(namespace, IN_NVME)
        return not is_over_quota and any(m.writable and m.has_room(namespace.record_bytes) for m in members)

    def _arrived(self, run: Run, block: Block | None) -> None:
        """A load ended, well or not; with what it is pinned by the loader still."""
        if block is None:
            if self._loader.has_free_slot(run.namespace) or run.to == "nvme":
                run.failed += 1
            else:
                run.refused += 1
            self._ended(run)
        elif run.to == "nvme" and not block.where & IN_NVME:
            self._writing[block] = run
        else:
            run.loaded += 1
            self._ended(run)

    def _look_at_writes(self) -> None:
        """What is on NVMe by now leaves DRAM, if nobody has used it meanwhile: it came to be written only."""
        waiting = self._residency.writes.waiting
        for block, run in list(self._writing.items()):
            if block in waiting or block.pins:
                continue
            del self._writing[block]
            if block.where & IN_NVME:
                run.loaded += 1
                if block.where & IN_DRAM and block.stretch is None:
                    self._residency.left_dram(block)
            elif block.where & IN_DRAM:  # no device takes it, or the write budget does not
                run.refused += 1
            else:
                run.failed += 1
            self._ended(run)

    def _ended(self, run: Run) -> None:
        run.under_way -= 1
        self._records -= 1
        self._bytes -= run.namespace.record_bytes
