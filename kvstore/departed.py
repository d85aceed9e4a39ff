"""Departed keys: why a block is not held any more, remembered compactly.

    key ──▶ 56-bit name ──▶ bucket of 2 words, newest first │ 56 bits of name │ 8 bits: why │

Tells "evicted" from "never seen" for the last million keys or so, at 8 bytes each: a table
of fixed size in which a newer key takes the place of the older one of its bucket. A wrong
answer needs two keys with the same name; it would cost a wrong word in a report. Larger
buckets would forget a little later, and cost more: this is told of every block that leaves.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvstore.constants import DEPARTED_KEYS_MAX
from kvstore.namespaces import Namespace

WAYS = 2


class Departed:
    """What became of keys that left, or were not let in; the latest `keys_max` of them."""

    def __init__(self, keys_max: int = DEPARTED_KEYS_MAX) -> None:
        self._buckets = max(1, keys_max // WAYS)
        self._words = memoryview(mmap.mmap(-1, 8 * WAYS * self._buckets)).cast("Q")  # memory as it is used

    def note(self, namespace: Namespace, hashes: Iterable[bytes], why: int) -> None:
        """These blocks are gone; `why` is the outcome of a later lookup (`kvstore.outcomes`)."""
        words, buckets = self._words, self._buckets
        for name in namespace.names_of(hashes):
            at = name % buckets * WAYS
            latest = words[at]
            if latest >> 8 != name:
                words[at + 1] = latest
            words[at] = name << 8 | why

    def why(self, namespace: Namespace, block_hash: bytes) -> int | None:
        """What was noted of this key last; None if nothing is remembered."""
        name = namespace.names_of((block_hash,))[0]
        at = name % self._buckets * WAYS
        for word in self._words[at : at + WAYS]:
            if word >> 8 == name and word:
                return word & 0xFF
        return None
