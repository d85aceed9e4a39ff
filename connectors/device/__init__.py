"""The seam between an engine's paged KV tensors and records in host memory.

A block of one KV group lies in the engine's storage as a handful of contiguous *runs*; a record is these runs, one after
the other:

    storage   ···[run 0 of block 7]········[run 1 of block 7]···      run = (base, length, stride)
                       │                         │                    at base + block * stride
    record    [ run 0 ........... ][ run 1 ........... ]

With a block-outermost layout all layers of a block are one run; with a layer-outermost one there is a run per layer; with
heads outside of blocks, one per layer and head. Only whole blocks are copied, so it does not matter how a kernel lays K and
V inside a block. What the runs are is part of the namespace: engines that cut blocks differently never exchange them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connectors.device.driver import Numbers

RUNS_MAX = 1 << 16  # contiguous pieces of one block; more is not a KV cache layout we know

Buffer = memoryview  # exactly one record


@dataclass(slots=True, frozen=True, order=True)
class Run:
    """`length` contiguous bytes of each block, at `base + block * stride` of storage number `storage`."""

    storage: int
    base: int
    length: int
    stride: int


@dataclass(slots=True, frozen=True)
class Blocks:
    """The blocks of one KV group: flat uint8 tensors, and the runs of a record in order."""

    storages: tuple[Any, ...]
    runs: tuple[Run, ...]
    block_count: int

    @property
    def record_bytes(self) -> int:
        return sum(run.length for run in self.runs)

    def addresses(self, block_ids: Sequence[int]) -> tuple[Numbers, Numbers, Numbers]:
        """Where the runs of these blocks are (a row a block), where in a record, and how long."""
        storages = [storage.data_ptr() for storage in self.storages]
        bases = np.array([storages[run.storage] + run.base for run in self.runs], dtype=np.int64)
        strides = np.array([run.stride for run in self.runs], dtype=np.int64)
        lengths = np.array([run.length for run in self.runs], dtype=np.int64)
        rows = np.asarray(block_ids, dtype=np.int64)[:, None]
        return bases + rows * strides, np.cumsum(lengths) - lengths, lengths


class BlockMover(ABC):
    """Copies whole blocks between an engine's storage and records. Thread-safe."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.record_bytes = blocks.record_bytes

    @abstractmethod
    def mark(self) -> Any:
        """Everything the engine gave to the device until now. Does not wait."""

    @abstractmethod
    def save(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> list[bytes]:
        """Copy blocks into writable records, not before `after` has happened, and wait.

        Returns the xxh3_128 digest of each record. Raises ValueError, or what the device raises;
        no copy is under way then either.
        """

    @abstractmethod
    def load(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        """Copy records into blocks, not before `after` has happened, and wait. Raises as `save`."""

    def check(self, block_ids: Sequence[int], records: Sequence[Buffer]) -> None:
        """Raises ValueError for a block that is not there, or a record of the wrong size."""
        if len(block_ids) != len(records):
            raise ValueError(f"{len(block_ids)} blocks and {len(records)} records")
        for block, record in zip(block_ids, records, strict=True):
            if not 0 <= block < self.blocks.block_count or record.nbytes != self.record_bytes:
                raise ValueError(
                    f"block {block} of {self.blocks.block_count}, record of {record.nbytes} bytes"
                )


def address_of(record: Buffer) -> int:
    """Where a record starts in memory; read-only views too."""
    address: int = np.frombuffer(record, dtype=np.uint8).__array_interface__["data"][0]
    return address


def blocks_of(layers: Sequence[Any], block_count: int) -> Blocks:
    """The runs of a KV group, from its layers' tensors (first dimension: blocks or parts of blocks).

    Storages are numbered as the layers name them first, so that where each was allocated does not matter; inside one, pieces
    are in order of address. Layers that share one tensor are taken once. Raises ValueError for a tensor that is not made of
    whole blocks, or that has more than RUNS_MAX pieces a block.
    """
    import torch

    storages: dict[int, int] = {}
    flat: list[Any] = []
    runs: set[Run] = set()
    for layer in layers:
        storage = layer.untyped_storage()
        number = storages.setdefault(storage.data_ptr(), len(storages))
        if number == len(flat):
            flat.append(torch.empty(0, dtype=torch.uint8, device=layer.device).set_(storage))
        runs.update(_layer_runs(layer, number, block_count))
        if len(runs) > RUNS_MAX:
            raise ValueError(f"a block has more than {RUNS_MAX} contiguous pieces")
    return Blocks(tuple(flat), tuple(_merged(sorted(runs))), block_count)


def _layer_runs(layer: Any, storage: int, block_count: int) -> Iterator[Run]:
    rows = layer.shape[0]
    if block_count < 1 or rows % block_count:
        raise ValueError(f"{rows} rows are not {block_count} whole blocks")
    item = layer.element_size()
    parts = rows // block_count  # kernels may cut a block of the manager into equal parts
    row_stride = layer.stride(0) * item
    extents = [(row_stride, parts)]
    extents += [(step * item, size) for step, size in zip(layer.stride()[1:], layer.shape[1:], strict=True)]
    length = item
    outer: list[tuple[int, int]] = []
    for step, size in sorted((step, size) for step, size in extents if size > 1):
        if step == length and not outer:
            length *= size
        elif step < length:
            raise ValueError("tensors that overlap themselves cannot be copied as blocks")
        else:
            outer.append((step, size))
    base = layer.storage_offset() * item
    for offset in _offsets(outer):
        yield Run(storage, base + offset, length, row_stride * parts)


def _offsets(extents: list[tuple[int, int]]) -> list[int]:
    offsets = [0]
    for step, size in extents:
        offsets = [offset + step * index for index in range(size) for offset in offsets]
        if len(offsets) > RUNS_MAX:
            raise ValueError(f"a block has more than {RUNS_MAX} contiguous pieces")
    return offsets


def _merged(runs: list[Run]) -> list[Run]:
    """Join neighbours that stay neighbours in every block."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else run
        length = last.length + run.length
        follows = (last.storage, last.base + last.length, last.stride) == (run.storage, run.base, run.stride)
        if follows and length <= run.stride:
            merged[-1] = Run(last.storage, last.base, length, run.stride)
        else:
            merged.append(run)
    return merged
