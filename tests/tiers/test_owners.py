"""Owners: who may still be writing into a slot, with real processes that are stopped and killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.tiers.records import CAPACITY_BYTES, SLAB_BYTES
from tests.tiers.test_arena import process
from tiers.constants import OWNER_ANY
from tiers.dram.arena import Arena, open_arena
from tiers.locks import try_lock

SIZE = 50_000


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "kvstore-test.arena"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    opened = open_arena(path, CAPACITY_BYTES, SLAB_BYTES)
    yield opened
    assert opened.check() == []
    opened.close()


def run_of(arena: Arena, count: int, owner: int) -> list[int]:
    keys = [bytes([number + 1]) for number in range(count)]
    slots = arena.reserve_run(keys, [b"", *keys[:-1]], SIZE, owner)
    assert len(slots) == count
    return slots


def generations(arena: Arena, slots: list[int]) -> list[int]:
    return [arena.generation(slot) for slot in slots]


def test_slots_of_a_lost_writer_wait_for_its_lock(arena: Arena, path: Path) -> None:
    """Whoever is lost in the middle of a write, a stopped process included, is waited for; it can see at once
    that the slots are not its own any more."""
    slots = run_of(arena, 3, owner=5)
    with process("hold", str(path), "5") as writer:
        writer.send_signal(signal.SIGSTOP)
        arena.abandon_run(slots)
        assert generations(arena, slots) == [1, 1, 1]
        assert arena.sweep() == 0 and arena.owners.quarantined() == 3 and arena.check() == []
        writer.kill()
        writer.wait()
        assert arena.sweep() == 3 and arena.owners.quarantined() == 0
    assert run_of(arena, 3, owner=5) == slots


def test_slots_of_a_lost_writer_that_does_not_write_are_free(arena: Arena, path: Path) -> None:
    """Without its lock nobody writes: the slots are handed out again at once, under another generation."""
    with process("hold", str(path), "6"):
        slots = run_of(arena, 3, owner=5)
        arena.abandon_run(slots)
        assert arena.owners.quarantined() == 0 and min(generations(arena, slots)) > 0
        assert run_of(arena, 3, owner=7) == slots


def test_a_writer_that_says_it_is_done_is_believed(arena: Arena, path: Path) -> None:
    """Slots that are given back, or committed, are nobody's business any more, whoever holds the lock."""
    with process("hold", str(path), "5"):
        given, kept = run_of(arena, 1, owner=5), run_of(arena, 1, owner=5)
        arena.free_run(given)
        arena.commit_run(kept, bytes(16))
        assert arena.owners.quarantined() == 0 and arena.stats().records == 1
        assert run_of(arena, 1, owner=5) == given


def test_each_slot_waits_for_its_own_writer(arena: Arena, path: Path) -> None:
    """One writer that hangs does not keep the slots of another one."""
    mine, theirs = run_of(arena, 2, owner=5), run_of(arena, 3, owner=6)
    with ExitStack() as writers:
        hanging = writers.enter_context(process("hold", str(path), "5"))
        dying = writers.enter_context(process("hold", str(path), "6"))
        arena.abandon_run([*mine, *theirs])
        assert arena.owners.quarantined() == 5
        dying.kill()
        dying.wait()
        assert arena.sweep() == 3 and arena.owners.quarantined() == 2
        hanging.kill()
        hanging.wait()
        assert arena.sweep() == 2


def test_an_adopted_arena_waits_for_writers_of_the_life_before(path: Path) -> None:
    """Its writers share a byte, which says to the next daemon that one of them may be writing; the next life has another
    byte, so that its own writers do not look like those."""
    first = open_arena(path, CAPACITY_BYTES, SLAB_BYTES)
    byte = first.owners.writers_byte
    run_of(first, 3, owner=first.owners.claim_file()[0])
    with process("hold", str(path), str(byte)) as writer:
        first.close()
        second = open_arena(path, CAPACITY_BYTES, SLAB_BYTES)
        assert second.owners.quarantined() == 3 and second.owners.writers_byte != byte
        with process("hold", str(path), str(second.owners.writers_byte)):
            assert second.sweep() == 0
            writer.kill()
            writer.wait()
            assert second.sweep() == 3 and second.check() == []
    second.close()


def test_a_lost_writer_s_file_is_kept_while_it_is_locked(arena: Arena) -> None:
    """Also where it fills a lease of somebody else, who gives it up later."""
    owner, fd = arena.owners.claim_file()
    writer = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert try_lock(writer, 0)
    slots = run_of(arena, 2, OWNER_ANY)
    arena.let_go_owner(owner)
    arena.abandon_run(slots)
    assert arena.sweep() == 0 and arena.owners.quarantined() == 2
    os.close(writer)
    assert arena.sweep() == 2
    with pytest.raises(OSError):
        os.fstat(fd)
