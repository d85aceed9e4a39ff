"""The slab files of one NVMe directory.

    slab 0  slab-000000.kvs  [■■■■■■■■■■■■]  backed: the file system has given all its blocks
    slab 1  slab-000001.kvs  [■■■■]          short: cut by somebody; given its blocks again on use
    slab 2                                   absent until a record needs it

A backed slab stays allocated when it empties: the next class takes it over without asking
the file system. Descriptors are opened on use and at most NVME_SLAB_FDS_MAX idle ones are
kept, so the number of slabs is not bound by the limit on open files.

Thread-safe. `read` and `write` hold no lock while they move bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from tiers.constants import NVME_HEADROOM_BYTES, NVME_SLAB_FDS_MAX
from tiers.direct import Direct, DirectFile, DiskIO

_NAME = re.compile(r"slab-(\d{6,})\.kvs")


class _Open:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


class SlabFiles:
    """Slab files 0 to slab_count - 1, each of slab_bytes once backed."""

    def __init__(self, path: Path, slab_count: int, slab_bytes: int, io: DiskIO, direct: Direct) -> None:
        """Raises OSError, also where `direct` is "on" and the file system cannot."""
        self.path = path
        self.slab_bytes = slab_bytes
        self._io = io
        self._files = DirectFile(path, io, direct)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # least recently used first
        found = self._sizes()
        for slab in found:
            if slab >= slab_count:  # the capacity was lowered
                self.file(slab).unlink()
        self._backed = {n for n, size in found.items() if n < slab_count and size >= slab_bytes}
        self._slab_count = slab_count

    @property
    def direct(self) -> bool:
        """Whether records bypass the page cache."""
        return self._files.direct

    @property
    def backed_count(self) -> int:
        return len(self._backed)

    def short_sizes(self) -> dict[int, int]:
        """Bytes there are of every slab that is not backed: 0 where there is no file."""
        found = self._sizes()
        return {n: found.get(n, 0) for n in range(self._slab_count) if n not in self._backed}

    def file(self, slab: int) -> Path:
        return self.path / f"slab-{slab:06d}.kvs"

    def is_backed(self, slab: int) -> bool:
        return slab in self._backed

    def back(self, slab: int) -> None:
        """Have the file system allocate the whole slab. Raises OSError, then nothing is kept.

        Blocks for about a millisecond. Refuses to eat into NVME_HEADROOM_BYTES, without
        which the rows could not be written.
        """
        self.forget(slab)
        room = self._io.free_bytes(self.path)
        path = self.file(slab)
        before = path.stat().st_size if path.exists() else 0
        needed = self.slab_bytes - before + NVME_HEADROOM_BYTES
        if room < needed:
            raise OSError(errno.ENOSPC, f"{room} bytes free, {needed} needed")
        fd = self._io.open(path, os.O_RDWR | os.O_CREAT)
        try:
            self._io.fallocate(fd, self.slab_bytes)
        except OSError:
            os.ftruncate(fd, before)  # give back what a half-done allocation took
            raise
        finally:
            os.close(fd)
        self._backed.add(slab)

    def forget(self, slab: int) -> None:
        """The file is not what it was: look again before the next use."""
        with self._lock:
            self._backed.discard(slab)
            held = self._open.pop(slab, None)
            if held is not None and not held.users:  # else its last user closes it
                os.close(held.fd)

    def write(self, slab: int, offset: int, view: memoryview) -> None:
        """Write one record into its slot. Blocks; raises OSError."""
        with self._descriptor(slab) as fd:
            self._files.write(fd, view, offset)

    def read(self, slab: int, offset: int, view: memoryview) -> bool:
        """Read one record; False where the file is gone or too short. Blocks; raises OSError."""
        try:
            with self._descriptor(slab) as fd:
                complete = self._files.read(fd, view, offset)
        except FileNotFoundError:
            complete = False
        if not complete:
            self.forget(slab)
        return complete

    def check(self) -> list[str]:
        """One line for each backed slab whose file is not there in full."""
        sizes = self._sizes()
        return [
            f"nvme {self.path}: {self.file(slab).name} has {sizes.get(slab, 0)} bytes, not {self.slab_bytes}"
            for slab in sorted(self._backed)
            if sizes.get(slab, 0) < self.slab_bytes
        ]

    def close(self) -> None:
        with self._lock:
            for held in self._open.values():
                os.close(held.fd)
            self._open.clear()

    @contextlib.contextmanager
    def _descriptor(self, slab: int) -> Iterator[int]:
        with self._lock:
            held = self._open.pop(slab, None) or _Open(self._files.open(self.file(slab)))
            self._open[slab] = held
            held.users += 1
        try:
            yield held.fd
        finally:
            with self._lock:
                held.users -= 1
                if not held.users and self._open.get(slab) is not held:
                    os.close(held.fd)
                elif len(self._open) > NVME_SLAB_FDS_MAX:
                    self._close_idle()

    def _close_idle(self) -> None:
        for slab, held in self._open.items():
            if not held.users:
                del self._open[slab]
                os.close(held.fd)
                return

    def _sizes(self) -> dict[int, int]:
        sizes = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match:
                    sizes[int(match[1])] = entry.stat().st_size
        return sizes
