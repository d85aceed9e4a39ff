"""Lookup: a prompt of 2048 blocks, all present, asked for again and again, in turn with a ping."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvstore.tools.bench.daemon import Daemon, DaemonError, settings
from kvstore.tools.bench.dram import HASH_BYTES
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.plan import Plan
from kvstore.tools.bench.rounds import percentile_us

WARM_UP_CALLS = 50


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """From the client's call to its answer. Raises DaemonError, ClientError."""
    count = plan.lookup_blocks
    hashes = [os.urandom(HASH_BYTES) for _ in range(count)]
    record = memoryview(os.urandom(plan.lookup_record_bytes))
    lookup_s, ping_s = [], []
    with Daemon(home, settings(arena_directory, plan.arena_bytes)) as daemon, daemon.client() as client:
        daemon.wait_until_prefaulted(plan.arena_bytes)
        space = client.namespace(os.urandom(16), plan.lookup_record_bytes, HASH_BYTES, 64, {"model": "bench"})
        if client.put(space, hashes, b"", [record] * count) != count:
            raise DaemonError("the arena does not hold the blocks to look up")
        for call in range(-WARM_UP_CALLS, plan.lookup_calls):
            started = time.perf_counter()
            client.ping()
            between = time.perf_counter()
            found = client.lookup([space], hashes)
            ended = time.perf_counter()
            if found != count:
                raise DaemonError(f"lookup found {found} of {count} blocks")
            if call >= 0:
                ping_s.append(between - started)
                lookup_s.append(ended - between)
    return {
        "ping_p50_us": percentile_us(ping_s, 0.5),
        "lookup_2048_blocks_p50_us": percentile_us(lookup_s, 0.5),
        "lookup_2048_blocks_p99_us": percentile_us(lookup_s, 0.99),
        "lookup_calls": plan.lookup_calls,
    }
