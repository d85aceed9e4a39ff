"""What the scheduler's half and the workers' half of the connector say to each other.

scheduler ── Orders (every step) ──▶ every worker
          ◀── Report (every step, summed over workers) ──

A Report also carries what each rank's blocks look like and which weights it computes with (Rank), as long as the
orders ask for it: at the start, and after a reset of the cache.
vLLM's handshake is not used for that: MultiConnector hands the metadata of one connector to all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connectors.transfer.orders import Column, Load, LoadEnd, Save


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work. columns: group -> shard -> its part of a record. cancel: saves whose blocks are about to be
    overwritten. draining: finished requests whose blocks no save reads any more. version: resets of the cache until now:
    loads from before the last one fail. idle: the step computes nothing. sync_step: number of this step if a connector, ours
    or another, loads inside it; otherwise 0. introduce: every rank is to report its Rank, with the weights of now.
    adapters_asked: the number of a question which adapters it has loaded, or 0."""

    loads: list[Load] = field(default_factory=list)
    load_ends: list[LoadEnd] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    columns: dict[int, dict[int, Column]] = field(default_factory=dict)
    cancel: list[int] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)
    version: int = 0
    idle: bool = False
    sync_step: int = 0
    introduce: bool = False
    adapters_asked: int = 0


@dataclass(slots=True)
class GroupFacts:
    """One KV group as a rank has it: what its column of a record holds, in words and numbers."""

    record_bytes: int
    fields: dict[str, str]


def this_node() -> str:
    """The identity of this machine since its last boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(slots=True)
class Weights:
    """What one rank computes with. first: digest when its KV tensors were registered. now: digest after as many resets
    as `version` says. unseen: why a digest is empty."""

    first: str = ""
    now: str = ""
    version: int = 0
    unseen: str = ""


@dataclass(slots=True)
class Rank:
    """One rank's blocks. shard: ranks of one shard hold the same bytes. groups: by group
    index. trouble: why this rank cannot store its blocks, or empty. node: the machine it runs on. number: of the
    rank within its engine. elsewhere: why the files of the model's directory do not name its weights, or empty."""

    shard: int
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    trouble: str = ""
    node: str = field(default_factory=this_node)
    number: int = 0
    elsewhere: str = ""
    weights: Weights = field(default_factory=Weights)


@dataclass
class Report(KVConnectorWorkerMetadata):
    """saves: (number of shards that are through with it, blocks committed, whether the daemon knows of all). loads: (number of
    ranks that are through with it, leading blocks that are there and true on all of them). failed: requests whose load failed
    on some rank. sync_step: of the orders that this report answers. ranks: one for each rank that was asked to introduce
    itself. adapters: what ranks have loaded, where that changed or was asked for: by rank, the last question and digests by
    number."""

    saves: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    sync_step: int = 0
    ranks: list[Rank] = field(default_factory=list)
    adapters: dict[int, tuple[int, dict[int, str]]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, Report):
            for number, (shards, committed, reached) in other.saves.items():
                known = self.saves.get(number, (0, 0, True))
                self.saves[number] = known[0] + shards, known[1] + committed, known[2] and reached
            for number, (ranks, valid) in other.loads.items():
                known_ranks, known_valid = self.loads.get(number, (0, valid))
                self.loads[number] = known_ranks + ranks, min(known_valid, valid)
            self.failed |= other.failed
            self.sync_step = max(self.sync_step, other.sync_step)
            self.ranks += other.ranks
            self.adapters |= other.adapters
        return self

    def is_empty(self) -> bool:
        return not (self.saves or self.loads or self.failed or self.sync_step or self.ranks or self.adapters)
