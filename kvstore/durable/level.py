"""The object level: the region's bucket, as the engine sees it.

    held, is_open ──▶ catalogue's filter, in memory                      engine's thread
    fetch, persist, probe ──▶ loop thread ──▶ `RegionNode` ──▶ bucket    one request, one answer
                                     ▲
    joining: marker, catalogue, feed ┘  tried again until it works; until then nothing is held

Nothing of the bucket, the catalogue's disk included, is touched on the engine's thread. A bucket that is away costs
lookups nothing: without it nothing is held.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from kvstore.constants import JOIN_PAUSE_S, REGION_CLOSE_S, TICK_INTERVAL_S
from kvstore.durable.loop_thread import LoopThread
from kvstore.durable.persister import Life
from kvstore.index.block import Namespace
from kvstore.movement.shared import Done, Fetched, SharedLevel, SharedLimits, Wanted
from replication.errors import RegionError, ReplicationError
from replication.region_node import RegionNode
from replication.tombstones import Tombstone
from tiers.base import Get
from tiers.errors import ObjectRefused, TierError
from tiers.packs import PackHeader

log = logging.getLogger("kvstore.durable.level")


class ObjectLevel(SharedLevel):
    """One region's bucket. Called from the engine's thread."""

    name = "object"

    def __init__(
        self,
        join: Callable[[Callable[[Tombstone], None]], Awaitable[RegionNode]],
        reply: Callable[[Callable[[], None]], object],
        limits: SharedLimits,
    ) -> None:
        """join: makes the node, on the loop of this level's thread; it is given what is to be told of tombstones.
        reply: runs a call on the engine's thread."""
        self.limits = limits
        self.problem = ""  # why it is not open, for people
        self.refusal = ""  # … where waiting is no use: settings and bucket do not fit
        self.tried = threading.Event()  # the first try to join ended
        self.erase: Callable[[Tombstone], None] = lambda tombstone: None  # on the engine's thread
        self._join = join
        self._reply = reply
        self._node: RegionNode | None = None
        self._status: dict[str, object] = {}
        self._thread = LoopThread("kvstore-region", reply)
        self._thread.keep(self._live)

    async def _live(self) -> None:
        """Be a part of the region until the thread closes."""
        while True:
            node = await self._joined()
            self._node = node
            try:
                await asyncio.gather(node.run(), self._keep_status(node))
            except Exception as error:  # a bug of ours: begin again, without what it may have left behind
                log.exception("a part of the region's node failed")
                self._failed(f"{type(error).__name__}: {error}; the log has more")
            finally:
                self._node = None
                node.close()
            await asyncio.sleep(JOIN_PAUSE_S)

    async def _joined(self) -> RegionNode:
        while True:
            try:
                node = await self._join(self._erased)
            except (RegionError, ObjectRefused) as error:
                self._failed(str(error), refusal=str(error))
            except (TierError, ReplicationError) as error:
                self._failed(str(error))
            else:
                self.problem = self.refusal = ""
                log.info("joined the region", extra={"bucket": node.where, "region": node.region})
                return node
            finally:
                self.tried.set()
            await asyncio.sleep(JOIN_PAUSE_S)

    async def _keep_status(self, node: RegionNode) -> None:
        while True:
            self._status = node.status()
            await asyncio.sleep(TICK_INTERVAL_S)

    def _failed(self, problem: str, refusal: str = "") -> None:
        if problem != self.problem:
            log.warning("no region: %s", problem)
        self.problem, self.refusal = problem, refusal

    def _erased(self, tombstone: Tombstone) -> None:
        self._reply(lambda: self.erase(tombstone))

    @property
    def is_open(self) -> bool:
        """Whether packs can be put."""
        return self._node is not None

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        node = self._node
        if node is None:
            return start
        return node.held(namespace.digest, namespace.hash_bytes, hashes, start)

    def load_s(self, records: int, size_bytes: int) -> float:
        return 0.0  # what is measured says more

    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        node = self._node
        failed: list[Fetched] = [(Get.FAILED, None)] * len(wanted)
        if node is None:  # it was left meanwhile
            self._reply(lambda: done(failed))
        else:
            self._thread.post(lambda: node.fetch(wanted), done, failed)

    def probe(self, done: Callable[[bool], None]) -> None:
        node = self._node
        if node is None:
            self._reply(lambda: done(False))
        else:
            self._thread.post(node.probe, done, False)

    def persist(
        self, header: PackHeader, records: Sequence[memoryview], life: Life, done: Callable[[bool], None]
    ) -> None:
        """Put a pack and announce it; `done` is called once: whether it is durable now."""
        node = self._node
        if node is None:
            self._reply(lambda: done(False))
        else:
            work = partial(node.persist, header, records, life.stored_s, life.kept_until_s)
            self._thread.post(work, done, False)

    def renew(self, namespace: Namespace, kept_until_s: Mapping[bytes, int]) -> None:
        """By block hash, until when the packs with these blocks are worth keeping."""
        node = self._node
        if node is not None:
            keys = {namespace.digest + block_hash: until_s for block_hash, until_s in kept_until_s.items()}
            self._thread.post(lambda: node.renew(keys), lambda _: None, None)

    def status(self) -> dict[str, object]:
        """Not older than a second; the fields are documented in docs/cli.md."""
        return {"open": self.is_open, "problem": self.problem, **self._status}

    def close(self) -> bool:
        """Let go of the bucket; False if something hangs."""
        return self._thread.close(REGION_CLOSE_S)
