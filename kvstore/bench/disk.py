"""NVMe: the tier's put and get, against pwritev and preadv with O_DIRECT.

    round   pwritev 1 GiB   NvmeTier.put 1 GiB   preadv 1 GiB   NvmeTier.get 1 GiB

Both sides move the same records, one system call each, from and to the same arena-like
memory, with the same number of threads, in files that were allocated and written once
before. The tier adds a row per record and, when reading, the checksum.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from kvstore.bench.daemon import DaemonError
from kvstore.bench.figures import Value
from kvstore.bench.memory import Region
from kvstore.bench.plan import DISK_BYTES_MIN, DISK_FREE_SHARE_MAX, Plan
from kvstore.bench.rounds import Rounds, numbered
from kvstore.constants import DEMOTE_BATCH_RECORDS, LOAD_BATCH_RECORDS
from tiers.base import Get, Put, Record
from tiers.checksum import digest
from tiers.constants import SLAB_BYTES
from tiers.nvme import NvmeTier, capacity_for

KEY_BYTES = 48  # namespace digest and a block hash of 32


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """Raw and tier, writing and reading. Nothing where the disk has too little room. Raises OSError, TierError."""
    count = record_count(plan, home)
    if not count:
        return {"disk_skipped": f"less than {DISK_BYTES_MIN} bytes may be written at {home}"}
    region = Region.shared(arena_directory, plan.disk_buffer_blocks, plan.block_bytes)
    threads = plan.io_threads
    with (
        RawFile(home / "raw", region, count, threads) as raw,
        _TierFiles(home, region, count, threads) as tier,
    ):
        rounds = Rounds(count * plan.block_bytes)
        for number in numbered(plan.warm_up_rounds, plan.disk_rounds):
            if number == 0:
                rounds.forget()
            tier.delete_all()
            rounds.time("raw write", raw.write)
            rounds.time("put", tier.put)
            rounds.time("raw read", raw.read)
            rounds.time("get", tier.get)
        return {
            "disk_write_raw_gbps": rounds.gbps("raw write"),
            "nvme_write_gbps": rounds.gbps("put"),
            "nvme_write_ratio": rounds.ratio("put", "raw write"),
            "disk_read_raw_gbps": rounds.gbps("raw read"),
            "nvme_read_gbps": rounds.gbps("get"),
            "nvme_read_ratio": rounds.ratio("get", "raw read"),
            "disk_rounds": plan.disk_rounds,
            "disk_round_bytes": count * plan.block_bytes,
            "disk_direct": raw.direct and tier.direct,
            "io_threads": threads,
        }


def record_count(plan: Plan, home: Path) -> int:
    """Records per round that the file system has room for, twice over; 0 where that is too few."""
    free_bytes = shutil.disk_usage(home).free * DISK_FREE_SHARE_MAX
    round_bytes = min(plan.disk_bytes, int(free_bytes / 2))
    return round_bytes // plan.block_bytes if round_bytes >= min(DISK_BYTES_MIN, plan.disk_bytes) else 0


class Threads:
    """Runs work(number) for 0 … count-1; thread t takes every `threads`-th, as batches where asked."""

    def __init__(self, threads: int) -> None:
        self._count = threads
        self._pool = ThreadPoolExecutor(threads, "kvstore-bench-io")

    def run(self, count: int, work: Callable[[Sequence[int]], None], batch: int = 1) -> None:
        """Raises what the work raised."""

        def share(first: int) -> None:
            mine = range(first, count, self._count)
            for at in range(0, len(mine), batch):
                work(mine[at : at + batch])

        for done in [self._pool.submit(share, first) for first in range(self._count)]:
            done.result()

    def close(self) -> None:
        self._pool.shutdown()


class RawFile:
    """A preallocated file and the two system calls: the limit."""

    def __init__(self, path: Path, region: Region, count: int, threads: int) -> None:
        """Raises OSError."""
        self._path = path
        self._views = region.views
        self._block_bytes = region.block_bytes
        self._count = count
        self._threads = Threads(threads)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._fd = os.open(path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._fd, 0, count * self._block_bytes)

    def write(self) -> None:
        self._threads.run(self._count, lambda numbers: self._move(os.pwritev, numbers))

    def read(self) -> None:
        self._threads.run(self._count, lambda numbers: self._move(os.preadv, numbers))

    def _move(self, call: Callable[[int, list[memoryview], int], int], numbers: Sequence[int]) -> None:
        for number in numbers:
            view = self._views[number % len(self._views)]
            if call(self._fd, [view], number * self._block_bytes) != len(view):
                raise OSError(errno.EIO, f"{self._path}: a short transfer")

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.close()
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


class _TierFiles:
    """The same records in an NvmeTier, in batches as large as the daemon's."""

    def __init__(self, home: Path, region: Region, count: int, threads: int) -> None:
        """Raises TierError, OSError."""
        slabs = -(-count * region.block_bytes // SLAB_BYTES) + 1
        self._path = home / "tier"
        self._views = region.views
        self._checksums = [digest(view) for view in region.views]
        self._threads = Threads(threads)
        self._keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        self._tier = NvmeTier([self._path], capacity_for(slabs, SLAB_BYTES), SLAB_BYTES)

    @property
    def direct(self) -> bool:
        return all(directory.direct for directory in self._tier.directories)

    def delete_all(self) -> None:
        self._tier.delete(self._keys)

    def put(self) -> None:
        self._threads.run(len(self._keys), self._put, DEMOTE_BATCH_RECORDS)

    def get(self) -> None:
        self._threads.run(len(self._keys), self._get, LOAD_BATCH_RECORDS)

    def _put(self, numbers: Sequence[int]) -> None:
        items = []
        for number in numbers:
            at = number % len(self._views)
            view = self._views[at]
            items.append((Record(self._keys[number], b"", len(view), self._checksums[at]), view))
        if any(answer is not Put.STORED for answer in self._tier.put(items)):
            raise DaemonError("the NVMe tier did not store what it has room for")

    def _get(self, numbers: Sequence[int]) -> None:
        items = [(self._keys[number], self._views[number % len(self._views)]) for number in numbers]
        if any(answer is not Get.HIT for answer, _checksum in self._tier.get(items)):
            raise DaemonError("the NVMe tier did not find what it stored")

    def __enter__(self) -> _TierFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.close()
        with contextlib.suppress(OSError):
            self._tier.close()
        shutil.rmtree(self._path, ignore_errors=True)
