"""A short measurement of a disk, in a file without a name: nothing is left, however it ends.

256 MiB are written and read in 2 MiB pieces by four threads, past the page cache; then 4 KiB reads, one by one. Longer and
beside the daemon's own code measures `kvstore bench`.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore.constants import KIB, MIB
from kvstore.units import format_bytes
from tiers.direct import free_bytes

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


def measure(directory: Path, size_bytes: int = DOCTOR_DISK_BYTES) -> Speed:
    """Takes a second or two on a good disk. Raises NotMeasured."""
    if free_bytes(directory) < 4 * size_bytes:
        raise NotMeasured(f"less than {format_bytes(4 * size_bytes)} free")
    try:
        fd, direct = _open(directory)
    except OSError as error:
        raise NotMeasured(error.strerror) from error
    try:
        return _measured(fd, size_bytes, direct)
    except OSError as error:
        raise NotMeasured(error.strerror) from error
    finally:
        os.close(fd)


def _open(directory: Path) -> tuple[int, bool]:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(directory, flags, 0o600), False


def _measured(fd: int, size_bytes: int, direct: bool) -> Speed:
    os.posix_fallocate(fd, 0, size_bytes)
    starts = range(0, size_bytes, DOCTOR_DISK_PIECE_BYTES)
    content = os.urandom(DOCTOR_DISK_PIECE_BYTES)  # nothing that a disk could make smaller

    def moved(work: str) -> float:
        def share(first: int) -> None:
            with mmap.mmap(-1, DOCTOR_DISK_PIECE_BYTES) as buffer:
                buffer[:] = content
                for start in starts[first::DOCTOR_DISK_THREADS]:
                    (os.pwritev if work == "write" else os.preadv)(fd, [buffer], start)

        began_s = time.perf_counter()
        with ThreadPoolExecutor(DOCTOR_DISK_THREADS) as pool:
            list(pool.map(share, range(DOCTOR_DISK_THREADS)))
        if work == "write":
            os.fdatasync(fd)
        return size_bytes / (time.perf_counter() - began_s)

    write = moved("write")
    read = moved("read")
    took = sorted(_small_reads(fd, size_bytes))
    return Speed(read, write, took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)], direct)


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
