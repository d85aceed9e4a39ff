"""What an engine's scheduler decides, and what it orders of its ranks.

Part: blocks and their hashes        decided in the scheduler, asked of the daemon there
  └─▶ Load, Save: blocks and slots   ordered of every rank, which copies its own column
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import NamedTuple

from kvstore.client import Grant, Namespace


class Column(NamedTuple):
    """The part of a record that one shard fills: its number, and where it begins."""

    number: int
    start_bytes: int


class Adapter(NamedTuple):
    """What requests are computed with besides the model: the number it has in the engine, and what each rank has loaded
    under it."""

    number: int
    digests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The same in all engines."""
        return sha256(" ".join(self.digests).encode()).hexdigest()[:32]


@dataclass(slots=True, frozen=True)
class Columns:
    """How the records of one KV group are laid out: shard -> its column. lease_blocks: how many one lease may hold.
    adapter: that their blocks are computed with."""

    index: int
    space: Namespace
    of_shard: dict[int, Column]
    lease_blocks: int
    adapter: Adapter | None = None


@dataclass(slots=True)
class Part:
    """Blocks of one group of a request, in prefix order. parent: the hash before the first, b"" at the
    root. first: position in the prompt of the first of a load."""

    group: Columns
    block_ids: list[int]
    hashes: list[bytes]
    parent: bytes = b""
    first: int = 0


@dataclass(slots=True)
class Order:
    """Copy these blocks, and report `number`. adapter: that they are computed with."""

    number: int
    group: int
    block_ids: list[int]
    grant: Grant
    adapter: Adapter | None


@dataclass(slots=True)
class Load(Order):
    """Fill the blocks from the first slots of the grant. sync: inside the step that asks."""

    request_id: str
    sync: bool


@dataclass(slots=True)
class LoadEnd:
    """No further loads of this request. missing: blocks that were promised to the engine and will not come."""

    request_id: str
    sync: bool
    missing: list[int] = field(default_factory=list)


class Save(Order):
    """Copy the blocks into the slots of the grant, and fill their column."""
