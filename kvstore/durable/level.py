"""The object level: the bucket of the daemon's own region, which is read, and where packs are put.

persist, renew ──▶ loop thread ──▶ `RegionNode` ──▶ bucket
tombstones     ◀── told on the engine's thread
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvstore.constants import TICK_INTERVAL_S
from kvstore.durable.persister import Life
from kvstore.durable.region_level import RegionLevel
from kvstore.index.block import Namespace
from kvstore.movement.shared import SharedLimits
from replication.region_node import RegionNode
from replication.tombstones import Tombstone
from tiers.packs import PackHeader


class ObjectLevel(RegionLevel[RegionNode]):
    """Of our own region. Called from the engine's thread."""

    def __init__(
        self,
        join: Callable[[Callable[[Tombstone], None]], Awaitable[RegionNode]],
        reply: Callable[[Callable[[], None]], object],
        limits: SharedLimits,
    ) -> None:
        """join: see `RegionLevel`; it is given what is to be told of tombstones."""
        self.erase: Callable[[Tombstone], None] = lambda tombstone: None  # on the engine's thread
        self.beside: Callable[[RegionNode], Awaitable[None]] | None = None  # goes on while it is joined
        super().__init__("object", lambda: join(self._erased), reply, limits)

    async def _beside(self, reader: RegionNode) -> None:
        while self.beside is None:  # the engine is not made yet
            await asyncio.sleep(TICK_INTERVAL_S)
        await self.beside(reader)

    def _erased(self, tombstone: Tombstone) -> None:
        self._reply(lambda: self.erase(tombstone))

    def persist(
        self, header: PackHeader, records: Sequence[memoryview], life: Life, done: Callable[[bool], None]
    ) -> None:
        """Put a pack and announce it; `done` is called once: whether it is durable now."""
        self._ask(lambda node: node.persist(header, records, life.stored_s, life.kept_until_s), done, False)

    def renew(self, namespace: Namespace, kept_until_s: Mapping[bytes, int]) -> None:
        """By block hash, until when the packs with these blocks are worth keeping."""
        node = self._reader
        if node is not None:
            keys = {namespace.digest + block_hash: until_s for block_hash, until_s in kept_until_s.items()}
            self._thread.post(lambda: node.renew(keys), lambda _: None, None)
