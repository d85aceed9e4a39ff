"""Restart: a daemon over a million rows, from its process's start to an answer that needs them.

    rows of 10,000 prefixes of 100 blocks ─▶ kvstore serve ─▶ lookup of one prefix answers 100

The rows are written by the device's own code; the records' bytes are not: the slab files are
sparse. Each start is a new process, with the slot table dropped from the page cache, in turn
with the start of a daemon that has nothing to read.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.bench.plan import Plan
from kvstore.tools.bench.daemon import Daemon, settings
from kvstore.tools.bench.dram import HASH_BYTES
from kvstore.tools.bench.figures import Value
from kvstore.units import exact_bytes
from tiers.base import CHECKSUM_BYTES, NAMESPACE_BYTES
from tiers.constants import SLAB_BYTES, SLOT_BYTES_MIN
from tiers.nvme.device import Device, capacity_for
from tiers.nvme.device_table import NAME, Row, RowTable, runs
from tiers.nvme.direct import DiskIO
from tiers.slots import SLAB_SLOTS_MAX, slot_bytes_for

ARENA_BYTES = 128 << 20  # nothing is put into it


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """Median of the starts. Raises DaemonError, ClientError, TierError, OSError."""
    stored = home / "stored"
    try:
        space = _prepare(plan, stored)
        answered_s, indexed_s, empty_s = [], [], []
        for number in range(plan.restart_rounds):
            empty_s.append(_start_empty(home / f"empty-{number}", arena_directory))
            answered, indexed = _start(plan, home / f"start-{number}", stored, arena_directory, space)
            answered_s.append(answered)
            indexed_s.append(indexed)
    finally:
        shutil.rmtree(stored, ignore_errors=True)
    return {
        "restart_empty_s": round(statistics.median(empty_s), 3),
        "restart_1m_blocks_s": round(statistics.median(answered_s), 3),
        "restart_1m_indexed_s": round(statistics.median(indexed_s), 3),
        "restart_blocks": plan.restart_blocks,
        "restart_rounds": plan.restart_rounds,
    }


def _start(
    plan: Plan, home: Path, stored: Path, arena_directory: Path, space: tuple[bytes, list[bytes]]
) -> tuple[float, float]:
    """Seconds from the start of the process until one whole prefix is found, and until all rows are read."""
    _drop_from_page_cache(stored)
    chosen = settings(
        arena_directory,
        ARENA_BYTES,
        nvme__directories=str(stored),
        nvme__capacity_bytes=exact_bytes(capacity_for(_slabs(plan), SLAB_BYTES)),
        dram__prefault="false",
    )
    digest, chain = space
    with Daemon(home, chosen) as daemon, daemon.client() as client:
        namespace = client.namespace(digest, plan.restart_record_bytes, HASH_BYTES, 64, {})
        daemon.wait(lambda: client.lookup([namespace], chain) == len(chain), "the first lookup")
        answered_s = time.perf_counter() - daemon.started_s
        daemon.wait(lambda: not client.status()["adopting"], "reading the rows")
        return answered_s, time.perf_counter() - daemon.started_s


def _start_empty(home: Path, arena_directory: Path) -> float:
    chosen = settings(arena_directory, ARENA_BYTES, dram__prefault="false")
    with Daemon(home, chosen) as daemon, daemon.client() as client:
        client.ping()
        return time.perf_counter() - daemon.started_s


def _prepare(plan: Plan, directory: Path) -> tuple[bytes, list[bytes]]:
    """Fills a directory with rows. Returns the namespace's digest and the hashes of its last prefix."""
    device = Device(directory, capacity_for(_slabs(plan), SLAB_BYTES), SLAB_BYTES)
    device.open()
    instance = device.instance
    device.close()
    digest = os.urandom(NAMESPACE_BYTES)
    chain: list[bytes] = []
    slots = (
        slab * SLAB_SLOTS_MAX + at for slab in range(_slabs(plan)) for at in range(_slots_per_slab(plan))
    )
    rows_per_slab = SLAB_BYTES // SLOT_BYTES_MIN
    with closing(RowTable(directory, _slabs(plan), rows_per_slab, instance, DiskIO())) as table:
        for _ in range(plan.restart_blocks // plan.restart_chain_blocks):
            chain = [os.urandom(HASH_BYTES) for _ in range(plan.restart_chain_blocks)]
            rows = {row.slot: row for row in _rows(plan, digest, chain, slots)}
            for run in runs(rows):
                table.write([rows[slot] for slot in run])
    for slab in range(_slabs(plan)):
        with open(directory / f"slab-{slab:06d}.kvs", "wb") as file:
            file.truncate(SLAB_BYTES)
    return digest, chain


def _rows(plan: Plan, digest: bytes, chain: list[bytes], slots: Iterator[int]) -> Iterator[Row]:
    """The rows of one prefix. Their checksums are of nothing: no record is read."""
    parent = b""
    for block_hash in chain:
        key = digest + block_hash
        yield Row(
            next(slots), key, parent, plan.restart_record_bytes, block_hash[:CHECKSUM_BYTES], stored_s=0
        )
        parent = key


def _slots_per_slab(plan: Plan) -> int:
    return SLAB_BYTES // slot_bytes_for(max(plan.restart_record_bytes, SLOT_BYTES_MIN))


def _slabs(plan: Plan) -> int:
    return -(-plan.restart_blocks // _slots_per_slab(plan))


def _drop_from_page_cache(directory: Path) -> None:
    """So that rows come from the disk, as after a boot."""
    os.sync()
    with open(directory / NAME, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
