"""The arena as a client sees it: a mapping to copy through, and a lock that says "I may be writing".

    daemon ── fds ─▶ client ─┬─ ArenaView   mapping of the slabs, and a read-only one of the generations;
                             │              one in a process, for all clients
                             └─ OwnerLock   a file of our own, while a write lease is open

The mapping lives as long as a client or a lease refers to it. A process that only loads gets a
descriptor that maps read-only: a stray write of it cannot change what others are served.

Why the lock: a client that the daemon gave up may still be copying into a slot. The daemon
raises the slot's generation, and does not hand it out before the lock is gone. So a client takes
the lock first and looks at the generations then: if they are those of its lease, it may write
until it drops the lock. The death of the process drops it at once.

The lock has an open file of its own: the mapping keeps a duplicate
of the descriptor it was made from, and a forked child inherits it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref

from kvstore.client.refusing import refusing, wrong
from kvstore.errors import Unavailable
from tiers.copying import Pinned
from tiers.locks import change_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.protocol.frames import Extents

TOUCH_BYTES = 2 << 20  # mapped in one go when first copied from or to
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; the mmap module does not name them

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_GENERATION_BYTES = 8


def reopen(fd: int) -> int:
    """A new open file of the same inode, with locks of its own. Raises OSError."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


@refusing
class ArenaView:
    """The arena's slabs mapped into this process, and the generations of its slots, read-only. Made by `mapped`.

    fd: of the slabs, to map parts of them elsewhere. address: where the mapping starts (for cudaHostRegister and the like). size_bytes: its
    length, a multiple of the page size of its file system. mapping: the mmap; the memory
    stays mapped while anything made from it (memoryview, tensor) is alive.
    """

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_generations",
        "_touched",
        "address",
        "fd",
        "mapping",
        "size_bytes",
        "writable",
    )

    def __init__(
        self, fd: int, size_bytes: int, generations_fd: int, generations_bytes: int, writable: bool
    ) -> None:
        """Map these parts of the files. Raises OSError or ValueError if a file is not that long."""
        self.writable = writable
        self.mapping = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.size_bytes = size_bytes
        self.fd = os.dup(fd)
        weakref.finalize(self, os.close, self.fd)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # not a file system with huge pages: 4 KiB pages it is
        self._generations = mmap.mmap(generations_fd, generations_bytes, prot=mmap.PROT_READ)
        self._bytes = memoryview(self.mapping)
        pinned = Pinned(self._bytes)
        self.address = pinned.address
        pinned.release()  # the memoryview keeps it where it is
        self._touched = bytearray(-(-size_bytes // TOUCH_BYTES))

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes at an absolute offset of the file, writable if the arena is. Raises Refused outside of it."""
        return self.views([offset], size_bytes)[0]

    def views(self, offsets: Sequence[int], size_bytes: int) -> list[memoryview]:
        """As many bytes at each of these offsets. Raises Refused."""
        first, last = min(offsets, default=0), max(offsets, default=0)
        if not 0 <= first <= last <= last + size_bytes <= self.size_bytes:
            raise wrong(f"arena: {size_bytes} bytes at {first} to {last} are outside of {self.size_bytes}")
        return [self._bytes[offset : offset + size_bytes] for offset in offsets]

    def touch(self, offset: int, size_bytes: int) -> None:
        """Map the pages of a range, if this process never did: one by one during the copy is 3x slower.

        Raises Unavailable if there is no memory behind it: the copy would kill the process; Refused outside of it.
        """
        if not 0 <= offset < offset + size_bytes <= self.size_bytes:
            raise wrong(f"arena: {size_bytes} bytes at {offset} are outside of {self.size_bytes}")
        self._touch(offset, size_bytes)

    def _touch(self, offset: int, size_bytes: int) -> None:
        """Of a slot that the daemon named: it is checked already."""
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        for piece in range(offset // TOUCH_BYTES, (offset + size_bytes - 1) // TOUCH_BYTES + 1):
            if not self._touched[piece]:
                start = piece * TOUCH_BYTES
                length = min(TOUCH_BYTES, self.size_bytes - start)
                failed = _libc.madvise(self.address + start, length, advice)
                if failed and ctypes.get_errno() != errno.EINVAL:  # EINVAL: a kernel without this advice
                    raise Unavailable(f"arena: no memory at {start}: {os.strerror(ctypes.get_errno())}")
                self._touched[piece] = 1

    def intact(self, extents: Extents) -> int:
        """How many leading slots still have the generation that they had when these extents were handed out.

        Between what was done before, such as a copy out of the arena, and this look there is a fence, because
        processors like arm64 reorder loads: each release of a lock keeps what was before it there, each acquire what
        comes after it.
        """
        for _ in range(2):
            with _fence:
                pass
        size, at = _GENERATION_BYTES, 0
        for count, _, offset in extents.runs:
            expected = extents.generations[at * size : (at + count) * size]
            found = self._generations[offset : offset + count * size]
            if found != expected:
                return at + next(
                    n for n in range(count) if found[n * size :][:size] != expected[n * size :][:size]
                )
            at += count
        return at


def mapped(
    fd: int, size_bytes: int, generations_fd: int, generations_bytes: int, writable: bool
) -> ArenaView:
    """This process's mapping of these files, made if there is none. Raises OSError, ValueError."""
    # A mapped file keeps its inode number.
    key = (*_identity(fd), size_bytes, *_identity(generations_fd), generations_bytes, writable)
    with _views_guard:
        view = _views.get(key)
        if view is None:
            view = _views[key] = ArenaView(fd, size_bytes, generations_fd, generations_bytes, writable)
        return view


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def _forget_guards_in_child() -> None:
    global _fence, _views_guard
    _fence, _views_guard = threading.Lock(), threading.Lock()


_fence = threading.Lock()
_views_guard = threading.Lock()
_views: weakref.WeakValueDictionary[tuple[int, ...], ArenaView] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_forget_guards_in_child)


class OwnerLock:
    """Held while a write lease is open: a lock on a file of our own, and one on the arena that all writers share."""

    def __init__(self, arena_fd: int, lock_base: int, owner: int, own_fd: int) -> None:
        """Lock through new open files of these. Raises OSError."""
        self._guard = threading.Lock()
        self._connected = True
        self._writers = 0
        self._byte, self._shared_byte = lock_base, lock_base + owner
        self._fd = reopen(own_fd)
        try:
            self._shared_fd = reopen(arena_fd)  # for the daemon that comes next
        except OSError:
            os.close(self._fd)
            raise

    def enter(self) -> None:
        """A write lease opens; look at its generations after this. Raises OSError where another process has the byte."""
        with self._guard:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the connection was lost")
            if not self._writers:
                self._set(fcntl.F_WRLCK)
            self._writers += 1

    def leave(self) -> None:
        """A write lease was closed: its owner will not write into its slots any more."""
        with self._guard:
            self._writers -= 1
            if not self._writers and self._fd >= 0:
                self._set(fcntl.F_UNLCK)
            self._close_if_unused()

    def disconnect(self) -> None:
        """The connection that this lock belongs to is gone. Idempotent."""
        with self._guard:
            self._connected = False
            self._close_if_unused()

    def forget_in_child(self) -> None:
        """After a fork: let go of the inherited descriptor, so that only the parent holds the lock."""
        self._guard = threading.Lock()
        self._close()

    def _set(self, kind: int) -> None:
        shared = fcntl.F_RDLCK if kind == fcntl.F_WRLCK else fcntl.F_UNLCK
        with contextlib.suppress(OSError):  # another process has it: then it is locked, as it is to be
            change_lock(self._shared_fd, shared, self._shared_byte)
        change_lock(self._fd, kind, self._byte)

    def _close_if_unused(self) -> None:
        if not self._connected and self._writers == 0:
            self._close()

    def _close(self) -> None:
        for fd in (self._fd, self._shared_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._shared_fd = -1
