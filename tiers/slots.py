"""Slots: how memory and disk are handed out.

    capacity ──▶ slabs of equal size ──▶ each cut into slots of one size class

        slab 0 (2 MiB slots) │■■■■■□□□│     slab 1 (64 KiB slots) │■■□□…│     slab 2 (unassigned)

All records of a namespace have one size, so a slab is cut into equal slots and there is
no fragmentation and no compaction. A slab belongs to no class until one needs it, and
goes back to the pool of unassigned slabs when its last slot is given back; that is how a
namespace that fades away hands its space to a new one.

A slot is named by one integer, `slab * SLAB_SLOTS_MAX + position`.

Invariant: for every class, total = used + free, and no slot is handed out twice.
Not thread-safe: the owner (arena, NVMe directory) locks.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from tiers.base import SizeClass
from tiers.errors import RecordSizeError

SLOT_ALIGN_BYTES = 4096  # O_DIRECT and page granularity
SLAB_SLOTS_MAX = 1 << 16


def slot_bytes_for(size_bytes: int) -> int:
    """The size class of a record: its size rounded up to SLOT_ALIGN_BYTES."""
    return -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class _Slab:
    __slots__ = ("flags", "free", "slot_bytes", "used")

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.flags = bytearray(slots)  # 1 = used
        self.free = list(range(slots - 1, -1, -1))  # a stack: lowest position first
        self.used = 0


class SlotPool:
    """Hands out slots of `slab_count` slabs of `slab_bytes` each."""

    def __init__(self, slab_count: int, slab_bytes: int) -> None:
        if slab_bytes % SLOT_ALIGN_BYTES or slab_bytes // SLOT_ALIGN_BYTES > SLAB_SLOTS_MAX:
            raise ValueError(
                f"slab_bytes {slab_bytes}: must be a multiple of {SLOT_ALIGN_BYTES}, at most {SLAB_SLOTS_MAX} of them"
            )
        self.slab_bytes = slab_bytes
        self.slab_count = slab_count
        self._unassigned = list(range(slab_count - 1, -1, -1))
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[int, dict[int, None]] = {}  # class -> slabs with a free slot
        self._members: dict[int, set[int]] = {}  # class -> its slabs; no entry without one
        self._used: dict[int, int] = {}  # class -> used slots; those without a slab may be missing

    def slots_per_slab(self, slot_bytes: int) -> int:
        return self.slab_bytes // slot_bytes

    def can_hold(self, size_bytes: int) -> bool:
        return 0 < size_bytes <= self.slab_bytes

    def locate(self, slot: int) -> tuple[int, int, int]:
        """(slab, offset inside the slab, slot_bytes) of a slot in use."""
        slab, position = divmod(slot, SLAB_SLOTS_MAX)
        slot_bytes = self._slabs[slab].slot_bytes
        return slab, position * slot_bytes, slot_bytes

    def has_room(self, size_bytes: int) -> bool:
        return bool(self._unassigned) or bool(self._open.get(slot_bytes_for(size_bytes)))

    def take(self, size_bytes: int) -> int | None:
        """A free slot that holds `size_bytes`, or None. Raises RecordSizeError."""
        if not self.can_hold(size_bytes):
            raise RecordSizeError(
                f"record of {size_bytes} bytes: allowed are 1 to {self.slab_bytes} (slab_bytes)"
            )
        slot_bytes = slot_bytes_for(size_bytes)
        open_slabs = self._open.setdefault(slot_bytes, {})
        if not open_slabs:
            if not self._unassigned:
                return None
            self._assign(self._unassigned.pop(), slot_bytes)
        number = next(iter(open_slabs))
        slab = self._slabs[number]
        position = slab.free.pop()
        slab.flags[position] = 1
        slab.used += 1
        self._used[slot_bytes] += 1
        if not slab.free:
            del open_slabs[number]
        return number * SLAB_SLOTS_MAX + position

    def give(self, slot: int) -> None:
        """Hand a slot back; its slab becomes unassigned when nothing in it is used."""
        number, position = divmod(slot, SLAB_SLOTS_MAX)
        slab = self._slabs[number]
        assert slab.flags[position], f"slot {slot} given back twice"
        slab.flags[position] = 0
        slab.used -= 1
        self._used[slab.slot_bytes] -= 1
        if slab.used:
            slab.free.append(position)
            self._open[slab.slot_bytes][number] = None
            return
        del self._slabs[number]
        self._open[slab.slot_bytes].pop(number, None)
        self._unassigned.append(number)
        members = self._members[slab.slot_bytes]
        members.remove(number)
        if not members:
            del self._members[slab.slot_bytes]

    def mark(self, slot: int, size_bytes: int) -> bool:
        """Claim one particular slot while restoring; False if it cannot be what it says.

        After the last mark, and before anything else, call `settle`.
        """
        number, position = divmod(slot, SLAB_SLOTS_MAX)
        if not (0 <= number < self.slab_count and self.can_hold(size_bytes)):
            return False
        slot_bytes = slot_bytes_for(size_bytes)
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._slabs[number] = _Slab(slot_bytes, self.slots_per_slab(slot_bytes))
        if slab.slot_bytes != slot_bytes or position >= len(slab.flags) or slab.flags[position]:
            return False
        slab.flags[position] = 1
        slab.used += 1
        return True

    def settle(self) -> None:
        """Rebuild the free lists and the classes from what was marked."""
        self._slabs = {number: slab for number, slab in self._slabs.items() if slab.used}
        self._unassigned = [n for n in range(self.slab_count - 1, -1, -1) if n not in self._slabs]
        self._open.clear()
        self._members.clear()
        self._used.clear()
        for number, slab in self._slabs.items():
            self._members.setdefault(slab.slot_bytes, set()).add(number)
            self._used[slab.slot_bytes] = self._used.get(slab.slot_bytes, 0) + slab.used
            slab.free = [p for p in range(len(slab.flags) - 1, -1, -1) if not slab.flags[p]]
            open_slabs = self._open.setdefault(slab.slot_bytes, {})
            if slab.free:
                open_slabs[number] = None

    def has_other_class(self, size_bytes: int) -> bool:
        """Whether a slab is cut for another size than this."""
        return len(self._members) > (slot_bytes_for(size_bytes) in self._members)

    def smallest_slab(self, size_bytes: int, busy: Set[int] = frozenset()) -> int | None:
        """The slab of another class with the fewest used slots: the cheapest to take over.

        None of `busy`. Looks at the slabs of other classes only.
        """
        slot_bytes = slot_bytes_for(size_bytes)
        others = (
            (self._slabs[number].used, number)
            for its_slot_bytes, members in self._members.items()
            if its_slot_bytes != slot_bytes
            for number in members
            if number not in busy
        )
        return min(others, default=(0, None))[1]

    def slots_in(self, slab: int) -> Iterator[int]:
        return (
            slab * SLAB_SLOTS_MAX + position for position, used in enumerate(self._slabs[slab].flags) if used
        )

    def used_bytes(self) -> int:
        return sum(slot_bytes * used for slot_bytes, used in self._used.items())

    def classes(self) -> tuple[SizeClass, ...]:
        """Slots of every class that owns a slab, smallest first. Does not look at the slabs."""
        return tuple(
            SizeClass(slot_bytes, len(members) * self.slots_per_slab(slot_bytes), self._used[slot_bytes])
            for slot_bytes, members in sorted(self._members.items())
        )

    def check(self) -> list[str]:
        """One line per violated invariant."""
        problems = []
        if sorted([*self._unassigned, *self._slabs]) != list(range(self.slab_count)):
            problems.append("slots: slabs are lost or assigned twice")
        for number, slab in self._slabs.items():
            free = [p for p, used in enumerate(slab.flags) if not used]
            if sorted(slab.free) != free or slab.used + len(free) != self.slots_per_slab(slab.slot_bytes):
                problems.append(f"slots: slab {number}: used + free is not {len(slab.flags)}")
            if number not in self._members.get(slab.slot_bytes, ()):
                problems.append(f"slots: slab {number}: not in its class")
            if bool(slab.free) != (number in self._open.get(slab.slot_bytes, {})):
                problems.append(f"slots: slab {number}: free list and open list disagree")
        if sum(map(len, self._members.values())) != len(self._slabs) or not all(self._members.values()):
            problems.append("slots: the classes have slabs that are not assigned")
        for slot_bytes, used in self._used.items():
            if used != sum(self._slabs[number].used for number in self._members.get(slot_bytes, ())):
                problems.append(f"slots: {used} slots of {slot_bytes} bytes are not what is used")
        return problems

    def _assign(self, number: int, slot_bytes: int) -> _Slab:
        slab = _Slab(slot_bytes, self.slots_per_slab(slot_bytes))
        self._slabs[number] = slab
        self._open.setdefault(slot_bytes, {})[number] = None
        self._members.setdefault(slot_bytes, set()).add(number)
        self._used.setdefault(slot_bytes, 0)
        return slab
