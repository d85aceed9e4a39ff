"""Byte-range locks that belong to an open file, not to a process (Linux OFD locks).

A lock is dropped by the kernel when the last descriptor of the open file is closed, also
by `kill -9`; that is how a dead process is known from a slow one. Locks lie beyond the end
of the file, so they need no storage: byte `LOCK_BASE + owner`.

A descriptor that was inherited or passed over a socket shares its locks with the sender.
A process that wants locks of its own opens the file anew, for example through /proc/self/fd/N.

Light on purpose: the client imports this inside inference engines.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

LOCK_BASE = 1 << 62  # far beyond any file's end

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


def change_lock(fd: int, kind: int, byte: int) -> None:
    """Lock one byte of the file, shared (F_RDLCK) or alone (F_WRLCK), or drop it (F_UNLCK). Raises OSError where another open
    file holds it."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(kind, byte))


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)


def try_lock(fd: int, owner: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Take an owner's byte for this open file; False if another open file holds it. Never blocks."""
    try:
        change_lock(fd, kind, LOCK_BASE + owner)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, owner: int) -> None:
    """Drop an owner's byte, also while copies of this descriptor are open."""
    change_lock(fd, fcntl.F_UNLCK, LOCK_BASE + owner)


def is_locked(fd: int, owner: int) -> bool:
    """Whether another open file than this one holds the owner's byte."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, LOCK_BASE + owner))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK
