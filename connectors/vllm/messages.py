"""What the scheduler's half and the workers' half of the connector say to each other.

scheduler ── Orders (every step) ──▶ every worker
          ◀── Report (every step, summed over workers) ──

A Report also carries what each rank's blocks look like (Rank), as long as the orders ask for it.
vLLM's handshake is not used for that: MultiConnector hands the metadata of one connector to all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connectors.transfer.orders import Load, Part, Save, SpaceSpec

__all__ = ["GroupFacts", "Load", "Orders", "Part", "Rank", "Report", "Save", "SpaceSpec"]


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work. cancel: saves whose blocks are about to be overwritten. draining:
    finished requests whose blocks wait for their saves. spaces: (shard, group) -> namespace, until
    every rank knows them. sync_step: number of this step if a connector, ours or another, loads inside
    it; otherwise 0. introduce: every rank is to report its Rank.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)
    spaces: dict[tuple[int, int], SpaceSpec] | None = None
    spaces_version: int = 0
    sync_step: int = 0
    introduce: bool = False


@dataclass(slots=True)
class GroupFacts:
    """One KV group as a rank has it: what its records hold, in words and numbers."""

    record_bytes: int
    fields: dict[str, str]


@dataclass(slots=True)
class Rank:
    """One rank's blocks. shard: ranks of one shard hold the same bytes. groups: by group
    index. trouble: why this rank cannot store its blocks, or empty."""

    shard: int
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    trouble: str = ""


@dataclass
class Report(KVConnectorWorkerMetadata):
    """saves: number of ranks that are through with each save. failed: requests whose load failed on
    some rank. versions: number of ranks that know each version of the namespaces. sync_step: of the
    orders that this report answers. ranks: one for each rank that was asked to introduce itself."""

    saves: Counter[int] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    versions: Counter[int] = field(default_factory=Counter)
    sync_step: int = 0
    ranks: list[Rank] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, Report):
            self.saves.update(other.saves)
            self.failed |= other.failed
            self.versions.update(other.versions)
            self.sync_step = max(self.sync_step, other.sync_step)
            self.ranks += other.ranks
        return self

    def is_empty(self) -> bool:
        return not (self.saves or self.failed or self.versions or self.sync_step or self.ranks)
