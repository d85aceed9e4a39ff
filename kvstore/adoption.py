"""Adoption: what the tiers still hold when a daemon starts becomes the index.

    arena rows (READY) ─▶ in DRAM, unverified until their checksum matched
    NVMe rows          ─▶ in NVMe (their checksum is compared at every read)

A million rows are one pass in each tier. Recency is not stored: the order of eviction
starts anew, with what is asked for first.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kvstore import index
from kvstore.blocks import IN_DRAM, IN_NVME
from kvstore.namespaces import Namespace
from tiers.base import NAMESPACE_BYTES, Record

if TYPE_CHECKING:
    from kvstore.engine import Engine

log = logging.getLogger("kvstore.adoption")


def adopt(engine: Engine) -> None:
    """Fill the engine's index; records that belong to no namespace we could serve are dropped."""
    collecting = gc.isenabled()
    gc.disable()  # a million new objects and no garbage: collections would only walk them
    try:
        _adopt_arena(engine)
        _adopt_nvme(engine)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
    for namespace in engine.namespaces:
        for block in namespace.blocks.values():
            engine.room.settle(block)


def _adopt_arena(engine: Engine) -> None:
    for slot, record in engine.arena.adopted_slots():
        namespace = engine.namespaces.found(record.key, record.size_bytes)
        block_hash = record.key[NAMESPACE_BYTES:]
        known = namespace.blocks.get(block_hash) if namespace is not None else None
        if namespace is None or (known is not None and known.where & IN_DRAM):
            engine.arena.free(slot)
            continue
        block = index.arrived(namespace, block_hash, record.parent[NAMESPACE_BYTES:], IN_DRAM)
        block.slot = slot
        engine.room.unverified[block] = None
        engine.counters.adopted += 1


def _adopt_nvme(engine: Engine) -> None:
    if engine.nvme is None:
        return
    foreign: list[bytes] = []
    for namespace, rows in _by_namespace(engine, engine.nvme.scan(), foreign):
        index.load(namespace, rows, IN_NVME)
    if foreign:
        log.warning("%d NVMe records of another record size are dropped", len(foreign))
        engine.nvme.delete(foreign)


def _by_namespace(
    engine: Engine, records: Iterable[Record], foreign: list[bytes]
) -> Iterator[tuple[Namespace, list[tuple[bytes, bytes]]]]:
    """Group a scan into runs of one namespace (rows are stored in key order, so runs are long)."""
    current: Namespace | None = None
    digest = b""
    rows: list[tuple[bytes, bytes]] = []
    for record in records:
        key = record.key
        if current is None or not key.startswith(digest):
            if current is not None:
                yield current, rows
            digest, rows = key[:NAMESPACE_BYTES], []
            current = engine.namespaces.found(key, record.size_bytes)
        if current is None or current.record_bytes != record.size_bytes:
            foreign.append(key)
        else:
            rows.append((key[NAMESPACE_BYTES:], record.parent[NAMESPACE_BYTES:]))
    if current is not None:
        yield current, rows
