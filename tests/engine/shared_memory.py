"""A shared level in memory, with faults on demand: what the seam of shared levels is tested with.

    fetch ─▶ latency (seeded) ─▶ lost: no answer │ refused: FAILED │ flipped: CORRUPT │ HIT

Time is the caller's: `later(delay_s, call)` runs a call after a delay, as an event loop's
`call_later` does. The catalogue lies when told to, in both directions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.index.block import Namespace
from kvstore.movement.shared import Chained, Done, Fetched, SharedLevel, SharedLimits, Wanted
from tiers.base import Get, Record
from tiers.checksum import digest

Later = Callable[[float, Callable[[], None]], object]


@dataclass
class Faults:
    """Shares from 0 to 1. lost: requests never answered; failed, missing, flipped: records; lies: of the
    catalogue's answers."""

    lost: float = 0.0
    failed: float = 0.0
    missing: float = 0.0
    flipped: float = 0.0
    lies: float = 0.0


class SharedMemoryLevel(SharedLevel):
    """Records by key. latency_s: of each request; bytes_per_s: of all together."""

    def __init__(
        self,
        later: Later,
        latency_s: float = 0.0,
        bytes_per_s: float = 1e12,
        seed: int = 0,
        limits: SharedLimits | None = None,
        name: str = "shared",
    ) -> None:
        self.name = name
        self.limits = limits or SharedLimits()
        self.faults = Faults()
        self.under_way = 0
        self.under_way_most = 0
        self.fetched = 0  # records that were asked for
        self._later = later
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._chance = random.Random(seed)
        self._records: dict[bytes, tuple[Record, bytes]] = {}

    def put(self, record: Record, content: bytes) -> None:
        """What another daemon made durable. Its ancestors must be here: the durable set is closed under prefixes."""
        assert not record.parent or record.parent in self._records, "a block without its ancestors"
        self._records[record.key] = (record, content)

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        size, digest_bytes = namespace.hash_bytes, namespace.digest
        low, high = start, len(hashes) // size
        if self._chance.random() < self.faults.lies:
            return self._chance.randint(low, high)
        while low < high:
            middle = (low + high) // 2
            if digest_bytes + hashes[middle * size : (middle + 1) * size] in self._records:
                low = middle + 1
            else:
                high = middle
        return low

    def chains(self, namespaces: Sequence[bytes], block_hash: bytes, most: int, done: Chained) -> None:
        found: dict[bytes, Sequence[bytes]] = {}
        for digest_bytes in namespaces:
            chain, key = [], digest_bytes + block_hash
            while key in self._records:
                chain.append(key[len(digest_bytes) :])
                key = self._records[key][0].parent
            if chain and len(found) < most:
                found[digest_bytes] = chain[::-1]
        self._later(self._latency_s, lambda: done(found))

    def probe(self, done: Callable[[bool], None]) -> None:
        if self._chance.random() >= self.faults.lost:
            self._later(self._latency_s, lambda: done(self._chance.random() >= self.faults.failed))

    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        self.under_way += 1
        self.fetched += len(wanted)
        self.under_way_most = max(self.under_way_most, self.under_way)
        if self._chance.random() < self.faults.lost:
            return
        answers = [self._answer(one) for one in wanted]

        def arrived() -> None:
            self.under_way -= 1
            done(answers)

        delay_s = self._latency_s * self._chance.uniform(0.5, 1.5)
        self._later(delay_s + sum(len(one.into) for one in wanted) / self._bytes_per_s, arrived)

    def _answer(self, wanted: Wanted) -> Fetched:
        if self._chance.random() < self.faults.failed:
            return Get.FAILED, None
        found = self._records.get(wanted.key)
        if (
            found is None
            or len(wanted.into) != found[0].size_bytes
            or self._chance.random() < self.faults.missing
        ):
            return Get.MISS, None
        record, content = found
        wanted.into[:] = content
        if self._chance.random() < self.faults.flipped:
            wanted.into[self._chance.randrange(len(wanted.into))] ^= 1
        if digest(wanted.into, record.columns) != record.checksum:
            return Get.CORRUPT, None
        return Get.HIT, record
