"""The warmer: brings blocks of durable packs into this node's tiers ahead of any request, because they were ordered.

    bring(run) ─▶ waits its turn ─▶ batch by batch (`Bringing`) ─▶ held: skipped │ on NVMe, in the bucket: loaded as a prefetch
                                                              ▼
    to dram: into free slots only, nothing leaves for it      to nvme: through DRAM, written, and out of DRAM again

Serving goes first. Nothing is begun while a load of an engine waits for its turn, WARM_RECORDS_MAX records are under way at most, and
each is behind what is urgent. Break-even is not asked: nobody waits. What DRAM holds stays; of NVMe, only free slots are used.

Runs are carried out in the order in which they came, so that a prefix is there before what hangs on it. A run ends with the
first batch that is not there as a whole.

Called from the engine's thread only; nothing here blocks. It pins nothing: blocks on their way are the loader's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.constants import WARM_BYTES_MAX, WARM_DRAM_SHARE, WARM_RECORDS_MAX
from kvstore.durable.bringing import Bringing
from kvstore.durable.traffic import Traffic
from kvstore.errors import RequestError
from kvstore.index.block import Block, Namespace
from kvstore.movement.loading import Loader
from kvstore.movement.sources import SharedSource
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from replication.formats.orders import To
from tiers.namespace_spec import NamespaceSpec


class Brought(NamedTuple):
    """What became of the blocks of a run. held: were there. loaded: are there now. failed: could not be had this time. refused: no room
    in the tier for it, and for those behind it. problem: why nothing of it can be here, "" otherwise."""

    held: int = 0
    loaded: int = 0
    failed: int = 0
    refused: int = 0
    problem: str = ""


class _ToDram(Bringing):
    """Into free slots."""

    displaces = False


class _ToNvme(Bringing):
    """Through DRAM, where others make room for it meanwhile, and out of it."""

    def __init__(
        self,
        residency: Residency,
        loader: Loader,
        namespace: Namespace,
        hashes: Sequence[bytes],
        parent: bytes,
    ) -> None:
        super().__init__(loader, namespace, hashes, parent)
        self._residency = residency

    def is_held(self, block: Block) -> bool:
        return block.where & IN_ANY != 0

    def has_come(self, block: Block) -> bool:
        return block.where & IN_NVME != 0

    def goes_on(self, block: Block) -> bool:
        """What is on NVMe by now leaves DRAM, if nobody has used it meanwhile: it came to be written only."""
        if not block.where & IN_DRAM:
            return False
        if block in self._residency.writes.waiting or block.pins:
            return True
        if block.where & IN_NVME and block.stretch is None:
            self._residency.left_dram(block)
        return False

    def has_room(self) -> bool:
        """Whether one more finds room on NVMe, and nothing has to leave."""
        quotas, namespace = self._residency.quotas, self.namespace
        is_over_quota = bool(quotas) and quotas.excess(namespace, IN_NVME)
        members = self._residency.nvme.members
        return not is_over_quota and any(m.writable and m.has_room(namespace.record_bytes) for m in members)


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
        self._runs: dict[Bringing, Callable[[Brought], None]] = {}  # in their order, until they are over
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

    def bring(
        self,
        spec: NamespaceSpec,
        parent: bytes,
        hashes: Sequence[bytes],
        to: To,
        done: Callable[[Brought], None],
    ) -> None:
        """Have these blocks in a tier; `done` is called once, later."""
        try:
            namespace = self._residency.namespaces.get(self._register(spec))
        except RequestError as error:
            done(Brought(problem=str(error)))
            return
        self._residency.namespaces.used(namespace)  # empty or not, it stays known until the run is over
        if to == "nvme":
            run: Bringing = _ToNvme(self._residency, self._loader, namespace, hashes, parent)
        else:
            run = _ToDram(self._loader, namespace, hashes, parent)
        self._runs[run] = done

    def steps(self) -> Steps[None]:
        """Look at what is under way, begin what may begin, end what is over."""
        under_way = sum(run.under_way for run in self._runs)
        under_way_bytes = sum(run.under_way * run.namespace.record_bytes for run in self._runs)
        for run in list(self._runs):
            records, record_bytes = run.under_way, run.namespace.record_bytes
            may_begin = self._source.loads.closed and (under_way_bytes < self._bytes_max or not under_way)
            records_max = WARM_RECORDS_MAX - under_way if may_begin else 0
            yield from run.go_on(records_max, self._bytes_max - under_way_bytes)
            under_way += run.under_way - records
            under_way_bytes += (run.under_way - records) * record_bytes
            if run.left:
                break  # its turn goes on
        for run in [run for run in self._runs if not run.under_way and not run.left]:
            done = self._runs.pop(run)
            self._residency.namespaces.let_go(run.namespace)
            failed = run.missing("failed") + run.missing("gone")
            done(Brought(run.held, run.loaded, failed, run.missing("refused")))
