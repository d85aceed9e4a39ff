"""What an engine's scheduler decides, and what it orders of its ranks.

Part: blocks and their hashes        decided in the scheduler, asked of the daemon there
  └─▶ Load, Save: blocks and slots   ordered of every rank, which copies its own column
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.client import Grant, Namespace


class Column(NamedTuple):
    """The part of a record that one shard fills: its number, and where it begins."""

    number: int
    start_bytes: int


@dataclass(slots=True, frozen=True)
class Columns:
    """How the records of one KV group are laid out: shard -> its column. lease_blocks: how many one lease may hold."""

    index: int
    space: Namespace
    of_shard: dict[int, Column]
    lease_blocks: int


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
class Load:
    """Fill these blocks from the first slots of the grant, and report `number`. sync: inside the step that asks."""

    number: int
    request_id: str
    group: int
    block_ids: list[int]
    grant: Grant
    sync: bool


@dataclass(slots=True)
class LoadEnd:
    """No further loads of this request. missing: blocks that were promised to the engine and will not come."""

    request_id: str
    sync: bool
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Save:
    """Copy these blocks into the slots of the grant, fill their column, and report `number`."""

    number: int
    group: int
    block_ids: list[int]
    grant: Grant
