"""Blocks in host memory: the copies of a whole batch in one system call.

Python gives up its interpreter lock around each foreign call, and an engine that spins in the
same process takes it for up to 5 ms. So a load must not make a call for each block.
`process_vm_readv` of the own process is the one function of the C library that copies many
pieces at once; where it is not allowed, it is one `memmove` each. Neither touches the OpenMP
threads that the engine computes with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from connectors.constants import COPY_THREADS, PARALLEL_COPY_BYTES_MIN
from connectors.device import BlockMover, Blocks, Buffer, address_of
from connectors.device.driver import Numbers
from kvstore.client import copying

_PIECES_MAX = 1024  # of one call: IOV_MAX of Linux

_copy_pieces = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy_pieces.restype = ctypes.c_ssize_t
_copy_pieces.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class CpuMover(BlockMover):
    """Copies on the calling thread, and on one more where there is much to load."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvstore-copy")

    def mark(self) -> None:
        return None  # the CPU has computed all it was given when a call returns

    def save(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> list[bytes]:
        self.check(block_ids, records)
        blocks, _, lengths = self.blocks.addresses(block_ids)
        sizes = lengths.tolist()
        pieces = [list(zip(starts, sizes, strict=True)) for starts in blocks.tolist()]
        return copying.gather_and_digest(records, [address_of(record) for record in records], pieces)

    def load(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        self.check(block_ids, records)
        blocks, within, lengths = self.blocks.addresses(block_ids)
        starts = np.array([address_of(record) for record in records], dtype=np.int64)
        sources, targets = (starts[:, None] + within).ravel(), blocks.ravel()
        sizes = np.tile(lengths, len(records))
        if len(records) * self.record_bytes < PARALLEL_COPY_BYTES_MIN:
            copy_pieces(sources, targets, sizes)
            return
        shares = [slice(part, None, COPY_THREADS) for part in range(COPY_THREADS)]
        list(self._pool.map(lambda share: copy_pieces(sources[share], targets[share], sizes[share]), shares))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def copy_pieces(sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
    """Copy `sizes[i]` bytes from address `sources[i]` to `targets[i]`."""
    for start in range(0, len(sizes), _PIECES_MAX):
        few = slice(start, start + _PIECES_MAX)
        into = np.stack([targets[few], sizes[few]], axis=1)  # two arrays of struct iovec
        out_of = np.stack([sources[few], sizes[few]], axis=1)
        count, addresses = len(into), (into.ctypes.data, out_of.ctypes.data)
        moved = _copy_pieces(os.getpid(), addresses[0], count, addresses[1], count, 0)
        if moved != int(sizes[few].sum()):  # forbidden here, or not all of it
            for (target, size), (source, _) in zip(into.tolist(), out_of.tolist(), strict=True):
                ctypes.memmove(target, source, size)
