"""The slab files of one NVMe device.

    slab 0  slab-000000.kvs  [■■■■■■■■■■■■]  backed: the file system has given all its blocks
    slab 1  slab-000001.kvs  [■■■■]          short: was cut off; given its blocks again on use
    slab 2                                   absent until the device grows

A backed slab stays allocated when it empties: the next class takes it over without asking
the file system. Descriptors are opened on use and at most NVME_SLAB_FDS_MAX idle ones are
kept, so the number of slabs is not bound by the limit on open files.

Files are opened in the directory that was there at the start, whatever is at its path later: nothing is written
to another directory that was put, or mounted, in its place.

Everything blocks on the disk and may raise OSError. Thread-safe; the lock is never held
during a system call, so one that hangs does not hold up others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tiers.constants import NVME_HEADROOM_BYTES
from tiers.nvme.device_home import LOCK
from tiers.nvme.direct import Direct, DirectFile, DiskIO
from tiers.sizes import format_bytes

NVME_SLAB_FDS_MAX: Final = 64  # slab files kept open per directory
assert NVME_SLAB_FDS_MAX > 0

_NAME = re.compile(r"slab-(\d{6,})\.kvs")


class _Open:
    __slots__ = ("fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 0


class Slabs:
    """Slab files 0 to slab_count - 1, each of slab_bytes once backed."""

    def __init__(self, path: Path, slab_count: int, slab_bytes: int, io: DiskIO, direct: Direct) -> None:
        """Looks which files there are; removes those beyond slab_count, and what cannot be a slab, where `io` may change something.

        Raises OSError, also where `direct` is "on" and the file system cannot.
        """
        self._path = path
        self._slab_bytes = slab_bytes
        self._io = io
        self._files = DirectFile(path / LOCK, io, direct)
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}  # least recently used first
        self._directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directory = Path(f"/proc/self/fd/{self._directory_fd}")
        try:
            self._find(slab_count)
        except BaseException:
            os.close(self._directory_fd)
            raise

    def _find(self, slab_count: int) -> None:
        """Which files there are. Raises OSError."""
        found, slab_bytes = self._sizes(), self._slab_bytes
        for slab, size_bytes in found.items():
            if self._io.may_change and (slab >= slab_count or not 0 <= size_bytes <= slab_bytes):
                os.unlink(self._file(slab))
        self.backed = {slab for slab, size in found.items() if slab < slab_count and size == slab_bytes}
        self.short = {slab: size for slab, size in found.items() if 0 < size < slab_bytes}

    @property
    def direct(self) -> bool:
        """Whether records bypass the page cache."""
        return self._files.direct

    def are_in_place(self) -> bool:
        """Whether those in use were not removed. Raises OSError."""
        with self._lock:
            in_use = self.backed.intersection(self._open)
        return all(os.path.lexists(self._file(slab)) for slab in in_use)

    def back(self, slab: int) -> None:
        """Have the file system allocate the whole slab. Raises OSError, then nothing is kept.

        Refuses to take the last NVME_HEADROOM_BYTES of the file system.
        """
        self.forget(slab)
        fd = self._io.open(self._file(slab), os.O_RDWR | os.O_CREAT)
        try:
            before = os.fstat(fd).st_size
            room = self._io.free_bytes(self._directory)
            needed = self._slab_bytes - before + NVME_HEADROOM_BYTES
            if room < needed:
                raise OSError(errno.ENOSPC, f"{format_bytes(room)} free, {format_bytes(needed)} needed")
            try:
                self._io.fallocate(fd, self._slab_bytes)
            except OSError:
                os.ftruncate(fd, before)  # give back what a half-done allocation took
                raise
        finally:
            os.close(fd)
        self.backed.add(slab)

    def forget(self, slab: int) -> None:
        """The file is not what it was: look again before the next use."""
        self.backed.discard(slab)
        with self._lock:
            held = self._open.pop(slab, None)
            is_idle = held is not None and not held.users  # else its last user closes it
        if held is not None and is_idle:
            os.close(held.fd)

    def write(self, slab: int, offset: int, view: memoryview) -> None:
        """Write one record into its slot."""
        with self._descriptor(slab) as fd:
            self._files.write(fd, view, offset)

    def read(self, slab: int, offset: int, view: memoryview) -> bool:
        """Read one record; False where the file is gone or too short."""
        try:
            with self._descriptor(slab) as fd:
                is_complete = self._files.read(fd, view, offset)
        except FileNotFoundError:
            is_complete = False
        if not is_complete:
            self.forget(slab)
        return is_complete

    def check(self) -> list[str]:
        """One line for each backed slab whose file is not there in full."""
        sizes = self._sizes()
        return [
            f"nvme {self._path}: {self._file(slab).name} has {sizes.get(slab, 0)} bytes, not {self._slab_bytes}"
            for slab in sorted(self.backed)
            if sizes.get(slab, 0) < self._slab_bytes
        ]

    def close(self) -> None:
        os.close(self._directory_fd)
        with self._lock:
            held = list(self._open.values())
            self._open.clear()
        for each in held:
            if not each.users:  # else its last user closes it
                os.close(each.fd)

    def _file(self, slab: int) -> Path:
        return self._directory / f"slab-{slab:06d}.kvs"

    @contextlib.contextmanager
    def _descriptor(self, slab: int) -> Iterator[int]:
        with self._lock:
            held = self._open.pop(slab, None)
            if held is not None:
                self._use(slab, held)
        if held is None:
            opened = _Open(self._files.open(self._file(slab)))
            with self._lock:
                held = self._open.pop(slab, opened)  # another thread may have been faster
                self._use(slab, held)
            if held is not opened:
                os.close(opened.fd)
        try:
            yield held.fd
        finally:
            with self._lock:
                held.users -= 1
                unused = self._take_idle(slab, held)
            for each in unused:
                os.close(each.fd)

    def _use(self, slab: int, held: _Open) -> None:
        self._open[slab] = held
        held.users += 1

    def _take_idle(self, slab: int, held: _Open) -> list[_Open]:
        """Descriptors to close now: the one just given back where it is out of date, or one too many."""
        if self._open.get(slab) is not held:
            return [] if held.users else [held]
        if len(self._open) > NVME_SLAB_FDS_MAX:
            for number, each in self._open.items():
                if not each.users:
                    return [self._open.pop(number)]
        return []

    def _sizes(self) -> dict[int, int]:
        """Bytes there are of each slab; -1 for what is no regular file.

        Not with os.scandir: the stat of its entries keeps the GIL while the disk hangs.
        """
        sizes = {}
        for name in os.listdir(self._directory):
            match = _NAME.fullmatch(name)
            if match:
                found = os.lstat(self._directory / name)
                sizes[int(match[1])] = found.st_size if stat.S_ISREG(found.st_mode) else -1
        return sizes
