"""The object level: the bucket of the daemon's own region, which is read, and where packs are put.

persist, renew ──▶ loop thread ──▶ `RegionNode` ──▶ bucket
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.durable.persister import Life
from kvstore.durable.region_level import RegionLevel
from kvstore.index.block import Namespace
from kvstore.movement.shared import SharedLimits
from replication.region.region_node import RegionNode
from tiers.packs.packs import PackHeader


class ObjectLevel(RegionLevel[RegionNode]):
    """Of our own region. Called from the engine's thread."""

    def __init__(
        self, reply: Callable[[Callable[[], None]], object], limits: SharedLimits, region: str = ""
    ) -> None:
        super().__init__("object", reply, limits, region)

    def persist(
        self,
        header: PackHeader,
        records: Sequence[memoryview],
        life: Life,
        done: Callable[[bool], None],
        prefix: bytes = b"",
    ) -> None:
        """Put a pack and announce it; `done` is called once: whether it is durable now. prefix: the hashes of all blocks before it."""
        self._ask(
            lambda node: node.persist(
                header, records, node.clock.theirs(life.stored_s), life.kept_until_s, prefix
            ),
            done,
            False,
        )

    def renew(self, namespace: Namespace, kept_until_s: Mapping[bytes, int]) -> None:
        """By block hash, until when the packs with these blocks are worth keeping."""
        node = self._reader
        if node is not None:
            keys = {namespace.digest + block_hash: until_s for block_hash, until_s in kept_until_s.items()}
            self._thread.post(lambda: node.renew(keys), lambda _: None, None)
