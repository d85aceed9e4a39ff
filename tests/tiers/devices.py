"""What the tests of NVMe devices share: an open device, and records with bytes that can be told apart."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.tiers.records import columns_of, content, key, record
from tiers.base import Get, Put
from tiers.checksum import digest
from tiers.nvme.device import Device, Row, capacity_for
from tiers.nvme.direct import DiskIO

SLAB_BYTES = 1 << 20
SIZE = 100_000
PER_SLAB = SLAB_BYTES // (25 * 4096)


class Clock:
    """Time that only the test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FaultyIO(DiskIO):
    """A disk that fails, tears and cuts short with a seeded chance, or has only so much room."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.failing = 0.0
        self.no_room = False
        self.writes = 0

    def _fails(self) -> bool:
        return self.chance.random() < self.failing

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._fails():
            raise OSError(errno.EIO, "injected")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes += 1
        if not self._fails():
            return super().pwritev(fd, buffers, offset)
        if self.chance.random() < 0.5:  # part of it reaches the disk
            data = b"".join(buffers)
            with open(f"/proc/self/fd/{fd}", "r+b") as file:  # without O_DIRECT, so cut anywhere
                os.pwrite(file.fileno(), data[: self.chance.randrange(len(data))], offset)
            if self.chance.random() < 0.5:
                return len(data) // 2
        raise OSError(errno.EIO, "injected")

    def fallocate(self, fd: int, size_bytes: int, offset: int = 0) -> None:
        if self.no_room:
            os.ftruncate(fd, size_bytes // 2)  # a half-done allocation
            raise OSError(errno.ENOSPC, "injected")
        super().fallocate(fd, size_bytes, offset)


def opened(path: Path, slabs: int = 3, **more: Any) -> tuple[Device, list[Row]]:
    """A device that is ready, and the rows its scan found."""
    device = Device(path, capacity_for(slabs, SLAB_BYTES), SLAB_BYTES, **more)
    device.open()
    rows = [row for piece in device.scan() for row in piece.rows()]
    assert device.ready and device.stats().records == len(rows)
    return device, rows


def put(device: Device, number: int, size_bytes: int = SIZE, version: int = 0) -> int | Put:
    """The slot that now holds a record, or why none does."""
    slot = device.pool.take(device.slot_bytes(size_bytes))
    if slot is None:
        return Put.NO_ROOM
    item, view = record(number, size_bytes, version)
    (answer,) = device.write([(slot, item, view)])
    if answer is Put.STORED:
        return slot
    device.set_aside(slot)
    return answer


def put_slot(device: Device, number: int, size_bytes: int = SIZE, version: int = 0) -> int:
    """The slot that now holds a record; there must be room."""
    slot = put(device, number, size_bytes, version)
    assert isinstance(slot, int), slot
    return slot


def read(device: Device, slot: int, number: int, size_bytes: int = SIZE, version: int = 0) -> Get:
    """What a read answers; a hit must have the right bytes."""
    into = bytearray(size_bytes)
    ((answer, checksum),) = device.read([(slot, key(number), memoryview(into))])
    if answer is Get.HIT:
        assert into == content(number, size_bytes, version)
    assert checksum == (digest(into, columns_of(number, size_bytes)) if answer is Get.HIT else b"")
    return answer


def flip(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))
