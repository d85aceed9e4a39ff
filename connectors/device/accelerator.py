"""Blocks in accelerator memory: one batched copy a lease, straight between blocks and the arena.

    save   blocks ══DMA══▶ records, in groups;   each group is hashed while the next one is copied
    load   records ══DMA══▶ blocks

Copies run on a stream of the calling thread, behind an event of the engine's stream, and the calling thread waits for them;
the engine's stream never does. A call returns or raises only when none of its copies is under way any more: the lease is
given back next, and another record may then lie in the slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from connectors.constants import MIB
from connectors.device import BlockMover, Blocks, Buffer, address_of
from connectors.device.driver import Driver, Numbers
from connectors.device.pinning import Pinning
from kvstore.client import copying

HASH_GROUP_BYTES = 8 * MIB  # what is hashed while the next group is copied from the device


class AcceleratorMover(BlockMover):
    """Of one KV group. Raises the driver's errors to the background thread that called."""

    def __init__(self, blocks: Blocks, driver: Driver, pinning: Pinning) -> None:
        super().__init__(blocks)
        self._driver, self._pinning = driver, pinning
        self._threads = threading.local()
        self._group = max(1, HASH_GROUP_BYTES // self.record_bytes)

    def mark(self) -> Any:
        return self._driver.mark()

    def save(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> list[bytes]:
        blocks, hosts, sizes = self._pieces(block_ids, records)
        step = self._group * len(self.blocks.runs)
        digests: list[bytes] = []
        with self._stream(after) as stream:
            done = []
            for start in range(0, len(sizes), step):
                group = slice(start, start + step)
                self._copy(stream, (blocks[group], hosts[group], sizes[group]), host=1)
                done.append(self._driver.record(stream))
            for number, event in enumerate(done):
                self._driver.synchronize(event)
                digests += copying.digest_all(records[number * self._group : (number + 1) * self._group])
        return digests

    def load(self, block_ids: Sequence[int], records: Sequence[Buffer], after: Any) -> None:
        blocks, hosts, sizes = self._pieces(block_ids, records)
        with self._stream(after) as stream:
            self._copy(stream, (hosts, blocks, sizes), host=0)

    @contextmanager
    def _stream(self, after: Any) -> Iterator[Any]:
        """This thread's stream, behind `after`; leaving waits for what it got, also after an error."""
        self._driver.set_device()
        if not hasattr(self._threads, "stream"):
            self._threads.stream = self._driver.new_stream()
        stream = self._threads.stream
        if after is not None:
            self._driver.wait(stream, after)
        try:
            yield stream
        finally:
            self._driver.synchronize(stream)

    def _pieces(
        self, block_ids: Sequence[int], records: Sequence[Buffer]
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Addresses on the device, addresses in the records, and sizes: record after record."""
        self.check(block_ids, records)
        blocks, within, lengths = self.blocks.addresses(block_ids)
        starts = np.array([address_of(record) for record in records], dtype=np.int64)
        hosts = starts[:, None] + within[None, :]
        return blocks.ravel(), hosts.ravel(), np.tile(lengths, len(records))

    def _copy(self, stream: Any, pieces: tuple[Numbers, Numbers, Numbers], host: int) -> None:
        """One batched copy. host: which of the two addresses is the arena's."""
        edges = self._pinning.edges()
        first, last = (
            np.searchsorted(edges, at, "right") for at in (pieces[host], pieces[host] + pieces[2] - 1)
        )
        if (first != last).any():
            pieces = _cut(pieces, edges, host)
        self._driver.copy(stream, *(np.ascontiguousarray(numbers) for numbers in pieces))


def _cut(
    pieces: tuple[Numbers, Numbers, Numbers], edges: Numbers, host: int
) -> tuple[Numbers, Numbers, Numbers]:
    """The same copies, with those that cross an edge cut in two (a copy is shorter than a pinned piece)."""
    size, start = pieces[2], pieces[host]
    at = np.searchsorted(edges, start, "right")
    head = np.minimum(np.append(edges, np.iinfo(np.int64).max)[at] - start, size)
    tail = size - head
    rest = tail > 0
    return (
        np.concatenate([pieces[0], (pieces[0] + head)[rest]]),
        np.concatenate([pieces[1], (pieces[1] + head)[rest]]),
        np.concatenate([head, tail[rest]]),
    )
