"""Shared levels: places that many daemons use, such as a region's bucket or other nodes' memory.

    lookup ─▶ owned prefix │ ends here ─▶ `held`: how much further, says the catalogue │ missing
    acquire ─────────────────────────────▶ `fetch`: into slots of DRAM, hundreds at a time

A shared level is asked only where the owned prefix ends, and costs the index no memory: what is
fetched becomes a block of DRAM. Its catalogue may be wrong. A record that is not there is a
miss, and one whose checksum does not match is never a hit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.constants import STALL_S
from kvstore.index.block import Namespace
from kvstore.steps import Steps
from tiers.base import Get, Record

# Of a bucket that works: the time for a job's bytes, before it counts as hanging.
BUCKET_LEAST_BYTES_PER_S = 4e6


class Wanted(NamedTuple):
    """A record to fetch, and where its bytes go: exactly as long as a record of its namespace."""

    key: bytes
    into: memoryview


Fetched = tuple[Get, Record | None]  # the record where it is a HIT: its parent, checksum and columns
Done = Callable[[Sequence[Fetched]], None]
Chained = Callable[[Mapping[bytes, Sequence[bytes]]], None]


@dataclass(frozen=True)
class SharedLimits:
    """What a shared level can take: requests under way, and records in one request, however small they are. A request
    hangs that takes longer than stall_s and its bytes at the least speed."""

    jobs_max: int = 64
    batch_records: int = 16
    stall_s: float = STALL_S
    least_bytes_per_s: float = BUCKET_LEAST_BYTES_PER_S


class SharedLevel(ABC):
    """One place. Every method is called on the engine's thread and returns at once."""

    name: str
    limits: SharedLimits = SharedLimits()
    is_far = False  # in another region: asked behind all that are not

    @abstractmethod
    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        """The end, in blocks, of the prefix that this level has behind the first `start` blocks; `start` if none.

        Changes nothing, never raises. It reads the catalogue a dozen times at most, so it may be wrong
        in both directions; the answer is a promise of nothing.
        """

    def held_steps(self, namespace: Namespace, hashes: bytes, start: int) -> Steps[int]:
        """The same in pieces, of a prompt of any length."""
        yield from ()
        return self.held(namespace, hashes, start)

    @abstractmethod
    def probe(self, done: Callable[[bool], None]) -> None:
        """Find out whether the level answers, with a request that no client waits for; `done` is called as by `fetch`."""

    def chains(self, namespaces: Sequence[bytes], block_hash: bytes, most: int, done: Chained) -> None:
        """Call `done` once, on the engine's thread, with the hashes of the prefix that ends with this block, from the first
        one on, by digest: of at most so many of these namespaces, of which this level has all of it. Never raises."""
        done({})

    @abstractmethod
    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        """Read records into their views, and call `done` once, on the engine's thread, with one answer each.

        HIT: the view holds the bytes and their checksum, of the record's columns, matched. After any other answer the view's content is
        undefined. Until `done` is called the views belong to the level. Never raises. A level that cannot
        answer calls `done` late, or never: a breaker looks after that.
        """
