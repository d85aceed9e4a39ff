"""The slot table: what the daemon knows about each slot of the arena.

    the table file                                         the data file: slabs only
    0        4 KiB             2 MiB aligned               0        slab_bytes
    │ header │ generations … │ row 0 │ row 1 │ … │         │ slab 0 │ slab 1 │ … │

    row, 256 bytes
    0       1   4           8          16         32         40     44    125      206       255
    │ state │ 0 │ time mark │ row hash │ checksum │ stored_s │ size │ key │ parent │ columns │ 0
                                                             ╰── covered by the row hash ────╯

Slot (slab, position) has number `slab * rows_per_slab + position`, where rows_per_slab is
the number of the smallest slots in a slab; row and generation are found by that number.
Rows that were never used are holes in the file.

Clients write into the data file and nowhere else. They map the generations read-only, to
see after a copy whether the slot was freed meanwhile. Nothing here is decided by what a
client can write.

Why a row may be believed after `kill -9` (stores of one process land in program order):

* taking: size, key, parent, columns and row hash are stored before the state becomes WRITING, and
  do not change until it is FREE again;
* committing: checksum and time are stored before the state becomes READY, with the mark of the time;
* giving back: the generation is raised before the state becomes FREE, so a reader that
  copied bytes out knows that they may have been replaced. A kill in between leaves a READY
  row whose bytes were not touched: it is adopted, under the new generation.

The state is one byte. The row hash is there for damage, not for kills; it is seeded with
the row's number, so that a row that was copied elsewhere is not believed. It does not cover
the checksum, which is compared with the bytes anyway, so that a commit hashes nothing. The time has a mark of its own, for a time
that is not true would be taken for the clock's, and end every TTL; it is 0 in rows of older programs.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, Record
from tiers.checksum import COLUMNS_BYTES_MAX
from tiers.constants import ARENA_HEADER_BYTES, GIB, ROW_BYTES, SLAB_ALIGN_BYTES, SLOT_BYTES_MIN
from tiers.sizes import exact_bytes
from tiers.slots import SLAB_SLOTS_MAX, SLOT_ALIGN_BYTES, neighbours

SLAB_BYTES_MAX: Final = 4 * GIB - SLAB_ALIGN_BYTES  # a record's size is stored in 32 bits
assert SLAB_BYTES_MAX < 1 << 32

FREE: Final = 0
WRITING: Final = 1
READY: Final = 2

# Positions inside a row, in words of 8 bytes and in bytes.
_STATE_WORD: Final = 0
_HASH_WORD: Final = 1
_CHECKSUM_WORD: Final = 2
_STORED_WORD: Final = 4
_BODY_AT: Final = 40
_BODY = struct.Struct(f"<I{KEY_BYTES_MAX + 1}p{KEY_BYTES_MAX + 1}p{COLUMNS_BYTES_MAX + 1}p")
_ROW = struct.Struct(f"<4xI8x{CHECKSUM_BYTES}sQ{_BODY.format[1:]}")
_SIZE = struct.Struct("<I")
_END: Final = _BODY_AT + _BODY.size
_USED = re.compile(rb"[^\x00]")
_MARK_FACTOR: Final = 0x9E3779B1  # odd: no two times have one mark
_MARK_MASK: Final = (1 << 32) - 1
_GENERATION_MASK: Final = (1 << 64) - 1

# (number of slots, offset of the first in the data file, of its generation in the table file) for each run of
# neighbours; and the generations of all, joined: u64, little endian.
Extents = tuple[list[tuple[int, int, int]], bytes]

assert _END <= ROW_BYTES and ROW_BYTES % 8 == 0 and CHECKSUM_BYTES == 16


@dataclass(slots=True, frozen=True)
class Layout:
    """Where things lie in an arena's files; all in bytes. Equal settings give equal layouts."""

    capacity_bytes: int  # also the size of the data file
    slab_bytes: int
    slot_bytes_min: int

    @classmethod
    def plan(cls, capacity_bytes: int, slab_bytes: int, slot_bytes_min: int = SLOT_BYTES_MIN) -> Layout:
        """The layout for these settings, whose ranges are those of the configuration; the capacity is rounded down to
        whole slabs."""
        assert 0 < slab_bytes <= SLAB_BYTES_MAX and slab_bytes % SLAB_ALIGN_BYTES == 0, (
            f"slabs of {slab_bytes}"
        )
        smallest = max(SLOT_ALIGN_BYTES, slab_bytes // SLAB_SLOTS_MAX)
        assert smallest <= slot_bytes_min <= slab_bytes, f"slots of {slot_bytes_min} in slabs of {slab_bytes}"
        assert slot_bytes_min % SLOT_ALIGN_BYTES == 0, f"slots of {slot_bytes_min}"
        assert capacity_bytes >= slab_bytes, f"{capacity_bytes} bytes in slabs of {slab_bytes}"
        return cls(capacity_bytes // slab_bytes * slab_bytes, slab_bytes, slot_bytes_min)

    @property
    def slab_count(self) -> int:
        return self.capacity_bytes // self.slab_bytes

    @property
    def rows_per_slab(self) -> int:
        return self.slab_bytes // self.slot_bytes_min

    @property
    def rows(self) -> int:
        return self.slab_count * self.rows_per_slab

    @property
    def settings(self) -> str:
        """In words, with units."""
        return (
            f"{exact_bytes(self.capacity_bytes)} in slabs of {exact_bytes(self.slab_bytes)}, "
            f"slots of at least {exact_bytes(self.slot_bytes_min)}"
        )

    @property
    def generations_end(self) -> int:
        """The part of the table file that clients map, read-only: header and generations."""
        return _aligned(ARENA_HEADER_BYTES + 8 * self.rows)

    @property
    def table_bytes(self) -> int:
        """The whole table file."""
        return self.generations_end + _aligned(ROW_BYTES * self.rows)

    @property
    def needed_bytes(self) -> int:
        """Memory for both files when every row is in use."""
        return self.capacity_bytes + self.table_bytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // SLAB_ALIGN_BYTES) * SLAB_ALIGN_BYTES


class SlotTable:
    """Reads and writes rows in place. Not thread-safe for one slot; different slots never meet."""

    def __init__(self, mapping: mmap.mmap, layout: Layout) -> None:
        self._map = mapping
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("Q")
        self._layout = layout
        self._rows_per_slab = layout.rows_per_slab
        self._rows_at = layout.generations_end
        self._generations = self._words[ARENA_HEADER_BYTES // 8 : layout.generations_end // 8]

    def row_range(self, slab: int, first: int, end: int) -> tuple[int, int]:
        """(file offset, bytes) of the pages of these rows of a slab: what must be backed before they are used."""
        start = self._row(slab << 16) + first * ROW_BYTES
        start -= start % mmap.PAGESIZE
        return start, self._row(slab << 16) + end * ROW_BYTES - start

    def state(self, slot: int) -> int:
        return self._map[self._row(slot)]

    def size_bytes(self, slot: int) -> int:
        size: int = _SIZE.unpack_from(self._map, self._row(slot) + _BODY_AT)[0]
        return size

    def generation(self, slot: int) -> int:
        return self._generations[self._number(slot)]

    def record(self, slot: int) -> Record:
        """The row as a record; its checksum and time mean something once the slot is READY. A damaged time is not known."""
        mark, checksum, stored_s, size, key, parent, columns = _ROW.unpack_from(self._map, self._row(slot))
        if mark and mark != _mark(stored_s):
            stored_s = 0
        return Record(key, parent, size, checksum, stored_s, columns)

    def extents(self, slots: Sequence[int], slot_bytes: Sequence[int]) -> Extents:
        """Runs of neighbours, and the generations of all.

        slot_bytes: how each slab is cut, by its number.
        """
        runs, generations = [], []
        for start, end in neighbours(slots):
            slab, position = slots[start] >> 16, slots[start] & 0xFFFF
            number, count = slab * self._rows_per_slab + position, end - start
            offset = slab * self._layout.slab_bytes + position * slot_bytes[slab]
            runs.append((count, offset, ARENA_HEADER_BYTES + 8 * number))
            generations.append(self._generations[number : number + count].tobytes())
        return runs, b"".join(generations)

    def begin(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        size_bytes: int,
        columns: bytes = b"",
    ) -> None:
        """FREE becomes WRITING. Slots beyond the keys, or keys beyond the slots, are left alone."""
        table, states, words = self._map, self._bytes, self._words
        rows_at, rows_per_slab = self._rows_at, self._rows_per_slab
        store, digest = _BODY.pack_into, xxhash.xxh64_intdigest
        for slot, key, parent in zip(slots, keys, parents, strict=False):
            row = rows_at + ((slot >> 16) * rows_per_slab + (slot & 0xFFFF)) * ROW_BYTES
            store(table, row + _BODY_AT, size_bytes, key, parent, columns)
            words[(row >> 3) + _HASH_WORD] = digest(states[row + _BODY_AT : row + _END], row)
            states[row] = WRITING

    def ready(self, slots: Sequence[int], checksums: bytes, stored_s: int) -> None:
        """WRITING becomes READY. checksums: joined, one after the other."""
        words = self._words
        rows_at, rows_per_slab = self._rows_at, self._rows_per_slab
        halves = memoryview(checksums).cast("Q")
        ready = READY | _mark(stored_s) << 32
        at = 0
        for slot in slots:
            row = rows_at + ((slot >> 16) * rows_per_slab + (slot & 0xFFFF)) * ROW_BYTES
            word = row >> 3
            words[word + _CHECKSUM_WORD] = halves[at]
            words[word + _CHECKSUM_WORD + 1] = halves[at + 1]
            words[word + _STORED_WORD] = stored_s
            words[word + _STATE_WORD] = ready
            at += 2

    def restamp(self, slots: Sequence[int], stored_s: int) -> None:
        """These READY rows say that time from now on. A kill in between leaves the one before or this one: without a mark
        either is believed."""
        words = self._words
        for slot in slots:
            word = self._row(slot) >> 3
            words[word + _STATE_WORD] = READY
            words[word + _STORED_WORD] = stored_s
            words[word + _STATE_WORD] = READY | _mark(stored_s) << 32

    def raise_generations(self, slots: Sequence[int]) -> None:
        """From now on the generation of these slots shows that they are not their leases' any more."""
        for slot in slots:
            number = self._number(slot)
            self._generations[number] = (self._generations[number] + 1) & _GENERATION_MASK

    def clear(self, slots: Sequence[int]) -> None:
        """Anything becomes FREE, with the next generation."""
        states, generations = self._bytes, self._generations
        rows_at, rows_per_slab = self._rows_at, self._rows_per_slab
        for slot in slots:
            number = (slot >> 16) * rows_per_slab + (slot & 0xFFFF)
            generations[number] = (generations[number] + 1) & _GENERATION_MASK
            states[rows_at + number * ROW_BYTES] = FREE

    def is_sound(self, slot: int) -> bool:
        """Whether the row hash matches, and the time of a READY row; not meaningful for a FREE row."""
        row, words = self._row(slot), self._words
        mark, is_ready = words[row >> 3] >> 32, self._map[row] == READY
        if is_ready and mark and mark != _mark(words[(row >> 3) + _STORED_WORD]):
            return False
        stored = words[(row >> 3) + _HASH_WORD]
        return stored == xxhash.xxh64_intdigest(self._bytes[row + _BODY_AT : row + _END], row)

    def used_slots(self, fd: int) -> Iterator[int]:
        """Every slot whose row is not FREE, in order. Reads only the parts of the table that exist.

        Not through the mapping: looking at a hole would fill it, or kill where there is no memory.
        """
        for slab in range(self._layout.slab_count):
            start, size_bytes = self._row(slab << 16), self._rows_per_slab * ROW_BYTES
            if not _has_data(fd, start, start + size_bytes):
                continue
            states = os.pread(fd, size_bytes, start)[::ROW_BYTES]
            yield from ((slab << 16) + match.start() for match in _USED.finditer(states))

    def close(self) -> None:
        """Release the views that keep the mapping alive."""
        self._generations.release()
        self._words.release()
        self._bytes.release()

    def _number(self, slot: int) -> int:
        return (slot >> 16) * self._rows_per_slab + (slot & 0xFFFF)

    def _row(self, slot: int) -> int:
        return self._rows_at + self._number(slot) * ROW_BYTES


def _mark(stored_s: int) -> int:
    """32 bits that follow from a time, not 0: another one for each time that differs in some bits."""
    return ((stored_s ^ stored_s >> 32) * _MARK_FACTOR + _MARK_FACTOR & _MARK_MASK) or 1


def _has_data(fd: int, start: int, stop: int) -> bool:
    """Whether any page of this file range was ever written."""
    try:
        return os.lseek(fd, start, os.SEEK_DATA) < stop
    except OSError:  # ENXIO: nothing but holes from here to the end
        return False
