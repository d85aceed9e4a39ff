"""One NVMe device: a directory on a disk that holds records in numbered slots.

    index: block ──▶ slot ─┬─▶ slots.table   row: key, size, checksum     who lies there
                           └─▶ slab file     the record's bytes

The caller knows each block's slot (its index holds it), so a device needs no map of keys: a
record costs no memory here but its flag in the pool.

    write   pwritev bytes ──▶ row           the row comes last
    read    row names the key? ──▶ preadv ──▶ the row's checksum matches?
    evict   pool.give                       no I/O: the row stays until the slot is used again

So a row may name a record that was evicted, even one whose bytes are overwritten already; at
the next start it is found again, and is either true or caught by its checksum. What must not
come back is cleared, rows of slots that are free included (`rows_of`, `clear_rows`).

Threads. The engine's thread has the pool: it takes and gives slots, and never waits for the
disk. Everything else blocks, and runs in the I/O threads of this device alone; it may hang
as long as the disk does. No lock here is ever waited for by the engine or another device.

Slots. A slab is cut for one size class. It is taken over by another only after its rows are
cleared, so all rows of a slab are of one class. The pool hands out slots of slabs that the
file system has backed; some are backed ahead of need, so a full disk means that the pool
stays as it is. A slot is given back only when no read or write of it is under way.

Errors never raise for one record. `open` raises an OpenError, and may be called again.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from tiers import checksum
from tiers.base import NAMESPACE_BYTES, Get, Put, Record, TierStats
from tiers.constants import ROW_BYTES, SLAB_BYTES, SLOT_BYTES_MIN
from tiers.errors import DamagedError, OpenError
from tiers.nvme.device_home import Home, marker_of_ours
from tiers.nvme.device_slabs import Slabs
from tiers.nvme.device_table import NAME as TABLE
from tiers.nvme.device_table import Piece, Row, RowTable, runs
from tiers.nvme.direct import Direct, DiskIO
from tiers.slots import SLAB_SLOTS_MAX, SLOT_ALIGN_BYTES, SlotPool, slot_bytes_for

NVME_RETRY_S: Final = 10.0  # pause before asking a full or failing medium again
DEVICE_SPARE_SLABS: Final = 32  # backed ahead of need: more than all writes under way can use up
DEVICE_ASIDE_MAX: Final = 64  # slots left alone because a write failed; then the oldest is tried again

__all__ = ["Device", "DeviceCounters", "Row"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class DeviceCounters:
    """What went wrong since the device was opened."""

    corrupt: int = 0  # records whose bytes were not what was written; dropped
    rows_damaged: int = 0  # rows that were neither empty nor sound; dropped
    rows_lost: int = 0  # rows whose slab file was gone or cut, or cut for another class; dropped
    io_errors: int = 0  # reads and writes that the disk refused
    allocate_failures: int = 0  # slabs the file system had no room for


class Memory(Protocol):
    """Who remembers which disk is which. Called in the device's thread."""

    def recognise(self, path: Path) -> tuple[str, str]:
        """Before anything is opened: who the directory is to be where it does not say so itself, "" for a new one; and of which one it
        is a copy, so that what it says is not true, "" for none. Raises an OpenError where it is not what is meant."""

    def opened(self, path: Path, disk: str) -> None:
        """It is open, and is this one. Raises nothing."""


