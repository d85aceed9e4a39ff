"""Prefetching: blocks are brought into DRAM ahead of any request, from wherever they are.

    hashes │ held by owned levels: loaded where they are on NVMe │ shared levels go on: fetched │ missing

A prefetch is only a hint, for a prompt whose request still waits in an engine's queue, or from an operator. It comes after
loads that requests wait for, leaves room for those, and takes turns with other prefetches.
"""

from __future__ import annotations

from kvstore.constants import STEP_SLOW_BLOCKS
from kvstore.index import forest
from kvstore.index.block import Namespace
from kvstore.movement.loading import Loader
from kvstore.movement.sources import SharedSource
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.steps import Steps


def prefetch_steps(
    loader: Loader, namespace: Namespace, hashes: bytes, parent: bytes, waiter: Prefetch
) -> Steps[int]:
    """Start bringing these blocks into DRAM; returns how many are on the way. Evicts nothing before it reads. waiter: called
    for each of them that is not there already."""
    size = namespace.hash_bytes
    owned, coming = len(hashes) // size, 0
    for start in range(0, len(hashes), STEP_SLOW_BLOCKS * size):
        before = loader.underway
        asked = forest.split_hashes(hashes[start : start + STEP_SLOW_BLOCKS * size], size)
        for position, block in enumerate(namespace.blocks.get_run(asked), start // size):
            if block is not None and block.where & IN_ANY:
                loader.prefetch(block, waiter)
            else:
                owned = min(owned, position)
        loader.pump()
        coming += loader.underway - before
        yield
    for source in loader.shared:
        end = (yield from source.held_steps(namespace, hashes, owned)) if source.loads.closed else owned
        coming += yield from _fetch_steps(loader, source, namespace, hashes, (owned, end), parent, waiter)
        owned = max(owned, end)
    return coming


def _fetch_steps(
    loader: Loader,
    source: SharedSource,
    namespace: Namespace,
    hashes: bytes,
    span: tuple[int, int],
    parent: bytes,
    waiter: Prefetch,
) -> Steps[int]:
    """The same of the blocks from one position to another that a shared level has."""
    size, coming = namespace.hash_bytes, 0
    for start in range(*span, STEP_SLOW_BLOCKS):
        if not loader.may_come(namespace):
            break
        before = loader.underway
        for at in range(start * size, min(span[1], start + STEP_SLOW_BLOCKS) * size, size):
            block_hash = hashes[at : at + size]
            block = namespace.blocks.get(block_hash)
            if block is None or not block.where & IN_ANY:
                loader.fetch(namespace, block_hash, hashes[at - size : at] if at else parent, source, waiter)
        loader.pump()
        coming += loader.underway - before
        yield
    return coming
