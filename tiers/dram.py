"""The arena seen as a tier: put copies in, get copies out and verifies.

The daemon's engine talks to the Arena itself, because its clients copy the bytes. This
is for everything that has bytes of its own: tools, and the suite that every tier passes.

    index: key ──▶ slot          lock: held for the index and the slots, never for a copy

A get copies without the lock. If the record is replaced or deleted meanwhile, the slot's
generation has changed, and the copy is thrown away: a miss, not corruption.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from tiers.arena import Arena
from tiers.base import Get, Put, Record, Tier, TierStats
from tiers.checksum import digest
from tiers.constants import OWNER_DAEMON
from tiers.errors import RecordSizeError


class DramTier(Tier):
    """Records in an arena that this object owns from now on."""

    name = "dram"

    def __init__(self, arena: Arena) -> None:
        """Indexes what the arena adopted; an adopted record is verified by the get that asks for it."""
        self._arena = arena
        self.slot_bytes_min = arena.layout.slot_bytes_min
        self._lock = threading.Lock()
        self._slots: dict[bytes, int] = {}
        for slot, record in arena.adopted_slots():
            if self._slots.setdefault(record.key, slot) != slot:
                arena.free(slot)  # one key committed twice: one of the two is enough

    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        with self._lock:
            wanted = self._slots if keys is None else [key for key in keys if key in self._slots]
            return iter([self._arena.record(self._slots[key]) for key in wanted])

    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        allowed = self._arena.layout.slab_bytes
        for record, view in items:
            assert len(view) == record.size_bytes, "the view is not as long as the record"
            if not 0 < record.size_bytes <= allowed:
                raise RecordSizeError(
                    f"record of {record.size_bytes} bytes: allowed are 1 to {allowed} (slab_bytes)"
                )
        return [self._put(record, view) for record, view in items]

    def _put(self, record: Record, view: memoryview) -> Put:
        arena = self._arena
        with self._lock:
            slot = self._reserve(record)
            if slot is None and record.key in self._slots:
                arena.free(self._slots.pop(record.key))  # its replacement may fit in its place
                slot = self._reserve(record)
        if slot is None:
            return Put.NO_ROOM
        arena.view(slot)[:] = view
        with self._lock:
            held = self._slots.get(record.key)
            if held is not None:
                arena.free(held)
            arena.commit(slot, record.checksum)
            self._slots[record.key] = slot
        return Put.STORED

    def _reserve(self, record: Record) -> int | None:
        return self._arena.reserve(record.key, record.parent, record.size_bytes, OWNER_DAEMON)

    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        return [self._get(key, view) for key, view in items]

    def _get(self, key: bytes, view: memoryview) -> tuple[Get, bytes]:
        arena = self._arena
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return Get.MISS, b""
            checksum, generation, stored = (
                arena.record(slot).checksum,
                arena.generation(slot),
                arena.view(slot),
            )
        if len(stored) != len(view):
            return Get.MISS, b""
        view[:] = stored
        if digest(view) == checksum:
            return Get.HIT, checksum
        with self._lock:
            if self._slots.get(key) != slot or arena.generation(slot) != generation:
                return Get.MISS, b""
            arena.free(self._slots.pop(key))
        return Get.CORRUPT, b""

    def delete(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            slots = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
            for slot in slots:
                self._arena.free(slot)
        return len(slots)

    def reclaim(self, size_bytes: int) -> list[bytes]:
        with self._lock:
            return [self._arena.record(slot).key for slot in self._arena.reclaim(size_bytes)]

    def stats(self) -> TierStats:
        with self._lock:  # never held for a copy
            return self._arena.stats()

    def check(self) -> list[str]:
        with self._lock:
            problems = self._arena.check()
            for key, slot in self._slots.items():
                if self._arena.record(slot).key != key:
                    problems.append(f"dram: slot {slot} holds another key than the index says")
            if len(self._slots) != self._arena.stats().records:
                problems.append(f"dram: {len(self._slots)} keys for {self._arena.stats().records} records")
        return problems

    def close(self) -> None:
        self._arena.close()
