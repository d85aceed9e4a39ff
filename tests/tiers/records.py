"""Records for tests: bytes that differ for each number and version, cheap to make again."""

from __future__ import annotations

from tiers.base import Record
from tiers.checksum import digest, pack_columns
from tiers.dram.arena import Arena

SLAB_BYTES = 2 << 20
CAPACITY_BYTES = 4 * SLAB_BYTES
STORED_S = 1_700_000_000


def content(number: int, size_bytes: int, version: int = 0) -> bytes:
    unit = digest(f"{number}/{version}".encode())
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


def record(number: int, size_bytes: int, version: int = 0) -> tuple[Record, memoryview]:
    """Record `number`, and its bytes."""
    data, columns = content(number, size_bytes, version), columns_of(number, size_bytes)
    parent = key(number - 1) if number else b""
    return Record(
        key(number), parent, size_bytes, digest(data, columns), STORED_S + version, columns
    ), memoryview(data)


def columns_of(number: int, size_bytes: int) -> bytes:
    """One column, four of two sizes, or two, by turns."""
    quarter = size_bytes // 4
    cuts = [[size_bytes], [quarter, quarter, quarter, size_bytes - 3 * quarter], [1, size_bytes - 1]]
    return pack_columns(cuts[number % 3] if quarter else [], size_bytes)


def key(number: int) -> bytes:
    return b"N" * 16 + digest(str(number).encode()) * 2


# Runs of one, for tests that are about one slot.


def reserve(
    arena: Arena, key: bytes, parent: bytes, size_bytes: int, owner: int, columns: bytes = b""
) -> int | None:
    slots = arena.reserve_run((key,), (parent,), size_bytes, owner, columns)
    return slots[0] if slots else None


def commit(arena: Arena, slot: int, checksum: bytes, stored_s: int = 0) -> None:
    arena.commit_run((slot,), checksum, stored_s)


def free(arena: Arena, slot: int) -> None:
    arena.free_run((slot,))


def place(arena: Arena, slot: int) -> tuple[int, int, int]:
    (((_, offset, at),), generation) = arena.extents((slot,))
    return offset, at, int.from_bytes(generation, "little")
