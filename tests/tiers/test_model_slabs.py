"""Slabs that models have, beside records: the arena against a model of it, over restarts and damage."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.tiers.records import CAPACITY_BYTES, SLAB_BYTES, content, key
from tiers import locks
from tiers.base import Record
from tiers.checksum import digest
from tiers.dram.arena import Arena, open_arena
from tiers.dram.model_slabs import LABEL_BYTES_MAX, MODELS, SLABS_MAX, ModelSlab, model_slab
from tiers.dram.owners import USERS_BASE

CLIENT = 9


def slab(number: int, label: str = "qwen3-8b@1f") -> ModelSlab:
    return ModelSlab(label, b"content-of-16-by", number, 4)


def make(path: Path) -> Arena:
    return open_arena(path, CAPACITY_BYTES, SLAB_BYTES)


def lend(arena: Arena, number: int, owner: int = 0) -> int:
    """A committed slab, whose bytes follow from its number."""
    (slot,) = arena.lend([slab(number)], owner)
    data = content(number, SLAB_BYTES)
    arena.view(slot)[:] = data
    arena.commit_run([slot], digest(data))
    return slot


@pytest.fixture
def arena(shm: Path) -> Iterator[Arena]:
    opened = make(shm / "kvstore-test.arena")
    yield opened
    assert opened.check() == []
    opened.close()


@pytest.mark.parametrize("size", [1, 40, 41, LABEL_BYTES_MAX])
def test_a_row_says_whose_slab_it_is(size: int) -> None:
    """Label, content, index and count come back from key and parent, however long the label is."""
    told = ModelSlab("m" * size, bytes(range(16)), 3, SLABS_MAX)
    record = Record(*told.names(), SLAB_BYTES, b"")
    assert model_slab(record) == told


@pytest.mark.parametrize(
    "wrong",
    [
        Record(key(0), b"", SLAB_BYTES, b""),
        Record(MODELS, b"", SLAB_BYTES, b""),
        Record(slab(0).names()[0][:40], b"", SLAB_BYTES, b""),
        Record(slab(0).names()[0] + b"\xff", b"", SLAB_BYTES, b""),
        Record(MODELS + bytes(16) + b"\4\0\0\0" + b"\4\0\0\0" + b"m@1", b"", SLAB_BYTES, b""),
        Record(MODELS + bytes(20) + b"\xff\xff\xff\xff" + b"m@1", b"", SLAB_BYTES, b""),
    ],
)
def test_a_row_that_cannot_be_a_models_is_none(wrong: Record) -> None:
    """Other keys, cut ones, a slab behind the last one, more slabs than there may be."""
    assert model_slab(wrong) is None


def test_models_are_no_records(arena: Arena) -> None:
    """What a model has counts as used, and neither as a record nor as a slot of a class; nothing drives it out."""
    record = arena.reserve_run([key(1)], [b""], 5000, 0)
    arena.commit_run(record, bytes(16))
    slots = [lend(arena, 0), lend(arena, 1)]
    stats = arena.stats()
    assert stats.records == 1 and stats.model_bytes == 2 * SLAB_BYTES
    assert stats.used_bytes == 2 * SLAB_BYTES + arena.layout.slot_bytes_min
    assert [size.slot_bytes for size in stats.classes] == [arena.layout.slot_bytes_min]
    assert arena.slabs_by_use() == [record[0] >> 16]
    last = arena.lend([slab(2), slab(3)], CLIENT)
    assert len(last) == 1 and not arena.has_room(100_000)
    assert arena.reclaim(100_000) == record
    arena.abandon_run(last)
    arena.free_run(slots)
    assert arena.stats().model_bytes == 0 and arena.has_room(SLAB_BYTES)


def test_a_flipped_byte_in_a_slab_does_not_verify(shm: Path) -> None:
    """Also in the last byte, and after an adoption, which says whose slab it is."""
    first = make(shm / "kvstore-test.arena")
    slot = lend(first, 2)
    first.close()
    again = make(shm / "kvstore-test.arena")
    assert again.adopted_slabs() == [(slot, slab(2))] and again.adopted_slots() == []
    assert again.verify(slot)
    again.mapping[again.offset(slot) + SLAB_BYTES - 1] ^= 1
    assert not again.verify(slot) and again.check() == []
    again.close()


def test_who_uses_a_model_is_seen_by_his_lock(arena: Arena) -> None:
    """A lock through a descriptor that may only read, of a process that no daemon needs to know."""
    slots = [lend(arena, 0), lend(arena, 1)]
    fd = os.open(f"/proc/self/fd/{arena.read_only_fd}", os.O_RDONLY)
    try:
        assert locks.try_lock(fd, USERS_BASE + (slots[1] >> 16), fcntl.F_RDLCK)
        assert [arena.is_locked(slot) for slot in slots] == [False, True]
    finally:
        os.close(fd)
    assert not arena.is_locked(slots[1])
    arena.free_run(slots)


class ArenaMachine(RuleBasedStateMachine):
    """The model: slots of records and of models, READY or being written; everything else is free."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.arena = make(self.directory / "arena")
        self.ready: dict[int, int] = {}  # slot of a record -> its number
        self.lent: dict[int, int] = {}  # slot of a slab -> its number
        self.writing: dict[int, bool] = {}  # slot -> whether it is a model's
        self.number = 0

    @rule(size_bytes=st.sampled_from([100, 70_000, SLAB_BYTES - 100, SLAB_BYTES]), stays=st.booleans())
    def store(self, size_bytes: int, stays: bool) -> None:
        self.number += 1
        for slot in self.arena.reserve_run([key(self.number)], [b""], size_bytes, CLIENT):
            assert not {*self.ready, *self.lent, *self.writing} & {slot}
            if stays:
                data = content(self.number, size_bytes)
                self.arena.view(slot)[:] = data
                self.arena.commit_run([slot], digest(data))
                self.ready[slot] = self.number
            else:
                self.writing[slot] = False

    @rule(count=st.integers(1, 3), stays=st.booleans())
    def model_comes(self, count: int, stays: bool) -> None:
        slots = self.arena.lend([slab(index) for index in range(count)], CLIENT)
        for index, slot in enumerate(slots):
            assert not {*self.ready, *self.lent, *self.writing} & {slot}
            if stays:
                data = content(index, SLAB_BYTES)
                self.arena.view(slot)[:] = data
                self.arena.commit_run([slot], digest(data))
                self.lent[slot] = index
            else:
                self.writing[slot] = True

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if slots := sorted({*self.ready, *self.lent, *self.writing}):
            slot = data.draw(st.sampled_from(slots))
            self.arena.free_run([slot])
            for held in (self.ready, self.lent, self.writing):
                held.pop(slot, None)

    @rule()
    def writers_are_lost(self) -> None:
        """Nobody holds their lock: what they were writing is free."""
        if self.writing:
            self.arena.abandon_run(list(self.writing))
            self.writing.clear()

    @rule()
    def a_model_drives_out_records(self) -> None:
        """The slab with the fewest bytes; whatever is in it leaves, and the slab is the model's."""
        slabs = self.arena.slabs_by_use()
        assert not {slot >> 16 for slot in [*self.lent, *self.writing]} & set(slabs)
        if not slabs:
            return
        slots = self.arena.slots_in(slabs[0])
        self.arena.drain(slots[0], SLAB_BYTES)
        self.arena.free_run(slots)
        for slot in slots:
            del self.ready[slot]
        assert not self.arena.stop_draining(slots[0])
        (slot,) = self.arena.lend([slab(0)], CLIENT)
        self.writing[slot] = True

    @rule()
    def daemon_dies(self) -> None:
        """Nothing is closed in order; the next one finds what is READY, true and its own, and frees the rest."""
        self.arena.close()
        self.arena = make(self.directory / "arena")
        self.writing.clear()
        assert {slot: record.key for slot, record in self.arena.adopted_slots()} == {
            slot: key(number) for slot, number in self.ready.items()
        }
        assert dict(self.arena.adopted_slabs()) == {slot: slab(number) for slot, number in self.lent.items()}
        assert all(self.arena.verify(slot) for slot in [*self.ready, *self.lent])

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "arena"):
            assert self.arena.check() == []
            stats = self.arena.stats()
            models = [*self.lent, *(slot for slot, is_models in self.writing.items() if is_models)]
            assert stats.records == len(self.ready) and stats.model_bytes == len(models) * SLAB_BYTES
            used = sum(size.used * size.slot_bytes for size in stats.classes)
            assert stats.used_bytes == used + stats.model_bytes
            assert sum(size.used for size in stats.classes) == len({*self.ready, *self.writing} - set(models))

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()
            shutil.rmtree(self.directory)


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
