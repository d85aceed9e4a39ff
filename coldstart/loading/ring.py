"""The ring that weights are read into, and what the ranks of an engine on one node say to each other about it.

    offsets       0 ──────────────▶ they only grow; a byte lies at its offset modulo the ring's size
    ring          │ span 7 │ span 8 ...        │ span 5 │ span 6 │
    freed         of each rank: the offset below which it needs nothing any more
    states        of each piece: 0, READY (its checksum was right), DAMAGED or FAILED

One rank alone has anonymous memory, on huge pages: twice as fast to read into as small ones. Several ranks have one file in
shared memory, on huge pages where there are some: it is read once and verified once for all of them, and each copies its
slice out of it. The page cache would do that too, at a third of the speed, and each rank would copy and verify every byte.

Nothing is locked: every word has one writer. A rank that is there holds a lock on the file (tiers/locks.py), which the kernel
drops when it dies.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from tiers.copying import Pinned
from tiers.dram.pages import SHM, advise_huge, has_pages, places, private_memory, whole_pages
from tiers.locks import is_locked, try_lock, unlock

READY, DAMAGED, FAILED = 1, 2, 3
NEVER_OFFSET: Final = 1 << 62  # freed: of a rank that reads no more
LEFT_S: Final = 600.0  # a ring has a name for as long as ranks need to open it, which are waiting for that
_SHARED_NAME: Final = "kvstore-load-"
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


class Ring:
    """Of one rank alone. memory: where pieces are read to; seen: where tensors look at them."""

    index, count = 0, 1

    def __init__(self, size_bytes: int, pieces: int) -> None:
        self.size_bytes = size_bytes
        self.states = memoryview(bytearray(pieces))
        self.freed = memoryview(bytearray(8)).cast("Q")
        self.memory = self.seen = private_memory(size_bytes)

    def leave_seen(self) -> None:
        """What is seen stays as it is for whoever holds it, and the ring is free: nothing may be under way."""
        self.memory = self.seen = private_memory(self.size_bytes)

    def is_there(self, rank: int) -> bool:
        """Whether a rank still reads its pieces. Raises OSError."""
        return True

    def close(self) -> None:
        """This rank reads no more, and needs nothing any more."""


class SharedRing(Ring):
    """One rank's part in a ring of several. path: as `make_shared` returned it. Raises OSError, also where that file is not
    as it should be."""

    def __init__(self, path: Path, size_bytes: int, pieces: int, index: int, count: int) -> None:
        self.size_bytes, self.index, self.count = size_bytes, index, count
        self._start = _words_bytes(pieces, count)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(self._fd)
            if found.st_uid != os.geteuid() or found.st_size < self._start + size_bytes:
                raise OSError(errno.EINVAL, "not the ring of this load", str(path))
            if not try_lock(self._fd, index):
                raise OSError(errno.EBUSY, "another process has this rank's place", str(path))
            words = memoryview(mmap.mmap(self._fd, self._start))
            self.freed = words[: 8 * count].cast("Q")
            self.states = words[8 * count : 8 * count + pieces]
            self.memory = self._map(mmap.PROT_READ | mmap.PROT_WRITE)
            self.seen = self._map(mmap.PROT_READ)  # what a rank changed would be wrong in the others
        except BaseException:
            os.close(self._fd)
            raise

    def leave_seen(self) -> None:
        """The bytes move to memory of their own, under the addresses that they are seen at."""
        size_bytes, seen = self.size_bytes, Pinned(self.seen)
        own = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE, -1, 0)
        if own != _MAP_FAILED:
            ctypes.memmove(own, seen.address, size_bytes)
            moved = _libc.mremap(own, size_bytes, size_bytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, seen.address)
        if own == _MAP_FAILED or moved != seen.address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.seen = self._map(mmap.PROT_READ)

    def is_there(self, rank: int) -> bool:
        return rank == self.index or is_locked(self._fd, rank)

    def close(self) -> None:
        if self._fd >= 0:
            self.freed[self.index] = NEVER_OFFSET
            # Its memory has descriptors of its own, as long as somebody holds tensors.
            unlock(self._fd, self.index)
            os.close(self._fd)
            self._fd = -1

    def _map(self, protection: int) -> memoryview:
        mapping = mmap.mmap(self._fd, self.size_bytes, mmap.MAP_SHARED, protection, offset=self._start)
        advise_huge(mapping)
        return memoryview(mapping)


def make_shared(size_bytes: int, pieces: int, count: int) -> Path:
    """A new file for the ring of so many ranks, with all of its memory; its name is to be removed when all of them have it, and
    who was killed before is cleaned up after. Raises OSError where that cannot be had."""
    for folder in {*places(None, "auto"), SHM}:
        _sweep(folder)
    whole_bytes = _words_bytes(pieces, count) + size_bytes
    place = next((place for place in places(None, "auto") if has_pages(place, whole_bytes)), SHM)
    path = place / f"{_SHARED_NAME}{secrets.token_hex(8)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, whole_bytes)
        os.posix_fallocate(fd, 0, whole_bytes)  # a page that is missing later would be a signal
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return path


def _sweep(folder: Path) -> None:
    """Names of rings that nobody has removed within LEFT_S, by the clock of files: whoever made them is dead."""
    left = list(folder.glob(f"{_SHARED_NAME}*"))
    if left:
        with suppress(OSError), tempfile.TemporaryFile(dir=folder) as new:
            now_s = os.fstat(new.fileno()).st_mtime
            for path in left:
                with suppress(OSError):  # gone by now, or another user's
                    if now_s - path.lstat().st_mtime > LEFT_S:
                        path.unlink()


def _words_bytes(pieces: int, count: int) -> int:
    return whole_pages(8 * count + pieces)
