"""Records for tests: bytes that differ for each number and version, cheap to make again."""

from __future__ import annotations

from tiers.arena import Arena
from tiers.base import Record
from tiers.checksum import digest

SLAB_BYTES = 2 << 20
CAPACITY_BYTES = 4 * SLAB_BYTES


def content(number: int, size_bytes: int, version: int = 0) -> bytes:
    unit = digest(f"{number}/{version}".encode())
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def record(number: int, size_bytes: int, version: int = 0) -> tuple[Record, memoryview]:
    """Record `number`, and its bytes."""
    data = content(number, size_bytes, version)
    return Record(key(number), key(number - 1) if number else b"", size_bytes, digest(data)), memoryview(data)


def key(number: int) -> bytes:
    return b"N" * 16 + digest(str(number).encode()) * 2


# Runs of one, for tests that are about one slot.


def reserve(arena: Arena, key: bytes, parent: bytes, size_bytes: int, owner: int) -> int | None:
    slots = arena.reserve_run((key,), (parent,), size_bytes, owner)
    return slots[0] if slots else None


def commit(arena: Arena, slot: int, checksum: bytes, stored_s: int = 0) -> None:
    arena.commit_run((slot,), checksum, stored_s)


def free(arena: Arena, slot: int) -> None:
    arena.free_run((slot,))


def place(arena: Arena, slot: int) -> tuple[int, int, int]:
    (((_, offset, at),), generation) = arena.extents((slot,))
    return offset, at, int.from_bytes(generation, "little")
