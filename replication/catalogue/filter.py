"""The filter: whether a block may be durable, asked of memory alone.

    word of a key (64 bits)   │ partition (16) │ print (32) │ not kept (16) │
    partitions                │ 0 │ 1 │ 2 │ … │ 65,535 │       each a sorted array of prints

48 of 64 bits are kept in 4 bytes a block, because the place of a print says the rest. A key that is not
there is found with a probability of n / 2**48: one in 3 million at 100 M blocks. What it says is a hint all the same.

Sorted arrays instead of an open-addressing table: they grow a piece at a time, never double their memory, prints can
be taken out again, and both search and insertion run in C. At 100 M blocks an array has 1,500 prints, so that an insertion
moves 3 KiB.

One thread writes, any other may ask at any time: under the interpreter's lock each step on an array is whole, and an
array that is replaced is replaced by one assignment. Who asks while something is inserted may get yesterday's answer.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

FILTER_PARTITION_BITS: Final = 16
FILTER_PRINT_BITS: Final = 32
assert FILTER_PARTITION_BITS + FILTER_PRINT_BITS <= 64

_UNUSED_BITS = 64 - FILTER_PARTITION_BITS - FILTER_PRINT_BITS
_PARTITION_SHIFT = 64 - FILTER_PARTITION_BITS
_PRINT_MASK = (1 << FILTER_PRINT_BITS) - 1
PARTITIONS = 1 << FILTER_PARTITION_BITS
KEPT_BYTES = (FILTER_PARTITION_BITS + FILTER_PRINT_BITS) // 8  # the first of a word, as big-endian bytes
PARTITION_BYTES = FILTER_PARTITION_BITS // 8

assert array("I").itemsize * 8 == FILTER_PRINT_BITS
_EMPTY = array("I")  # shared by all partitions in which there is nothing yet; never changed


class Filter:
    """A set of words."""

    def __init__(self) -> None:
        self._partitions: list[array[int]] = [_EMPTY] * PARTITIONS

    def __len__(self) -> int:
        """How many differ in the bits that are kept. Takes milliseconds."""
        return sum(map(len, self._partitions))

    def __contains__(self, word: int) -> bool:
        """From any thread."""
        prints = self._partitions[word >> _PARTITION_SHIFT]
        wanted = word >> _UNUSED_BITS & _PRINT_MASK
        try:
            return prints[bisect_left(prints, wanted)] == wanted
        except IndexError:  # behind the last one
            return False

    def add(self, words: Iterable[int]) -> None:
        partitions = self._partitions
        for word in words:
            prints = partitions[word >> _PARTITION_SHIFT]
            wanted = word >> _UNUSED_BITS & _PRINT_MASK
            at = bisect_left(prints, wanted)
            if at < len(prints) and prints[at] == wanted:
                continue
            if prints is _EMPTY:
                partitions[word >> _PARTITION_SHIFT] = array("I", (wanted,))
            else:
                prints.insert(at, wanted)

    def discard(self, word: int) -> None:
        prints = self._partitions[word >> _PARTITION_SHIFT]
        wanted = word >> _UNUSED_BITS & _PRINT_MASK
        at = bisect_left(prints, wanted)
        if at < len(prints) and prints[at] == wanted:
            del prints[at]

    def fill(self, partition: int, prints: Iterable[int]) -> None:
        """Make these the content of a partition; ascending, without repetition."""
        self._partitions[partition] = array("I", prints)

    def clear(self) -> None:
        self._partitions = [_EMPTY] * PARTITIONS
