"""Runs of bytes at any place of a file, past the page cache as far as that goes.

    file       │····:■■■■│■■■■■■■■│■■■■■■■■│■■■:····│      ■ a run; │ borders of blocks
    slot       │····:■■■■│■■■■■■■■│■■■■■■■■│■■■:    │      lies as far behind a border as in the file
                 edge     ╰─ O_DIRECT ────╯  edge

O_DIRECT wants address, length and offset on borders of blocks, and chunks begin at any byte. A run that lies in memory as far
behind a border as in the file has all but its edges moved directly; the edges, less than a block each, go through the page
cache, because the neighbour's bytes in their blocks come at another time. Runs that lie otherwise, and file systems without
O_DIRECT, go through the page cache altogether.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tiers.pages import advise_huge

BLOCK_BYTES: Final = 4096
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_HUGE_PAGE_BYTES: Final = 2 << 20

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

    def around(self, at: int, size_bytes: int) -> memoryview:
        """The whole blocks that this run lies in."""
        return self._memory[: _up(at % BLOCK_BYTES + size_bytes)]


def slots(count: int, run_bytes_max: int) -> list[Slot]:
    """A ring of them, on huge pages where the kernel has some."""
    slot_bytes = _up(run_bytes_max) + BLOCK_BYTES
    whole_bytes = -(-count * slot_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(memory)
    view = memoryview(memory)
    return [Slot(view[start : start + slot_bytes]) for start in range(0, count * slot_bytes, slot_bytes)]


class Tree:
    """Files below a directory: reading and writing runs of them. Blocks; raises OSError. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._has_direct = True

    def read(self, path: str, at: int, slot: Slot, size_bytes: int) -> memoryview | None:
        """The run in the slot; None where the file ends before."""
        run, around = slot.run(at, size_bytes), slot.around(at, size_bytes)
        if self._has_direct:
            try:
                with self._opened(path, os.O_RDONLY | os.O_DIRECT) as fd:
                    count = os.preadv(fd, [around], at - at % BLOCK_BYTES)
                if count >= at % BLOCK_BYTES + size_bytes:
                    return run
            except OSError as error:
                self._without_direct(error)
        with self._opened(path, os.O_RDONLY) as fd:
            return run if read_all(fd, run, at) else None

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
