"""Slots: how memory and disk are handed out.

    capacity ──▶ slabs of equal size ──▶ each cut into slots of one size class

        slab 0 (2 MiB slots) │■■■■■□□□│     slab 1 (64 KiB slots) │■■□□…│     slab 2 (unassigned)

All records of a namespace have one size, so a slab is cut into equal slots and there is
no fragmentation and no compaction. A slab belongs to no class until one needs it, and
goes back to the pool of unassigned slabs when its last slot is given back; that is how a
namespace that fades away hands its space to a new one. A slab that is drained hands out no
more slots, and is cut for the class it is drained for when its last one is given back. A slab
may be absent: the medium has no room for it yet, and nothing in it is handed out before `add_slab`.

Slots are taken in runs, because the blocks of a prefix come and go together: neighbours in
a run are neighbours in memory wherever a slab has the room.

A slot is named by one integer, `slab * SLAB_SLOTS_MAX + position`.

Invariant: for every class, total = used + free, and no slot is handed out twice.
Not thread-safe: the owner (arena, NVMe directory) locks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import compress, islice, pairwise

from tiers.base import SizeClass
from tiers.errors import RecordSizeError

SLOT_ALIGN_BYTES = 4096  # O_DIRECT and page granularity
SLAB_SLOTS_MAX = 1 << 16
CHECK_SLICE_SLOTS = 1000  # looked at between two yields of a check, about a millisecond
SLABS_COMPARED_MAX = 2000  # of all other classes, about a millisecond
_SLABS_SEARCHED_MAX = 4  # for a whole run in one piece, before it is taken in pieces


def neighbours(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the pieces of a list begin and end in which each number is one more than the one before."""
    gaps = (at for at, (before, number) in enumerate(pairwise(numbers), 1) if number != before + 1)
    return pairwise([0, *gaps, len(numbers)]) if numbers else iter(())


