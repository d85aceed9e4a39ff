"""Counted places: an arena of N equal slots without bytes.

Like the real one it keeps its rows in one table and hands out numbers, so that a process
with counted places costs what a daemon costs outside its arena.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvstore.blocks import NO_SLOT
from tiers.base import Record, TierStats
from tiers.slots import SLOT_ALIGN_BYTES

RECORD_BYTES = 1  # what a namespace of these places says of its records
FREE, WRITING, READY = 0, 1, 2


@dataclass(frozen=True, slots=True)
class CountedLayout:
    slot_bytes_min: int = SLOT_ALIGN_BYTES
    slab_bytes: int = SLOT_ALIGN_BYTES


class CountedPlaces:
    """Implements `kvstore.places.Places` for keys of one length; a slot is a number.

    Parents are not kept: there is no slower tier that would want them.
    """

    def __init__(self, slots: int, key_bytes: int) -> None:
        self.layout = CountedLayout()
        self.slots = slots
        self._key_bytes = key_bytes
        self._keys = bytearray(1) * (slots * key_bytes)  # all of its memory is touched here
        self._free = array("q", range(slots - 1, -1, -1))
        self._states = bytearray(slots)
        self._records_ready = 0

    def has_room(self, size_bytes: int) -> bool:
        return bool(self._free)

    def reserve(self, key: bytes, parent: bytes, size_bytes: int, owner: int) -> int | None:
        if not self._free:
            return None
        assert len(key) == self._key_bytes and size_bytes == RECORD_BYTES, "not what is counted here"
        slot = self._free.pop()
        self._keys[slot * self._key_bytes : (slot + 1) * self._key_bytes] = key
        self._states[slot] = WRITING
        return slot

    def commit(self, slot: int, checksum: bytes) -> None:
        self._states[slot] = READY
        self._records_ready += 1

    def free(self, slot: int) -> None:
        self._records_ready -= self._states[slot] == READY
        self._states[slot] = FREE
        self._free.append(slot)

    def place(self, slot: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def record(self, slot: int) -> Record:
        assert self._states[slot] != FREE, f"slot {slot} is free"
        key = bytes(self._keys[slot * self._key_bytes : (slot + 1) * self._key_bytes])
        return Record(key, b"", RECORD_BYTES, b"")

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
        free = set(self._free)
        problems = []
        if len(free) != len(self._free) or NO_SLOT in free:
            problems.append("places: a slot is free twice")
        if any(self._states[slot] != FREE for slot in free) or self._states.count(FREE) != len(free):
            problems.append("places: used + free is not the capacity")
        if self._states.count(READY) != self._records_ready:
            problems.append("places: records are miscounted")
        return problems
