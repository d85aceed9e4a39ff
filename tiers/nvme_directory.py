"""One NVMe directory: rows that say where records lie, and slabs that hold their bytes.

    put    reserve a slot ──▶ pwritev ──▶ row          the row comes last: no row, no record
    get    row, pin ──▶ preadv ──▶ checksum, unpin
    drop   row deleted ──▶ slot free                   the row goes first: no row ever points
                                                       to a slot that holds another key
A slot is in exactly one of these states:

    free · writing (reserved, no row yet) · held (one row) · zombie (row gone, still being
    read) · sidelined (a write to it failed; tried again after NVME_RETRY_S)

so used slots = rows + writing + zombies + sidelined; `check` proves it. Free slots are
found by reading the rows once, in the first full pass of `sound_rows`; whatever needs a free
slot before that makes the pass itself. No key is kept in memory.

One lock guards slots and changes of rows, never the moving of bytes. A disk that hangs can
hold it for long, so what an event loop asks waits for nobody: `stats` answers what was true
when the lock was last let go, `rows_of` and `holds` read rows without it, `reclaim` gives up.
Pins make sure that a slot is not written again while somebody reads it, so a checksum that
differs is always damage.

Failures. No room on the file system: the directory behaves as full, warns once, and asks
again after NVME_RETRY_S. A failed row write: what was being stored is not stored, what was
being deleted stays; the database is reopened and read again after NVME_RETRY_S, for RocksDB
never writes again after one failure. Until both worked every put fails, every delete raises,
and gets are answered where rows can be read. Rejected: freeing a slot whose row could not be
deleted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiers import checksum
from tiers.base import Get, Put, Record, SizeClass
from tiers.constants import (
    NVME_REOPEN_BYTES,
    NVME_RETRY_S,
    NVME_ROW_BYTES_EST,
    NVME_SCAN_ROWS,
    NVME_SIDELINED_MAX,
)
from tiers.direct import Direct, DiskIO
from tiers.errors import OpenError, RecordSizeError, TierError
from tiers.nvme_census import Census, Sound, sound
from tiers.nvme_home import Home
from tiers.nvme_slabs import SlabFiles
from tiers.rows import HEAD, Row, Rows, RowsError, unpack
from tiers.slots import SLAB_SLOTS_MAX, SlotPool, slot_bytes_for

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class NvmeCounters:
    """What went wrong since the directory was opened."""

    corrupt: int = 0  # records whose bytes were not what was put; dropped
    rows_damaged: int = 0  # rows that made no sense; dropped
    rows_lost: int = 0  # rows whose slab file was gone or cut; dropped
    io_errors: int = 0  # reads, writes and row changes that the medium refused
    allocate_failures: int = 0  # slabs the file system had no room for


def slab_count_for(capacity_bytes: int, slab_bytes: int, slot_bytes_min: int) -> int:
    """How many slabs fit a capacity, each with the disk space of its rows."""
    return capacity_bytes // (slab_bytes + slab_bytes // slot_bytes_min * NVME_ROW_BYTES_EST)


class NvmeDirectory:
    """Records in one directory. Thread-safe. Raises an OpenError when it cannot be opened."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        slab_bytes: int,
        slot_bytes_min: int,
        io: DiskIO,
        clock: Callable[[], float] = time.monotonic,
        direct: Direct = "auto",
    ) -> None:
        self.path = path
        self.slab_count = slab_count_for(capacity_bytes, slab_bytes, slot_bytes_min)
        self.slab_bytes = slab_bytes
        self.counters = NvmeCounters()
        self._slot_bytes_min = slot_bytes_min
        self._io = io
        self._clock = clock
        self._lock = threading.RLock()
        self._slots = SlotPool(self.slab_count, slab_bytes)
        self._used_bytes = 0
        self._records = 0
        self._writing: dict[int, int] = {}  # slot -> size
        self._pins: Counter[int] = Counter()  # slot -> readers
        self._zombies: dict[int, int] = {}  # slot -> size
        self._sidelined: deque[tuple[float, int, int]] = deque()  # until, slot, size
        self._allocate_at = 0.0  # after a refusal: not before this time
        self._is_full = False  # warned; the file system has no room for another slab
        self._reopen_at: float | None = None  # rows are broken: reopen at this time
        self._warn_at = 0.0
        self._is_closed = False
        self._restored = False
        self._early: dict[int, Row] = {}  # slot -> row dropped before the slots were known
        self._counting = threading.Lock()  # of errors; held for nothing else
        self._home = Home(path, slab_bytes, slot_bytes_min)
        try:
            self._files = SlabFiles(path, self.slab_count, slab_bytes, io, direct)
            self._rows: Rows | None = self._open_rows()
        except OSError as error:
            self._home.release()
            raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error
        except BaseException:
            self._home.release()
            raise
        self._shown = self._count()

    # -- what is held ------------------------------------------------------------

    def sound_rows(self) -> Iterator[list[Sound]]:
        """Every row held, in chunks and in key order; the first full pass finds the free slots.

        Blocks for a few milliseconds a chunk. Raises OpenError for damaged rows. May be left
        before its end: no lock and no part of the database is held in between.
        """
        with self._lock:
            census = None if self._restored else self._new_census()
        for chunk in self._chunks():
            yield census.take(chunk) if census is not None else sound(chunk)
        if census is not None:
            with self._changing():
                if not self._restored:
                    self._install(census)

    def rows_of(self, keys: Sequence[bytes]) -> list[tuple[bytes, Row]]:
        """The rows held under these keys. Waits for no change that is under way."""
        return [(key, row) for key in keys if (row := self._row(key)) is not None]

    def holds(self, key: bytes) -> bool:
        return self._row(key) is not None

    def _chunks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """All rows, as they are. Raises OpenError. The lock is held for one chunk at a time."""
        after: bytes | None = None
        while True:
            with self._lock:
                if self._rows is None:
                    raise OpenError(f"nvme directory {self.path}: its rows are closed")
                chunk = self._rows.chunk(after, NVME_SCAN_ROWS)
            yield chunk
            if len(chunk) < NVME_SCAN_ROWS:
                break
            after = chunk[-1][0]

    # -- storing -----------------------------------------------------------------

    def free_for(self, size_bytes: int) -> tuple[bool, int]:
        """(whether a put of this size would find a slot, bytes not in use); for placement.

        (False, -1) while nothing can be stored. Blocks on the medium.
        """
        with self._changing():
            if not self._is_ready():
                return False, -1
            self._return_sidelined()
            return self._has_room(size_bytes), self.capacity_bytes - self._used_bytes

    def reserve(self, key: bytes, size_bytes: int) -> int | Put:
        """A slot to write a record into, or NO_ROOM, or FAILED while rows cannot be written.

        Every slot must come back through `store`. Where only the slot that `key` itself
        holds is left, the old record is dropped for it. Raises RecordSizeError.
        """
        with self._changing():
            if not self._is_ready():
                return Put.FAILED
            self._return_sidelined()
            slot = self._take(size_bytes)
            if slot is None:
                old = self._row(key)
                if (
                    old is None
                    or self._class_of(old.size_bytes) != self._class_of(size_bytes)
                    or old.slot in self._pins
                ):
                    return Put.NO_ROOM
                if not self._drop({key: old}):
                    return Put.FAILED
                slot = self._take(size_bytes)
                if slot is None:
                    return Put.NO_ROOM
            self._writing[slot] = size_bytes
            return slot

    def store(self, items: Sequence[tuple[Record, memoryview, int]]) -> list[Put]:
        """Write records into their reserved slots, then their rows. Blocks on the medium."""
        written = [self._write(record, view, slot) for record, view, slot in items]
        with self._changing():
            rows: dict[bytes, Row] = {}
            displaced: list[Row] = []
            for (record, _view, slot), is_written in zip(items, written, strict=True):
                if is_written:
                    old = rows.get(record.key) or self._row(record.key)
                    if old is not None:
                        displaced.append(old)
                    rows[record.key] = Row(slot, record.size_bytes, record.checksum, record.parent)
            is_stored = self._apply(rows, ())
            for (record, _view, slot), is_written in zip(items, written, strict=True):
                del self._writing[slot]
                if not is_written:
                    self._sideline(slot, record.size_bytes)
                elif not is_stored:
                    self._give(slot, record.size_bytes)
            if is_stored:
                self._records += sum(written) - len(displaced)
                for old in displaced:
                    self._free(old)
        return [Put.STORED if is_written and is_stored else Put.FAILED for is_written in written]

    # -- reading -----------------------------------------------------------------

    def load(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        """Read and verify records. Blocks on the medium; drops what turns out corrupt."""
        with self._changing():
            self._heal()
            found = [self._pin(key) for key, _view in items]
        answers = []
        try:
            for (_key, view), row in zip(items, found, strict=True):
                answers.append(self._read(row, view) if isinstance(row, Row) else row)
        finally:
            with self._changing():
                for row in found:
                    if isinstance(row, Row):
                        self._unpin(row.slot)
        for (key, _view), row, answer in zip(items, found, answers, strict=True):
            if answer is Get.CORRUPT and isinstance(row, Row):
                self._drop_corrupt(key, row)
        return [
            (answer, row.checksum if answer is Get.HIT and isinstance(row, Row) else b"")
            for row, answer in zip(found, answers, strict=True)
        ]

    # -- forgetting --------------------------------------------------------------

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget records; answers how many were held.

        Raises TierError where rows cannot be read or written: then none of them is forgotten.
        """
        with self._changing():
            self._is_ready()  # a delete of what is not held works at any time
            held: dict[bytes, Row] = {}
            for key in dict.fromkeys(keys):
                found = self._find(key)
                if isinstance(found, Row):
                    held[key] = found
                elif found is not Get.MISS:
                    raise RowsError(f"nvme directory {self.path}: its rows cannot be read now")
            if not self._drop(held):
                raise RowsError(f"nvme directory {self.path}: its rows cannot be written now")
            return len(held)

    def reclaim(self, size_bytes: int) -> list[bytes]:
        """Keys of the emptiest slab of another size class; [] where none such is needed."""
        with self._lock:
            wanted = max(size_bytes, self._slot_bytes_min)
            if not self._slots.can_hold(wanted) or self._has_room(size_bytes):
                return []
            slab = self._slots.smallest_slab(wanted)
            if slab is None or self._rows is None:
                return []
            keys = []
            for slot in self._slots.slots_in(slab):
                try:
                    key = self._rows.key_in(slot)
                except RowsError as error:
                    self._count_error("reading a row", error)
                    return []
                row = self._row(key) if key is not None else None
                if key is not None and row is not None and row.slot == slot:
                    keys.append(key)
            return keys

    def propose(self, size_bytes: int) -> tuple[bool, list[bytes]] | None:
        """(whether there is room, what `reclaim` says); None when it is not to be had at once."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if not self._restored or self._reopen_at is not None:
                return False, []
            return self._has_room(size_bytes), self.reclaim(size_bytes)
        finally:
            self._lock.release()

    # -- the books ---------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all slabs; the disk space of their rows comes on top of it."""
        return self.slab_count * self.slab_bytes

    @property
    def instance(self) -> str:
        """Identity of the directory, made when it was first claimed."""
        marker = self._home.marker
        return marker.instance if marker is not None else ""

    @property
    def direct(self) -> bool:
        """Whether records bypass the page cache."""
        return self._files.direct

    def stats(self) -> tuple[int, int, tuple[SizeClass, ...]]:
        """(records, used bytes, size classes) after the last change; never waits.

        Before the first scan an estimate of the records, made at open.
        """
        return self._shown

    def check(self) -> list[str]:
        """One line per violation. Blocks the directory for about a second per million rows."""
        with self._changing():
            try:
                if not self._restored:
                    self._restore()
                return self._slots.check() + self._files.check() + self._check_rows()
            except (OpenError, RowsError) as error:
                return [str(error)]

    def close(self) -> None:
        """Flush rows and let go of files. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._rows is not None:
                self._rows.close()
                self._rows = None
            self._files.close()
            self._home.release()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock; what `stats` shows is renewed when it is let go."""
        with self._lock:
            try:
                yield
            finally:
                if self._restored:
                    self._shown = self._count()

    def _count(self) -> tuple[int, int, tuple[SizeClass, ...]]:
        if not self._restored:
            return self._rows.estimate() if self._rows is not None else 0, 0, ()
        return self._records, self._used_bytes, self._slots.classes()

    # -- slots (the lock is held) ------------------------------------------------

    def _class_of(self, size_bytes: int) -> int:
        return slot_bytes_for(max(size_bytes, self._slot_bytes_min))

    def _locate(self, slot: int, size_bytes: int) -> tuple[int, int]:
        slab, position = divmod(slot, SLAB_SLOTS_MAX)
        return slab, position * self._class_of(size_bytes)

    def _has_room(self, size_bytes: int) -> bool:
        wanted = self._class_of(size_bytes)
        if self._clock() >= self._allocate_at or not self._slots.has_room(wanted):
            return self._slots.has_room(wanted)
        classes = self._slots.classes()  # the file system is full: only what is backed counts
        assigned = sum(c.total // self._slots.slots_per_slab(c.slot_bytes) for c in classes)
        return self._files.backed_count > assigned or any(c.free for c in classes if c.slot_bytes == wanted)

    def _take(self, size_bytes: int) -> int | None:
        """A slot in a backed slab, or None. Raises RecordSizeError."""
        if not self._slots.can_hold(size_bytes):
            raise RecordSizeError(
                f"record of {size_bytes} bytes: allowed are 1 to {self.slab_bytes} (slab_bytes)"
            )
        wanted = self._class_of(size_bytes)
        slot = self._slots.take(wanted)
        if slot is None:
            return None
        slab = slot // SLAB_SLOTS_MAX
        if not self._files.is_backed(slab) and not self._back(slab):
            self._slots.give(slot)
            return None
        self._used_bytes += wanted
        return slot

    def _back(self, slab: int) -> bool:
        if self._clock() < self._allocate_at:
            return False
        try:
            self._files.back(slab)
        except OSError as error:
            self._allocate_at = self._clock() + NVME_RETRY_S
            self.counters.allocate_failures += 1
            if not self._is_full:
                self._is_full = True
                _log.warning(
                    "nvme directory %s: no room for another slab, it stays as it is: %s", self.path, error
                )
            return False
        self._is_full = False
        return True

    def _give(self, slot: int, size_bytes: int) -> None:
        self._slots.give(slot)
        self._used_bytes -= self._class_of(size_bytes)

    def _free(self, row: Row) -> None:
        """The row is gone: its slot is free as soon as nobody reads it."""
        if row.slot in self._pins:
            self._zombies[row.slot] = row.size_bytes
        else:
            self._give(row.slot, row.size_bytes)

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._zombies:
                self._give(slot, self._zombies.pop(slot))

    def _sideline(self, slot: int, size_bytes: int) -> None:
        if len(self._sidelined) >= NVME_SIDELINED_MAX:
            _until, oldest, oldest_bytes = self._sidelined.popleft()
            self._give(oldest, oldest_bytes)
        self._sidelined.append((self._clock() + NVME_RETRY_S, slot, size_bytes))

    def _return_sidelined(self) -> None:
        while self._sidelined and self._sidelined[0][0] <= self._clock():
            _until, slot, size_bytes = self._sidelined.popleft()
            self._give(slot, size_bytes)

    # -- rows (the lock is held, except by _row, _find and _count_error) ---------

    def _open_rows(self) -> Rows:
        path = self.path / "rows"
        path.mkdir(mode=0o700, exist_ok=True)
        return Rows(path)

    def _row(self, key: bytes) -> Row | None:
        """The row of a key; None also where it cannot be read."""
        found = self._find(key)
        return found if isinstance(found, Row) else None

    def _find(self, key: bytes) -> Row | Get:
        rows = self._rows
        if rows is None:
            return Get.FAILED
        try:
            raw = rows.get(key)
        except RowsError as error:
            self._count_error("reading a row", error)
            return Get.FAILED
        return (unpack(raw) if raw is not None else None) or Get.MISS

    def _apply(self, puts: dict[bytes, Row], deletes: Sequence[bytes]) -> bool:
        """Write one batch of rows; False when it is not written, and nothing changed."""
        if not puts and not deletes:
            return True
        if self._rows is None or self._reopen_at is not None:
            return False
        try:
            self._rows.apply(puts.items(), deletes)
        except RowsError as error:
            self._count_error("writing rows", error)
            self._reopen_at = self._clock() + NVME_RETRY_S
            return False
        return True

    def _drop(self, held: dict[bytes, Row]) -> bool:
        """Delete these rows; False when they stay, and nothing changed."""
        if not self._apply({}, list(held)):
            return False
        if not self._restored:
            self._early.update({row.slot: row for row in held.values()})
            return True
        for row in held.values():
            self._free(row)
        self._records -= len(held)
        return True

    def _is_ready(self) -> bool:
        """Whether slots are known and rows can be written, after doing for it what is due."""
        self._heal()
        if not self._restored and self._reopen_at is None:
            try:
                self._restore()
            except (OSError, TierError) as error:
                self._count_error("reading all rows", error)
                self._reopen_at = self._clock() + NVME_RETRY_S
        return self._restored and self._reopen_at is None

    def _heal(self) -> None:
        """Reopen and read rows that failed, once it is time and there is room; else later again."""
        if self._reopen_at is None or self._clock() < self._reopen_at:
            return
        self._reopen_at = self._clock() + NVME_RETRY_S  # until it is proven that they work again
        try:
            if self._io.free_bytes(self.path) < NVME_REOPEN_BYTES:
                return
            if self._rows is not None:
                self._rows.close()
                self._rows = None
            self._rows = self._open_rows()
            self._restore()
        except (OSError, TierError) as error:
            self._count_error("reopening rows", error)
            return
        _log.warning("nvme directory %s: rows are written again", self.path)

    # -- restoring (the lock is held) --------------------------------------------

    def _restore(self) -> None:
        """Find the free slots now. Raises OpenError, OSError: then what was known stays."""
        census = self._new_census()
        for chunk in self._chunks():
            census.take(chunk)
        self._reopen_at = None  # they can be read; the first change shows whether they can be written
        self._install(census)

    def _new_census(self) -> Census:
        short = self._files.short_sizes()
        return Census(self.slab_count, self.slab_bytes, self._slot_bytes_min, short)

    def _install(self, census: Census) -> None:
        """The census is complete: from here on slots can be handed out."""
        pool, records = census.pool, census.records
        for slot, size_bytes in self._in_flight():
            pool.mark(slot, max(size_bytes, self._slot_bytes_min))
        for row in self._early.values():  # dropped while the scan ran, before or after it came by
            records -= not pool.mark(row.slot, max(row.size_bytes, self._slot_bytes_min))
        pool.settle()
        for row in self._early.values():
            if row.slot in self._pins:
                self._zombies[row.slot] = row.size_bytes
            else:
                pool.give(row.slot)
        self._early.clear()
        self._slots = pool
        self._used_bytes = pool.used_bytes()
        self._records = records
        self._restored = True
        if census.damaged or census.lost:
            self.counters.rows_damaged += len(census.damaged)
            self.counters.rows_lost += len(census.lost)
            text = "nvme directory %s: dropped %d rows that name no slot of ours and %d whose bytes are gone"
            _log.warning(text, self.path, len(census.damaged), len(census.lost))
            self._apply({}, census.damaged + census.lost)

    def _in_flight(self) -> list[tuple[int, int]]:
        sidelined = [(slot, size) for _until, slot, size in self._sidelined]
        return [*self._writing.items(), *self._zombies.items(), *sidelined]

    def _check_rows(self) -> list[str]:
        problems: list[str] = []
        slots = {slot for slot, _size in self._in_flight()}
        count = len(slots)
        records = 0
        for chunk in self.sound_rows():
            for key, raw, _size in chunk:
                slot, _ = HEAD.unpack_from(raw)
                records += 1
                count += 1
                if slot in slots:
                    problems.append(f"nvme {self.path}: the row of {key.hex()} shares its slot")
                slots.add(slot)
        held: set[int] = set()
        for slab in {slot // SLAB_SLOTS_MAX for slot in slots}:
            held.update(self._slots.slots_in(slab))
        used = sum(c.used for c in self._slots.classes())
        if not slots <= held or used != count:
            problems.append(f"nvme {self.path}: {count} slots have an owner, {used} are used")
        if records != self._records or self._used_bytes != self._slots.used_bytes():
            problems.append(f"nvme {self.path}: {records} sound rows, {self._records} counted")
        return problems

    # -- bytes (no lock is held) -------------------------------------------------

    def _pin(self, key: bytes) -> Row | Get:
        found = self._find(key)
        if isinstance(found, Row):
            self._pins[found.slot] += 1
        return found

    def _write(self, record: Record, view: memoryview, slot: int) -> bool:
        slab, offset = self._locate(slot, record.size_bytes)
        try:
            self._files.write(slab, offset, view)
        except OSError as error:
            self._count_error("writing a record", error)
            return False
        return True

    def _read(self, row: Row, view: memoryview) -> Get:
        if len(view) != row.size_bytes:
            return Get.MISS
        slab, offset = self._locate(row.slot, row.size_bytes)
        try:
            is_complete = self._files.read(slab, offset, view)
        except OSError as error:
            self._count_error("reading a record", error)
            return Get.FAILED
        return Get.HIT if is_complete and checksum.digest(view) == row.checksum else Get.CORRUPT

    def _drop_corrupt(self, key: bytes, row: Row) -> None:
        with self._changing():
            self.counters.corrupt += 1
            _log.warning("nvme directory %s: record %s is corrupt: dropped", self.path, key.hex())
            if self._row(key) == row:
                self._drop({key: row})

    def _count_error(self, doing: str, error: Exception) -> None:
        with self._counting:
            self.counters.io_errors += 1
            is_due = self._clock() >= self._warn_at
            if is_due:
                self._warn_at = self._clock() + NVME_RETRY_S
        if is_due:
            _log.warning("nvme directory %s: %s failed: %s", self.path, doing, error)
