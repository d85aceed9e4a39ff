"""Adoption: what the tiers still hold when a daemon starts becomes the index.

    arena rows (READY) ─▶ in DRAM, unverified until their checksum matched      at once
    NVMe rows          ─▶ in NVMe (their checksum is compared at every read)    in slices

The daemon answers from its first moment, however many rows there are: until the last
slice is in, whatever a request asks about is fetched from the rows by name first
(`materialise`), so a request never sees a half-filled index. Nothing is written to or
evicted from NVMe before the scan is complete, because only then the free slots are known.

Recency is not stored: the order of eviction starts anew, with what is asked for first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from kvstore import index
from kvstore.blocks import IN_DRAM, IN_NVME, Block
from kvstore.constants import ADOPT_SLICE_ROWS
from kvstore.counters import Counters
from kvstore.namespaces import Namespace, NamespaceRegistry
from kvstore.room import Room
from tiers.base import NAMESPACE_BYTES, Record, Tier

log = logging.getLogger("kvstore.adoption")


class Adoption:
    """Fills the index from arena and NVMe rows. `step` until it answers False."""

    def __init__(
        self,
        room: Room,
        namespaces: NamespaceRegistry,
        counters: Counters,
        adopted: Callable[[bool], None],
    ) -> None:
        """`adopted` is called when the arena is in the index (False), and when everything is (True)."""
        self._room = room
        self._namespaces = namespaces
        self._counters = counters
        self._adopted = adopted
        self._foreign: list[bytes] = []
        self._work: Iterator[None] = iter(())
        self.done = True

    def start(self) -> None:
        """Adopt the arena; prepare the slices of NVMe."""
        self._adopt_arena()
        self._adopted(self._room.nvme is None)
        if self._room.nvme is not None:
            self.done = False
            self._room.nvme_ready = False
            self._work = self._slices(self._room.nvme)

    def step(self) -> bool:
        """Load one slice; False when everything is in."""
        if next(self._work, self) is not self:
            return True
        if not self.done:
            self._finish()
        return False

    def materialise(self, namespace: Namespace, hashes: bytes) -> None:
        """Make the index know what NVMe has of these blocks, ahead of the scan."""
        nvme = self._room.nvme
        if self.done or nvme is None:
            return
        asked = index.split_hashes(hashes, namespace.hash_bytes)
        digest, known = namespace.digest, namespace.blocks
        missing = [digest + h for h in asked if (block := known.get(h)) is None or not block.where & IN_NVME]
        self._load(nvme.scan(missing))

    def _slices(self, nvme: Tier) -> Iterator[None]:
        rows = nvme.scan()
        while batch := list(islice(rows, ADOPT_SLICE_ROWS)):
            self._load(batch)
            yield
        blocks = chain.from_iterable(namespace.blocks.walk() for namespace in list(self._namespaces))
        while chunk := list(islice(blocks, ADOPT_SLICE_ROWS)):
            self._settle(chunk)
            yield

    def _settle(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block.where & IN_NVME and not block.has_child_in(IN_NVME):
                self._room.settle(block)

    def _finish(self) -> None:
        self.done = True
        self._room.nvme_ready = True
        self._room.gone.clear()
        self._room.forget_written()
        self._adopted(True)
        if self._foreign and self._room.nvme is not None:
            log.warning("%d NVMe records of another record size are dropped", len(self._foreign))
            self._room.nvme.delete(self._foreign)

    def _load(self, records: Iterable[Record]) -> None:
        for namespace, rows in self._by_namespace(records):
            self._room.quotas.used(namespace, IN_NVME, index.load(namespace, rows, IN_NVME))

    def _by_namespace(
        self, records: Iterable[Record]
    ) -> Iterator[tuple[Namespace, list[tuple[bytes, bytes]]]]:
        """Runs of one namespace: rows are stored in key order, so runs are long."""
        current: Namespace | None = None
        digest = b""
        rows: list[tuple[bytes, bytes]] = []
        for record in records:
            key = record.key
            if current is None or not key.startswith(digest):
                if current is not None:
                    yield current, rows
                digest, rows = key[:NAMESPACE_BYTES], []
                current = self._namespaces.found(key, record.size_bytes)
            if key in self._room.gone:
                continue  # read into this slice before it went
            if current is None or current.record_bytes != record.size_bytes:
                self._foreign.append(key)
            else:
                rows.append((key[NAMESPACE_BYTES:], record.parent[NAMESPACE_BYTES:]))
        if current is not None:
            yield current, rows

    def _adopt_arena(self) -> None:
        for slot, record in self._room.arena.adopted_slots():
            namespace = self._namespaces.found(record.key, record.size_bytes)
            block_hash = record.key[NAMESPACE_BYTES:]
            known = namespace.blocks.get(block_hash) if namespace is not None else None
            if namespace is None or (known is not None and known.where & IN_DRAM):
                self._room.arena.free(slot)
                continue
            block = index.arrived(namespace, block_hash, record.parent[NAMESPACE_BYTES:], IN_DRAM)
            self._room.adopted(block, slot)
            self._counters.adopted += 1
        for block in self._room.unverified:
            self._room.settle(block)
