"""Which tiers the conformance suite runs over. One more tier is one more line in FACTORIES."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiers.arena import open_arena
from tiers.base import Record, Tier
from tiers.checksum import digest
from tiers.dram import DramTier
from tiers.memory import MemoryTier
from tiers.null import NullTier
from tiers.nvme import NvmeTier, capacity_for

SLAB_BYTES = 2 << 20
CAPACITY_BYTES = 4 * SLAB_BYTES


@dataclass(frozen=True)
class Factory:
    """How to open one kind of tier in an empty or used directory, and what it promises.

    survives: records outlive close and kill -9. slab_bytes: 0 without slabs, else equal to
    SLAB_BYTES. damage: flips a byte of every record in the directory of a closed tier.
    """

    name: str
    open: Callable[[Path], Tier]
    holds: bool = True
    survives: bool = False
    slab_bytes: int = 0
    in_shared_memory: bool = False
    damage: Callable[[Path], None] | None = None

    def open_ready(self, directory: Path) -> Tier:
        """An open tier after its first full scan, from which it may learn its free slots."""
        tier = self.open(directory)
        for _ in tier.scan():
            continue
        return tier


def open_dram(directory: Path) -> Tier:
    return DramTier(open_arena(directory / "test.arena", CAPACITY_BYTES, SLAB_BYTES))


def damage_dram(directory: Path) -> None:
    """Flip one byte in each 4 KiB of the slabs."""
    path = directory / "test.arena"
    with path.open("r+b") as file:
        start = os.fstat(file.fileno()).st_size - CAPACITY_BYTES
        file.seek(start)
        data = bytearray(file.read())
        data[::4096] = bytes(byte ^ 0xFF for byte in data[::4096])
        file.seek(start)
        file.write(data)


def open_nvme(count: int) -> Callable[[Path], Tier]:
    """NVMe over so many directories, together of at least the capacity that all tiers here have."""
    capacity_bytes = capacity_for(-(-CAPACITY_BYTES // SLAB_BYTES // count), SLAB_BYTES)

    def opening(directory: Path) -> Tier:
        return NvmeTier([directory / f"disk-{n}" for n in range(count)], capacity_bytes, SLAB_BYTES)

    return opening


def damage_nvme(directory: Path) -> None:
    """Flip one byte in each 4 KiB of every slab."""
    for path in directory.glob("disk-*/slab-*.kvs"):
        data = bytearray(path.read_bytes())
        data[::4096] = bytes(byte ^ 0xFF for byte in data[::4096])
        path.write_bytes(data)


FACTORIES: list[Factory] = [
    Factory("null", lambda directory: NullTier(), holds=False),
    Factory("memory", lambda directory: MemoryTier(CAPACITY_BYTES)),
    Factory(
        "dram", open_dram, survives=True, slab_bytes=SLAB_BYTES, in_shared_memory=True, damage=damage_dram
    ),
    Factory("nvme", open_nvme(1), survives=True, slab_bytes=SLAB_BYTES, damage=damage_nvme),
    Factory("nvme-3", open_nvme(3), survives=True, slab_bytes=SLAB_BYTES, damage=damage_nvme),
]
BY_NAME = {factory.name: factory for factory in FACTORIES}


def content(number: int, size_bytes: int, version: int = 0) -> bytes:
    """Bytes that differ for each record and version, cheap to make again."""
    unit = digest(f"{number}/{version}".encode())
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def record(number: int, size_bytes: int, version: int = 0) -> tuple[Record, memoryview]:
    """Record `number`, and its bytes as `Tier.put` wants them."""
    data = content(number, size_bytes, version)
    return Record(key(number), key(number - 1) if number else b"", size_bytes, digest(data)), memoryview(data)


def key(number: int) -> bytes:
    return b"N" * 16 + digest(str(number).encode()) * 2