class Device:
    """Records in one directory. Outlives its process; what kill -9 interrupts is a miss, nothing else.

    capacity_bytes covers slabs and table (ROW_BYTES for each smallest slot); `stats().capacity_bytes`
    is that of the slabs alone.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        slab_bytes: int = SLAB_BYTES,
        direct: Direct = "auto",
        *,
        slot_bytes_min: int = SLOT_BYTES_MIN,
        io: DiskIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: Memory | None = None,
    ) -> None:
        """Does not touch the disk. The ranges of sizes are those of the configuration. With a LookingIO nothing on it is changed, and
        damage is only counted."""
        assert 0 < slot_bytes_min <= slab_bytes <= SLAB_SLOTS_MAX * SLOT_ALIGN_BYTES, f"slabs of {slab_bytes}"
        assert (slot_bytes_min | slab_bytes) % SLOT_ALIGN_BYTES == 0, f"slots of {slot_bytes_min}"
        self.path = path
        self.slab_bytes = slab_bytes
        self.slab_count = slab_count_for(capacity_bytes, slab_bytes, slot_bytes_min)
        assert self.slab_count, f"{capacity_bytes} bytes in slabs of {slab_bytes}"
        self.slot_bytes_min = slot_bytes_min
        self.ready = False  # slots are known and may be taken; set once `scan` is through
        self.counters = DeviceCounters()
        self._direct = direct
        self._io = io or DiskIO()
        self._clock = clock
        self._memory = memory
        self._pool = SlotPool(self.slab_count, slab_bytes, absent=range(self.slab_count))
        self._added: deque[int] = deque()  # slabs backed since; on their way to the pool
        self._aside: deque[int] = deque()  # slots to leave alone for a while
        self._unbacked: list[int] = []  # slabs still to be backed, the next one last
        self._cut: dict[int, int] = {}  # slab -> size class of its rows
        self._cutting = threading.Lock()
        self._growing = threading.Lock()
        self._grow_at = 0.0  # after a refusal: not before this time
        self._is_full = False  # warned; the file system has no room for another slab
        self._counting = threading.Lock()  # held for nothing but counting
        self._warn_at = 0.0
        self._home: Home | None = None

    # -- the engine's thread: never waits ------------------------------------------

    @property
    def pool(self) -> SlotPool:
        """The slots. Nothing is free before `ready`; sizes are those of `slot_bytes`."""
        while self._added:
            self._pool.add_slab(self._added.popleft())
        return self._pool

    def slot_bytes(self, size_bytes: int) -> int:
        """The size class of a record."""
        return slot_bytes_for(max(size_bytes, self.slot_bytes_min))

    def set_aside(self, slot: int) -> None:
        """Give back a slot whose write was not STORED, but not soon: it may lie on bad sectors."""
        self._aside.append(slot)
        if len(self._aside) > DEVICE_ASIDE_MAX:
            self._pool.give(self._aside.popleft())

    @property
    def aside(self) -> int:
        """Slots that are left alone for a while; they count as used."""
        return len(self._aside)

    def stats(self) -> TierStats:
        """Counts and bytes of the slots in use, now."""
        classes = self._pool.classes()
        used_bytes = sum(each.slot_bytes * each.used for each in classes)
        records = sum(each.used for each in classes) - len(self._aside)
        return TierStats("nvme", self.slab_count * self.slab_bytes, used_bytes, records, classes)

    # -- the device's I/O threads: opening -----------------------------------------

    def open(self) -> None:
        """Claim the directory and open its files; then `scan`. Raises an OpenError, and leaves nothing open."""
        memory = self._memory
        disk, original = memory.recognise(self.path) if memory is not None else ("", "")
        may_change = self._io.may_change
        home = Home(self.path, self.slab_bytes, self.slot_bytes_min, disk, original, may_change)
        try:
            self._slabs = Slabs(self.path, self.slab_count, self.slab_bytes, self._io, self._direct)
            rows_per_slab = self.slab_bytes // self.slot_bytes_min
            self._table = RowTable(self.path, self.slab_count, rows_per_slab, home.marker.instance, self._io)
        except OSError as error:
            home.release()
            raise OpenError(f"nvme directory {self.path}: {error.strerror or error}") from error
        except BaseException:
            home.release()
            raise
        self._home = home
        if memory is not None:
            memory.opened(self.path, home.marker.disk)

    def scan(self) -> Iterator[Piece]:
        """Every sound row, in pieces of one slab; `ready` when it is through. Once after `open`, not again.

        Each slot found is in use. Two rows may have one key: the caller keeps one and gives the
        other slot back, as all that it does not want, but not before `ready`.
        """
        pool = SlotPool(
            self.slab_count, self.slab_bytes, absent=set(range(self.slab_count)) - self._slabs.backed
        )
        for run in self._table.pieces():
            try:
                piece, damaged = self._table.scan(run)
            except OSError as error:
                self._count_error("reading rows", error)
                continue
            if damaged:
                self.counters.rows_damaged += damaged
                self.clear(sorted(set(run).difference(piece.slots)))
            piece = self._fitting(piece)
            if piece.slots:
                pool.mark_run(piece.slots, self._cut[run.start // SLAB_SLOTS_MAX])
                yield piece
        pool.settle()
        if self.counters.rows_damaged or self.counters.rows_lost:
            text = "nvme directory %s: dropped %d damaged rows and %d whose bytes are gone"
            _log.warning(text, self.path, self.counters.rows_damaged, self.counters.rows_lost)
        self._unbacked = sorted(pool.absent, reverse=True)
        self._pool = pool
        self.ready = True
        self.grow()

    def _fitting(self, piece: Piece) -> Piece:
        """Those rows of one slab that fit the class of its first one and have bytes in its file.

        All others, which a power cut or a change by hand may leave, are cleared.
        """
        if not piece.slots:
            return piece
        slab = piece.slots[0] // SLAB_SLOTS_MAX
        slot_bytes = self._cut.setdefault(slab, self.slot_bytes(piece.sizes_bytes[0]))
        have_bytes = self.slab_bytes if slab in self._slabs.backed else self._slabs.short.get(slab, 0)
        classes = {size_bytes: self.slot_bytes(size_bytes) for size_bytes in set(piece.sizes_bytes)}
        end = piece.slots[-1] % SLAB_SLOTS_MAX * slot_bytes + max(classes)
        if set(classes.values()) == {slot_bytes} and end <= have_bytes:
            return piece
        fitting = piece.only(
            [
                at
                for at, (slot, size_bytes) in enumerate(zip(piece.slots, piece.sizes_bytes, strict=True))
                if classes[size_bytes] == slot_bytes
                and slot % SLAB_SLOTS_MAX * slot_bytes + size_bytes <= have_bytes
            ]
        )
        lost = set(piece.slots).difference(fitting.slots)
        self.clear(sorted(lost))
        self.counters.rows_lost += len(lost)
        return fitting

    # -- the device's I/O threads: records -----------------------------------------

    def write(self, items: Sequence[tuple[int, Record, memoryview]]) -> list[Put]:
        """Write (slot, record, bytes): all bytes, then the rows. One answer per item, in order.

        The slots were taken from the pool for the records' class. NO_ROOM: the slab lost its
        blocks, and the disk is full. After anything but STORED the slot holds nothing.
        """
        answers = [self._write(*item) for item in items]
        rows = {
            slot: Row(slot, r.key, r.parent, r.size_bytes, r.checksum, r.stored_s, r.columns)
            for (slot, r, _view), answer in zip(items, answers, strict=True)
            if answer is Put.STORED
        }
        failed: set[int] = set()
        for run in runs(rows):
            try:
                self._table.write([rows[slot] for slot in run])
            except OSError as error:
                self._count_error("writing rows", error)
                failed.update(run)
        self.grow()
        return [
            Put.FAILED if item[0] in failed else answer for item, answer in zip(items, answers, strict=True)
        ]

    def read(self, items: Sequence[tuple[int, bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        """Read (slot, key, destination), verified; (HIT, checksum) or what else happened and b"".

        MISS: the slot holds another record, another size or none. CORRUPT: the bytes are not
        those of the row, which is dropped. After anything but HIT the destination is undefined.
        """
        return [(answer, row.checksum if row is not None else b"") for answer, row in self.read_rows(items)]

    def read_rows(self, items: Sequence[tuple[int, bytes, memoryview]]) -> list[tuple[Get, Row | None]]:
        """As `read`, with the row of each HIT."""
        rows = self._rows([slot for slot, _key, _view in items])
        answers: list[tuple[Get, Row | None]] = []
        for slot, key, view in items:
            row = rows.get(slot, Get.FAILED)
            answer = row if isinstance(row, Get) else self._read(row, key, view)
            answers.append((answer, row if answer is Get.HIT and isinstance(row, Row) else None))
        return answers

    def rows(self, slots: Sequence[int]) -> list[Row | None]:
        """Who lies in these slots, as far as the table can be read; for taking over a slab."""
        found = self._rows(slots)
        return [found.get(slot) for slot in slots]

    def clear(self, slots: Sequence[int]) -> bool:
        """Forget these rows for good, kill -9 or not; False where the disk refused some of them."""
        is_done = True
        for run in runs(slots) if self._io.may_change else ():
            try:
                self._table.clear(run)
            except OSError as error:
                self._count_error("clearing rows", error)
                is_done = False
        return is_done

    def rows_of(self, is_meant: Callable[[bytes], bool]) -> Iterator[list[Row]]:
        """All rows of some namespaces, of slots that are free as well, in pieces that may be empty. is_meant: whether a namespace
        is one of them. Raises OSError."""
        for run in self._table.pieces():
            piece = self._table.scan(run)[0]
            yield piece.only(
                [at for at, key in enumerate(piece.keys) if is_meant(key[:NAMESPACE_BYTES])]
            ).rows()

    def clear_rows(self, rows: Sequence[Row]) -> bool:
        """As `clear`, but for slots that were written again since these rows were read."""
        try:
            self._table.clear_rows(rows)
        except OSError as error:
            self._count_error("clearing rows", error)
            return False
        return True

    def restamp(self, keys: Mapping[int, bytes], stored_s: int) -> None:
        """These records, by slot, were stored then, where they are there still."""
        try:
            self._table.restamp(keys, stored_s)
        except OSError as error:
            self._count_error("writing rows", error)

    def check(self) -> list[str]:
        """One line per violation. Blocks; only while nothing else is under way."""
        problems = self.pool.check() + self._slabs.check()
        for piece in self._table.pieces():
            for row in self._table.scan(piece)[0].rows():
                slab = row.slot // SLAB_SLOTS_MAX
                if self.slot_bytes(row.size_bytes) != self._cut.get(slab):
                    problems.append(
                        f"nvme {self.path}: the row of {row.key.hex()} is of another class than its slab"
                    )
        return problems

    def close(self) -> None:
        """Let go of files and directory. Idempotent; only while nothing else is under way."""
        if self._home is not None:
            self.ready = False
            self._table.close()
            self._slabs.close()
            self._home.release()
            self._home = None

    @property
    def instance(self) -> str:
        """Identity of what is stored here: a new one after each cold start. "" while not open."""
        return self._home.marker.instance if self._home is not None else ""

    @property
    def disk(self) -> str:
        """Who the directory is, for as long as it lives. "" while not open."""
        return self._home.marker.disk if self._home is not None else ""

    def is_in_place(self) -> bool:
        """Whether the directory that was opened, and what it needs, still lies at its path; True while not open. Blocks on the
        disk. Raises OSError."""
        if self._home is None:
            return True
        try:
            is_ours = self._home.is_in_place(self.path) and self._table.is_in_place(self.path)
            return is_ours and self._slabs.are_in_place()
        except FileNotFoundError:
            return False

    @property
    def unbacked_bytes(self) -> int:
        """Of its capacity, what the file system was not asked for yet, or had no room for; only once `ready`."""
        return len(self._unbacked) * self.slab_bytes

    @property
    def is_full(self) -> bool:
        """The file system had no room for the next slab when it was asked last."""
        return self._is_full and bool(self._unbacked)

    @property
    def direct(self) -> bool:
        """Whether records bypass the page cache; only once open."""
        return self._slabs.direct

    # -- one record ------------------------------------------------------------------

    def _write(self, slot: int, record: Record, view: memoryview) -> Put:
        slab, position = divmod(slot, SLAB_SLOTS_MAX)
        slot_bytes = self.slot_bytes(record.size_bytes)
        try:
            if self._cut.get(slab) != slot_bytes or slab not in self._slabs.backed:
                self._cut_slab(slab, slot_bytes)
            self._slabs.write(slab, position * slot_bytes, view)
        except OSError as error:
            self._count_error("writing a record", error)
            return Put.NO_ROOM if error.errno == errno.ENOSPC else Put.FAILED
        return Put.STORED

    def _cut_slab(self, slab: int, slot_bytes: int) -> None:
        """Make a slab ready for records of a class: backed, and without rows of another one. Raises OSError."""
        with self._cutting:
            if slab not in self._slabs.backed:
                self._slabs.back(slab)
                self._table.back(slab)
            before = self._cut.get(slab, slot_bytes)
            if before != slot_bytes:
                first = slab * SLAB_SLOTS_MAX
                self._table.clear(range(first, first + self.slab_bytes // before))
            self._cut[slab] = slot_bytes

    def _rows(self, slots: Sequence[int]) -> dict[int, Row | None]:
        """The rows of these slots; those that cannot be read are missing."""
        found: dict[int, Row | None] = {}
        for run in runs(slots):
            try:
                found.update(zip(run, self._table.read(run), strict=True))
            except OSError as error:
                self._count_error("reading rows", error)
        return found

    def _read(self, row: Row | None, key: bytes, view: memoryview) -> Get:
        if row is None or row.key != key or row.size_bytes != len(view):
            return Get.MISS
        slab, position = divmod(row.slot, SLAB_SLOTS_MAX)
        try:
            if self._slabs.read(slab, position * self.slot_bytes(row.size_bytes), view):
                if checksum.digest(view, row.columns) == row.checksum:
                    return Get.HIT
            self._drop(row)
        except OSError as error:
            self._count_error("reading a record", error)
            return Get.FAILED
        return Get.CORRUPT

    def _drop(self, row: Row) -> None:
        """Forget a row that lies, unless the slot was written again meanwhile. Raises OSError."""
        with self._counting:
            self.counters.corrupt += 1
        self._warn(f"record {row.key.hex()} is corrupt: dropped")
        if self._io.may_change:
            self._table.clear_rows([row])

    # -- room ------------------------------------------------------------------------

    @property
    def has_growth_due(self) -> bool:
        """Whether `grow` has work now."""
        spare = self._pool.uncut - len(self._unbacked)
        is_wanted = bool(self._unbacked) and self._io.may_change
        return is_wanted and spare < DEVICE_SPARE_SLABS and self._clock() >= self._grow_at

    def grow(self) -> None:
        """Back slabs ahead of need, so that a slot that is handed out has its bytes on the disk."""
        if not self._growing.acquire(blocking=False):
            return  # another thread is at it
        try:
            while self.has_growth_due and self._back(self._unbacked[-1]):
                self._added.append(self._unbacked.pop())
        finally:
            self._growing.release()

    def _back(self, slab: int) -> bool:
        try:
            self._slabs.back(slab)
            self._table.back(slab)
        except OSError as error:
            self._grow_at = self._clock() + NVME_RETRY_S
            with self._counting:
                self.counters.allocate_failures += 1
            if not self._is_full:
                self._is_full = True
                text = "nvme directory %s: no room for another slab, what is new takes the place of what is old: %s"
                _log.warning(text, self.path, error.strerror or error)
            return False
        self._is_full = False
        return True

    def _count_error(self, doing: str, error: OSError) -> None:
        with self._counting:
            self.counters.io_errors += 1
        self._warn(f"{doing} failed: {error.strerror or error}")

    def _warn(self, text: str) -> None:
        """Log a line, but not one for each record of a sick disk."""
        with self._counting:
            is_due = self._clock() >= self._warn_at
            if is_due:
                self._warn_at = self._clock() + NVME_RETRY_S
        if is_due:
            _log.warning("nvme directory %s: %s", self.path, text)


def device_as_made(
    path: Path, direct: Direct, io: DiskIO | None = None, memory: Memory | None = None
) -> Device:
    """That of a directory as it was made, whatever the settings say now. Blocks on the disk. Raises OpenError, OSError."""
    made = marker_of_ours(path)
    rows_per_slab = made.slab_bytes // made.slot_bytes_min if made.slot_bytes_min > 0 else 0
    is_possible = 0 < made.slab_bytes <= SLAB_SLOTS_MAX * SLOT_ALIGN_BYTES and rows_per_slab > 0
    if not is_possible or (made.slab_bytes | made.slot_bytes_min) % SLOT_ALIGN_BYTES:
        raise DamagedError(
            f"nvme directory {path}: its marker says slabs of {made.slab_bytes}, slots of {made.slot_bytes_min}"
        )
    slabs = max(1, os.stat(path / TABLE).st_size // (rows_per_slab * ROW_BYTES))
    capacity_bytes = capacity_for(slabs, made.slab_bytes, made.slot_bytes_min)
    return Device(
        path,
        capacity_bytes,
        made.slab_bytes,
        direct,
        slot_bytes_min=made.slot_bytes_min,
        io=io,
        memory=memory,
    )


def slab_count_for(capacity_bytes: int, slab_bytes: int, slot_bytes_min: int = SLOT_BYTES_MIN) -> int:
    """How many slabs fit a capacity, each with its part of the table."""
    return capacity_bytes // (slab_bytes + slab_bytes // slot_bytes_min * ROW_BYTES)


def capacity_for(slabs: int, slab_bytes: int, slot_bytes_min: int = SLOT_BYTES_MIN) -> int:
    """The least capacity_bytes that gives a device so many slabs."""
    return slabs * (slab_bytes + slab_bytes // slot_bytes_min * ROW_BYTES)
