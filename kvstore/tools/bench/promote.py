"""Promotion: blocks that only NVMe holds, acquired through the daemon, against plain preadv.

NVMe   │ group 0 │ group 1 │ … │ group 5 │      asked for in turn, so that the one asked
arena  │ the four that were asked for last │    for now was evicted from DRAM before
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from kvstore.client import Client, Namespace
from kvstore.protocol.residency_bits import IN_NVME
from kvstore.tools.bench.daemon import Daemon, DaemonError, settings
from kvstore.tools.bench.disk import raw_file, record_count
from kvstore.tools.bench.dram import HASH_BYTES
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.memory import Region
from kvstore.tools.bench.plan import DISK_BYTES_MIN, SETTLE_TIMEOUT_S, Plan
from kvstore.tools.bench.rounds import Rounds
from kvstore.units import exact_bytes
from tiers.constants import SLAB_BYTES
from tiers.nvme.device import capacity_for


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """From acquire to its answer. Raises DaemonError, ClientError, OSError."""
    stored_bytes = plan.promote_groups * plan.round_bytes
    if record_count(plan, home) * plan.block_bytes < min(plan.disk_bytes, stored_bytes):
        return {"promote_skipped": f"less than {DISK_BYTES_MIN} bytes may be written at {home}"}
    nvme_bytes = capacity_for(-(-stored_bytes // SLAB_BYTES) + 1, SLAB_BYTES)
    chosen = settings(
        arena_directory,
        plan.arena_bytes,
        nvme__directories=str(home / "nvme"),
        nvme__capacity_bytes=exact_bytes(nvme_bytes),
        engine__io_threads=plan.io_threads,
    )
    region = Region(plan.blocks, plan.block_bytes, arena_directory)
    with (
        Daemon(home / "daemon", chosen) as daemon,
        daemon.client() as client,
        closing(raw_file(home / "raw", region, plan.blocks, plan.io_threads)) as raw,
    ):
        raw.write()
        daemon.wait_until_prefaulted(plan.arena_bytes)
        space = client.namespace(os.urandom(16), plan.block_bytes, HASH_BYTES, 64, {"model": "bench"})
        groups = _store(plan, daemon, client, space, region)
        rounds = Rounds(plan.round_bytes, plan.warm_up_rounds)
        for group in islice(cycle(groups), plan.warm_up_rounds + plan.promote_rounds):
            rounds.time("raw read", raw.read)
            _require_on_nvme_only(client, space, group)
            rounds.time("promote", partial(_acquire, client, space, group))
    return {
        "promote_read_raw_gbps": rounds.gbps("raw read"),
        "nvme_promote_gbps": rounds.gbps("promote"),
        "nvme_promote_ratio": rounds.ratio("promote", "raw read"),
        "promote_rounds": plan.promote_rounds,
    }


def _store(plan: Plan, daemon: Daemon, client: Client, space: Namespace, region: Region) -> list[list[bytes]]:
    """Groups of blocks, each a prefix of its own, all written to NVMe."""
    groups = []
    for _ in range(plan.promote_groups):
        hashes = [os.urandom(HASH_BYTES) for _ in range(plan.blocks)]
        if client.put(space, hashes, b"", region.views) != plan.blocks:
            raise DaemonError("the arena had no room for blocks to store on NVMe")
        daemon.wait_until_demoted()
        groups.append(hashes)
    return groups


def _require_on_nvme_only(client: Client, space: Namespace, group: Sequence[bytes]) -> None:
    """Else the figure would be of DRAM."""
    if set(client.residency(space, group)) != {IN_NVME}:
        raise DaemonError("blocks to be promoted are not on NVMe only")


def _acquire(client: Client, space: Namespace, group: Sequence[bytes]) -> None:
    with client.acquire(space, group, wait_s=SETTLE_TIMEOUT_S) as lease:
        if len(lease.leading()) != len(group):
            raise DaemonError(f"{len(lease.leading())} of {len(group)} blocks were promoted")
