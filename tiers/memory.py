"""The in-memory tier: a bounded dict. The model that the real tiers are compared with.

Records take whole slots here too, so that used and free mean the same as elsewhere; but
there are no slabs, so `reclaim` never has anything to propose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tiers.base import Get, Put, Record, Tier, TierStats
from tiers.checksum import digest
from tiers.errors import OpenError, RecordSizeError
from tiers.slots import slot_bytes_for


class MemoryTier(Tier):
    """At most `capacity_bytes` of records in this process; gone when it ends."""

    name = "memory"

    def __init__(self, capacity_bytes: int) -> None:
        """Raises OpenError for a negative capacity."""
        if capacity_bytes < 0:
            raise OpenError(f"memory tier: capacity_bytes is {capacity_bytes}: allowed are 0 and more")
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._held: dict[bytes, tuple[Record, bytes]] = {}
        self._lock = threading.Lock()

    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        with self._lock:
            wanted = self._held if keys is None else [key for key in keys if key in self._held]
            return iter([self._held[key][0] for key in wanted])

    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        for record, _ in items:
            if record.size_bytes <= 0 or slot_bytes_for(record.size_bytes) > self._capacity_bytes:
                raise RecordSizeError(
                    f"record of {record.size_bytes} bytes: "
                    f"allowed are 1 to {self._capacity_bytes} (capacity_bytes)"
                )
        return [self._put(record, bytes(view)) for record, view in items]

    def _put(self, record: Record, data: bytes) -> Put:
        assert len(data) == record.size_bytes, "the view is not as long as the record"
        with self._lock:
            held = self._held.get(record.key)
            freed = slot_bytes_for(held[0].size_bytes) if held else 0
            used = self._used_bytes - freed + slot_bytes_for(record.size_bytes)
            if used > self._capacity_bytes:
                return Put.NO_ROOM
            self._held[record.key] = (record, data)
            self._used_bytes = used
        return Put.STORED

    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        return [self._get(key, view) for key, view in items]

    def _get(self, key: bytes, view: memoryview) -> tuple[Get, bytes]:
        held = self._held.get(key)
        if held is None or len(held[1]) != len(view):
            return Get.MISS, b""
        record, data = held
        view[:] = data
        if digest(view) == record.checksum:
            return Get.HIT, record.checksum
        with self._lock:
            if self._held.get(key) is not held:
                return Get.MISS, b""  # replaced or deleted meanwhile
            del self._held[key]
            self._used_bytes -= slot_bytes_for(record.size_bytes)
        return Get.CORRUPT, b""

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            gone = [held for key in keys if (held := self._held.pop(key, None))]
            self._used_bytes -= sum(slot_bytes_for(record.size_bytes) for record, _ in gone)
        return len(gone)

    def reclaim(self, size_bytes: int) -> list[bytes]:
        return []

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(self.name, self._capacity_bytes, self._used_bytes, len(self._held))

    def check(self) -> list[str]:
        with self._lock:
            used = sum(slot_bytes_for(record.size_bytes) for record, _ in self._held.values())
        if used != self._used_bytes or used > self._capacity_bytes:
            return [f"memory tier: {used} bytes held, {self._used_bytes} counted of {self._capacity_bytes}"]
        return []

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._used_bytes = 0
