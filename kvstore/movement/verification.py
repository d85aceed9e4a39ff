"""Verification: whether the bytes in DRAM are still those that were committed.

    adopted ─▶ asked for: at once │ else: a few at a time, in the background ─▶ true: served, and written to NVMe
                                                                            └▶ not: dropped, loaded from NVMe
    handed out ─▶ a sample, in the background: a stray write of an engine ──────▶ not: dropped, and logged

Bytes that an earlier daemon left are believed only after their checksum matched. What engines stored since is handed out
at once. A process that maps the arena to write could overwrite it by mistake: the sample finds that. A wrong block that is
being read stays until its readers are done, and is not handed out again.

A block being verified is pinned once by this object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from random import sample

from kvstore.constants import VERIFY_JOBS_MAX
from kvstore.index.block import Block
from kvstore.io_pool import Io
from kvstore.movement.waiting import Prefetch, Waiter, Waiting
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.residency.residency import Residency

log = logging.getLogger("kvstore.movement.verification")


class Verifier:
    """Compares checksums in I/O threads. Waiters are called with the block, whatever the result: if it is not in
    DRAM any more, or unverified still, its bytes were not true. share: of what is handed out, how much is compared."""

    def __init__(self, residency: Residency, io: Io) -> None:
        self.share = 0.0  # a setting
        self._residency = residency
        self._io = io
        self._waiting = Waiting()
        self._in_background = 0
        self._due = 0.0  # less than one block of what was handed out is still to be compared

    @property
    def underway(self) -> int:
        return len(self._waiting)

    def pinned(self) -> Iterator[Block]:
        """Each is pinned once by this object."""
        return iter(list(self._waiting))

    def want(self, block: Block, waiter: Waiter) -> None:
        """Verify an adopted block now, for a request that waits."""
        if self._waiting.full:
            self._residency.counters.loads_refused += 1
            waiter(None)
            return
        is_new = block not in self._waiting
        self._waiting.add(block, waiter)
        if is_new:
            self._submit(block, urgent=True)

    def next_ones(self) -> None:
        """Keep verifying adopted blocks that were not asked for yet, a few at a time."""
        unverified = self._residency.unverified
        fresh = [b for b in islice(unverified, 2 * VERIFY_JOBS_MAX) if b not in self._waiting and not b.pins]
        for block in fresh[: VERIFY_JOBS_MAX - self._in_background]:
            self._start(block)

    def handed_out(self, run: Sequence[Block]) -> None:
        """These blocks were in DRAM and are being read: compare a sample of them, a smaller one where threads are busy."""
        wanted, self._due = divmod(self._due + self.share * len(run), 1.0)
        for block in sample(run, min(int(wanted), len(run), VERIFY_JOBS_MAX - self._in_background)):
            if block.where & IN_DRAM and block not in self._waiting:
                self._start(block)

    def _start(self, block: Block) -> None:
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
        was_adopted = residency.unverified.pop(block, self) is None
        waiters = self._waiting.pop(block)
        if is_true:
            residency.counters.verified += 1
            if was_adopted:
                residency.writes.offer(block)
        elif block.pins > 1:
            residency.unverified[block] = None  # until its readers are done
        else:
            self._drop(block)
        for waiter in waiters:
            waiter(block)
        residency.unpin(block)

    def _drop(self, block: Block) -> None:
        self._residency.counters.corrupt_dram += 1
        log.error(
            "a block in DRAM has not the bytes that were committed: dropped",
            extra={"namespace": block.namespace.digest.hex(), "block": block.hash.hex(), "slot": block.slot},
        )
        self._residency.left_dram(block, why=outcomes.CORRUPT)
