"""What the scheduler's half and the workers' half of the connector say to each other.

scheduler ── Orders (every step) ──▶ every worker
          ◀── Report (every step, summed over workers) ──
          ◀── Rank (once, at the start: what this rank's blocks look like) ──
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(slots=True)
class Part:
    """Blocks of one group of a request, in prefix order. parent: the hash before the first, b"" at the
    root. first: position in the prompt of the first of a load."""

    group: int
    block_ids: list[int]
    hashes: list[bytes]
    parent: bytes = b""
    first: int = 0


@dataclass(slots=True)
class Load:
    """Fill these blocks. sync: inside the step that asks. ticket: of the lookup that found them. A part
    without hashes fails: it was promised to vLLM and could not be ordered."""

    request_id: str
    parts: list[Part]
    sync: bool
    ticket: int = 0


@dataclass(slots=True)
class Save:
    """Offer these blocks; every rank reports `number` when it is through with it, whatever came of it."""

    number: int
    request_id: str
    parts: list[Part]


@dataclass(slots=True, frozen=True)
class SpaceSpec:
    """A namespace, complete enough to be registered with the daemon."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int
    fields: dict[str, str]


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work. cancel: saves whose blocks are about to be overwritten. draining:
    finished requests whose blocks wait for their saves. spaces: (shard, group) -> namespace, until
    every rank knows them.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    draining: list[str] = field(default_factory=list)
    spaces: dict[tuple[int, int], SpaceSpec] | None = None
    spaces_version: int = 0


@dataclass
class Report(KVConnectorWorkerMetadata):
    """saves: how many ranks are through with each save. sync_loads: how many ranks made each
    synchronous load. failed: requests whose load failed on some rank. versions: how many ranks
    know each version of the namespaces."""

    saves: Counter[int] = field(default_factory=Counter)
    sync_loads: Counter[str] = field(default_factory=Counter)
    failed: set[str] = field(default_factory=set)
    versions: Counter[int] = field(default_factory=Counter)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        if isinstance(other, Report):
            self.saves.update(other.saves)
            self.sync_loads.update(other.sync_loads)
            self.failed |= other.failed
            self.versions.update(other.versions)
        return self

    def is_empty(self) -> bool:
        return not (self.saves or self.sync_loads or self.failed or self.versions)


@dataclass(slots=True)
class GroupFacts:
    """One KV group as a rank has it: what its records hold, in words and numbers."""

    record_bytes: int
    fields: dict[str, str]


@dataclass
class Rank(KVConnectorHandshakeMetadata):
    """One rank's blocks. shard: ranks of one shard hold the same bytes. groups: by group
    index. trouble: why this rank cannot store its blocks, or empty."""

    shard: int
    groups: dict[int, GroupFacts] = field(default_factory=dict)
    trouble: str = ""
