"""Counted places: an arena of N equal slots without bytes.

Like the real one it keeps its rows in one table and hands out numbers, so that a process
with counted places costs what a daemon costs outside its arena.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.index.block import NO_SLOT
from tiers.base import Record, TierStats
from tiers.dram.slot_table import Extents
from tiers.slots import SLOT_ALIGN_BYTES, neighbours

RECORD_BYTES = 1  # what a namespace of these places says of its records
FREE, WRITING, READY = 0, 1, 2
CHECK_SLICE_STATES = 1 << 20


@dataclass(frozen=True, slots=True)
class CountedLayout:
    slot_bytes_min: int = SLOT_ALIGN_BYTES
    slab_bytes: int = SLOT_ALIGN_BYTES


class CountedSlots:
    """Implements `kvstore.index.slots.Slots` for keys of one length; a slot is a number.

    Parents are not kept: there is no slower tier that would want them. Models have no place here.
    """

    slabs = None

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

    def reserve_run(
        self, keys: Sequence[bytes], parents: Sequence[bytes], size_bytes: int, owner: int, columns: bytes
    ) -> list[int]:
        count, width = min(len(keys), len(self._free)), self._key_bytes
        slots = self._free[len(self._free) - count :].tolist()[::-1]
        del self._free[len(self._free) - count :]
        for start, end in neighbours(slots):
            at, behind = slots[start], slots[end - 1] + 1
            self._keys[at * width : behind * width] = b"".join(keys[start:end])
            self._states[at:behind] = bytes([WRITING]) * (end - start)
        return slots

    def commit_run(self, slots: Sequence[int], checksums: bytes, stored_s: int = 0) -> None:
        for slot in slots:
            self._states[slot] = READY
        self._records_ready += len(slots)

    def restamp(self, slots: Sequence[int], stored_s: int) -> None:
        """Nothing here has a time."""

    def free_run(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._records_ready -= self._states[slot] == READY
            self._states[slot] = FREE
        self._free.extend(slots)

    def extents(self, slots: Sequence[int]) -> Extents:
        return [], b""

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

    def drain(self, slot: int, size_bytes: int) -> None:
        """There is one size class."""

    def stop_draining(self, slot: int) -> bool:
        return False

    def abandon_run(self, slots: Sequence[int]) -> None:
        self.free_run(slots)

    def let_go_owner(self, owner: int) -> None:
        """There are no other writers here."""

    def sweep(self) -> int:
        return 0

    def stats(self) -> TierStats:
        used = self.slots - len(self._free)
        size = SLOT_ALIGN_BYTES
        return TierStats("dram", self.slots * size, used * size, self._records_ready)

    def check_slices(self) -> Iterator[list[str]]:
        free, states = set(self._free), self._states
        is_twice = len(free) != len(self._free) or NO_SLOT in free
        yield ["places: a slot is free twice"] * is_twice
        counts = [0] * 3
        for at in range(0, len(states), CHECK_SLICE_STATES):
            for state in (FREE, WRITING, READY):
                counts[state] += states.count(state, at, at + CHECK_SLICE_STATES)
            yield []
        is_wrong = any(states[slot] != FREE for slot in free) or counts[FREE] != len(free)
        yield ["places: used + free is not the capacity"] * is_wrong
        yield ["places: records are miscounted"] * (counts[READY] != self._records_ready)
