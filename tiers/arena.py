"""The DRAM arena: one shared-memory file that engines copy KV bytes into and out of.

    client ──reserve──▶ WRITING ──commit──▶ READY ──free──▶ FREE (generation + 1)
                           │  abort / owner died              ▲
                           ╰──────────────────────────────────╯

The daemon owns the file: it holds the exclusive lock of owner 0 and is the only one that
writes the slot table. Clients get a descriptor of the file and write bytes only, and only
into slots they reserved. After a crash the next daemon adopts the file: READY rows whose
hash matches are kept (their bytes are verified with `verify` before they are believed),
WRITING rows are freed, or quarantined while their owner still lives.

What must hold:
* a slot is FREE in the table exactly when the pool may hand it out;
* a slot that some live process may write into is never handed out (see owners.py);
* a file of another version, or one that is not ours, is never touched.

Threads: `reserve`, `commit`, `free`, the owner calls and `sweep` belong to one thread (the
daemon's event loop). `view`, `offset`, `record`, `generation` and `verify` may be called
from any thread for a slot that the caller keeps from being freed: they read that slot's
row and one dict entry, both of which cannot change meanwhile.

Two descriptors are open: `fd` is for handing out and carries no locks, because locks
travel with a passed descriptor; the lock of the daemon lives on a private one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import struct
import threading
import uuid
from array import array
from collections.abc import Callable
from pathlib import Path

import xxhash

from tiers import checksum, locks, pages
from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, Record, TierStats
from tiers.constants import (
    ARENA_HEADER_BYTES,
    ARENA_MAGIC,
    ARENA_VERSION,
    OPEN_ATTEMPTS_MAX,
    OWNER_DAEMON,
    SLAB_BYTES,
    SLOT_BYTES_MIN,
)
from tiers.errors import BusyError, NotOursError, OpenError, VersionError
from tiers.owners import Owners
from tiers.slot_table import READY, WRITING, Layout, SlotTable
from tiers.slots import SlotPool, slot_bytes_for

_log = logging.getLogger(__name__)
# magic, version, capacity, slab, smallest slot, table offset, data offset, uuid; then xxh64 of these
_HEADER = struct.Struct("<8sI4x5Q16s")
_HEADER_HASH = struct.Struct("<Q")


class Arena:
    """An open arena. Made by `open_arena`; every method's thread rule is in the module's head."""

    def __init__(self, path: Path, lock_fd: int, layout: Layout, instance: uuid.UUID, adopted: bool) -> None:
        """Takes over `lock_fd`, on which the daemon's lock is held. Raises OpenError."""
        self.path = path
        self.layout = layout
        self.uuid = instance
        self.adopted = adopted
        self.page_kind = pages.page_kind(path.parent)
        self._lock_fd = lock_fd
        self.fd = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.mapping = mmap.mmap(self.fd, layout.file_bytes)
        except OSError as error:
            os.close(self.fd)
            raise OpenError(
                f"arena {path}: cannot map {layout.file_bytes} bytes: {error.strerror}"
            ) from error
        pages.advise_huge(self.mapping)
        self._bytes = memoryview(self.mapping)
        self._table = SlotTable(self.mapping, layout)
        self._slot_bytes_min = layout.slot_bytes_min
        self._pool = SlotPool(layout.slab_count, layout.slab_bytes)
        self._owners = Owners(lock_fd)
        self._ready = 0
        self._closed = False
        self._closing = threading.Event()
        self._prefaulting = threading.Lock()
        self.torn_rows = 0
        self._adopted_slots = self._adopt() if adopted else array("Q")

    @property
    def size_bytes(self) -> int:
        """The whole file: header, slot table and slabs."""
        return self.layout.file_bytes

    @property
    def capacity_bytes(self) -> int:
        """The slabs: what records can use."""
        return self.layout.capacity_bytes

    # -- slots ---------------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """Whether a reserve of this size would find a slot. Changes nothing."""
        return self._pool.has_room(max(size_bytes, self._slot_bytes_min))

    def reserve(self, key: bytes, parent: bytes, size_bytes: int, owner: int) -> int | None:
        """A slot to write this record into, or None when there is no room. Raises RecordSizeError."""
        assert 0 < len(key) <= KEY_BYTES_MAX and len(parent) <= KEY_BYTES_MAX, "key too long or empty"
        smallest = self._slot_bytes_min
        slot = self._pool.take(size_bytes if size_bytes > smallest or size_bytes <= 0 else smallest)
        if slot is None:
            return None
        self._table.begin(slot, key, parent, size_bytes, owner)
        self._owners.begin(owner, slot)
        return slot

    def commit(self, slot: int, checksum: bytes) -> None:
        """The bytes are written and have this checksum: the record may be served."""
        table = self._table
        assert table.state(slot) == WRITING and len(checksum) == CHECKSUM_BYTES, f"commit of slot {slot}"
        table.ready(slot, checksum)
        self._owners.end(table.owner(slot), slot)
        self._ready += 1

    def free(self, slot: int) -> None:
        """Abort a write or drop a record. Only for slots nobody writes into any more."""
        table = self._table
        state = table.state(slot)
        if state == WRITING:
            self._owners.end(table.owner(slot), slot)
        else:
            assert state == READY, f"slot {slot} freed twice"
            self._ready -= 1
        table.clear(slot)
        self._pool.give(slot)

    def offset(self, slot: int) -> int:
        """Absolute file offset of a slot's bytes; a multiple of 4096."""
        slab, inside, _ = self._pool.locate(slot)
        return self.layout.data_offset + slab * self.layout.slab_bytes + inside

    def view(self, slot: int) -> memoryview:
        """The record's bytes, writable, exactly as long as the record. Valid until the slot is freed."""
        start = self.offset(slot)
        return self._bytes[start : start + self._table.size_bytes(slot)]

    def generation(self, slot: int) -> int:
        return self._table.generation(slot)

    def generation_offset(self, slot: int) -> int:
        """Absolute file offset of the slot's generation (u64, little endian), for readers to compare."""
        return self._table.generation_offset(slot)

    def place(self, slot: int) -> tuple[int, int, int]:
        """What a client needs to copy: the slot's offset, its generation's offset, its generation."""
        row = self._table.generation_offset(slot)
        return self.offset(slot), row, self._table.generation_at(row)

    def record(self, slot: int) -> Record:
        return self._table.record(slot)

    def verify(self, slot: int) -> bool:
        """Whether the bytes of a READY slot have the committed checksum. 30 µs per MiB, without the GIL."""
        view = self.view(slot)
        try:
            return checksum.digest(view) == self._table.checksum(slot)
        finally:
            view.release()

    def adopted_slots(self) -> list[tuple[int, Record]]:
        """Records found READY at open, bytes not yet verified. Ask once, before any other change."""
        slots, self._adopted_slots = self._adopted_slots, array("Q")
        return [(slot, self._table.record(slot)) for slot in slots]

    def reclaim(self, size_bytes: int) -> list[int]:
        """Slots to free so that a whole slab becomes available for this size; [] if there is room already.

        A proposal, valid until the next change. Never names a slot that is being written.
        """
        size_bytes = max(size_bytes, self._slot_bytes_min)
        if self._pool.has_room(size_bytes) or not self._pool.has_other_class(size_bytes):
            return []
        slab = self._pool.smallest_slab(size_bytes, busy=self._owners.slabs())
        return [] if slab is None else list(self._pool.slots_in(slab))

    # -- owners --------------------------------------------------------------------------

    def claim_owner(self) -> int:
        """A number from 1 to OWNER_MAX for a new client. Raises TierError when all are taken."""
        return self._owners.claim()

    def abandon_owner(self, owner: int) -> None:
        """The client is gone: its unfinished writes are quarantined until `sweep` finds its lock free."""
        self._owners.abandon(owner)

    def sweep(self) -> int:
        """Free the slots of abandoned owners that hold no lock any more; answers how many."""
        expired = self._owners.expired()
        for slot in expired:
            self._table.clear(slot)
            self._pool.give(slot)
        return len(expired)

    @property
    def quarantined_slots(self) -> int:
        """Slots that wait until their abandoned owner dies."""
        return self._owners.quarantined()

    # -- the whole -----------------------------------------------------------------------

    def prefault(self, stop: threading.Event, progress: Callable[[int, int], None] | None = None) -> bool:
        """Touch every slab, so that no put pays for first touch. For a background thread.

        Calls `progress(done_bytes, total_bytes)` after each piece. False if stopped early.
        Raises OpenError when the memory is not there.
        """
        with self._prefaulting:
            pieces = pages.populate(self.mapping, self.fd, self.layout.data_offset, self.capacity_bytes)
            with contextlib.closing(pieces):
                while not (stop.is_set() or self._closing.is_set()):
                    try:
                        done = next(pieces, None)
                    except OSError as error:
                        raise OpenError(
                            f"arena {self.path}: no memory for its slabs: {error.strerror}; "
                            "lower the arena's capacity or make room in shared memory"
                        ) from error
                    if done is None:
                        return True
                    if progress is not None:
                        progress(done, self.capacity_bytes)
        return False

    def stats(self) -> TierStats:
        """Counts and bytes, now. A slot that is being written counts as used but not as a record."""
        return TierStats(
            "dram", self.capacity_bytes, self._pool.used_bytes(), self._ready, self._pool.classes()
        )

    def check(self) -> list[str]:
        """One line per violated invariant. Reads every row; call it from the owning thread."""
        problems = self._pool.check()
        writing, ready = set(), 0
        for slot in self._table.used_slots(self.fd):
            state, size = self._table.state(slot), max(self._table.size_bytes(slot), self._slot_bytes_min)
            if state == WRITING:
                writing.add(slot)
            elif state != READY or not self._table.is_sound(slot):
                problems.append(f"arena: slot {slot}: damaged row")
            else:
                ready += 1
            if not self._is_used(slot, size):
                problems.append(f"arena: slot {slot}: in the table but not in use")
        used = sum(size_class.used for size_class in self._pool.classes())
        if used != ready + len(writing):
            problems.append(f"arena: {used} slots in use, {ready + len(writing)} in the table")
        if ready != self._ready:
            problems.append(f"arena: {self._ready} records counted, {ready} in the table")
        if writing != self._owners.slots():
            problems.append("arena: the owners' slots are not the ones being written")
        return problems

    def _is_used(self, slot: int, size_bytes: int) -> bool:
        """Whether the slot lies in a slab that is cut for this size."""
        try:
            return self._pool.locate(slot)[2] == slot_bytes_for(size_bytes)
        except KeyError:
            return False

    def close(self, unlink: bool = False) -> None:
        """Let go of the file; it stays for the next daemon unless `unlink`. Idempotent.

        Waits for a running prefault to finish its piece. Views still held elsewhere stay
        readable; the memory is unmapped when the last of them is released.
        """
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        with self._prefaulting:
            self._table.close()
            self._bytes.release()
            with contextlib.suppress(BufferError):
                self.mapping.close()
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)
        os.close(self._lock_fd)

    def _adopt(self) -> array[int]:
        """Take over what the table says; answers the READY slots."""
        table, pool = self._table, self._pool
        ready = array("Q")
        dropped = []
        for slot in table.used_slots(self.fd):
            state = table.state(slot)
            believed = state == WRITING or (state == READY and table.is_sound(slot))
            if not believed or not pool.mark(slot, max(table.size_bytes(slot), self._slot_bytes_min)):
                dropped.append(slot)
            elif state == READY:
                ready.append(slot)
            else:
                self._owners.begin(table.owner(slot), slot)
                self._owners.abandon(table.owner(slot))
        for slot in dropped:
            table.clear(slot)
        pool.settle()
        self.torn_rows = len(dropped)
        self._ready = len(ready)
        self.sweep()
        return ready


