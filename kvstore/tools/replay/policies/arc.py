"""ARC (Megiddo, Modha 2003): used once, used again, and a border that its ghosts move.

        ghosts ◀─ recent (used once) ─┤ target ├─ frequent (used again) ─▶ ghosts

A block that comes back as a ghost of one side shows that this side was too small.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.index.block import Block
from kvstore.policies.base import Policy


class Arc(Policy):
    """A reference: it knows nothing of prefixes."""

    def __init__(self, bit: int) -> None:
        self._recent: OrderedDict[bytes, Block] = OrderedDict()  # oldest first, as all here
        self._frequent: OrderedDict[bytes, Block] = OrderedDict()
        self._recent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._target = 0.0  # of the size of `_recent`
        self._capacity = 1

    def touched(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            key = block.key
            if key in self._frequent:
                self._frequent.move_to_end(key)
            elif self._recent.pop(key, None) is not None or self._was_ghost(key):
                self._frequent[key] = block
            else:
                self._recent[key] = block
        self._trim()

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            key = block.key
            if self._recent.pop(key, None) is not None:
                self._recent_ghosts[key] = None
            elif self._frequent.pop(key, None) is not None:
                self._frequent_ghosts[key] = None

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        self._adapt(incoming)
        size = len(self._recent)
        from_recent = size > self._target or (size == int(self._target) and incoming in self._frequent_ghosts)
        first, second = self._recent, self._frequent
        if not (from_recent and size):
            first, second = second, first
        yield from (block for block in chain(first.values(), second.values()) if not block.pins)

    def _adapt(self, key: bytes) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            self._target = min(self._capacity, self._target + max(1.0, frequent / recent))
        elif key in self._frequent_ghosts:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))

    def _was_ghost(self, key: bytes) -> bool:
        for ghosts in (self._recent_ghosts, self._frequent_ghosts):
            if key in ghosts:
                del ghosts[key]
                return True
        return False

    def _trim(self) -> None:
        """Ghosts are remembered as far as a cache of twice the size would reach."""
        held = len(self._recent) + len(self._frequent)
        self._capacity = max(self._capacity, held)
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > self._capacity:
            self._recent_ghosts.popitem(last=False)
        while (
            self._frequent_ghosts
            and held + len(self._recent_ghosts) + len(self._frequent_ghosts) > 2 * self._capacity
        ):
            self._frequent_ghosts.popitem(last=False)
