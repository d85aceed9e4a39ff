"""Verification: bytes adopted from a dead daemon are believed only after their checksum matched.

    adopted ─▶ asked for: at once │ else: a few at a time, in the background ─▶ true: served, and written to NVMe
                                                                            └▶ not: dropped, loaded from NVMe

A block being verified is pinned once by this object.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvstore.constants import VERIFY_JOBS_MAX
from kvstore.index.block import Block
from kvstore.io_pool import Io
from kvstore.movement.waiting import Prefetch, Waiter, Waiting
from kvstore.protocol import outcomes
from kvstore.residency.residency import Residency


class Verifier:
    """Compares checksums in I/O threads. Waiters are called with the block, whatever the result: if it is not in
    DRAM any more, its bytes were not true."""

    def __init__(self, residency: Residency, io: Io) -> None:
        self._residency = residency
        self._io = io
        self._waiting = Waiting()
        self._in_background = 0

    @property
    def underway(self) -> int:
        return len(self._waiting)

    def pinned(self) -> Iterator[Block]:
        """Each is pinned once by this object."""
        return iter(list(self._waiting))

    def want(self, block: Block, waiter: Waiter) -> None:
        """Verify an adopted block now, for somebody who waits."""
        if self._waiting.full:
            self._residency.counters.loads_refused += 1
            waiter(None)
            return
        is_new = block not in self._waiting
        self._waiting.add(block, waiter)
        if is_new:
            self._submit(block, urgent=True)

    def next_ones(self) -> None:
        """Keep verifying adopted blocks that nobody asked for yet, a few at a time."""
        unverified = self._residency.unverified
        fresh = [b for b in islice(unverified, 2 * VERIFY_JOBS_MAX) if b not in self._waiting]
        for block in fresh[: VERIFY_JOBS_MAX - self._in_background]:
            self._in_background += 1
            self._waiting.add(block, Prefetch(lambda _: self._ended()))
            self._submit(block, urgent=False)

    def _ended(self) -> None:
        """One of those in the background is through."""
        self._in_background -= 1
        self.next_ones()

    def _submit(self, block: Block, urgent: bool) -> None:
        self._residency.pin(block)
        slot, verify = block.slot, self._residency.arena.verify
        self._io.submit(lambda: verify(slot), lambda true: self._verified(block, true), False, urgent)

    def _verified(self, block: Block, is_true: bool) -> None:
        residency = self._residency
        residency.unverified.pop(block, None)
        waiters = self._waiting.pop(block)
        if is_true:
            residency.counters.verified += 1
            residency.writes.offer(block)
        else:
            residency.counters.corrupt_dram += 1
            residency.left_dram(block, why=outcomes.CORRUPT)
        for waiter in waiters:
            waiter(block)
        residency.unpin(block)
