"""Runs of bytes of a file, read past the page cache into memory that neighbours share.

    file      │····:■■■■│■■■■■■■■│■■■■■■■■│■■■:····│     ■ a run; │ borders of blocks
    memory    │ ···:■■■■│■■■■■■■■│■■■■■■■■│■■■:··· │     as far behind a border as in the file
                bounce    ╰── straight ──╯  bounce

The blocks at both ends hold bytes of neighbours, which may have been verified already: of those blocks only the run's own
bytes are copied, by way of a bounce buffer of the thread; all in between is read in place, in the same call. A file system
without O_DIRECT is read through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from pathlib import Path
from typing import Final

from coldstart.blocks import BLOCK_BYTES, read_all

_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_thread = threading.local()


class RunsFile:
    """One file. fd: for whoever asks about it. Thread-safe. Every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
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
