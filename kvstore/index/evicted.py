"""Departed keys: why a block is not held any more, remembered compactly.

    key ──▶ 56-bit name ──▶ bucket of 2 words, newest first │ 27 bits of name │ 5 bits: why │

Tells "evicted" from "never seen" for the last million keys or so, at 4 bytes each: a table
of fixed size in which a newer key takes the place of the older one of its bucket. Of ten
million keys that never were here, less than one is mistaken for another: that costs a wrong
word in a report. Larger buckets would forget a little later, and cost more time: this is
told of every block that leaves.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvstore.constants import DEPARTED_KEYS_MAX, require
from kvstore.index.block import Namespace
from kvstore.protocol import outcomes

WAYS = 2
_WHY_BITS = 5
_WHY_MASK = (1 << _WHY_BITS) - 1
_NAME_SHIFT = 56 - (32 - _WHY_BITS)  # the low bits choose the bucket

require(outcomes.OUTCOMES <= _WHY_MASK + 1, "every outcome fits a word of departed keys")


class Departed:
    """What became of keys that left, or were not let in; the latest `keys_max` of them."""

    def __init__(self, keys_max: int = DEPARTED_KEYS_MAX) -> None:
        self._buckets = max(1, keys_max // WAYS)
        # All of its memory at once: a lookup of many keys would wait for each page.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._words = memoryview(mmap.mmap(-1, 4 * WAYS * self._buckets, flags)).cast("I")

    def note(self, names: Iterable[int], why: int) -> None:
        """The blocks that `Namespace.names_of` calls so are gone; `why` is the outcome of a later lookup."""
        words, buckets = self._words, self._buckets
        for name in names:
            at = name % buckets * WAYS
            kept = name >> _NAME_SHIFT
            latest = words[at]
            if latest >> _WHY_BITS != kept:
                words[at + 1] = latest
            words[at] = kept << _WHY_BITS | why

    def whys(self, namespace: Namespace, hashes: Iterable[bytes]) -> list[int]:
        """What was noted of each of these keys last, 0 where nothing is remembered."""
        words, buckets, found = self._words, self._buckets, []
        for name in namespace.names_of(hashes):
            at, kept = name % buckets * WAYS, name >> _NAME_SHIFT
            word = words[at]
            if word >> _WHY_BITS != kept:
                word = words[at + 1]
            found.append(word & _WHY_MASK if word >> _WHY_BITS == kept else 0)
        return found
