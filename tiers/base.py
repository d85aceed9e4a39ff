"""The tier interface: eight methods that every place for bytes answers to.

    engine ── put ──▶ ┌────────┐
           ◀─ get ──  │  tier  │   null · memory · DRAM arena · NVMe · (object store)
           ── delete ▶└────────┘

A tier stores *records*: the bytes of one key, with their checksum. It does not decide
what to keep: the engine asks for room by deleting what its policy chose. Tiers are
thread-safe: the engine calls them from the threads of its I/O pool.

Invariants, proven by the conformance suite for every implementation:

* a get answers the bytes that were put under that key, or it is not a hit;
* used + free = capacity, and capacity is never exceeded;
* what a put acknowledged is still there after a clean close and reopen, and (for the
  tiers that outlive a process) after kill -9.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

KEY_BYTES_MAX = 80  # namespace digest (16) + block hash (at most 64)
NAMESPACE_BYTES = 16
CHECKSUM_BYTES = 16


@dataclass(slots=True, frozen=True)
class Record:
    """What a tier knows of one record, apart from its bytes.

    key: namespace digest + block hash. parent: the key before it in its prefix, b"" for
    the first block. checksum: xxh3_128 of exactly `size_bytes` bytes.
    """

    key: bytes
    parent: bytes
    size_bytes: int
    checksum: bytes


class Put(enum.Enum):
    STORED = "stored"
    NO_ROOM = "no_room"  # no free slot of this size; delete something and try again
    FAILED = "failed"  # the medium refused (I/O error, disk full); nothing is stored


class Get(enum.Enum):
    HIT = "hit"  # the destination holds the bytes, and their checksum matched
    MISS = "miss"  # the tier does not hold this key
    CORRUPT = "corrupt"  # bytes came back but are not what was put; the tier dropped them
    FAILED = "failed"  # the medium failed; the record may still be there


@dataclass(slots=True, frozen=True)
class SizeClass:
    """Slots of one size: total = used + free."""

    slot_bytes: int
    total: int
    used: int

    @property
    def free(self) -> int:
        return self.total - self.used


@dataclass(slots=True, frozen=True)
class TierStats:
    """capacity_bytes = used_bytes + free_bytes; used counts whole slots, not record sizes."""

    name: str
    capacity_bytes: int
    used_bytes: int
    records: int
    classes: tuple[SizeClass, ...] = field(default=())

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes


class Tier(ABC):
    """A place for records. Every method may be called from any thread."""

    name: str
    slot_bytes_min: int = 1  # smaller records take a slot of this size

    @abstractmethod
    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        """Every record held when the iteration started, or those of them with these keys.

        In no particular order, without bytes. May block on the medium. Never raises for a
        damaged row: damaged rows are dropped and counted. The result stays valid until the
        next delete. A tier that outlives its process learns its free slots from the first
        full scan: until that is exhausted, only scan and get may be called.
        """

    @abstractmethod
    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        """Store records; one answer per item, in order. Putting a held key replaces it.

        Changes state; blocks until the bytes are handed to the medium (no fsync: a row
        that lies is caught by its checksum). The views must not change meanwhile; each is
        exactly `size_bytes` long. Raises RecordSizeError for a record no slot can hold.
        """

    @abstractmethod
    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        """Copy records into the given views, verifying each checksum; one answer per item.

        An answer is (HIT, the record's checksum), or what else happened and b"".
        A view must be exactly as long as the record (else CORRUPT is *not* claimed: MISS).
        Drops a record that turns out corrupt. Blocks on the medium; never raises for one
        record. After anything but HIT the content of that view is undefined.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget all of these records; answers how many were held. Unknown keys are no error.

        Changes state; may block briefly. Bytes may stay on the medium until reused. Raises
        TierError when the medium refused: then what was asked may still be held.
        """

    @abstractmethod
    def reclaim(self, size_bytes: int) -> list[bytes]:
        """Keys whose deletion would free a whole slab for records of this size.

        A proposal: changes nothing, does not block on the medium. Empty where a put of
        this size would already find room, where no slab of another size exists, or where
        the medium keeps the tier busy just now. Valid until the next put or delete.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Counts and bytes, now. Changes nothing, never blocks, never raises."""

    @abstractmethod
    def check(self) -> list[str]:
        """Prove that the books balance; one line per violation, empty when sound.

        Changes nothing. May be slow (reads every row, not every record's bytes).
        """

    @abstractmethod
    def close(self) -> None:
        """Flush rows and let go of files. Idempotent. No other call may follow."""
