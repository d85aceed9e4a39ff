"""DRAM: put and get through a daemon, against one thread's memcpy.

    round   memcpy 128 MiB   put 128 MiB (new keys)   get 128 MiB (those keys)

Once in blocks of 2 MiB, once in blocks of 64 KiB, whose puts are compared with the same copies and digests
alone: there the calls count. All of them see the same caches: memcpy's destination rotates through as many bytes as the
arena has, as the slots of the puts do once the arena is full and every put evicts.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

from kvstore.client import Client, Namespace
from kvstore.tools.bench.daemon import Daemon, DaemonError, settings
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.memory import Region
from kvstore.tools.bench.plan import Plan
from kvstore.tools.bench.rounds import Rounds, percentile_us
from tiers.checksum import digest

HASH_BYTES = 32
ROOM_S = 5.0  # for the first records of a size to find room


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """Large blocks, small ones, and view. Raises DaemonError, ClientError, OSError."""
    with Daemon(home, settings(arena_directory, plan.arena_bytes)) as daemon, daemon.client() as client:
        daemon.wait_until_prefaulted(plan.arena_bytes)
        large, space, last = _move(plan, client, arena_directory, plan.block_bytes, plan.blocks)
        view_s, ping_s = _views(client, space, last, plan.view_calls)
        small, *_ = _move(plan, client, arena_directory, plan.small_block_bytes, plan.small_blocks)
    return {
        "memcpy_gbps": large.gbps("memcpy"),
        "dram_put_gbps": large.gbps("put"),
        "dram_get_gbps": large.gbps("get"),
        "put_ratio": large.ratio("put", "memcpy"),
        "get_ratio": large.ratio("get", "memcpy"),
        "small_put_gbps": small.gbps("put"),
        "small_get_gbps": small.gbps("get"),
        "small_put_ratio": small.ratio("put", "memcpy and digest"),
        "small_get_ratio": small.ratio("get", "memcpy"),
        "dram_get_view_p50_us": percentile_us(view_s, 0.5),
        "view_pings": round(statistics.median(view_s) / statistics.median(ping_s), 2),
        "dram_rounds": plan.dram_rounds,
        "block_bytes": plan.block_bytes,
        "blocks": plan.blocks,
        "small_block_bytes": plan.small_block_bytes,
    }


def _move(
    plan: Plan, client: Client, arena_directory: Path, block_bytes: int, blocks: int
) -> tuple[Rounds, Namespace, bytes]:
    """Rounds of puts, gets and their limits; the namespace, and a block that is in it at the end."""
    source, into = Region(blocks, block_bytes), Region(blocks, block_bytes)
    outside = Region(plan.arena_bytes // block_bytes, block_bytes, arena_directory)
    targets = cycle(outside.addresses)  # the next ones each time
    space = client.namespace(os.urandom(16), block_bytes, HASH_BYTES, 64, {"model": "bench"})
    fill = -(-plan.arena_bytes // (blocks * block_bytes))  # rounds until every put evicts
    rounds = Rounds(blocks * block_bytes, fill + plan.warm_up_rounds)
    hashes = [os.urandom(HASH_BYTES) for _ in range(blocks)]
    until_s = time.monotonic() + ROOM_S
    while client.put(space, hashes, b"", source.views) < blocks and time.monotonic() < until_s:
        time.sleep(0.01)  # a slab of records of another size is being taken over
    for _ in range(fill + plan.warm_up_rounds + plan.dram_rounds):
        hashes = [os.urandom(HASH_BYTES) for _ in range(blocks)]
        rounds.time("memcpy", partial(_memcpy, source, targets))
        rounds.time("memcpy and digest", partial(_memcpy, source, targets, digest))
        moved = [
            rounds.time("put", partial(client.put, space, hashes, b"", source.views)),
            rounds.time("get", partial(client.get, space, hashes, into.views)),
        ]
        if moved != [blocks, blocks]:  # a put that found no room is fast and worth nothing
            raise DaemonError(f"{moved} of {blocks} blocks were put and got")
    if into.views[-1] != source.views[-1]:
        raise DaemonError("what was got is not what was put")
    return rounds, space, hashes[0]


def _memcpy(
    source: Region, targets: Iterator[int], then: Callable[[memoryview], object] | None = None
) -> None:
    """One thread's memcpy of the source's blocks. then: done with each of them."""
    size_bytes, memmove = source.block_bytes, ctypes.memmove
    for address, view, target in zip(source.addresses, source.views, targets, strict=False):
        memmove(target, address, size_bytes)
        if then is not None:
            then(view)


def _views(
    client: Client, space: Namespace, block_hash: bytes, calls: int
) -> tuple[list[float], list[float]]:
    """Seconds of each view of a block, and of a ping in turn."""
    views, pings = [], []
    for _ in range(calls):
        started_s = time.perf_counter()
        with client.acquire(space, [block_hash]) as lease:
            slot = lease.slots[0]
            if slot is None or slot.view.nbytes != space.record_bytes:
                raise DaemonError("the block to be viewed is gone")
        viewed_s = time.perf_counter()
        client.ping()
        views.append(viewed_s - started_s)
        pings.append(time.perf_counter() - viewed_s)
    return views, pings