# -- opening ---------------------------------------------------------------------------------


def open_arena(
    path: Path, capacity_bytes: int, slab_bytes: int = SLAB_BYTES, slot_bytes_min: int = SLOT_BYTES_MIN
) -> Arena:
    """Adopt the arena at `path`, or make one. The file's directory must exist and be shared memory.

    An arena with other settings is replaced (one warning: its records are lost). Raises
    BusyError (another daemon has it), VersionError, NotOursError, or OpenError; after any
    of these the file is as it was.
    """
    layout = Layout.plan(capacity_bytes, slab_bytes, slot_bytes_min)
    for _ in range(OPEN_ATTEMPTS_MAX):
        try:
            arena = _open_existing(path, layout) or _create(path, layout)
        except OSError as error:
            raise OpenError(f"arena {path}: {error.strerror}") from error
        if arena is not None:
            return arena
    raise BusyError(f"arena {path}: other processes keep replacing it")


def existing_layout(path: Path) -> Layout | None:
    """What the arena at `path` was made for, None when there is no file. Changes nothing.

    Raises NotOursError, VersionError or OpenError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpenError(f"arena {path}: {error.strerror}") from error
    try:
        return _read_header(path, fd)[0]
    finally:
        os.close(fd)


def _open_existing(path: Path, layout: Layout) -> Arena | None:
    """The arena at the path; None when there is none (any more)."""
    try:
        lock_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotOursError(f"arena {path}: not a regular file") from error
        raise
    try:
        found, instance = _read_header(path, lock_fd)
        if not locks.try_lock(lock_fd, OWNER_DAEMON):
            raise BusyError(f"arena {path}: another daemon is using it")
        if not _is_at(path, lock_fd):
            os.close(lock_fd)
            return None
        if found == layout:
            return Arena(path, lock_fd, layout, instance, adopted=True)
        _log.warning("arena %s: was made for %s, now %s: replaced, its records are lost", path, found, layout)
        pages.require_room(path.parent, layout.file_bytes - os.fstat(lock_fd).st_blocks * 512)
        path.unlink()
        os.close(lock_fd)
        return None
    except BaseException:
        os.close(lock_fd)
        raise


def _read_header(path: Path, fd: int) -> tuple[Layout, uuid.UUID]:
    """What the file says of itself. Raises NotOursError or VersionError; changes nothing."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotOursError(f"arena {path}: not a regular file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NotOursError(f"arena {path}: must belong to user {os.geteuid()} with mode 0600")
    head = os.pread(fd, _HEADER.size + _HEADER_HASH.size, 0)
    if len(head) < _HEADER.size + _HEADER_HASH.size or not head.startswith(ARENA_MAGIC):
        raise NotOursError(f"arena {path}: not an arena file; move it away or choose another place")
    _, version, capacity, slab, slot_min, table_at, data_at, instance = _HEADER.unpack_from(head)
    if version != ARENA_VERSION:
        raise VersionError(
            f"arena {path}: format version {version}, this program reads {ARENA_VERSION}; remove it"
        )
    found = Layout(capacity, slab, slot_min)
    sound = xxhash.xxh64_intdigest(head[: _HEADER.size]) == _HEADER_HASH.unpack_from(head, _HEADER.size)[0]
    if not sound or (table_at, data_at, status.st_size) != (
        found.table_offset,
        found.data_offset,
        found.file_bytes,
    ):
        raise NotOursError(f"arena {path}: its header is damaged; remove it")
    return found, uuid.UUID(bytes=instance)


def _is_at(path: Path, fd: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def _create(path: Path, layout: Layout) -> Arena | None:
    """A new arena that appears under its name complete and locked; None when somebody was faster."""
    instance = uuid.uuid4()
    directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        pages.require_room(path.parent, layout.file_bytes)
        lock_fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(lock_fd, 0o600)
            os.ftruncate(lock_fd, layout.file_bytes)
            arena = Arena(path, lock_fd, layout, instance, adopted=False)
        except BaseException:
            os.close(lock_fd)
            raise
    except BaseException:
        os.close(directory_fd)
        raise
    try:
        arena.mapping[: _HEADER.size + _HEADER_HASH.size] = _header(layout, instance)
        locks.try_lock(lock_fd, OWNER_DAEMON)
        os.link(f"/proc/self/fd/{lock_fd}", path, src_dir_fd=directory_fd, follow_symlinks=True)
        return arena
    except FileExistsError:
        arena.close()
        return None
    except BaseException:
        arena.close()
        raise
    finally:
        os.close(directory_fd)


def _header(layout: Layout, instance: uuid.UUID) -> bytes:
    fields = _HEADER.pack(
        ARENA_MAGIC,
        ARENA_VERSION,
        layout.capacity_bytes,
        layout.slab_bytes,
        layout.slot_bytes_min,
        layout.table_offset,
        layout.data_offset,
        instance.bytes,
    )
    return fields + _HEADER_HASH.pack(xxhash.xxh64_intdigest(fields))


assert _HEADER.size + _HEADER_HASH.size <= ARENA_HEADER_BYTES
