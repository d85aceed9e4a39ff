"""Queues of the blocks that wait for their read: those who asked for them take turns.

    lines    lease 7 ▸ b1 b2 b3 b4 …      a turn takes some of the first line, which is the last one then:
             lease 9 ▸ b8 b9              no lease waits for all of a long prompt that came before
             lease 4 ▸ b3 …               a block that several want is in the lines of all, and is taken once

What was taken or given up from another line stays in a line until it surfaces there.

A line is a dictionary: of blocks, which the garbage collector does not know, it leaves a dictionary alone. A list or a deque of
twenty thousand of them, made at once, it walks through twice: that held the loop for 7 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from kvstore.index.block import Block


class Fifo:
    """Blocks in the order in which they came."""

    __slots__ = ("_blocks", "_first", "_next")

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}  # by number, which are without gaps
        self._first = self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def append(self, block: Block) -> None:
        self._blocks[self._next] = block
        self._next += 1

    def first(self) -> Block:
        return self._blocks[self._first]

    def popleft(self) -> Block:
        self._first += 1
        return self._blocks.pop(self._first - 1)


class LoadQueue:
    """Of one source."""

    def __init__(self) -> None:
        self.size_bytes = 0  # of records
        self._waiting: dict[Block, None] = {}
        self._lines: OrderedDict[object, Fifo] = OrderedDict()  # by who asked
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
            line = self._lines[asker] = Fifo()
        line.append(block)
        if block not in self._waiting:
            self._waiting[block] = None
            self.size_bytes += block.namespace.record_bytes

    def discard(self, block: Block) -> None:
        """It is not to be taken any more, for none of those who asked."""
        if block in self._waiting:
            del self._waiting[block]
            self.size_bytes -= block.namespace.record_bytes
            if not self._waiting:
                # What is left was taken from other lines: thousands, that `first` would look at in one turn.
                self._lines.clear()

    def first(self) -> Block | None:
        """The next one."""
        while self._lines:
            line = next(iter(self._lines.values()))
            while line:
                if (block := line.first()) in self._waiting:
                    return block
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
