"""A short measurement of a disk, in a file without a name: nothing is left, however it ends.

256 MiB are written and read in 2 MiB pieces by four threads, past the page cache; then 4 KiB reads, one by one. Longer and
beside the daemon's own code measures `kvstore bench`, with the same `RawFile`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.constants import KIB, MIB
from kvstore.units import format_bytes
from tiers.nvme.direct import free_bytes

DOCTOR_DISK_BYTES = 256 * MIB  # written and read by --disks in each directory
DOCTOR_DISK_PIECE_BYTES, DOCTOR_DISK_THREADS = 2 * MIB, 4  # written or read at once, and threads that do so
DOCTOR_DISK_SMALL_READS = 64  # reads of 4 KiB that measure the latency


class NotMeasured(Exception):
    """Why not, in words."""


@dataclass(frozen=True, slots=True)
class Speed:
    """direct: past the page cache; else the reads are of memory."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_p50_s: float
    latency_p99_s: float
    direct: bool


class RawFile:
    """A file of `count` records and the two system calls, from and to a few views of memory: the limit of a disk."""

    def __init__(self, fd: int, views: Sequence[memoryview], count: int, threads: int) -> None:
        """Takes over the descriptor. Raises OSError."""
        self._fd, self._views, self._count, self._threads = fd, views, count, threads
        self._record_bytes = len(views[0])
        try:
            os.posix_fallocate(fd, 0, count * self._record_bytes)
        except OSError:
            os.close(fd)
            raise

    def write(self) -> None:
        spread(self._threads, self._count, lambda numbers: self._move(os.pwritev, numbers))

    def read(self) -> None:
        spread(self._threads, self._count, lambda numbers: self._move(os.preadv, numbers))

    def _move(self, call: Callable[[int, list[memoryview], int], int], numbers: Sequence[int]) -> None:
        for number in numbers:
            view = self._views[number % len(self._views)]
            if call(self._fd, [view], number * self._record_bytes) != len(view):
                raise OSError(errno.EIO, "a short transfer")

    def close(self) -> None:
        os.close(self._fd)


def spread(threads: int, count: int, work: Callable[[Sequence[int]], None], batch: int = 1) -> None:
    """Run work(numbers) for 0 … count-1 in batches; each thread takes every `threads`-th. Raises what it raised."""

    def share(first: int) -> None:
        mine = range(first, count, threads)
        for at in range(0, len(mine), batch):
            work(mine[at : at + batch])

    with ThreadPoolExecutor(threads, "kvstore-disk") as pool:
        list(pool.map(share, range(threads)))


def nameless(directory: Path) -> tuple[int, bool]:
    """A file without a name, and whether it is past the page cache. Raises OSError."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(directory, flags, 0o600), False


def measure(directory: Path, size_bytes: int = DOCTOR_DISK_BYTES) -> Speed:
    """Takes a second or two on a good disk. Raises NotMeasured."""
    if free_bytes(directory) < 4 * size_bytes:
        raise NotMeasured(f"less than {format_bytes(4 * size_bytes)} free")
    try:
        return _measured(directory, size_bytes)
    except OSError as error:
        raise NotMeasured(error.strerror) from error


def _measured(directory: Path, size_bytes: int) -> Speed:
    """Raises OSError."""
    memory, piece = mmap.mmap(-1, DOCTOR_DISK_THREADS * DOCTOR_DISK_PIECE_BYTES), DOCTOR_DISK_PIECE_BYTES
    memory.write(os.urandom(len(memory)))  # nothing that a disk could make smaller
    views = [memoryview(memory)[at : at + piece] for at in range(0, len(memory), piece)]
    fd, direct = nameless(directory)
    with contextlib.closing(RawFile(fd, views, size_bytes // piece, DOCTOR_DISK_THREADS)) as raw:
        began_s = time.perf_counter()
        raw.write()
        os.fdatasync(fd)
        written_s = time.perf_counter()
        raw.read()
        read_s = time.perf_counter()
        took = sorted(_small_reads(fd, size_bytes))
    p99_s = took[min(len(took) - 1, len(took) * 99 // 100)]
    return Speed(
        size_bytes / (read_s - written_s),
        size_bytes / (written_s - began_s),
        took[len(took) // 2],
        p99_s,
        direct,
    )


def _small_reads(fd: int, size_bytes: int) -> list[float]:
    chance = random.Random(0)
    took = []
    with mmap.mmap(-1, 4 * KIB) as buffer:
        for _ in range(DOCTOR_DISK_SMALL_READS):
            start = chance.randrange(size_bytes // (4 * KIB)) * 4 * KIB
            began_s = time.perf_counter()
            os.preadv(fd, [buffer], start)
            took.append(time.perf_counter() - began_s)
    return took