def slot_bytes_for(size_bytes: int) -> int:
    """The size class of a record: its size rounded up to SLOT_ALIGN_BYTES."""
    return -(-size_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class _Slab:
    __slots__ = ("flags", "slot_bytes", "used")

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.flags = bytearray(slots)  # 1 = used
        self.used = 0

    def take(self, count: int) -> Iterator[range]:
        """Take the first free positions, at most `count`; yields them in pieces, ascending."""
        flags, end = self.flags, 0
        while count and (start := flags.find(0, end)) >= 0:
            end = flags.find(1, start, start + count)
            if end < 0:
                end = min(start + count, len(flags))
            self._mark(start, end)
            count -= end - start
            yield range(start, end)

    def take_whole(self, count: int) -> range | None:
        """Take `count` neighbouring positions, or nothing."""
        start = self.flags.find(bytes(count))
        if start < 0:
            return None
        self._mark(start, start + count)
        return range(start, start + count)

    def _mark(self, start: int, end: int) -> None:
        self.flags[start:end] = b"\1" * (end - start)
        self.used += end - start


class SlotPool:
    """Hands out slots of `slab_count` slabs of `slab_bytes` each, those in `absent` not yet."""

    def __init__(self, slab_count: int, slab_bytes: int, absent: Iterable[int] = ()) -> None:
        if slab_bytes % SLOT_ALIGN_BYTES or slab_bytes // SLOT_ALIGN_BYTES > SLAB_SLOTS_MAX:
            raise ValueError(
                f"slab_bytes {slab_bytes}: must be a multiple of {SLOT_ALIGN_BYTES}, at most {SLAB_SLOTS_MAX} of them"
            )
        self.slab_bytes = slab_bytes
        self.slab_count = slab_count
        self.slot_bytes = array("I", bytes(4 * slab_count))  # of each slab; 0: unassigned or absent
        self.absent = set(absent)
        self._unassigned = [n for n in range(slab_count - 1, -1, -1) if n not in self.absent]  # a stack
        self._slabs: dict[int, _Slab] = {}
        self._open: dict[int, dict[int, None]] = {}  # class -> slabs with a free slot
        self._members: dict[int, set[int]] = {}  # class -> its slabs; no entry without one
        self._used: dict[int, int] = {}  # class -> used slots; those without a slab may be missing
        self._draining: dict[int, int] = {}  # slab -> the class that gets it when it is empty

    @property
    def uncut(self) -> int:
        """Slabs without a class: unassigned, or absent."""
        return self.slab_count - len(self._slabs)

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

    def take_run(self, size_bytes: int, count: int) -> list[int]:
        """Up to `count` free slots that hold `size_bytes` each, ascending; fewer where room ends.

        In one piece where one of the first slabs has one, else filling up slab after slab.
        Raises RecordSizeError.
        """
        if not self.can_hold(size_bytes):
            raise RecordSizeError(
                f"record of {size_bytes} bytes: allowed are 1 to {self.slab_bytes} (slab_bytes)"
            )
        slot_bytes = slot_bytes_for(size_bytes)
        open_slabs = self._open.setdefault(slot_bytes, {})
        if count > 1:
            for number in islice(open_slabs, _SLABS_SEARCHED_MAX):
                whole = self._slabs[number].take_whole(count)
                if whole is not None:
                    return self._taken(number, slot_bytes, [whole])
        slots: list[int] = []
        while len(slots) < count:
            number = next(iter(open_slabs), -1)
            if number < 0:
                if not self._unassigned:
                    break
                number = self._unassigned.pop()
                self._assign(number, slot_bytes)
            slots += self._taken(number, slot_bytes, list(self._slabs[number].take(count - len(slots))))
        slots.sort()
        return slots

    def take(self, size_bytes: int) -> int | None:
        """A free slot that holds `size_bytes`, or None. Raises RecordSizeError."""
        slots = self.take_run(size_bytes, 1)
        return slots[0] if slots else None

    def give_run(self, slots: Sequence[int]) -> None:
        """Hand slots back; a slab becomes unassigned when nothing in it is used."""
        slabs, used = self._slabs, self._used
        for slot in slots:
            number = slot >> 16
            slab, position = slabs[number], slot & 0xFFFF
            assert slab.flags[position], f"slot {slot} given back twice"
            slab.flags[position] = 0
            slab.used -= 1
            used[slab.slot_bytes] -= 1
            if not slab.used:
                self._unassign(number, slab.slot_bytes)
            elif number not in self._draining:
                self._open[slab.slot_bytes][number] = None

    def give(self, slot: int) -> None:
        self.give_run((slot,))

    def drain(self, number: int, size_bytes: int) -> None:
        """Hand out no more slots of this slab; when nothing in it is used it is cut for records of that size."""
        slab = self._slabs[number]
        is_other = slab.slot_bytes != slot_bytes_for(size_bytes)
        assert is_other or len(slab.flags) == 1, f"slab {number} is of that class"
        self._draining[number] = slot_bytes_for(size_bytes)
        self._open[slab.slot_bytes].pop(number, None)
        if not slab.used:
            self._unassign(number, slab.slot_bytes)

    def stop_draining(self, number: int) -> bool:
        """A slab that is not empty yet stays what it is. False where it is empty, and cut for the other class."""
        if self._draining.pop(number, None) is None:
            return False
        slab = self._slabs[number]
        if slab.used < len(slab.flags):
            self._open[slab.slot_bytes][number] = None
        return True

    def add_slab(self, number: int) -> None:
        """An absent slab has its bytes now: hand it out, after those that were there before."""
        self.absent.remove(number)
        self._unassigned.insert(0, number)

    def mark(self, slot: int, size_bytes: int) -> bool:
        """Claim one particular slot while restoring; False if it cannot be what it says.

        Its slab is no longer absent. After the last mark, and before anything else, call `settle`.
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

    def mark_run(self, slots: Sequence[int], slot_bytes: int) -> None:
        """Claim ascending slots of one slab while restoring: as `mark`, for slots known to be free and of this class."""
        number = slots[0] // SLAB_SLOTS_MAX
        slab = self._slabs.get(number)
        if slab is None:
            slab = self._slabs[number] = _Slab(slot_bytes, self.slots_per_slab(slot_bytes))
        flags, first, count = slab.flags, slots[0] & 0xFFFF, len(slots)
        if slots[-1] - slots[0] == count - 1:
            flags[first : first + count] = b"\1" * count
        else:
            for slot in slots:
                flags[slot & 0xFFFF] = 1
        slab.used += count

    def settle(self) -> None:
        """Rebuild the classes from what was marked. Looks at each slab once."""
        self._slabs = {number: slab for number, slab in self._slabs.items() if slab.used}
        self.absent.difference_update(self._slabs)
        missing = self.absent.union(self._slabs)
        self._unassigned = [n for n in range(self.slab_count - 1, -1, -1) if n not in missing]
        self._open.clear()
        self._members.clear()
        self._used.clear()
        self._draining.clear()
        for number, slab in self._slabs.items():
            self.slot_bytes[number] = slab.slot_bytes
            self._members.setdefault(slab.slot_bytes, set()).add(number)
            self._used[slab.slot_bytes] = self._used.get(slab.slot_bytes, 0) + slab.used
            open_slabs = self._open.setdefault(slab.slot_bytes, {})
            if slab.used < len(slab.flags):
                open_slabs[number] = None

    def reclaim(self, size_bytes: int, busy: Set[int] = frozenset()) -> list[int]:
        """Used slots of the cheapest slab of another class, to be freed so that it can be cut for this size; [] where
        there is room, or no such slab, or where an empty one was found, which is drained."""
        if not self.can_hold(size_bytes) or self.has_room(size_bytes):
            return []
        slab = self.smallest_slab(size_bytes, busy)
        slots = [] if slab is None else list(self.slots_in(slab))
        if slab is not None and not slots:
            self.drain(slab, size_bytes)
        return slots

    def smallest_slab(self, size_bytes: int, busy: Set[int] = frozenset()) -> int | None:
        """The slab of another class with the fewest used slots: the cheapest to take over.

        None of `busy`, and none that is being drained. Looks at the slabs of other classes only, and at some of each where
        there are very many: all hundred thousand of a disk would take 60 ms.
        """
        slot_bytes = slot_bytes_for(size_bytes)
        looks = 1 + SLABS_COMPARED_MAX // max(1, len(self._members))
        others = (
            (self._slabs[number].used, number)
            for its_slot_bytes, members in self._members.items()
            if its_slot_bytes != slot_bytes
            for number in islice(members, looks)
            if number not in busy and number not in self._draining
        )
        return min(others, default=(0, None))[1]

    def by_use(self, busy: Set[int] = frozenset()) -> list[int]:
        """Slabs of all classes, those with the fewest used bytes first; none of `busy`, and none that is drained."""
        slabs, draining = self._slabs, self._draining
        return sorted(
            (number for number in slabs if number not in busy and number not in draining),
            key=lambda number: slabs[number].used * slabs[number].slot_bytes,
        )

    def slots_in(self, slab: int) -> Iterator[int]:
        flags, first = self._slabs[slab].flags, slab * SLAB_SLOTS_MAX
        return compress(range(first, first + len(flags)), flags)

    def undrained(self, slab: int) -> list[int]:
        """Used slots of a slab; [] where it is being drained."""
        return [] if slab in self._draining else list(self.slots_in(slab))

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
        return [line for lines in self.check_slices() for line in lines]

    def check_slices(self) -> Iterator[list[str]]:
        """The same in slices. What they say holds if no slot was taken or given back meanwhile."""
        problems: list[str] = []
        cuts_differ = False
        if sorted([*self._unassigned, *self.absent, *self._slabs]) != list(range(self.slab_count)):
            problems.append("slots: slabs are lost or assigned twice")
        for looks, (number, slab) in enumerate(list(self._slabs.items()), 1):
            if looks % CHECK_SLICE_SLOTS == 0:
                yield problems
                problems = []
            if slab.used != slab.flags.count(1) or len(slab.flags) != self.slots_per_slab(slab.slot_bytes):
                problems.append(f"slots: slab {number}: used + free is not {len(slab.flags)}")
            if number not in self._members.get(slab.slot_bytes, ()):
                problems.append(f"slots: slab {number}: not in its class")
            cuts_differ |= self.slot_bytes[number] != slab.slot_bytes
            is_open = slab.used < len(slab.flags) and number not in self._draining
            if is_open != (number in self._open.get(slab.slot_bytes, {})):
                problems.append(f"slots: slab {number}: free slots and open list disagree")
        if not self._draining.keys() <= self._slabs.keys():
            problems.append("slots: a slab is drained that nothing is in")
        if sum(map(len, self._members.values())) != len(self._slabs) or not all(self._members.values()):
            problems.append("slots: the classes have slabs that are not assigned")
        if cuts_differ or self.slot_bytes.count(0) != self.uncut:
            problems.append("slots: a slab is not cut as the list of slot sizes says")
        for slot_bytes, used in self._used.items():
            if used != sum(self._slabs[number].used for number in self._members.get(slot_bytes, ())):
                problems.append(f"slots: {used} slots of {slot_bytes} bytes are not what is used")
        yield problems

    def _taken(self, number: int, slot_bytes: int, pieces: list[range]) -> list[int]:
        """Book what was taken from one slab; returns its slots."""
        slab, first = self._slabs[number], number * SLAB_SLOTS_MAX
        slots = [slot for piece in pieces for slot in range(first + piece.start, first + piece.stop)]
        self._used[slot_bytes] += len(slots)
        if slab.used == len(slab.flags):
            del self._open[slot_bytes][number]
        return slots

    def _assign(self, number: int, slot_bytes: int) -> None:
        self._slabs[number] = _Slab(slot_bytes, self.slots_per_slab(slot_bytes))
        self.slot_bytes[number] = slot_bytes
        self._open[slot_bytes][number] = None
        self._members.setdefault(slot_bytes, set()).add(number)
        self._used.setdefault(slot_bytes, 0)

    def _unassign(self, number: int, slot_bytes: int) -> None:
        del self._slabs[number]
        self.slot_bytes[number] = 0
        self._open[slot_bytes].pop(number, None)
        members = self._members[slot_bytes]
        members.remove(number)
        if not members:
            del self._members[slot_bytes]
        heir = self._draining.pop(number, 0)
        if heir:
            self._open.setdefault(heir, {})
            self._assign(number, heir)
        else:
            self._unassigned.append(number)
