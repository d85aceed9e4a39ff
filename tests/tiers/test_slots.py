"""The slot pool against a model: slots never overlap, and the books always balance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import tiers.slots
from tiers.errors import RecordSizeError
from tiers.slots import SLOT_ALIGN_BYTES, SlotPool, slot_bytes_for

SLABS = 3
SLAB_BYTES = 8 * SLOT_ALIGN_BYTES
SIZES = st.integers(1, SLAB_BYTES)


class PoolMachine(RuleBasedStateMachine):
    """The model is a dict slot -> size of what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLABS, SLAB_BYTES, absent={1, 2})
        self.taken: dict[int, int] = {}

    @rule(size_bytes=SIZES)
    def take(self, size_bytes: int) -> None:
        room = self.pool.has_room(size_bytes)
        slot = self.pool.take(size_bytes)
        assert (slot is not None) == room
        if slot is not None:
            assert slot not in self.taken
            self.taken[slot] = size_bytes

    @rule(size_bytes=SIZES, count=st.integers(1, 12))
    def take_run(self, size_bytes: int, count: int) -> None:
        room = self.pool.has_room(size_bytes)
        slots = self.pool.take_run(size_bytes, count)
        assert bool(slots) == room and slots == sorted(slots)
        assert len(slots) == count or not self.pool.has_room(size_bytes)
        assert self.taken.keys().isdisjoint(slots)
        self.taken.update(dict.fromkeys(slots, size_bytes))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_run(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True))
        self.pool.give_run(slots)
        for slot in slots:
            del self.taken[slot]

    @precondition(lambda self: self.pool.absent)
    @rule()
    def add_slab(self) -> None:
        self.pool.add_slab(min(self.pool.absent))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.pool.give(slot)
        del self.taken[slot]

    @rule()
    def restore(self) -> None:
        pool = SlotPool(SLABS, SLAB_BYTES, self.pool.absent)
        assert all(pool.mark(slot, size) for slot, size in self.taken.items())
        assert not any(pool.mark(slot, size) for slot, size in self.taken.items())
        pool.settle()
        assert pool.used_bytes() == self.pool.used_bytes() and pool.classes() == self.pool.classes()
        self.pool = pool

    @rule(size_bytes=SIZES)
    def smallest_slab_is_of_another_class(self, size_bytes: int) -> None:
        slab = self.pool.smallest_slab(size_bytes)
        others = {
            s >> 16 for s, size in self.taken.items() if slot_bytes_for(size) != slot_bytes_for(size_bytes)
        }
        assert (slab in others) if others else slab is None
        if slab is not None:
            assert set(self.pool.slots_in(slab)) == {slot for slot in self.taken if slot >> 16 == slab}

    @rule(size_bytes=SIZES, busy=st.sets(st.integers(0, SLABS - 1)))
    def smallest_slab_is_not_busy(self, size_bytes: int, busy: set[int]) -> None:
        used: dict[int, int] = {}
        for slot, size in self.taken.items():
            if slot_bytes_for(size) != slot_bytes_for(size_bytes):
                used[slot >> 16] = used.get(slot >> 16, 0) + 1
        slab = self.pool.smallest_slab(size_bytes, busy)
        allowed = {number: count for number, count in used.items() if number not in busy}
        assert slab is None if not allowed else allowed[slab or 0] == min(allowed.values())

    @invariant()
    def slots_do_not_overlap(self) -> None:
        ranges = []
        for slot, size_bytes in self.taken.items():
            slab, offset, slot_bytes = self.pool.locate(slot)
            assert size_bytes <= slot_bytes == slot_bytes_for(size_bytes)
            assert offset + slot_bytes <= SLAB_BYTES
            ranges.append((slab * SLAB_BYTES + offset, slab * SLAB_BYTES + offset + slot_bytes))
        ranges.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(ranges))

    @invariant()
    def absent_slabs_hold_nothing(self) -> None:
        assert self.pool.absent.isdisjoint(slot >> 16 for slot in self.taken)

    @invariant()
    def books_balance(self) -> None:
        assert self.pool.check() == []
        assert self.pool.uncut == self.pool.slot_bytes.count(0)
        assert self.pool.used_bytes() == sum(slot_bytes_for(size) for size in self.taken.values())
        assert sum(entry.used for entry in self.pool.classes()) == len(self.taken)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("size_bytes", [0, -1, SLAB_BYTES + 1])
def test_impossible_sizes_raise(size_bytes: int) -> None:
    """A record that no slab can hold is refused by name."""
    with pytest.raises(RecordSizeError, match="slab_bytes"):
        SlotPool(SLABS, SLAB_BYTES).take(size_bytes)


def test_a_slab_changes_its_class_when_empty() -> None:
    """The last slot given back frees the slab for records of any size."""
    pool = SlotPool(1, SLAB_BYTES)
    slot = pool.take(SLOT_ALIGN_BYTES)
    assert slot is not None and not pool.has_room(SLAB_BYTES)
    pool.give(slot)
    assert pool.take(SLAB_BYTES) is not None


