"""S3-FIFO (Yang et al. 2023): a small queue that most blocks only pass, a main queue with second chances.

new ─▶ small (a tenth) ─▶ used meanwhile? main : ghost          ghost ─▶ back to main
                                          main ─▶ used meanwhile? to its end : out
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvstore.index.block import Block
from kvstore.policies.base import Policy

SMALL_SHARE = 0.1
USES_MAX = 3


class S3Fifo(Policy):
    """A reference: it knows nothing of prefixes."""

    def __init__(self, bit: int) -> None:
        self._small: OrderedDict[bytes, Block] = OrderedDict()  # oldest first, as all here
        self._main: OrderedDict[bytes, Block] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._capacity = 1

    def touched(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            key = block.key
            if key in self._uses:
                self._uses[key] = min(self._uses[key] + 1, USES_MAX)
                continue
            self._uses[key] = 0
            if key in self._ghosts:
                del self._ghosts[key]
                self._main[key] = block
            else:
                self._small[key] = block
        self._capacity = max(self._capacity, len(self._uses))

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            key = block.key
            if self._small.pop(key, None) is not None:
                self._ghosts[key] = None
                while len(self._ghosts) > self._capacity * (1 - SMALL_SHARE):
                    self._ghosts.popitem(last=False)
            self._main.pop(key, None)
            self._uses.pop(key, None)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        """Each block that is pinned, or used since, is passed over; a round without a victim ends it."""
        passed = 0
        while passed <= (USES_MAX + 1) * len(self._uses):
            from_small = self._small and (
                not self._main or len(self._small) >= max(1, int(self._capacity * SMALL_SHARE))
            )
            queue = self._small if from_small else self._main
            if not queue:
                return
            key, block = next(iter(queue.items()))
            if from_small and self._uses[key]:
                del self._small[key]
                self._main[key] = block
                self._uses[key] = 0
            elif self._uses[key]:
                self._uses[key] -= 1
                queue.move_to_end(key)
            elif block.pins:
                queue.move_to_end(key)
            else:
                yield block
                if key in queue:
                    queue.move_to_end(key)
            passed += 1
