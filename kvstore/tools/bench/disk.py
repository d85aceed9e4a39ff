"""NVMe: a device's write and read, against pwritev and preadv with O_DIRECT.

    round   pwritev 1 GiB   Device.write 1 GiB   preadv 1 GiB   Device.read 1 GiB

Both sides move the same records, one system call each, from and to the same arena-like
memory, with the same number of threads, in files that were allocated and written once
before. The device adds a row per record and, when reading, the checksum.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from kvstore.constants import DEMOTE_BATCH_RECORDS, LOAD_BATCH_RECORDS
from kvstore.tools.bench.daemon import DaemonError
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.memory import Region
from kvstore.tools.bench.plan import DISK_BYTES_MIN, DISK_FREE_SHARE_MAX, Plan
from kvstore.tools.bench.rounds import Rounds
from kvstore.tools.doctor.disk_speed import RawFile, spread
from tiers.base import Get, Put, Record
from tiers.checksum import digest
from tiers.constants import SLAB_BYTES
from tiers.nvme.device import Device, capacity_for
from tiers.nvme.direct import DirectFile, DiskIO

KEY_BYTES = 48  # namespace digest and a block hash of 32


def measure(plan: Plan, home: Path, arena_directory: Path) -> dict[str, Value]:
    """Raw and device, writing and reading. Nothing where the disk has too little room. Raises OSError, TierError."""
    count = record_count(plan, home)
    if not count:
        return {"disk_skipped": f"less than {DISK_BYTES_MIN} bytes may be written at {home}"}
    region = Region(plan.disk_buffer_blocks, plan.block_bytes, arena_directory)
    threads = plan.io_threads
    with (
        contextlib.closing(raw_file(home / "raw", region, count, threads)) as raw,
        contextlib.closing(_DeviceFiles(home, region, count, threads)) as device,
    ):
        rounds = Rounds(count * plan.block_bytes, plan.warm_up_rounds)
        for _ in range(plan.warm_up_rounds + plan.disk_rounds):
            rounds.time("raw write", raw.write)
            rounds.time("write", device.write)
            rounds.time("raw read", raw.read)
            rounds.time("read", device.read)
        return {
            "disk_write_raw_gbps": rounds.gbps("raw write"),
            "nvme_write_gbps": rounds.gbps("write"),
            "nvme_write_ratio": rounds.ratio("write", "raw write"),
            "disk_read_raw_gbps": rounds.gbps("raw read"),
            "nvme_read_gbps": rounds.gbps("read"),
            "nvme_read_ratio": rounds.ratio("read", "raw read"),
            "disk_rounds": plan.disk_rounds,
            "disk_round_bytes": count * plan.block_bytes,
            "disk_direct": device.direct,
            "io_threads": threads,
        }


def record_count(plan: Plan, home: Path) -> int:
    """Records per round that the file system has room for, twice over; 0 where that is too few."""
    free_bytes = shutil.disk_usage(home).free * DISK_FREE_SHARE_MAX
    round_bytes = min(plan.disk_bytes, int(free_bytes / 2))
    return round_bytes // plan.block_bytes if round_bytes >= min(DISK_BYTES_MIN, plan.disk_bytes) else 0


def raw_file(path: Path, region: Region, count: int, threads: int) -> RawFile:
    """The limit, in a file whose name is gone as soon as it is open. Raises OSError."""
    path.touch()
    fd = DirectFile(path, DiskIO()).open(path)
    path.unlink()
    return RawFile(fd, region.views, count, threads)


class _DeviceFiles:
    """The same records on a Device, in batches as large as the daemon's. Each round writes the same slots again."""

    def __init__(self, home: Path, region: Region, count: int, threads: int) -> None:
        """Raises TierError, OSError, and DaemonError where the disk has no room after all."""
        slabs = -(-count * region.block_bytes // SLAB_BYTES) + 1
        self._path = home / "device"
        self._views = region.views
        self._checksums = [digest(view) for view in region.views]
        self._threads = threads
        self._keys = [os.urandom(KEY_BYTES) for _ in range(count)]
        self._device = Device(self._path, capacity_for(slabs, SLAB_BYTES), SLAB_BYTES)
        self._device.open()
        for _ in self._device.scan():  # nothing is there; afterwards slots may be taken
            continue
        slot_bytes = self._device.slot_bytes(region.block_bytes)
        taken = (self._device.pool.take(slot_bytes) for _ in range(count))
        self._slots = [slot for slot in taken if slot is not None]
        if len(self._slots) < count:
            self.close()
            raise DaemonError(f"the NVMe device has room for {len(self._slots)} of {count} records")

    @property
    def direct(self) -> bool:
        return self._device.direct

    def write(self) -> None:
        spread(self._threads, len(self._keys), self._write, DEMOTE_BATCH_RECORDS)

    def read(self) -> None:
        spread(self._threads, len(self._keys), self._read, LOAD_BATCH_RECORDS)

    def _write(self, numbers: Sequence[int]) -> None:
        items = []
        for number in numbers:
            at = number % len(self._views)
            view = self._views[at]
            record = Record(self._keys[number], b"", len(view), self._checksums[at])
            items.append((self._slots[number], record, view))
        if any(answer is not Put.STORED for answer in self._device.write(items)):
            raise DaemonError("the NVMe device did not store what it has room for")

    def _read(self, numbers: Sequence[int]) -> None:
        items = [(self._slots[n], self._keys[n], self._views[n % len(self._views)]) for n in numbers]
        if any(answer is not Get.HIT for answer, _checksum in self._device.read(items)):
            raise DaemonError("the NVMe device did not find what it stored")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._device.close()
        shutil.rmtree(self._path, ignore_errors=True)
