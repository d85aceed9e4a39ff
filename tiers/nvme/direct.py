"""Whole records between memory and a file, past the page cache.

    view, aligned      [■■■■■■■■■■■■■■■■|■■··]     the last, partial block goes through one
    file, slot         [■■■■■■■■■■■■■■■■|■■□□]     4 KiB bounce block; nothing else is copied

O_DIRECT wants address, length and offset on block boundaries. Slots are padded to
SLOT_ALIGN_BYTES and arena views begin on one, so a record moves straight between disk and
arena. A view that begins elsewhere (or is read-only, so that its address is not to be
had) goes through a bounce buffer of the calling thread.

A file system without O_DIRECT (tmpfs of older kernels, some network ones) is used through
the page cache, with one warning per directory.

`DiskIO` is the seam: the handful of system calls that may fail, in one object, so that a
test puts a failing disk in its place.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tiers.slots import SLOT_ALIGN_BYTES, slot_bytes_for

_log = logging.getLogger(__name__)


class DiskIO:
    """System calls of the NVMe tier, as they are. Every method raises OSError."""

    may_change = True  # whether files may be made, cut, written and removed

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int, offset: int = 0) -> None:
        os.posix_fallocate(fd, offset, size_bytes)

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be allocated on the file system of `path`."""
        return free_bytes(path)


class LookingIO(DiskIO):
    """Those that change nothing."""

    may_change = False

    def open(self, path: Path, flags: int) -> int:
        return super().open(path, flags & ~(os.O_RDWR | os.O_CREAT))

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EROFS, "only looked at")

    def fallocate(self, fd: int, size_bytes: int, offset: int = 0) -> None:
        raise OSError(errno.EROFS, "only looked at")


def free_bytes(path: Path) -> int:
    """Of a file system; of one that does not say how large it is, as many as there could be. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else NO_LIMIT_BYTES


NO_LIMIT_BYTES = 1 << 62
Direct = Literal["auto", "on", "off"]


class DirectFile:
    """Opens, reads and writes the files of one directory past the page cache. Thread-safe.

    direct: "auto" tries O_DIRECT and warns once where there is none, "on" raises OSError
    there, "off" always goes through the page cache.
    """

    def __init__(self, there: Path, io: DiskIO, direct: Direct = "auto") -> None:
        """there: any file of the directory; a full disk may have no room for one more."""
        self._io = io
        self.direct = direct != "off" and self._has_direct(there, required=direct == "on")

    def open(self, path: Path) -> int:
        """A descriptor of an existing file. Blocks briefly; raises OSError."""
        return self._io.open(path, os.O_RDWR | (os.O_DIRECT if self.direct else 0))

    def _has_direct(self, there: Path, *, required: bool) -> bool:
        try:
            os.close(self._io.open(there, os.O_RDWR | os.O_DIRECT))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if required:
                why = 'direct is "on", but there is no O_DIRECT: use another file system, "auto" or "off"'
                raise OSError(error.errno, why) from error
            _log.warning("%s: no O_DIRECT here: records go through the page cache", there.parent)
            return False
        return True

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        """Write one record at the start of its slot. Blocks; raises OSError, also for a short write."""
        buffers = self._outgoing(view) if self.direct else [view]
        wanted = sum(map(len, buffers))
        written = self._io.pwritev(fd, buffers, offset)
        if written != wanted:
            raise OSError(errno.EIO, f"wrote {written} of {wanted} bytes")

    def read(self, fd: int, view: memoryview, offset: int) -> bool:
        """Fill the view from the start of a slot; False where the file ends before. Raises OSError."""
        if not self.direct:
            return self._io.preadv(fd, [view], offset) >= len(view)
        whole = len(view) & -SLOT_ALIGN_BYTES if _is_aligned(view) else 0
        rest = _bounce(slot_bytes_for(len(view) - whole))
        buffers = [part for part in (view[:whole], rest) if len(part)]
        count = self._io.preadv(fd, buffers, offset)
        if count < len(view):
            return False
        view[whole:] = rest[: len(view) - whole]
        return True

    @staticmethod
    def _outgoing(view: memoryview) -> list[memoryview]:
        """The view as aligned buffers, padded to a whole number of blocks."""
        whole = len(view) & -SLOT_ALIGN_BYTES if _is_aligned(view) else 0
        rest = _bounce(slot_bytes_for(len(view) - whole))
        rest[: len(view) - whole] = view[whole:]
        return [part for part in (view[:whole], rest) if len(part)]


_thread = threading.local()


def _bounce(size_bytes: int) -> memoryview:
    """Page-aligned scratch memory of this thread, valid until its next call."""
    held: mmap.mmap | None = getattr(_thread, "bounce", None)
    if held is None or len(held) < size_bytes:
        held = _thread.bounce = mmap.mmap(-1, max(size_bytes, SLOT_ALIGN_BYTES))
    return memoryview(held)[:size_bytes]


def _is_aligned(view: memoryview) -> bool:
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % SLOT_ALIGN_BYTES == 0
