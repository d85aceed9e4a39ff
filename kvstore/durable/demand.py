"""Demand: how often each prefix was asked for lately, and until when it was told to be worth keeping.

    name of a prefix ─▶ one of 2**n sets of 8 places ─▶ name │ count │ second of the last ask │ kept until

A table of a fixed size: a prefix that is not in its set yet takes the place of the one asked for longest ago.
Names are the same in every process, so the table outlives a restart; what is lost with a file that
cannot be read is experience only.

How a count goes on after a pause is the caller's rule (`kvstore.durable.worth`): it may decay, or begin anew.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator

import xxhash

# Prefixes that are counted, 16 bytes each, and how many share a set.
DEMAND_PLACES, DEMAND_SET_PLACES = (1 << 20, 8)

DEMAND_PART_BYTES = 64 << 10  # of a snapshot, copied at a time: a few microseconds

_MAGIC = b"KVDEMND1"
_HEAD = struct.Struct("<8sQ16s")
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads names that differ in few bits
_NAME_MASK = (1 << 64) - 1
_PLACE_BYTES = 20


class Demand:
    """Counts of prefixes by 64-bit names. count, kept_until_s: by place, as `asked` returns it; unix seconds, 0: not told."""

    def __init__(self, places: int = DEMAND_PLACES) -> None:
        sets = places // DEMAND_SET_PLACES
        assert sets and sets & (sets - 1) == 0, "a power of two"
        self.count = array("f", bytes(4 * places))
        self.kept_until_s = array("I", bytes(4 * places))
        self._shift = 64 - (sets - 1).bit_length()
        self._names = array("Q", bytes(8 * places))
        self._asked_s = array("I", bytes(4 * places))

    def asked(self, name: int, now_s: int, grown: Callable[[float, int], float]) -> int:
        """One more ask for a prefix: its place, which holds until the next ask for anything. grown: the count after a
        count and a pause in seconds."""
        start = self._set_of(name)
        try:
            at = self._names.index(name, start, start + DEMAND_SET_PLACES)
            self.count[at] = grown(self.count[at], now_s - self._asked_s[at])
        except ValueError:
            at = min(range(start, start + DEMAND_SET_PLACES), key=self._asked_s.__getitem__)
            self._names[at], self.count[at], self.kept_until_s[at] = name, 1.0, 0
        self._asked_s[at] = now_s
        return at

    def _set_of(self, name: int) -> int:
        return ((name * _MIX & _NAME_MASK) >> self._shift) * DEMAND_SET_PLACES if self._shift < 64 else 0

    def snapshot(self) -> bytes:
        """For `restore`."""
        parts = [content for _, content in self.parts()]
        return b"".join([parts[-1], *parts[:-1]])

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """A snapshot in small parts, each with where it begins; the head comes last. Prefixes that are asked for between two
        parts may be in it with the count of another one."""
        digest, at = xxhash.xxh3_128(), _HEAD.size
        for table in (self._names, self.count, self._asked_s, self.kept_until_s):
            with memoryview(table) as view, view.cast("B") as held:
                for start in range(0, len(held), DEMAND_PART_BYTES):
                    part = bytes(held[start : start + DEMAND_PART_BYTES])
                    digest.update(part)
                    yield at, part
                    at += len(part)
        yield 0, _HEAD.pack(_MAGIC, len(self._names), digest.digest())

    @property
    def snapshot_bytes(self) -> int:
        """The size of a snapshot."""
        return int(_HEAD.size + _PLACE_BYTES * len(self._names))

    def restore(self, content: bytes) -> bool:
        """Go on from a snapshot of a table of this size; False, and nothing changed, if it is none."""
        places = len(self._names)
        if len(content) != self.snapshot_bytes:
            return False
        magic, held, checksum = _HEAD.unpack_from(content)
        body = content[_HEAD.size :]
        if magic != _MAGIC or held != places or xxhash.xxh3_128_digest(body) != checksum:
            return False
        self._names = array("Q", body[: 8 * places])
        self.count = array("f", body[8 * places : 12 * places])
        self._asked_s = array("I", body[12 * places : 16 * places])
        self.kept_until_s = array("I", body[16 * places :])
        return True


def name_of(digest: bytes, block_hash: bytes) -> int:
    """The name of the prefix that ends with this block of a namespace."""
    return int.from_bytes(digest[:8], "little") ^ int.from_bytes(block_hash[-8:], "little") or 1
