"""The DRAM arena: shared memory that engines copy KV bytes into and out of.

    client ──reserve──▶ WRITING ──commit──▶ READY ──free──▶ FREE (generation + 1)
                           │  abort / owner died              ▲
                           ╰──────────────────────────────────╯

It is two files (arena_files.py): slabs, which clients map, and a table (slot_table.py), which
only the daemon writes. Clients get a descriptor of the slabs, one that may write or one that
may not, and one of the table that may not: they see the generations through it. After a
crash the next daemon adopts both: READY rows whose hash matches are kept (their bytes are
verified with `verify` before they are believed), WRITING rows are freed, or quarantined
while a client is in the middle of a copy.

What must hold:
* a slot is FREE in the table exactly when the pool may hand it out;
* a slot that some live process may write into is never handed out (see owners.py);
* a slot is handed out only when its bytes, its row and its generation have their memory:
  touching them cannot fail, however full the memory becomes. Slabs get theirs in the
  background (`back`), and are absent until then;
* nothing that a client can write or cut off is touched by the owning thread.

Models may have whole slabs of it (model_slabs.py): a slot each, as large as the slab, with a row like any other. They are
lent by a call of their own, and are no records: not counted as such, and never named for another size class.

Threads: `reserve_run`, `commit_run`, `free_run`, `abandon_run`, `extents`, those of models, the owner calls and `sweep` belong
to one thread (the daemon's event loop). `view`, `record` and `verify` may be called from any
thread for a slot that the caller keeps from being freed: they read that slot's row and how
its slab is cut, which cannot change meanwhile. `back` runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Final

import xxhash

from tiers import locks
from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, Record, SizeClass, TierStats
from tiers.checksum import column_sizes, joined
from tiers.constants import MEMORY_HEADROOM_BYTES, MIB, SLAB_BYTES, SLOT_BYTES_MIN
from tiers.dram import pages
from tiers.dram.arena_files import ArenaFiles, open_files
from tiers.dram.memory_limits import memory_left
from tiers.dram.model_slabs import ModelSlab, is_models, model_slab
from tiers.dram.owners import USERS_BASE, Owners
from tiers.dram.slot_table import READY, WRITING, Extents, Layout, SlotTable
from tiers.errors import OpenError
from tiers.sizes import format_bytes
from tiers.slots import CHECK_SLICE_SLOTS, SLAB_SLOTS_MAX, SlotPool, slot_bytes_for

ARENA_OPEN_BYTES: Final = 256 * MIB  # has its memory when an open returns; 30 to 50 ms
ARENA_ROWS_AHEAD: Final = 256  # rows of a slab that get their memory with the one that is used
ARENA_RETRY_S: Final = 10.0  # pause before asking for memory again that was not there
SWEEP_SLOTS: Final = 1000  # taken out of quarantine at once, about a millisecond
VERIFY_PIECE_BYTES: Final = 1 * MIB  # read at a time to compare a checksum

_log = logging.getLogger(__name__)


class Arena:
    """An open arena. Made by `open_arena`; every method's thread rule is in the module's head.

    fd, read_only_fd: descriptors of the slabs to hand out. generations_fd: a read-only one of the
    table, of which clients map the first `layout.generations_end` bytes.
    """

    def __init__(self, files: ArenaFiles, headroom_bytes: int = MEMORY_HEADROOM_BYTES) -> None:
        """Takes over the files, on which the daemon's lock is held. Raises OpenError.

        headroom_bytes: of the memory, left to others.
        """
        self.path = files.path
        self.layout = layout = files.layout
        self.adopted = files.adopted
        self.page_kind = pages.page_kind(files.path.parent)
        self._files = files
        self._headroom_bytes = headroom_bytes
        with contextlib.ExitStack() as opened:
            opened.callback(files.close)
            self.fd, self.read_only_fd, self.generations_fd = (
                _kept(opened, files.reopen(fd, flags))
                for fd, flags in (
                    (files.data_fd, os.O_RDWR),
                    (files.data_fd, os.O_RDONLY),
                    (files.table_fd, os.O_RDONLY),
                )
            )
            self.mapping = _map(files.path, self.fd, layout.capacity_bytes)
            self._table_mapping = _map(files.path, files.table_fd, layout.table_bytes)
            self._opened = opened.pop_all()
        pages.advise_huge(self.mapping)
        pages.advise_small(self._table_mapping)  # a slab of large records has a page of rows, not 2 MiB
        self._bytes = memoryview(self.mapping)
        self._table = SlotTable(self._table_mapping, layout)
        self._slot_bytes_min = layout.slot_bytes_min
        self._pool = SlotPool(layout.slab_count, layout.slab_bytes, absent=range(layout.slab_count))
        self._rows_backed = array("I", bytes(4 * layout.slab_count))  # per slab
        self.is_short = False  # memory ran out before all slabs had theirs
        self._unbacked: set[int] = set()  # slabs without memory; used by `back` from the first one on
        self._arrived: deque[int] = deque()  # slabs that `back` has backed, not yet in the pool
        self.owners = Owners(files.data_fd)  # who may be writing; of the owning thread
        self._ready = 0  # slots of models included
        self._lent: set[int] = set()  # slots that models have, also those that are written, or in quarantine
        self._closed = False
        self._closing = threading.Event()
        self._backing = threading.Lock()
        self.torn_rows = 0
        self._adopted_slots = self._adopt() if files.adopted else array("Q")
        self._back_first()

    @property
    def capacity_bytes(self) -> int:
        """The slabs: what records can use once all of them have their memory."""
        return self.layout.capacity_bytes

    @property
    def slabs(self) -> Arena:
        """Of models: those calls are below."""
        return self

    @property
    def backed_bytes(self) -> int:
        """The slabs that have their memory."""
        return self.layout.capacity_bytes - len(self._unbacked) * self.layout.slab_bytes

    def is_whole(self) -> bool:
        """False once the file of slabs was cut off: what is in it is lost, touching it kills."""
        return self._files.is_whole()

    def is_named(self) -> bool:
        """False once its files are gone from their directory: the next daemon would not find them."""
        return self._files.is_named()

    # -- runs of slots -------------------------------------------------------------------

    def has_room(self, size_bytes: int) -> bool:
        """Whether a reserve of this size would find a slot."""
        self._take_in_arrived()
        return self._pool.has_room(max(size_bytes, self._slot_bytes_min))

    def reserve_run(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        size_bytes: int,
        owner: int,
        columns: bytes = b"",
    ) -> list[int]:
        """Slots to write these records into, ascending; fewer than keys where room ends.

        owner: whose lock is held while they are written. columns: as in Record. Raises RecordSizeError.
        """
        assert keys and min(map(len, keys)) and max(map(len, [*keys, *parents])) <= KEY_BYTES_MAX, "bad key"
        slots = self._take(size_bytes, len(keys))
        if slots:
            self._table.begin(slots, keys, parents, size_bytes, columns)
            self.owners.begin(owner, slots)
        return slots

    def commit_run(self, slots: Sequence[int], checksums: bytes, stored_s: int = 0) -> None:
        """The bytes are written and have these checksums (joined): the records may be served.

        stored_s: a time that the record says, also after an adoption; below 2**32.
        """
        assert len(checksums) == CHECKSUM_BYTES * len(slots), f"{len(slots)} slots, {len(checksums)} bytes"
        assert 0 <= stored_s < 1 << 32, f"stored_s {stored_s}"
        self.owners.end(slots)
        self._table.ready(slots, checksums, stored_s)
        self._ready += len(slots)

    def restamp(self, slots: Sequence[int], stored_s: int) -> None:
        """These records say that they were stored then."""
        self._table.restamp(slots, stored_s)

    def free_run(self, slots: Sequence[int]) -> None:
        """Drop records, or abort writes whose writer says that it is done."""
        writing = self.owners.writing(slots)
        self.owners.end(writing)
        self._ready -= len(slots) - len(writing)
        self._give(slots)

    def abandon_run(self, slots: Sequence[int]) -> None:
        """Abort writes whose writer is lost: slots that it may be writing into now go into quarantine."""
        self._table.raise_generations(slots)
        self._give(self.owners.abandon(slots))

    def sweep(self) -> int:
        """Free quarantined slots that cannot be written any more, some at a time; returns their number."""
        self._take_in_arrived()
        expired = self.owners.expired(SWEEP_SLOTS)
        self._give(expired)
        return len(expired)

    def _give(self, slots: Sequence[int]) -> None:
        self._pool.give_run(slots)
        self._table.clear(slots)
        if self._lent:
            self._lent.difference_update(slots)

    def extents(self, slots: Sequence[int]) -> Extents:
        """What a client needs to copy: where the slots lie, and their generations, to be compared."""
        return self._table.extents(slots, self._pool.slot_bytes)

    # -- slabs of models -----------------------------------------------------------------

    def lend(self, slabs: Sequence[ModelSlab], owner: int) -> list[int]:
        """Slots for these slabs, to be written by this owner, in any order; fewer where room ends."""
        names = [slab.names() for slab in slabs]
        keys, parents = [key for key, _ in names], [parent for _, parent in names]
        slots = self.reserve_run(keys, parents, self.layout.slab_bytes, owner)
        self._lent.update(slots)
        return slots

    def adopted_slabs(self) -> list[tuple[int, ModelSlab]]:
        """Slots of models found READY at open, bytes not yet verified."""
        found = [(slot, model_slab(self._table.record(slot))) for slot in sorted(self._lent_ready())]
        return [(slot, slab) for slot, slab in found if slab is not None]

    def _lent_ready(self) -> set[int]:
        """Those that nobody is writing, or may be writing still."""
        return self._lent.difference(self.owners.writing(list(self._lent)))

    def slabs_by_use(self) -> list[int]:
        """Of records: the slots of each by `slots_in`. Those with the fewest bytes come first, and those that are being
        written into, or drained, not at all."""
        self._take_in_arrived()
        return self._pool.by_use(self._busy())

    def slots_in(self, slab: int) -> list[int]:
        """Those in use of a slab of records; [] where it is empty, written into or drained."""
        is_busy = slab in self.owners.slabs() or slab * SLAB_SLOTS_MAX in self._lent
        return [] if is_busy or not self._pool.slot_bytes[slab] else self._pool.undrained(slab)

    def is_locked(self, slot: int) -> bool:
        """Whether a process uses the slab of a model, as its lock says; it may have begun under an earlier daemon."""
        return locks.is_locked(self._files.data_fd, USERS_BASE + (slot >> 16))

    def wrong_of_slabs(self, known: Set[int]) -> str:
        """What is wrong, in words, where models have these slots and no others; "" if nothing is. A slab that a model had is
        right as long as its writer is waited for."""
        lost = self._lent - known
        if known <= self._lent and lost <= self.owners.slots():
            return ""
        return f"arena: {len(lost)} slabs that no model has, {len(known - self._lent)} that no model may have"

    def _busy(self) -> Set[int]:
        """Slabs that no records are to be driven out of."""
        busy = self.owners.slabs()
        return busy | {slot >> 16 for slot in self._lent} if self._lent else busy

    # -- one slot ------------------------------------------------------------------------

    def offset(self, slot: int) -> int:
        """Offset of a slot's bytes in the data file; a multiple of 4096."""
        slab, inside, _ = self._pool.locate(slot)
        return slab * self.layout.slab_bytes + inside

    def view(self, slot: int) -> memoryview:
        """The record's bytes, writable, exactly as long as the record. Valid until the slot is freed."""
        start = self.offset(slot)
        return self._bytes[start : start + self._table.size_bytes(slot)]

    def generation(self, slot: int) -> int:
        return self._table.generation(slot)

    def record(self, slot: int) -> Record:
        return self._table.record(slot)

    def verify(self, slot: int) -> bool:
        """Whether the bytes of a READY slot have the committed checksum. About 0.2 ms per MiB, without the GIL.

        Reads through the file: a client may have cut it off, and touching memory that is gone kills.
        """
        at, record, digests = self.offset(slot), self._table.record(slot), []
        piece = memoryview(bytearray(min(record.size_bytes, VERIFY_PIECE_BYTES)))
        for size_bytes in column_sizes(record.columns, record.size_bytes):
            hasher, end = xxhash.xxh3_128(), at + size_bytes
            while at < end:
                count = os.preadv(self._files.data_fd, [piece[: end - at]], at)
                if not count:
                    return False
                hasher.update(piece[:count])
                at += count
            digests.append(hasher.digest())
        return joined(digests) == record.checksum

    # -- the table -----------------------------------------------------------------------

    def adopted_slots(self) -> list[tuple[int, Record]]:
        """Records found READY at open, bytes not yet verified. Ask once, before any other change."""
        slots, self._adopted_slots = self._adopted_slots, array("Q")
        return [(slot, self._table.record(slot)) for slot in slots]

    def reclaim(self, size_bytes: int) -> list[int]:
        """As of SlotPool: a proposal, valid until the next change. Never names a slot that is being written."""
        self._take_in_arrived()
        return self._pool.reclaim(max(size_bytes, self._slot_bytes_min), self._busy())

    def drain(self, slot: int, size_bytes: int) -> None:
        """The slab of this slot hands out no more; when nothing is in it, it is for records of that size."""
        self._pool.drain(slot // SLAB_SLOTS_MAX, max(size_bytes, self._slot_bytes_min))

    def stop_draining(self, slot: int) -> bool:
        """The slab of this slot stays what it is; False where it was emptied."""
        return self._pool.stop_draining(slot // SLAB_SLOTS_MAX)

    def let_go_owner(self, owner: int) -> None:
        """The client with this number is gone, and what it was writing was abandoned."""
        self.owners.let_go(owner)

    # -- memory --------------------------------------------------------------------------

    def back(
        self, stop: threading.Event, touch: bool = True, progress: Callable[[int, int], None] | None = None
    ) -> bool:
        """Give every slab its memory, for a background thread; True when all have it, False if stopped.

        touch: also map it into this process, so that no request pays for first touch; without it, memory is
        only reserved. Calls `progress(touched_bytes, capacity_bytes)` after each slab. Where memory
        runs out it warns once, and tries again every ARENA_RETRY_S; the arena is smaller meanwhile.
        """
        left = list(range(self.layout.slab_count))
        while True:
            left = self._back_these(left, stop, touch, progress)
            was_short, self.is_short = self.is_short, bool(left) and not self._must_stop(stop, 0)
            if not left and was_short:
                _log.info("arena %s: all of its slabs have their memory now", self.path)
            if not self.is_short:
                return not left
            if not was_short:
                _log.warning(
                    "arena %s: no memory for %s of its %s: it is smaller until there is some",
                    self.path,
                    format_bytes(self.capacity_bytes - self.backed_bytes),
                    format_bytes(self.capacity_bytes),
                )
            if self._must_stop(stop, ARENA_RETRY_S):
                return False

    def _back_these(
        self,
        slabs: list[int],
        stop: threading.Event,
        touch: bool,
        progress: Callable[[int, int], None] | None,
    ) -> list[int]:
        """Back these slabs until `stop` is set or memory runs out; returns those that are left."""
        unbacked = self._unbacked
        for at, slab in enumerate(slabs):
            if not (slab in unbacked or touch):
                continue
            with self._backing:
                if self._must_stop(stop, 0) or not self._back_slab(slab, touch):
                    return slabs[at:]
            if slab in unbacked:
                unbacked.remove(slab)
                self._arrived.append(slab)
            if touch and progress is not None:
                done = self.layout.slab_count - len(slabs) + at + 1
                progress(done * self.layout.slab_bytes, self.capacity_bytes)
        return []

    def _back_slab(self, slab: int, touch: bool) -> bool:
        """Give one slab its memory; False if there is none."""
        size_bytes, is_new = self.layout.slab_bytes, slab in self._unbacked
        is_scarce = is_new and self.page_kind != "hugetlb"
        if is_scarce and not memory_left(size_bytes, self._headroom_bytes):
            return False
        try:
            if touch:
                pages.populate(self.mapping, self.fd, slab * size_bytes, size_bytes)
            else:
                os.posix_fallocate(self._files.data_fd, slab * size_bytes, size_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EDQUOT, errno.EFBIG):
                raise
            return not is_new  # it has its memory, only not yet in our page tables
        return True

    def _back_first(self) -> None:
        """As much as takes no time: a small arena has all of its slabs before the first request."""
        touch = self.page_kind == "huge tmpfs"  # huge=advise gives huge pages to touched memory only
        self._unbacked = set(self._pool.absent)
        for slab in sorted(self._unbacked)[: -(-ARENA_OPEN_BYTES // self.layout.slab_bytes)]:
            if not self._back_slab(slab, touch):
                _log.warning("arena %s: memory is short: it starts smaller", self.path)
                break
            self._unbacked.remove(slab)
            self._pool.add_slab(slab)

    def _must_stop(self, stop: threading.Event, within_s: float) -> bool:
        """Whether this is the end, or is within that time."""
        end_s = time.monotonic() + within_s
        while not (stop.is_set() or self._closing.is_set()):
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return False
            stop.wait(min(0.5, left_s))
        return True

    def _take_in_arrived(self) -> None:
        while self._arrived:
            self._pool.add_slab(self._arrived.popleft())

    def _take(self, size_bytes: int, count: int) -> list[int]:
        """Slots from the pool whose rows have their memory, too."""
        if self._arrived:
            self._take_in_arrived()
        slots = self._pool.take_run(max(size_bytes, self._slot_bytes_min) if size_bytes > 0 else 0, count)
        last_of = {
            slot >> 16: slot & 0xFFFF for slot in slots
        }  # they ascend: the last one of each slab is left
        for slab, last in last_of.items():
            if not self._back_rows(slab, last):
                self._pool.give_run([slot for slot in slots if slot >> 16 == slab])
                slots = [slot for slot in slots if slot >> 16 != slab]
        return slots

    def _back_rows(self, slab: int, last: int) -> bool:
        """Give the rows of a slab's slots up to `last` their memory; False if there is none. Mostly nothing to do."""
        backed = self._rows_backed[slab]
        if last >= backed:
            end = min(self.layout.rows_per_slab, last + ARENA_ROWS_AHEAD)
            try:
                pages.populate(
                    self._table_mapping, self._files.table_fd, *self._table.row_range(slab, backed, end)
                )
            except OSError:
                return False
            self._rows_backed[slab] = end
        return True

    # -- the whole -----------------------------------------------------------------------

    def stats(self) -> TierStats:
        """Counts and bytes, now. A slot that is being written counts as used but not as a record."""
        lent, records, classes = len(self._lent), self._ready - len(self._lent_ready()), self._pool.classes()
        if lent:
            whole = self.layout.slab_bytes
            others = [c for c in classes if c.slot_bytes != whole]
            of_records = [
                SizeClass(whole, c.total - lent, c.used - lent)
                for c in classes
                if c.slot_bytes == whole and c.total > lent
            ]
            classes = (*others, *of_records)
        used_bytes, model_bytes = self._pool.used_bytes(), lent * self.layout.slab_bytes
        return TierStats("dram", self.capacity_bytes, used_bytes, records, classes, model_bytes)

    def check(self) -> list[str]:
        """One line per violated invariant. Reads every row; call it from the owning thread."""
        return [line for lines in self.check_slices() for line in lines]

    def check_slices(self) -> Iterator[list[str]]:
        """The same in slices. What they say holds if no slot was taken or given back meanwhile."""
        yield from self._pool.check_slices()
        problems: list[str] = []
        if not self.is_whole():
            problems.append("arena: the length of its file was changed")
        writing, ready, lent = set(), 0, set()
        for looks, slot in enumerate(self._table.used_slots(self._files.table_fd), 1):
            if looks % CHECK_SLICE_SLOTS == 0:
                yield problems
                problems = []
            state, size = self._table.state(slot), max(self._table.size_bytes(slot), self._slot_bytes_min)
            if state == WRITING:
                writing.add(slot)
            elif state != READY or not self._table.is_sound(slot):
                problems.append(f"arena: slot {slot}: damaged row")
            else:
                ready += 1
            if not self._is_used(slot, size):
                problems.append(f"arena: slot {slot}: in the table but not in use")
            if size == self.layout.slab_bytes and is_models(self._table.record(slot).key):
                lent.add(slot)
        used = sum(size_class.used for size_class in self._pool.classes())
        if used != ready + len(writing):
            problems.append(f"arena: {used} slots in use, {ready + len(writing)} in the table")
        if ready != self._ready:
            problems.append(f"arena: {self._ready} records counted, {ready} in the table")
        if writing != self.owners.slots():
            problems.append("arena: the owners' slots are not the ones being written")
        if lent != self._lent:
            problems.append("arena: the slabs that models have are not those in the table")
        yield problems

    def _is_used(self, slot: int, size_bytes: int) -> bool:
        """Whether the slot lies in a slab that is cut for this size."""
        try:
            return self._pool.locate(slot)[2] == slot_bytes_for(size_bytes)
        except KeyError:
            return False

    def close(self, unlink: bool = False) -> None:
        """Let go of the files; they stay for the next daemon unless `unlink`. Idempotent.

        Waits until a running `back` has done its slab. Views still held elsewhere stay
        readable; the memory is unmapped when the last of them is released.
        """
        if self._closed:
            return
        self._closed = True
        self._closing.set()
        with self._backing:
            self._table.close()
            self._bytes.release()
            self._table_mapping.close()
            with contextlib.suppress(BufferError):
                self.mapping.close()
        if unlink:
            self._files.unlink()
        self.owners.close()
        self._opened.close()

    def _adopt(self) -> array[int]:
        """Take over what the table says; returns the READY slots."""
        table, pool = self._table, self._pool
        ready = array("Q")
        dropped, writing, whole = [], [], self.layout.slab_bytes
        for slot in table.used_slots(self._files.table_fd):
            state = table.state(slot)
            believed = state in (WRITING, READY) and table.is_sound(slot)
            is_lent = believed and table.size_bytes(slot) == whole and is_models(table.record(slot).key)
            if is_lent:
                believed = model_slab(table.record(slot)) is not None
            if not believed or not pool.mark(slot, max(table.size_bytes(slot), self._slot_bytes_min)):
                dropped.append(slot)
                continue
            if is_lent:
                self._lent.add(slot)
            if state != READY:
                writing.append(slot)
                continue
            self._ready += 1
            if not is_lent:
                ready.append(slot)
        table.clear(dropped)
        pool.settle()
        self.torn_rows = len(dropped)
        table.raise_generations(writing)
        self._give(self.owners.adopt(writing))
        return ready


def open_arena(
    path: Path,
    capacity_bytes: int,
    slab_bytes: int = SLAB_BYTES,
    slot_bytes_min: int = SLOT_BYTES_MIN,
    headroom_bytes: int = MEMORY_HEADROOM_BYTES,
) -> Arena:
    """Adopt the arena at `path`, or make one. The file's directory must exist and be shared memory.

    headroom_bytes: of the memory, left to others.
    An arena that cannot be adopted is replaced (one warning: its records are lost). Raises
    BusyError (another daemon has it), NotOursError, or OpenError; after any of these the
    files are as they were.
    """
    layout = Layout.plan(capacity_bytes, slab_bytes, slot_bytes_min)
    return Arena(open_files(path, layout), headroom_bytes)


def _kept(opened: contextlib.ExitStack, fd: int) -> int:
    opened.callback(os.close, fd)
    return fd


def _map(path: Path, fd: int, size_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size_bytes)
    except OSError as error:
        raise OpenError(f"arena {path}: cannot map {format_bytes(size_bytes)}: {error.strerror}") from error
