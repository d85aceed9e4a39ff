"""Blocks in host memory: plain copies, by several threads when there is much to copy.

`memmove` through ctypes lets go of the interpreter lock and, unlike a tensor copy, leaves
the OpenMP threads alone that the engine computes with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from connectors.constants import COPY_THREADS, PARALLEL_COPY_BYTES_MIN
from connectors.device import BlockMover, Blocks, Buffer


def address_of(record: Buffer) -> int:
    """Where a record starts in memory; read-only views too."""
    import numpy as np

    address: int = np.frombuffer(record, dtype=np.uint8).__array_interface__["data"][0]
    return address


class CpuMover(BlockMover):
    """Copies on the calling thread, helped by COPY_THREADS others above PARALLEL_COPY_BYTES_MIN."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self._starts = [storage.data_ptr() for storage in blocks.storages]
        self._pool = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="kvstore-copy")

    def mark(self) -> None:
        return None  # the CPU has computed all it was given when a call returns

    def save(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        self._spread(self._copy_out, block_ids, records)

    def load(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        self._spread(self._copy_in, block_ids, records)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _spread(
        self, copy: Callable[[int, Buffer], None], block_ids: Sequence[int], records: Sequence[Buffer]
    ) -> None:
        pairs = list(zip(block_ids, records, strict=True))
        for block, record in pairs:
            self._check(block, record)
        if len(pairs) * self.record_bytes < PARALLEL_COPY_BYTES_MIN:
            for block, record in pairs:
                copy(block, record)
            return
        list(self._pool.map(copy, block_ids, records))

    def _check(self, block: int, record: Buffer) -> None:
        if not 0 <= block < self.blocks.block_count or record.nbytes != self.record_bytes:
            raise ValueError(f"block {block} of {self.blocks.block_count}, record of {record.nbytes} bytes")

    def _copy_out(self, block: int, record: Buffer) -> None:
        target = address_of(record)
        for run in self.blocks.runs:
            ctypes.memmove(target, self._starts[run.storage] + run.base + block * run.stride, run.length)
            target += run.length

    def _copy_in(self, block: int, record: Buffer) -> None:
        source = address_of(record)
        for run in self.blocks.runs:
            ctypes.memmove(self._starts[run.storage] + run.base + block * run.stride, source, run.length)
            source += run.length
