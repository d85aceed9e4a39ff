"""The slot table of an NVMe device: one file, one row per slot, found by the slot's number.

    slots.table   │ rows of slab 0 │ rows of slab 1 │ …          row number =
                  ╰ row 0, row 1, … (256 bytes each)             slab * rows_per_slab + position

    row   0        8      12         16         32    113      194       243
          │ hash   │ size │ stored_s │ checksum │ key │ parent │ columns │ spare … 256
                   ╰─────────────── covered by the hash ─────────────────╯

A row of zeros is no row. The hash is seeded with the row's number and the instance of the
directory: a torn row, a row copied elsewhere and a row of an earlier life are not believed.
A row does not cross a page, so `kill -9` leaves it old or new; a power cut may lose it.

Rows go through the page cache with pread and pwrite, and nothing is synced. Measured on ext4
(microseconds): a row read 0.8, or 72 where the page is not cached; a row written 6. With
O_DIRECT each costs 50 to 75, and a write would have to read and lock its 4 KiB first. A
mapping would be as fast, but a page fault on a file system that hangs stops the thread that
touches it. A trailer of 4 KiB behind each record would save the row, and cost 6 % of the disk at
64 KiB a record and one random read per record at the start: a million instead of 256 MiB
read in one go.

Every call blocks on the disk and raises OSError. Thread-safe.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX
from tiers.checksum import COLUMNS_BYTES_MAX
from tiers.constants import ROW_BYTES
from tiers.nvme.direct import DiskIO
from tiers.slots import SLAB_SLOTS_MAX

DEVICE_PIECE_ROWS: Final = 512  # rows read and checked at a time: what stays in the processor's cache

NAME = "slots.table"

_ROW = struct.Struct(f"<QII{CHECKSUM_BYTES}s{KEY_BYTES_MAX + 1}p{KEY_BYTES_MAX + 1}p{COLUMNS_BYTES_MAX + 1}p")
_BODY_AT = 8
_PADDING = bytes(ROW_BYTES - _ROW.size)
_ROWS = struct.Struct(f"{_ROW.format}{len(_PADDING)}x")
_BODIES = struct.Struct(
    f"{_BODY_AT}x{_ROW.size - _BODY_AT}s{len(_PADDING)}x"
)  # the same rows: what is hashed
_digest = xxhash.xxh3_64_intdigest


class Row(NamedTuple):
    """What the table says of one slot. The rest is as in `tiers.base.Record`."""

    slot: int
    key: bytes
    parent: bytes
    size_bytes: int
    checksum: bytes
    stored_s: int
    columns: bytes = b""


class Piece(NamedTuple):
    """Rows of neighbouring slots of one slab, a sequence for each field of Row: a million of them are read at a start,
    and a step for each takes twice as long as one for all."""

    slots: Sequence[int]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    sizes_bytes: Sequence[int]
    checksums: Sequence[bytes]
    stored_s: Sequence[int]
    columns: Sequence[bytes]

    def rows(self) -> list[Row]:
        return list(map(Row._make, zip(*self, strict=True)))

    def only(self, places: Sequence[int]) -> Piece:
        """The rows at these places, counted from 0."""
        return Piece._make([field[at] for at in places] for field in self)


class RowTable:
    """The open table of one directory."""

    def __init__(
        self, directory: Path, slab_count: int, rows_per_slab: int, instance: str, io: DiskIO
    ) -> None:
        """Opens the file, or makes it, with room for slab_count slabs; cuts off what lies beyond. Where `io` may change nothing, it is
        opened as it is."""
        self._rows_per_slab = rows_per_slab
        self._seed = _digest(instance.encode()) >> 1  # the sum with a row's number stays below 2**64
        self._io = io
        self._changing = threading.Lock()
        self._size_bytes = slab_count * rows_per_slab * ROW_BYTES
        self._fd = io.open(directory / NAME, os.O_RDWR | os.O_CREAT)
        try:
            if io.may_change:
                os.ftruncate(self._fd, self._size_bytes)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def is_in_place(self, directory: Path) -> bool:
        """Whether the file was not removed, replaced or cut off. Raises OSError."""
        mine = os.fstat(self._fd)
        return mine.st_size >= self._size_bytes and os.path.samestat(os.lstat(directory / NAME), mine)

    def back(self, slab: int) -> None:
        """Have the file system allocate the rows of a slab, so that a full disk cannot refuse one later."""
        size_bytes = self._rows_per_slab * ROW_BYTES
        self._io.fallocate(self._fd, size_bytes, slab * size_bytes)

    # -- single runs of neighbouring slots -----------------------------------------

    def read(self, run: range) -> list[Row | None]:
        """The rows of neighbouring slots of one slab; None where there is none."""
        found = {row.slot: row for row in self.scan(run)[0].rows()}
        return [found.get(slot) for slot in run]

    def write(self, rows: Sequence[Row]) -> None:
        """Write the rows of neighbouring slots of one slab, in ascending order, at once."""
        number, packed = self._packed(rows)
        with self._changing:
            self._store(number, packed)

    def restamp(self, keys: Mapping[int, bytes], stored_s: int) -> None:
        """Have the rows of these slots say that time, where they are of these keys still, and say an earlier one."""
        for run in runs(keys):
            with self._changing:
                for row in self.read(run):
                    if row is not None and row.key == keys[row.slot] and row.stored_s < stored_s:
                        self._store(*self._packed([row._replace(stored_s=stored_s)]))

    def _packed(self, rows: Sequence[Row]) -> tuple[int, bytearray]:
        """The number of the first one, and the bytes of all."""
        number = self._number(rows[0].slot)
        packed = bytearray()
        for at, (_, key, parent, size_bytes, checksum, stored_s, columns) in enumerate(rows):
            assert 0 < len(key) <= KEY_BYTES_MAX and len(parent) <= KEY_BYTES_MAX
            body = _ROW.pack(0, size_bytes, stored_s, checksum, key, parent, columns)[_BODY_AT:]
            packed += _digest(body, self._seed + number + at).to_bytes(_BODY_AT, "little") + body + _PADDING
        return number, packed

    def clear(self, run: range) -> None:
        """Forget the rows of neighbouring slots of one slab. Outlives kill -9."""
        with self._changing:
            self._store(self._number(run.start), bytes(len(run) * ROW_BYTES))

    def clear_rows(self, rows: Sequence[Row]) -> None:
        """Forget these rows, but for those whose slots were written again meanwhile."""
        known = {row.slot: row for row in rows}
        for run in runs(known):
            with self._changing:
                same = [row.slot for row in self.read(run) if row is not None and row == known[row.slot]]
                for part in runs(same):
                    self._store(self._number(part.start), bytes(len(part) * ROW_BYTES))

    # -- all of them ---------------------------------------------------------------

    def pieces(self) -> Iterator[range]:
        """The slots that may have rows, in runs of at most DEVICE_PIECE_ROWS of one slab, ascending.

        Holes of the file are skipped: of slabs cut into large slots only the first rows were ever written. Raises OSError.
        """
        for start, stop in self._extents():
            number = start // ROW_BYTES
            end = -(-stop // ROW_BYTES)
            while number < end:
                slab, position = divmod(number, self._rows_per_slab)
                count = min(end - number, self._rows_per_slab - position, DEVICE_PIECE_ROWS)
                first = slab * SLAB_SLOTS_MAX + position
                yield range(first, first + count)
                number += count

    def scan(self, run: range) -> tuple[Piece, int]:
        """The sound rows among neighbouring slots of one slab, and how many are neither sound nor empty."""
        raw = self._load(run.start, len(run))
        seed = self._seed + self._number(run.start)
        hashes = [_digest(body, seed + at) for at, (body,) in enumerate(_BODIES.iter_unpack(raw))]
        stored, sizes, times, checksums, keys, parents, columns = zip(*_ROWS.iter_unpack(raw), strict=True)
        piece = Piece(run, keys, parents, sizes, checksums, times, columns)
        if list(stored) == hashes and all(keys):
            return piece, 0
        sound = [at for at, key in enumerate(keys) if key and stored[at] == hashes[at]]
        empty = list(zip(stored, keys, sizes, strict=True)).count((0, b"", 0))
        return piece.only(sound), len(run) - empty - len(sound)

    def _extents(self) -> Iterator[tuple[int, int]]:
        stop = 0
        while True:
            try:
                start = os.lseek(self._fd, stop, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole from here to the end
                    return
                raise
            stop = os.lseek(self._fd, start, os.SEEK_HOLE)
            yield start, stop

    def _number(self, slot: int) -> int:
        slab, position = divmod(slot, SLAB_SLOTS_MAX)
        return slab * self._rows_per_slab + position

    def _load(self, slot: int, count: int) -> bytearray:
        """The bytes of so many rows; zeros where the file ends before."""
        raw = bytearray(count * ROW_BYTES)
        self._io.preadv(self._fd, [memoryview(raw)], self._number(slot) * ROW_BYTES)
        return raw

    def _store(self, number: int, packed: bytes | bytearray) -> None:
        written = self._io.pwritev(self._fd, [memoryview(packed)], number * ROW_BYTES)
        if written != len(packed):
            raise OSError(errno.EIO, f"wrote {written} of {len(packed)} bytes of rows")


def runs(slots: Iterable[int]) -> Iterator[range]:
    """Slots, in any order, as runs of neighbours of one slab, ascending."""
    start = stop = -1
    for slot in sorted(slots):
        if slot != stop or slot % SLAB_SLOTS_MAX == 0:
            if start >= 0:
                yield range(start, stop)
            start = slot
        stop = slot + 1
    if start >= 0:
        yield range(start, stop)