def test_a_pool_of_one_class_lists_nothing_to_find_another() -> None:
    """Asking a full pool of one class for a slab to take over looks at none of its slabs."""
    pool = SlotPool(SLABS, SLAB_BYTES)
    while pool.take(SLOT_ALIGN_BYTES) is not None:
        pass
    slabs, pool._slabs = pool._slabs, {}  # looking at one would be a KeyError
    assert pool.smallest_slab(SLOT_ALIGN_BYTES) is None
    assert [(entry.total, entry.used) for entry in pool.classes()] == [(SLABS * 8, SLABS * 8)]
    pool._slabs = slabs
    assert pool.check() == []


def test_of_very_many_slabs_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of several TB has a hundred thousand: some of each other class are looked at, the smallest of which is taken."""
    monkeypatch.setattr(tiers.slots, "SLABS_COMPARED_MAX", 12)
    pool = SlotPool(300, SLAB_BYTES)
    for size in (2 * SLOT_ALIGN_BYTES, 4 * SLOT_ALIGN_BYTES):
        pool.take_run(size, 100 * (SLAB_BYTES // size) - 1)  # the last slab of each has a free slot
    looked: list[int] = []

    class Watched(dict[int, Any]):
        def __getitem__(self, number: int) -> Any:
            looked.append(number)
            return super().__getitem__(number)

    slabs, pool._slabs = pool._slabs, Watched(pool._slabs)
    slab = pool.smallest_slab(SLOT_ALIGN_BYTES)
    assert slab in looked and len(looked) <= 14
    assert {pool.slot_bytes[number] for number in looked} == {2 * SLOT_ALIGN_BYTES, 4 * SLOT_ALIGN_BYTES}
    assert slabs[slab].used == min(slabs[number].used for number in looked)
    assert pool.uncut == 100


def test_a_run_is_in_one_piece_where_one_fits() -> None:
    """Holes are passed over for a run that fits behind them, and filled by one that fits nowhere else."""
    pool = SlotPool(1, SLAB_BYTES)
    slots = pool.take_run(SLOT_ALIGN_BYTES, 5)
    assert slots == [0, 1, 2, 3, 4]
    pool.give_run([1, 3])
    assert pool.take_run(SLOT_ALIGN_BYTES, 3) == [5, 6, 7]
    assert pool.take_run(SLOT_ALIGN_BYTES, 3) == [1, 3] and pool.take_run(SLOT_ALIGN_BYTES, 1) == []


@pytest.mark.parametrize(("slot", "size_bytes"), [(SLABS << 16, 4096), (-1, 4096), (8, 4096), (0, 0)])
def test_marks_that_cannot_be_are_refused(slot: int, size_bytes: int) -> None:
    """Restoring refuses slots outside the pool, and leaves the books in order."""
    pool = SlotPool(SLABS, SLAB_BYTES)
    assert not pool.mark(slot, size_bytes)
    pool.settle()
    assert pool.check() == []


DRAIN_STEPS = st.tuples(
    st.sampled_from(["take", "take", "give", "give", "drain", "stop"]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)


@given(steps=st.lists(DRAIN_STEPS, max_size=80))
def test_a_slab_that_is_drained_goes_to_who_wanted_it(steps: list[tuple[str, int, int]]) -> None:
    """It hands out nothing, whatever comes and goes; empty, it is for that class and no other; or it stays what it is."""
    pool = SlotPool(SLABS, SLAB_BYTES)
    taken: dict[int, int] = {}
    draining: dict[int, int] = {}
    for what, size, pick in steps:
        wanted = size * SLOT_ALIGN_BYTES
        if what == "take":
            slots = pool.take_run(wanted, 1 + pick % 5)
            assert not {slot >> 16 for slot in slots} & draining.keys()
            taken.update(dict.fromkeys(slots, wanted))
        elif what == "give" and taken:
            slot = sorted(taken)[pick % len(taken)]
            pool.give(slot)
            del taken[slot]
        elif what == "drain" and (slab := pool.smallest_slab(wanted)) is not None:
            assert slab not in draining
            pool.drain(slab, wanted)
            draining[slab] = wanted
        elif what == "stop" and draining:
            slab = sorted(draining)[pick % len(draining)]
            is_left = any(slot >> 16 == slab for slot in taken)
            assert pool.stop_draining(slab) == is_left
            del draining[slab]
        for slab, heir in list(draining.items()):
            if not any(slot >> 16 == slab for slot in taken):
                assert pool.slot_bytes[slab] == heir and pool.has_room(heir)
                assert not pool.stop_draining(slab)
                del draining[slab]
        assert pool.check() == []
        assert pool.used_bytes() == sum(taken.values())


def test_slabs_come_with_the_fewest_bytes_first() -> None:
    """What is used counts in bytes, whatever the class; slabs that are busy or drained are not named."""
    pool = SlotPool(SLABS, SLAB_BYTES)
    small, large = pool.take_run(SLOT_ALIGN_BYTES, 3), pool.take_run(2 * SLOT_ALIGN_BYTES, 1)
    assert pool.by_use() == [large[0] >> 16, small[0] >> 16]
    assert pool.by_use({large[0] >> 16}) == [small[0] >> 16]
    pool.drain(large[0] >> 16, 4 * SLOT_ALIGN_BYTES)
    assert pool.by_use() == [small[0] >> 16]
