"""The journal: what came to the owned levels and what left them, until it is published.

    Residency ── came, left ─▶ journal ── take, a few times a second ─▶ publisher

Written by the engine's thread only, which pays for it with one small object a run of blocks. It is
bounded: where more waits than EVENTS_WAITING_MAX blocks, the oldest is forgotten, and the
stream gets a gap: a subscriber that sees it asks for everything that is held (`held`). A million changes are never let go of
at once, in whichever thread: that takes 0.1 s, for which no engine is answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from kvstore.index.block import Block, Namespace
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME

# Blocks that came or went and are not published; beyond it subscribers see a gap.
EVENTS_WAITING_MAX = 1 << 20
EVENTS_SLICE_BLOCKS = 2000  # of everything that is held, read in one go: half a millisecond


class Change(msgspec.Struct, gc=False):
    """Blocks of one namespace that came to the tier of this bit, or left it."""

    is_stored: bool
    bit: int
    namespace: Namespace
    hashes: list[bytes]


class Taken(msgspec.Struct, gc=False):
    """What was in the journal, to be taken out one by one. is_after_gap: changes before these were forgotten."""

    changes: deque[Change]
    is_after_gap: bool


class Journal:
    """Changes in the order in which they happened."""

    def __init__(self, waiting_max: int = EVENTS_WAITING_MAX) -> None:
        self.waiting = 0  # blocks in `_changes`
        self.lost = 0  # blocks that were forgotten
        self._waiting_max = waiting_max
        self._changes: deque[Change] = deque()
        self._is_after_gap = False

    def came(self, bit: int, run: Sequence[Block]) -> None:
        """A tier has these blocks of one namespace now."""
        if run:
            self._add(Change(True, bit, run[0].namespace, [block.hash for block in run]))

    def left(self, bit: int, run: Sequence[Block]) -> None:
        """A tier has these blocks of one namespace no more."""
        self._add(Change(False, bit, run[0].namespace, [block.hash for block in run]))

    def take(self) -> Taken | None:
        """Everything that waits; None if nothing happened."""
        if not self._changes and not self._is_after_gap:
            return None
        taken = Taken(self._changes, self._is_after_gap)
        self._changes, self.waiting, self._is_after_gap = deque(), 0, False
        return taken

    def _add(self, change: Change) -> None:
        self._changes.append(change)
        self.waiting += len(change.hashes)
        while self.waiting > self._waiting_max:
            blocks = len(self._changes.popleft().hashes)
            self.waiting -= blocks
            self.lost += blocks
            self._is_after_gap = True


def held(namespaces: Iterable[Namespace]) -> Iterator[list[Change]]:
    """Everything that the owned levels hold, in slices of less than a millisecond. Between two of them blocks
    may come and go: each that is held all the time is named, and none that is never held."""
    for namespace in list(namespaces):
        blocks = namespace.blocks.walk()
        while piece := list(islice(blocks, EVENTS_SLICE_BLOCKS)):
            changes: list[Change] = []
            for bit in (IN_DRAM, IN_NVME):
                if hashes := [block.hash for block in piece if block.where & bit]:
                    changes.append(Change(True, bit, namespace, hashes))
            yield changes
