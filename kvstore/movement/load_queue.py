"""Blocks that wait for their read, in turns of those who asked for them.

    lines    lease 7 ▸ b1 b2 b3 b4 …      a turn takes some of the first line, which is the last one then:
             lease 9 ▸ b8 b9              nobody waits for all of a long prompt that came before
             lease 4 ▸ b3 …               a block that several want is in the lines of all, and is taken once

What was taken or given up from another line stays in a line until it surfaces there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from kvstore.index.block import Block


class LoadQueue:
    """Of one source."""

    def __init__(self) -> None:
        self.size_bytes = 0  # of records
        self._waiting: dict[Block, None] = {}
        self._lines: OrderedDict[object, deque[Block]] = OrderedDict()  # by who asked
        self._served: object = None  # whose line the latest one was taken from

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, block: Block) -> bool:
        return block in self._waiting

    def __iter__(self) -> Iterator[Block]:
        return iter(self._waiting)

    @property
    def lines(self) -> int:
        """How many take turns, at most."""
        return len(self._lines)

    def add(self, block: Block, asker: object) -> None:
        """Behind what this asker wants already."""
        line = self._lines.get(asker)
        if line is None:
            line = self._lines[asker] = deque()
        line.append(block)
        if block not in self._waiting:
            self._waiting[block] = None
            self.size_bytes += block.namespace.record_bytes

    def discard(self, block: Block) -> None:
        """It is not to be taken, whoever asked for it."""
        if block in self._waiting:
            del self._waiting[block]
            self.size_bytes -= block.namespace.record_bytes

    def first(self) -> Block | None:
        """The next one."""
        while self._lines:
            line = next(iter(self._lines.values()))
            while line:
                if line[0] in self._waiting:
                    return line[0]
                line.popleft()
            self._lines.popitem(last=False)
        return None

    def take(self) -> Block:
        """Take the next one out. Only after `first` found one."""
        self._served = asker = next(iter(self._lines))
        block = self._lines[asker].popleft()
        self.discard(block)
        return block

    def end_turn(self) -> None:
        """The line that was served last is the last one now."""
        if self._lines.get(self._served):
            self._lines.move_to_end(self._served)
        else:
            self._lines.pop(self._served, None)
        self._served = None

    def clear(self) -> None:
        self._lines.clear()
        self._waiting.clear()
        self.size_bytes = 0
