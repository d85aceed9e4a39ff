"""The arena as a client sees it: a mapping to copy through, and a lock that says "I may be writing".

    daemon ── fd ──▶ client ─┬─ ArenaView   mapping of the whole file; kept while the file is the same
                             └─ OwnerLock   byte lock_base + owner; one per connection

Why the lock: a client that the daemon gave up may still be copying into a slot. The daemon
does not hand that slot out again before the lock is gone. So the lock is dropped only when
the connection is lost *and* the last open write lease of that connection is closed; the
death of the process drops it at once.

The lock has an open file of its own that nobody else shares: the mapping keeps a duplicate
of the descriptor it was made from, and a forked child inherits it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading

TOUCH_BYTES = 2 << 20  # mapped in one go when first copied from or to
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_GENERATION = struct.Struct("=Q")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def reopen(fd: int) -> int:
    """A new open file of the same inode, with locks of its own. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class ArenaView:
    """The arena file mapped into this process.

    address: where the mapping starts (for cudaHostRegister and the like). size_bytes: its
    length, a multiple of the page size of its file system. mapping: the mmap; the memory
    stays mapped while anything made from it (memoryview, tensor) is alive.
    """

    __slots__ = ("_anchor", "_bytes", "_identity", "_touched", "address", "mapping", "size_bytes")

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map `size_bytes` of the file. Raises OSError or ValueError if the file is not that long."""
        self._identity = _identity(fd)
        self.mapping = mmap.mmap(fd, size_bytes)
        self.size_bytes = size_bytes
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # not a file system with huge pages: 4 KiB pages it is
        self._bytes = memoryview(self.mapping)
        self._anchor = ctypes.c_char.from_buffer(self.mapping)
        self.address = ctypes.addressof(self._anchor)
        self._touched = bytearray(-(-size_bytes // TOUCH_BYTES))

    def is_of(self, fd: int, size_bytes: int) -> bool:
        """Whether this is a mapping of that very file, so that it can be kept."""
        return size_bytes == self.size_bytes and _identity(fd) == self._identity

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes at an absolute offset of the file. Raises ValueError outside of it."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"arena: {size_bytes} bytes at {offset} are outside of {self.size_bytes}")
        return self._bytes[offset : offset + size_bytes]

    def touch(self, offset: int, size_bytes: int) -> None:
        """Map the pages of a range, if this process never did: one by one during the copy is 3x slower."""
        for piece in range(offset // TOUCH_BYTES, (offset + size_bytes - 1) // TOUCH_BYTES + 1):
            if not self._touched[piece]:
                self._touched[piece] = 1
                start = piece * TOUCH_BYTES
                length = min(TOUCH_BYTES, self.size_bytes - start)
                _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE)  # advice: may fail

    def generation(self, offset: int) -> int:
        """The slot generation stored at an absolute offset, as it is now."""
        value: int = _GENERATION.unpack_from(self._bytes, offset)[0]
        return value


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


class OwnerLock:
    """Holds the owner's byte while the connection lives or a write lease is open."""

    def __init__(self, fd: int, lock_base: int, owner: int) -> None:
        """Lock through a new open file of `fd`. Raises OSError, also when another client holds the byte."""
        self._guard = threading.Lock()
        self._connected = True
        self._writers = 0
        self._fd = reopen(fd)
        try:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lock_base + owner, 1, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except BaseException:
            os.close(self._fd)
            raise

    def enter(self) -> None:
        """A write lease was opened."""
        with self._guard:
            self._writers += 1

    def leave(self) -> None:
        """A write lease was closed: its owner will not write into its slots any more."""
        with self._guard:
            self._writers -= 1
            self._drop_if_unused()

    def disconnect(self) -> None:
        """The connection that this lock belongs to is gone. Idempotent."""
        with self._guard:
            self._connected = False
            self._drop_if_unused()

    def forget_in_child(self) -> None:
        """After a fork: let go of the inherited descriptor, so that only the parent holds the lock."""
        self._guard = threading.Lock()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _drop_if_unused(self) -> None:
        if not self._connected and self._writers == 0 and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
