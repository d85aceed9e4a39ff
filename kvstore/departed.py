"""Departed keys: why a block is not held any more, remembered compactly.

    key ──▶ 64-bit fingerprint ──▶ bucket of 4 words │ 56 bits of fingerprint │ 8 bits: why │

Tells "evicted" from "never seen" for the last million keys or so, at 8 bytes each: a table
of fixed size in which a newer key takes the place of an older one of its bucket. A wrong
answer needs two keys that agree in 56 bits; it would cost a wrong word in a report.
"""

from __future__ import annotations

import mmap

from kvstore.constants import DEPARTED_KEYS_MAX
from kvstore.namespaces import Namespace

WAYS = 4
_WHY = 0xFF
_ALL = (1 << 64) - 1
_NAME = _ALL - _WHY
_SPREAD = 0x9E3779B97F4A7C15  # odd, 2**64 over the golden ratio: hashes that are small numbers spread, too


class Departed:
    """What became of keys that left, or were not let in; the latest `keys_max` of them."""

    def __init__(self, keys_max: int = DEPARTED_KEYS_MAX) -> None:
        self._buckets = max(1, keys_max // WAYS)
        self._words = memoryview(mmap.mmap(-1, 8 * WAYS * self._buckets)).cast("Q")  # memory as it is used
        self._turn = 0

    def note(self, namespace: Namespace, block_hash: bytes, why: int) -> None:
        """The block is gone; `why` is the outcome of a later lookup (`kvstore.outcomes`)."""
        name = _name_of(namespace, block_hash)
        words = self._words
        at = (name >> 8) % self._buckets * WAYS
        for way in range(at, at + WAYS):
            if words[way] & _NAME == name:
                words[way] = name | why
                return
        self._turn += 1
        words[at + self._turn % WAYS] = name | why

    def why(self, namespace: Namespace, block_hash: bytes) -> int | None:
        """What was noted of this key last; None if nothing is remembered."""
        name = _name_of(namespace, block_hash)
        words = self._words
        at = (name >> 8) % self._buckets * WAYS
        for way in range(at, at + WAYS):
            word = words[way]
            if word & _NAME == name and word:
                return word & _WHY
        return None


def _name_of(namespace: Namespace, block_hash: bytes) -> int:
    mixed = int.from_bytes(block_hash[-8:], "little") ^ namespace.salt
    mixed = (mixed ^ mixed >> 32) * _SPREAD & _ALL
    return (mixed ^ mixed >> 32) & _NAME
