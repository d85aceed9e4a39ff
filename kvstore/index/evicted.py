"""Evicted keys: why a block is not held any more, remembered compactly.

    key ──▶ name of 64 bits ──▶ word of the table │ 27 bits of the name │ 5 bits: why │

Distinguishes "evicted" from "never seen" for the last million keys or so, at 4 bytes each: a table
of fixed size in which a newer key takes the place of an older one. Of ten
million keys that never were here, less than one is mistaken for another: that costs a wrong
word in a report. Tried: buckets of two words, which forget a little later, and cost twice the time for every block
that leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvstore.constants import require
from kvstore.index.block import Namespace
from kvstore.protocol import outcomes

EVICTED_KEYS_MAX = 1 << 21  # keys whose end is remembered, 4 bytes each

_WHY_BITS = 5
_WHY_MASK = (1 << _WHY_BITS) - 1
_KEPT_SHIFT = 32  # the low bits choose the word
_KEPT_MASK = 0xFFFF_FFFF & ~_WHY_MASK

require(outcomes.OUTCOMES <= _WHY_MASK + 1, "every outcome fits a word of evicted keys")


class Evicted:
    """What became of keys that left, or were not let in; about the latest `keys_max` of them."""

    def __init__(self, keys_max: int = EVICTED_KEYS_MAX) -> None:
        # All of its memory at once: a lookup of many keys would wait for each page.
        self._words = array("I", bytes(4 * keys_max))

    def note(self, names: Iterable[int], why: int) -> None:
        """These blocks are gone. names: of `Namespace.names_of`; why: the outcome of a later lookup."""
        words, count = self._words, len(self._words)
        for name in names:
            words[name % count] = name >> _KEPT_SHIFT & _KEPT_MASK | why

    def whys(self, namespace: Namespace, hashes: Iterable[bytes]) -> list[int]:
        """What was noted of each of these keys last, 0 where nothing is remembered."""
        words, count, found = self._words, len(self._words), []
        for name in namespace.names_of(hashes):
            word = words[name % count]
            found.append(word & _WHY_MASK if word & _KEPT_MASK == name >> _KEPT_SHIFT & _KEPT_MASK else 0)
        return found
