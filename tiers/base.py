"""Records: what every place for bytes says of them, and how it answers.

A place stores *records*: the bytes of one key, with their checksum. It does not decide what to keep.
A read answers the bytes that were written under that key, or it is not a hit.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

KEY_BYTES_MAX = 80  # namespace digest (16) + block hash (at most 64)
NAMESPACE_BYTES = 16
CHECKSUM_BYTES = 16


@dataclass(slots=True, frozen=True)
class Record:
    """What a tier knows of one record, apart from its bytes.

    key: namespace digest + block hash. parent: the key before it in its prefix, b"" for
    the first block. checksum: of exactly `size_bytes` bytes, see tiers/checksum.py. stored_s:
    when they were stored first, unix seconds below 2**32; 0: not known. columns: how they are
    laid out, as described there; b"": in one piece.
    """

    key: bytes
    parent: bytes
    size_bytes: int
    checksum: bytes
    stored_s: int = 0
    columns: bytes = b""


class Put(enum.Enum):
    STORED = "stored"
    NO_ROOM = "no_room"  # no free slot of this size; delete something and try again
    FAILED = "failed"  # the medium refused (I/O error, disk full); nothing is stored


class Get(enum.Enum):
    HIT = "hit"  # the destination holds the bytes, and their checksum matched
    MISS = "miss"  # the tier does not hold this key
    UNKNOWN = "unknown"  # a later version has written it, or a key is missing here: nobody here can read it
    CORRUPT = "corrupt"  # bytes came back but are not what was put; the tier dropped them
    REFUSED = "refused"  # the store does not hand out this object; whether it hands out others is not known
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
    """capacity_bytes = used_bytes + free_bytes; used counts whole slots, not record sizes. model_bytes: what models have
    of the used bytes; they are no records, and of no class."""

    name: str
    capacity_bytes: int
    used_bytes: int
    records: int
    classes: tuple[SizeClass, ...] = field(default=())
    model_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes
