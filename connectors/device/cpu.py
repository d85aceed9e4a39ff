"""Blocks in host memory: the copies of a whole batch in one system call.

Python gives up its interpreter lock around each foreign call, and an engine that spins in the same process takes it for up
to 5 ms. So a load must not make a call for each block: `process_vm_readv` of the own process copies many pieces at once.
Where it is not allowed, each piece is one `memmove`. Neither touches the OpenMP threads that the engine computes with.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from connectors.device import BlockMover, Buffer, address_of
from connectors.device.driver import Numbers
from kvstore.client import copying

COPY_SHARES = 4  # of a load: the thread that copies it and its helper take one after the other

_PIECES_MAX = 1024  # of one call: IOV_MAX of Linux

_copy_pieces = ctypes.CDLL(None, use_errno=True).process_vm_readv
_copy_pieces.restype = ctypes.c_ssize_t
_copy_pieces.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)


class CpuMover(BlockMover):
    """Copies on the calling thread, which another one helps where there is much to copy."""

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

        def work(number: int) -> None:
            part = slice(number, None, COPY_SHARES)
            copy_pieces(sources[part], targets[part], sizes[part])

        copying.share(work, COPY_SHARES, len(records) * self.record_bytes)


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
