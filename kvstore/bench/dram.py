"""DRAM: put and get through a daemon, against one thread's memcpy.

    round   memcpy 128 MiB   put 128 MiB (new keys)   get 128 MiB (those keys)

All three see the same caches: memcpy's destination rotates through as many bytes as the
arena has, as the slots of the puts do once the arena is full and every put evicts.
"""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial
from pathlib import Path

from kvstore.bench.daemon import Daemon, DaemonError, settings
from kvstore.bench.figures import Value
from kvstore.bench.memory import Region
from kvstore.bench.plan import Plan
from kvstore.bench.rounds import Rounds, percentile_us
from kvstore.client import Client, Namespace

HASH_BYTES = 32


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """memcpy, put, get and view. Raises DaemonError, ClientError, OSError."""
    source = Region.private(plan.blocks, plan.block_bytes)
    into = Region.private(plan.blocks, plan.block_bytes)
    memcpy = _Memcpy(source, Region.shared(arena_directory, plan.arena_blocks, plan.block_bytes))
    with Daemon(home, settings(arena_directory, plan.arena_bytes)) as daemon, daemon.client() as client:
        daemon.wait_until_prefaulted(plan.arena_bytes)
        space = client.namespace(os.urandom(16), plan.block_bytes, HASH_BYTES, 64, {"model": "bench"})
        rounds = Rounds(plan.round_bytes)
        fill = -(-plan.arena_blocks // plan.blocks)  # rounds until every put evicts
        for number in range(-fill - plan.warm_up_rounds, plan.dram_rounds):
            if number == 0:
                rounds.forget()
            hashes = [os.urandom(HASH_BYTES) for _ in range(plan.blocks)]
            rounds.time("memcpy", memcpy.next_blocks)
            moved = [
                rounds.time("put", partial(client.put, space, hashes, b"", source.views)),
                rounds.time("get", partial(client.get, space, hashes, into.views)),
            ]
            if moved != [plan.blocks, plan.blocks]:  # a put that found no room is fast and worth nothing
                raise DaemonError(f"{moved} of {plan.blocks} blocks were put and got")
        if into.views[-1] != source.views[-1]:
            raise DaemonError("what was got is not what was put")
        view_us = _view_p50_us(client, space, hashes[0], plan.view_calls)
    return {
        "memcpy_gbps": rounds.gbps("memcpy"),
        "dram_put_gbps": rounds.gbps("put"),
        "dram_get_gbps": rounds.gbps("get"),
        "put_ratio": rounds.ratio("put", "memcpy"),
        "get_ratio": rounds.ratio("get", "memcpy"),
        "dram_get_view_p50_us": view_us,
        "dram_rounds": plan.dram_rounds,
        "block_bytes": plan.block_bytes,
        "blocks": plan.blocks,
    }


class _Memcpy:
    """One thread's memcpy of the source's blocks, to the next blocks of the target each time."""

    def __init__(self, source: Region, target: Region) -> None:
        self._source = source
        self._target = target
        self._next = 0

    def next_blocks(self) -> None:
        targets, size_bytes, memmove = self._target.addresses, self._source.block_bytes, ctypes.memmove
        at = self._next
        for address in self._source.addresses:
            memmove(targets[at], address, size_bytes)
            at = (at + 1) % len(targets)
        self._next = at


def _view_p50_us(client: Client, space: Namespace, block_hash: bytes, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        with client.acquire(space, [block_hash]) as lease:
            slot = lease.slots[0]
            if slot is None or slot.view.nbytes != space.record_bytes:
                raise DaemonError("the block to be viewed is gone")
        seconds.append(time.perf_counter() - started)
    return percentile_us(seconds, 0.5)
