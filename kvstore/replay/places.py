"""Counted places: an arena of N equal slots without bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blocks import NO_SLOT
from tiers.base import Record, TierStats
from tiers.slots import SLOT_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class CountedLayout:
    slot_bytes_min: int = SLOT_ALIGN_BYTES
    slab_bytes: int = SLOT_ALIGN_BYTES


class CountedPlaces:
    """Implements `kvstore.places.Places` for records of one size; a slot is a number."""

    def __init__(self, slots: int) -> None:
        self.layout = CountedLayout()
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._records: list[tuple[bytes, bytes, int] | None] = [None] * slots
        self._ready = bytearray(slots)
        self._records_ready = 0

    def has_room(self, size_bytes: int) -> bool:
        return bool(self._free)

    def reserve(self, key: bytes, parent: bytes, size_bytes: int, owner: int) -> int | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._records[slot] = (key, parent, size_bytes)
        return slot

    def commit(self, slot: int, checksum: bytes) -> None:
        self._ready[slot] = 1
        self._records_ready += 1

    def free(self, slot: int) -> None:
        self._records_ready -= self._ready[slot]
        self._ready[slot] = 0
        self._records[slot] = None
        self._free.append(slot)

    def place(self, slot: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def record(self, slot: int) -> Record:
        held = self._records[slot]
        assert held is not None, f"slot {slot} is free"
        return Record(*held, b"")

    def view(self, slot: int) -> memoryview:
        return memoryview(b"")

    def verify(self, slot: int) -> bool:
        return True

    def adopted_slots(self) -> list[tuple[int, Record]]:
        return []

    def reclaim(self, size_bytes: int) -> list[int]:
        return []

    def abandon_owner(self, owner: int) -> None:
        """Nobody else writes here."""

    def sweep(self) -> int:
        return 0

    def stats(self) -> TierStats:
        used = self.slots - len(self._free)
        size = SLOT_ALIGN_BYTES
        return TierStats("dram", self.slots * size, used * size, self._records_ready)

    def check(self) -> list[str]:
        held = sum(record is not None for record in self._records)
        problems = [] if held + len(self._free) == self.slots else ["places: used + free is not the capacity"]
        if any(self._ready[slot] for slot in self._free) or NO_SLOT in self._free:
            problems.append("places: a free slot is ready")
        return problems
