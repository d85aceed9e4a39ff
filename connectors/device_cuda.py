"""Blocks in accelerator memory: side streams, events, and the arena registered as pinned memory.

    save   blocks ──gather──▶ staging (device) ──DMA──▶ records (arena)
    load   records ──DMA──▶ staging ──scatter──▶ blocks

When a block is one run (a block-outermost layout) there is nothing to gather: one DMA a
block, straight between the block and the record. Otherwise runs are gathered on the device
first, so that the bus sees one transfer a record and not one for each layer and head.

Copies run on a side stream of their own per direction, behind an event of the engine's
stream, and the calling background thread waits for them: the engine's stream never does. On
tensors in host memory the same code runs without streams; that is how tests reach it on a
machine without an accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from connectors.constants import STAGING_BYTES
from connectors.device import BlockMover, Blocks, Buffer
from connectors.device_cpu import address_of

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class _Lane:
    """One direction: its stream, its staging buffer, and the lock that one copy at a time holds."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.lock = threading.Lock()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._device = device
        self._staging_bytes = staging_bytes
        self._staging: torch.Tensor | None = None

    def staging(self) -> torch.Tensor:
        if self._staging is None:  # only layouts that need it pay for it
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self._device)
        return self._staging

    @contextlib.contextmanager
    def running(self, after: Any) -> Any:
        """Copies inside go to this lane's stream, behind `after`; leaving waits for them."""
        with self.lock:
            if self.stream is None:
                yield
                return
            if after is not None:
                self.stream.wait_event(after)
            with torch.cuda.stream(self.stream):
                yield
            self.stream.synchronize()


class StagedMover(BlockMover):
    """See the module's head. Raises torch errors to the background thread that called."""

    def __init__(self, blocks: Blocks, staging_bytes: int = STAGING_BYTES) -> None:
        super().__init__(blocks)
        self._device = blocks.storages[0].device
        self._batch = max(1, staging_bytes // self.record_bytes)
        staging_bytes = self._batch * self.record_bytes
        self._out, self._in = _Lane(self._device, staging_bytes), _Lane(self._device, staging_bytes)
        self._word, self._dtype = self._widest_word()
        self._pages = [self._page_view(number) for number in range(len(blocks.runs))]

    def mark(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def save(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        hosts = [self._host(record) for record in records]
        with self._out.running(after):
            if len(self._pages) == 1:
                for block, host in zip(block_ids, hosts, strict=True):
                    host.copy_(self._pages[0][block], non_blocking=True)
                return
            for start in range(0, len(hosts), self._batch):
                self._gather(block_ids[start : start + self._batch], hosts[start : start + self._batch])

    def load(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        hosts = [self._host(record) for record in records]
        with self._in.running(after):
            if len(self._pages) == 1:
                for block, host in zip(block_ids, hosts, strict=True):
                    self._pages[0][block].copy_(host, non_blocking=True)
                return
            for start in range(0, len(hosts), self._batch):
                self._scatter(block_ids[start : start + self._batch], hosts[start : start + self._batch])

    def _gather(self, block_ids: Sequence[int], hosts: Sequence[torch.Tensor]) -> None:
        staged = self._staged(self._out, len(hosts))
        picks = torch.tensor(list(block_ids), dtype=torch.int64, device=self._device)
        at = 0
        for page in self._pages:
            words = page.shape[1]
            staged[:, at : at + words] = page.index_select(0, picks)
            at += words
        for host, row in zip(hosts, staged, strict=True):
            host.copy_(row, non_blocking=True)

    def _scatter(self, block_ids: Sequence[int], hosts: Sequence[torch.Tensor]) -> None:
        staged = self._staged(self._in, len(hosts))
        picks = torch.tensor(list(block_ids), dtype=torch.int64, device=self._device)
        for host, row in zip(hosts, staged, strict=True):
            row.copy_(host, non_blocking=True)
        at = 0
        for page in self._pages:
            words = page.shape[1]
            page.index_copy_(0, picks, staged[:, at : at + words])
            at += words

    def _staged(self, lane: _Lane, count: int) -> torch.Tensor:
        flat = lane.staging()[: count * self.record_bytes].view(self._dtype)
        return flat.view(count, self.record_bytes // self._word)

    def _widest_word(self) -> tuple[int, torch.dtype]:
        numbers = [n for run in self.blocks.runs for n in (run.base, run.length, run.stride)]
        return next((size, dtype) for size, dtype in _WORDS if all(n % size == 0 for n in numbers))

    def _page_view(self, number: int) -> torch.Tensor:
        """One run as a matrix: a row for each block."""
        run = self.blocks.runs[number]
        storage = self.blocks.storages[run.storage]
        usable = storage.numel() // self._word * self._word
        shape = (self.blocks.block_count, run.length // self._word)
        words: torch.Tensor = storage[:usable].view(self._dtype)
        return words.as_strided(shape, (run.stride // self._word, 1), run.base // self._word)

    def _host(self, record: Buffer) -> torch.Tensor:
        """A record as a tensor; the caller holds the lease, and so the memory, until the copy is done."""
        if record.nbytes != self.record_bytes:
            raise ValueError(f"record of {record.nbytes} bytes: a block has {self.record_bytes}")
        memory = (ctypes.c_uint8 * self.record_bytes).from_address(address_of(record))
        return torch.frombuffer(memory, dtype=torch.uint8).view(self._dtype)


class PinnedArena:
    """The daemon's arena, registered with the driver so that copies to it are DMA.

    Registering may fail (no accelerator, a limit on locked memory): copies still work then,
    only slower. `active` says which it is.
    """

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address = address
        self.active = False
        if torch.cuda.is_available():
            self.active = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)) == 0

    def close(self) -> None:
        """Unregister; idempotent."""
        if self.active:
            self.active = False
            torch.cuda.cudart().cudaHostUnregister(self._address)
