"""Runs of bytes at any place of a file, past the page cache as far as that goes.

    file       │····:■■■■│■■■■■■■■│■■■■■■■■│■■■:····│      ■ a run; │ borders of blocks
    memory     │····:■■■■│■■■■■■■■│■■■■■■■■│■■■:    │      lies as far behind a border as in the file
                 edge     ╰─ O_DIRECT ────╯  edge

O_DIRECT wants address, length and offset on borders of blocks, and chunks begin at any byte. A run that lies in memory as far
behind a border as in the file has all but its edges moved directly. The blocks of its edges hold bytes of neighbours, too: read,
they come in the same call, by way of a bounce buffer of the thread, out of which only the run's own bytes are copied; written,
they go through the page cache, because the neighbour's bytes come at another time. Runs that lie otherwise are not read, and
written through the page cache altogether, as on file systems without O_DIRECT.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from tiers.dram.pages import private_memory, whole_pages

BLOCK_BYTES: Final = 4096
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_thread = threading.local()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Slot:
    """Aligned memory for a run of so many bytes at any place of a file."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def run(self, at: int, size_bytes: int) -> memoryview:
        """Where a run lies that begins at this byte of a file."""
        start = at % BLOCK_BYTES
        return self._memory[start : start + size_bytes]


def slots(count: int, run_bytes_max: int) -> list[Slot]:
    """A ring of them, on huge pages where the kernel has some."""
    slot_bytes = _up(run_bytes_max) + BLOCK_BYTES
    view = private_memory(whole_pages(count * slot_bytes))
    return [Slot(view[start : start + slot_bytes]) for start in range(0, count * slot_bytes, slot_bytes)]


class RunsFile:
    """One file, to be read. fd: for whoever asks about it. Thread-safe. Every method blocks, and may raise OSError."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        flags |= os.O_RDONLY | os.O_CLOEXEC
        self.fd = os.open(path, flags)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                os.close(self.fd)
                raise

    def close(self) -> None:
        os.close(self.fd)
        if self._direct is not None:
            os.close(self._direct)

    def read(self, view: memoryview, at: int) -> bool:
        """Fill the view, which lies as far behind a border of a block as the run does. False where the file ends before."""
        count = 0
        if self._direct is not None and len(view):
            try:
                count = _read_direct(self._direct, view, at)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
        return read_all(self.fd, view[count:], at + count)


def _read_direct(fd: int, view: memoryview, at: int) -> int:
    """How many bytes of the run were read, from its start: less than all where the file ends, or the kernel had enough."""
    head, tail = at % BLOCK_BYTES, (at + len(view)) % BLOCK_BYTES
    low, high = -at % BLOCK_BYTES, len(view) - tail  # of the whole blocks, in the view
    edges = _bounce()
    if low >= high:  # no block is the run's alone
        read = os.preadv(fd, [edges], at - head)
        count = max(0, min(len(view), read - head))
        view[:count] = edges[head : head + count]
        return count
    first, last = edges[:BLOCK_BYTES], edges[BLOCK_BYTES : 2 * BLOCK_BYTES]
    buffers = [first] * bool(head) + [view[low:high]] + [last] * bool(tail)
    count = max(0, os.preadv(fd, buffers, at - head) - head)
    if head:
        view[:low] = first[head:]
    if tail and count > high:
        view[high:] = last[:tail]
    return count if count <= high else min(count, len(view))


def _bounce() -> memoryview:
    """Three blocks of this thread: a run shorter than two blocks may lie in three."""
    held: mmap.mmap | None = getattr(_thread, "bounce", None)
    if held is None:
        held = _thread.bounce = mmap.mmap(-1, 3 * BLOCK_BYTES)
    return memoryview(held)


class Tree:
    """Files below a directory: reading and writing runs of them. Blocks; raises OSError. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._has_direct = True

    def read(self, path: str, at: int, slot: Slot, size_bytes: int) -> memoryview | None:
        """The run in the slot; None where the file ends before."""
        run = slot.run(at, size_bytes)
        with closing(RunsFile(self.root / path, os.O_NOFOLLOW)) as file:
            return run if file.read(run, at) else None

    def write(self, path: str, at: int, run: memoryview, is_aligned: bool) -> None:
        """is_aligned: it lies as far behind a border of a block as in the file."""
        low, high = _up(at), (at + len(run)) & -BLOCK_BYTES
        is_direct = (
            is_aligned
            and low < high
            and self._has_direct
            and self._write_direct(path, low, run[low - at : high - at])
        )
        with self._opened(path, os.O_WRONLY) as fd:
            if not is_direct:
                write_all(fd, run, at)
                return
            write_all(fd, run[: low - at], at)
            write_all(fd, run[high - at :], high)

    def sync(self, path: str) -> None:
        with self._opened(path, os.O_RDONLY) as fd:
            os.fsync(fd)

    def filled(self, path: str) -> Filled:
        """What was written of a file, at least; of a file system that does not say, all of it."""
        with self._opened(path, os.O_RDONLY) as fd:
            return Filled(list(_extents(fd)))

    def _write_direct(self, path: str, at: int, run: memoryview) -> bool:
        """Whether there is such a way."""
        try:
            with self._opened(path, os.O_WRONLY | os.O_DIRECT) as fd:
                while run:
                    count = os.pwrite(fd, run, at)
                    if not count or count % BLOCK_BYTES:
                        return False  # the disk is full, say: the other way tells
                    run, at = run[count:], at + count
        except OSError as error:
            self._without_direct(error)
            return False
        return True

    def _without_direct(self, error: OSError) -> None:
        """From now on. Raises it if it was about something else."""
        if error.errno not in _NO_DIRECT:
            raise error
        self._has_direct = False

    @contextmanager
    def _opened(self, path: str, flags: int) -> Iterator[int]:
        fd = os.open(self.root / path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield fd
        finally:
            os.close(fd)


class Filled:
    """Extents of a file that are not holes, in order: starts and ends."""

    def __init__(self, edges: list[int]) -> None:
        self._edges = edges

    def covers(self, start: int, end: int) -> bool:
        """Whether all of this run may have been written."""
        place = bisect_right(self._edges, start)
        return place % 2 == 1 and end <= self._edges[place]


def _extents(fd: int) -> Iterator[int]:
    """Neighbours are one."""
    end, size_bytes = 0, os.fstat(fd).st_size
    while end < size_bytes:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing from here on
                return
            if error.errno not in _NO_DIRECT:
                raise
            start, end = end, size_bytes
        yield start
        yield end


def allocate(path: Path, size_bytes: int) -> None:
    """A file of this size, with the room for its bytes where the file system gives it beforehand; what is in it stays.

    Blocks; raises OSError. Not posix_fallocate: where there is no such call, that one writes into every block.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        while size_bytes and _libc.fallocate(fd, 0, 0, size_bytes):
            number = ctypes.get_errno()
            if number in (*_NO_DIRECT, errno.ENOSYS):
                break
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(path))
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)


def read_all(fd: int, view: memoryview, at: int) -> bool:
    """Fill the view; False where the file ends before. Raises OSError."""
    while view:
        count = os.preadv(fd, [view], at)
        if not count:
            return False
        view, at = view[count:], at + count
    return True


def write_all(fd: int, view: memoryview, at: int) -> None:
    """Raises OSError."""
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


def _up(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
