"""The slot table: what the arena file says about each of its slots.

    0        4 KiB                                   2 MiB aligned
    │ header │ row 0 │ row 1 │ … │ row n-1 │ padding │ slab 0 │ slab 1 │ … │

    row, 256 bytes
    0      2       8           16           24     28      32         48    128      208
    │state │ owner │ row hash  │ generation │ size │ lengths │ checksum │ key │ parent │ spare │
                               ╰──────────────── covered by the row hash ─────────────╯

Slot (slab, position) has row `slab * rows_per_slab + position`, where rows_per_slab is
the number of the smallest slots in a slab. Rows that were never used are holes in the file.

Why a reader may trust a row after `kill -9` (stores of one process land in program order):

* taking: size, key and parent are stored before the state becomes WRITING, and do not
  change until it is FREE again; so the size of a WRITING row can be relied on;
* committing: checksum and row hash are stored before the state becomes READY; a READY row
  whose hash does not match is torn and is dropped;
* giving back: the generation is raised before the state becomes FREE. A kill in between
  leaves a READY row with a wrong hash: dropped too. So a generation is never used twice,
  and whoever copied bytes out can tell by it that they were replaced meanwhile.

The hash is seeded with the row number: a row that was copied elsewhere is not believed.
State and generation are stored with one machine instruction each (mmap item, 64-bit view).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from tiers.base import Record
from tiers.constants import (
    ARENA_HEADER_BYTES,
    ROW_BYTES,
    SLAB_ALIGN_BYTES,
    SLAB_BYTES_MAX,
    SLOT_BYTES_MIN,
)
from tiers.errors import OpenError
from tiers.slots import SLAB_SLOTS_MAX, SLOT_ALIGN_BYTES

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

_OWNER = struct.Struct("<H")
_OWNER_AT: Final = 2
_HASH = struct.Struct("<Q")
_HASH_AT: Final = 8
_GENERATION_AT: Final = 16
_BODY = struct.Struct("<IBB2x16s80s80s")
_BODY_AT: Final = 24
_SIZE = struct.Struct("<I")
_CHECKSUM = struct.Struct("16s")
_CHECKSUM_AT: Final = 32
_END: Final = _BODY_AT + _BODY.size
_NO_CHECKSUM: Final = bytes(16)
_USED = re.compile(rb"[^\x00]")
_GENERATION_MASK: Final = (1 << 64) - 1

assert _END <= ROW_BYTES and _CHECKSUM_AT == _BODY_AT + 8


@dataclass(slots=True, frozen=True)
class Layout:
    """Where things lie in an arena file; all in bytes. Equal settings give equal layouts."""

    capacity_bytes: int
    slab_bytes: int
    slot_bytes_min: int

    @classmethod
    def plan(cls, capacity_bytes: int, slab_bytes: int, slot_bytes_min: int = SLOT_BYTES_MIN) -> Layout:
        """The layout for these settings; the capacity is rounded down to whole slabs. Raises OpenError."""
        if slab_bytes % SLAB_ALIGN_BYTES or not 0 < slab_bytes <= SLAB_BYTES_MAX:
            raise OpenError(
                f"arena: slab_bytes is {slab_bytes}: "
                f"allowed are multiples of {SLAB_ALIGN_BYTES} up to {SLAB_BYTES_MAX}"
            )
        smallest = max(SLOT_ALIGN_BYTES, slab_bytes // SLAB_SLOTS_MAX)
        if slot_bytes_min % SLOT_ALIGN_BYTES or not smallest <= slot_bytes_min <= slab_bytes:
            raise OpenError(
                f"arena: slot_bytes_min is {slot_bytes_min}: "
                f"allowed are multiples of {SLOT_ALIGN_BYTES} from {smallest} to {slab_bytes}"
            )
        if capacity_bytes < slab_bytes:
            raise OpenError(
                f"arena: capacity_bytes is {capacity_bytes}: at least one slab of {slab_bytes} is needed"
            )
        return cls(capacity_bytes // slab_bytes * slab_bytes, slab_bytes, slot_bytes_min)

    @property
    def slab_count(self) -> int:
        return self.capacity_bytes // self.slab_bytes

    @property
    def rows_per_slab(self) -> int:
        return self.slab_bytes // self.slot_bytes_min

    @property
    def table_offset(self) -> int:
        return ARENA_HEADER_BYTES

    @property
    def data_offset(self) -> int:
        table_end = self.table_offset + self.slab_count * self.rows_per_slab * ROW_BYTES
        return -(-table_end // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.capacity_bytes


class SlotTable:
    """Reads and writes rows in place. Not thread-safe for one slot; different slots never meet."""

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        self._map = mapping
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("Q")
        self._layout = layout
        self._rows_per_slab = layout.rows_per_slab
        self._table_offset = layout.table_offset

    def row_offset(self, slot: int) -> int:
        """Absolute file offset of a slot's row."""
        slab, position = slot >> 16, slot & 0xFFFF
        return self._table_offset + (slab * self._rows_per_slab + position) * ROW_BYTES

    def generation_offset(self, slot: int) -> int:
        """Absolute file offset of a slot's generation: 64 bits, little endian, aligned."""
        return self.row_offset(slot) + _GENERATION_AT

    def state(self, slot: int) -> int:
        return self._map[self.row_offset(slot)]

    def owner(self, slot: int) -> int:
        owner: int = _OWNER.unpack_from(self._map, self.row_offset(slot) + _OWNER_AT)[0]
        return owner

    def size_bytes(self, slot: int) -> int:
        size: int = _SIZE.unpack_from(self._map, self.row_offset(slot) + _BODY_AT)[0]
        return size

    def generation(self, slot: int) -> int:
        return self.generation_at(self.generation_offset(slot))

    def generation_at(self, offset: int) -> int:
        """The generation whose file offset is known."""
        return self._words[offset >> 3]

    def checksum(self, slot: int) -> bytes:
        at = self.row_offset(slot) + _CHECKSUM_AT
        return self._map[at : at + 16]

    def record(self, slot: int) -> Record:
        """The row as a record; its checksum is all zero until the slot is READY."""
        size, key_bytes, parent_bytes, checksum, key, parent = _BODY.unpack_from(
            self._map, self.row_offset(slot) + _BODY_AT
        )
        return Record(key[:key_bytes], parent[:parent_bytes], size, checksum)

    def begin(self, slot: int, key: bytes, parent: bytes, size_bytes: int, owner: int) -> None:
        """FREE becomes WRITING."""
        row = self.row_offset(slot)
        _BODY.pack_into(
            self._map, row + _BODY_AT, size_bytes, len(key), len(parent), _NO_CHECKSUM, key, parent
        )
        _OWNER.pack_into(self._map, row + _OWNER_AT, owner)
        self._map[row] = WRITING

    def ready(self, slot: int, checksum: bytes) -> None:
        """WRITING becomes READY."""
        row = self.row_offset(slot)
        _CHECKSUM.pack_into(self._map, row + _CHECKSUM_AT, checksum)
        _HASH.pack_into(self._map, row + _HASH_AT, self._hash(row))
        self._map[row] = READY

    def clear(self, slot: int) -> None:
        """Anything becomes FREE, with the next generation."""
        row = self.row_offset(slot)
        word = (row + _GENERATION_AT) >> 3
        self._words[word] = (self._words[word] + 1) & _GENERATION_MASK
        self._map[row] = FREE

    def is_sound(self, slot: int) -> bool:
        """Whether the row hash matches; only meaningful for a READY row."""
        row = self.row_offset(slot)
        stored: int = _HASH.unpack_from(self._map, row + _HASH_AT)[0]
        return stored == self._hash(row)

    def used_slots(self, fd: int) -> Iterator[int]:
        """Every slot whose row is not FREE, in order. Reads only the parts of the table that exist."""
        for slab in range(self._layout.slab_count):
            start = self.row_offset(slab << 16)
            stop = start + self._rows_per_slab * ROW_BYTES
            if not _has_data(fd, start, stop):
                continue
            states = self._map[start:stop:ROW_BYTES]
            yield from ((slab << 16) + match.start() for match in _USED.finditer(states))

    def close(self) -> None:
        """Release the views that keep the mapping alive."""
        self._words.release()
        self._bytes.release()

    def _hash(self, row: int) -> int:
        return xxhash.xxh64_intdigest(self._map[row + _GENERATION_AT : row + _END], row)


def _has_data(fd: int, start: int, stop: int) -> bool:
    """Whether any page of this file range was ever written."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) < stop
    except OSError:  # ENXIO: nothing but holes from here to the end
        return False
