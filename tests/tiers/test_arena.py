"""The arena: adoption after kill -9, quarantine, torn rows, foreign files, and the books."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import pytest

from tests.tiers.arena_filler import CLIENT
from tests.tiers.records import (
    CAPACITY_BYTES,
    SLAB_BYTES,
    STORED_S,
    commit,
    content,
    free,
    place,
    record,
    reserve,
)
from tiers.checksum import column_sizes
from tiers.dram.arena import Arena, open_arena
from tiers.dram.arena_files import ARENA_VERSION, existing_layout, table_path
from tiers.errors import BusyError, NotOursError, OpenError, RecordSizeError

SIZE = 50_000


@pytest.fixture
def path(shm: Path) -> Path:
    return shm / "kvstore-test.arena"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    opened = make(path)
    yield opened
    assert opened.check() == []
    opened.close()


def make(path: Path, capacity_bytes: int = CAPACITY_BYTES) -> Arena:
    return open_arena(path, capacity_bytes, SLAB_BYTES)


def store(arena: Arena, number: int, size_bytes: int = SIZE) -> int:
    slot, item = write(arena, number, 0, size_bytes), record(number, size_bytes)[0]
    commit(arena, slot, item.checksum, item.stored_s)
    return slot


def write(arena: Arena, number: int, owner: int, size_bytes: int = SIZE) -> int:
    item, data = record(number, size_bytes)
    slot = reserve(arena, item.key, item.parent, size_bytes, owner, item.columns)
    assert slot is not None
    arena.view(slot)[:] = data
    return slot


def row_at(arena: Arena, slot: int) -> int:
    """Where a slot's row is in the table file."""
    return (
        arena.layout.generations_end + (slot >> 16) * arena.layout.rows_per_slab * 256 + (slot & 0xFFFF) * 256
    )


def poke(path: Path, at: int, flip: int) -> None:
    """Change a byte of the table file behind the arena's back."""
    with table_path(path).open("r+b", buffering=0) as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ flip]))


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A filler process that has said its first line; killed with -9 at the end."""
    command = [sys.executable, "-m", "tests.tiers.arena_filler", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() in ("ready\n", "held\n")
            yield child
        finally:
            child.kill()
            child.wait()


# -- slots -----------------------------------------------------------------------------------


def test_a_record_goes_in_and_comes_out(arena: Arena) -> None:
    """A committed slot has the record, its bytes at its offset, and a checksum that matches."""
    slot = store(arena, 3)
    assert arena.record(slot) == record(3, SIZE)[0]
    assert bytes(arena.view(slot)) == content(3, SIZE)
    assert arena.mapping[arena.offset(slot) : arena.offset(slot) + SIZE] == content(3, SIZE)
    assert arena.verify(slot) and arena.offset(slot) % 4096 == 0
    arena.view(slot)[SIZE - 1] ^= 1
    assert not arena.verify(slot)


def test_generation_rises_at_every_free(arena: Arena) -> None:
    """A reader that looks at the generation's bytes sees another value after an abort and after a drop."""
    seen = []
    for committed in (True, False, True):
        slot = store(arena, 0) if committed else write(arena, 0, 0)
        offset, at, stored = place(arena, slot)
        assert struct.unpack("<Q", os.pread(arena.generations_fd, 8, at)) == (stored,)
        assert stored == arena.generation(slot) and offset == arena.offset(slot)
        seen.append((slot, stored))
        free(arena, slot)
    assert len(set(seen)) == 3 and len({slot for slot, _ in seen}) == 1


def test_small_records_use_the_smallest_slot(arena: Arena) -> None:
    """A one-byte record takes a slot of slot_bytes_min, so the table has a row for every slot."""
    slots = [store(arena, number, 1) for number in range(SLAB_BYTES // arena.layout.slot_bytes_min + 1)]
    ends = {place(arena, slot)[1] for slot in slots}
    assert len(ends) == len(slots) and max(ends) < arena.layout.generations_end
    assert arena.stats().used_bytes == len(slots) * arena.layout.slot_bytes_min


def test_a_full_arena_says_so(arena: Arena) -> None:
    """Without a free slot reserve answers None, and one free makes room for one."""
    slots = [store(arena, number, SLAB_BYTES) for number in range(4)]
    assert not arena.has_room(1) and reserve(arena, b"k", b"", 1, 0) is None
    free(arena, slots[2])
    assert arena.has_room(SLAB_BYTES) and reserve(arena, b"k", b"", SLAB_BYTES, 0) is not None
    with pytest.raises(RecordSizeError):
        reserve(arena, b"k", b"", 0, 0)


def test_reclaim_never_names_a_slot_being_written(arena: Arena) -> None:
    """The slab to take over is the emptiest one of another class in which nobody writes."""
    slots = [store(arena, number, SLAB_BYTES // 2) for number in range(8)]
    assert arena.reclaim(SLAB_BYTES // 2) == []  # the smallest slab of another class does not exist
    free(arena, slots[1])
    written = write(arena, 100, 5, SLAB_BYTES // 2)
    for slot in (slots[0], slots[3]):
        free(arena, slot)
    proposed = arena.reclaim(SLAB_BYTES)
    assert proposed == [slots[2]] and written not in proposed
    free(arena, slots[2])
    assert arena.has_room(SLAB_BYTES)


def test_closing_unmaps_and_spares_held_views(path: Path) -> None:
    """A close without views outside unmaps at once; a view still held stays readable."""
    arena = make(path)
    view = arena.view(store(arena, 0))
    arena.close()
    assert bytes(view) == content(0, SIZE)
    view.release()
    again = make(path)
    again.close()
    assert again.mapping.closed
    again.close(unlink=True)
    assert path.exists()  # the second close does nothing


def test_close_can_remove_the_file(path: Path) -> None:
    """An unlinking close leaves nothing behind."""
    make(path).close(unlink=True)
    assert list(path.parent.iterdir()) == []


def test_a_run_costs_few_calls(arena: Arena) -> None:
    """Of a run of 128 blocks, none of whose steps is a loop of calls, each costs at most three calls from the
    reserve to the free."""
    keys = [b"N" * 16 + number.to_bytes(32, "big") for number in range(128)]
    parents, sums = [b"", *keys[:-1]], bytes(16 * 128)
    counts: dict[str, int] = {}

    def count(_frame: object, event: str, _argument: object) -> None:
        counts[event] = counts.get(event, 0) + 1

    sys.setprofile(count)
    try:
        slots = arena.reserve_run(keys, parents, 16_384, (1,))
        arena.extents(slots)
        arena.commit_run(slots, sums)
        arena.free_run(slots)
    finally:
        sys.setprofile(None)
    assert counts["call"] + counts["c_call"] <= 3 * len(keys), counts


# -- adoption --------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_kill_9_at_any_instant(path: Path) -> None:
    """After kill -9 every READY record verifies, nothing stays WRITING, and no generation goes back. Ten times, and until records and
    a model were found."""
    generations: dict[int, int] = {}
    adopted = lent = seed = 0
    while seed < 10 or adopted <= 100 or len(generations) <= 10 or lent == 0:
        with process("fill", str(path), str(seed)) as child:
            time.sleep(0.03 + 0.017 * seed)
            seed += 1
            child.kill()
            assert child.stdout is not None
            lines = child.stdout.read().splitlines(keepends=True)
        for line in lines:
            if line.startswith("slot") and line.endswith("\n"):
                _, slot, generation = line.split()
                generations[int(slot)] = max(int(generation), generations.get(int(slot), 0))
        arena = make(path)
        assert arena.adopted and arena.owners.quarantined() == 0 and arena.check() == []
        slots = arena.adopted_slots()
        slabs = arena.adopted_slabs()
        assert all(arena.verify(slot) for slot, _ in [*slots, *slabs])
        assert arena.torn_rows <= 1 and arena.stats().records == len(slots)
        for number, known in generations.items():
            assert arena.generation(number) >= known
        adopted += len(slots)
        lent += len(slabs)
        arena.close()


@pytest.mark.timeout(120)
def test_kill_9_beside_a_living_client(path: Path) -> None:
    """While a client lives, what it was writing when the daemon died stays in quarantine, and only that."""
    make(path).close()
    for seed in range(6):
        with process("hold", str(path), str(CLIENT)):
            with process("fill", str(path), str(seed)):
                time.sleep(0.05 + 0.013 * seed)
            arena = make(path)
            waiting = arena.owners.quarantined()
            assert waiting <= 1 and arena.sweep() == 0 and arena.check() == []
            stats = arena.stats()
            used = sum(entry.used for entry in stats.classes) + stats.model_bytes // SLAB_BYTES
            assert used == len(arena.adopted_slots()) + len(arena.adopted_slabs()) + waiting
        assert arena.sweep() == waiting and arena.owners.quarantined() == 0
        assert arena.check() == []
        arena.close()


def test_killed_writes_wait_for_a_living_owner(path: Path) -> None:
    """WRITING slots of a dead daemon are freed at once, unless some client is in the middle of a write; it
    sees at once that they are not its own any more."""
    first = make(path)
    store(first, 0)
    writing = {write(first, 1, 5), write(first, 2, 6)}
    with process("hold", str(path), "6"):
        first.close()
        second = make(path)
        assert second.owners.quarantined() == 2 and second.stats().records == 1
        assert all(second.generation(slot) == 1 for slot in writing)
        while (slot := reserve(second, b"k", b"", SIZE, 0)) is not None:
            assert slot not in writing
        assert second.sweep() == 0 and second.check() == []
    assert second.sweep() == 2 and second.owners.quarantined() == 0
    assert {reserve(second, b"k", b"", SIZE, 0), reserve(second, b"k", b"", SIZE, 0)} == writing
    assert second.check() == []
    second.close()


STATE, TIME_MARK, HASH, TIME, SIZE_AT, KEY, PARENT, COLUMNS = 0, 4, 8, 32, 40, 44, 125, 206


@pytest.mark.parametrize("at", [HASH, SIZE_AT, KEY, PARENT, COLUMNS, COLUMNS + 48])
def test_damaged_rows_are_dropped(path: Path, at: int) -> None:
    """A flipped bit anywhere in a row but its checksum drops the row, and only that one."""
    first = make(path)
    slots = [store(first, number) for number in range(3)]
    poke(path, row_at(first, slots[1]) + at, 16)
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == [slots[0], slots[2]] and second.torn_rows == 1
    assert second.check() == []
    second.close()


def test_a_damaged_checksum_does_not_verify(path: Path) -> None:
    """A flipped bit in a stored checksum costs the record when it is verified."""
    first = make(path)
    slot = store(first, 0)
    poke(path, row_at(first, slot) + 16, 1)
    first.close()
    second = make(path)
    assert [found for found, _ in second.adopted_slots()] == [slot] and not second.verify(slot)
    second.close()


@pytest.mark.parametrize("number", range(3))
def test_a_flipped_byte_in_any_column_does_not_verify(path: Path, number: int) -> None:
    """The next daemon knows the columns of a record, and finds damage at either end of each."""
    first = make(path)
    slot, item = store(first, number, 3 << 19), record(number, 3 << 19)[0]  # more than is read at a time
    first.close()
    second = make(path)
    assert second.adopted_slots() == [(slot, item)] and second.verify(slot)
    ends = list(accumulate(column_sizes(item.columns, item.size_bytes)))
    for at in {0, *ends[:-1], *(end - 1 for end in ends)}:
        second.view(slot)[at] ^= 1
        assert not second.verify(slot)
        second.view(slot)[at] ^= 1
    assert second.verify(slot)
    second.close()


def test_a_kill_in_the_middle_of_a_free_loses_nothing(path: Path) -> None:
    """A READY row whose generation was raised already is adopted: nobody has touched its bytes."""
    first = make(path)
    slot = store(first, 0)
    _, at, generation = place(first, slot)
    with table_path(path).open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(struct.pack("<Q", generation + 1))
    first.close()
    second = make(path)
    assert [found for found, _ in second.adopted_slots()] == [slot] and second.verify(slot)
    assert second.generation(slot) == generation + 1 and second.check() == []
    second.close()


def test_a_copied_row_is_not_believed(path: Path) -> None:
    """A row that appears under another slot's number does not match its hash."""
    first = make(path)
    slots = [store(first, number) for number in range(2)]
    one, two = (row_at(first, slot) for slot in slots)
    with table_path(path).open("r+b", buffering=0) as file:
        file.seek(one)
        row = file.read(256)
        file.seek(two)
        file.write(row)
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == slots[:1]
    second.close()


def test_check_finds_what_is_wrong(path: Path) -> None:
    """The books do not balance when a row changes behind the arena's back."""
    arena = make(path)
    row = row_at(arena, store(arena, 0))
    for flip in (2, 3, 11):  # READY becomes FREE, WRITING, nonsense
        poke(path, row, flip)
        assert arena.check() != []
        poke(path, row, flip)
    assert arena.check() == []
    poke(path, row + KEY, 1)
    assert any("damaged row" in line for line in arena.check())
    arena.close()


def test_the_time_of_storing_survives(path: Path) -> None:
    """What a commit says of the time is read again, also by the next daemon; without a word it is 0."""
    first = make(path)
    slots = first.reserve_run([b"a", b"b"], [b"", b"a"], SIZE, 0)
    first.commit_run(slots, bytes(32), stored_s=(1 << 32) - 1)
    other = store(first, 0)
    assert [first.record(slot).stored_s for slot in (*slots, other)] == [
        (1 << 32) - 1,
        (1 << 32) - 1,
        STORED_S,
    ]
    first.close()
    second = make(path)
    assert [second.record(slot).stored_s for slot in (*slots, other)] == [
        (1 << 32) - 1,
        (1 << 32) - 1,
        STORED_S,
    ]
    free(second, slots[0])
    commit(second, reserve(second, b"c", b"", SIZE, 0) or 0, bytes(16))
    assert second.record(slots[0]).stored_s == 0
    second.close()


def test_a_record_is_stored_again_at_another_time(path: Path) -> None:
    """The next daemon reads that one, and drops no row for it."""
    first = make(path)
    slots = [store(first, number) for number in range(3)]
    first.restamp(slots[:2], STORED_S + 7)
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == slots and second.check() == []
    assert [second.record(slot).stored_s - STORED_S for slot in slots] == [7, 7, 0]
    second.close()


@pytest.mark.parametrize("at", [TIME, TIME + 3, TIME + 7, TIME_MARK, TIME_MARK + 3])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_damaged_time_costs_its_row(path: Path, at: int, bit: int) -> None:
    """A flipped bit in it, or in its mark, would be taken for the clock's, and end every TTL: no time is read meanwhile,
    and the next daemon drops the row. A row of an older program, without a mark, is believed."""
    first = make(path)
    slots = [store(first, number) for number in range(3)]
    poke(path, row_at(first, slots[1]) + at, 1 << bit)
    with table_path(path).open("r+b") as table:
        table.seek(row_at(first, slots[2]) + TIME_MARK)
        table.write(bytes(4))
    assert [first.record(slot).stored_s for slot in slots] == [STORED_S, 0, STORED_S]
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == [slots[0], slots[2]] and second.torn_rows == 1
    second.close()


def test_adoption_reads_only_what_was_written(path: Path) -> None:
    """A large arena with one record has a table of holes, and adopting it does not fill them."""
    large = open_arena(path, 1 << 30)
    slot = store(large, 0)
    large.close()
    written = table_path(path).stat().st_blocks
    again = open_arena(path, 1 << 30)
    assert [found for found, _ in again.adopted_slots()] == [slot]
    assert table_path(path).stat().st_blocks == written
    assert written * 512 - again.layout.generations_end < 1 << 20 < again.layout.table_bytes
    again.close()


@pytest.mark.parametrize("smallest_bytes", [4096, 256 << 10, 1 << 20])
def test_rows_get_their_memory_as_they_are_used(path: Path, smallest_bytes: int) -> None:
    """However many rows a slab has, one or thousands: all of its slots can be used, and are found again."""
    size_bytes = min(smallest_bytes, SIZE)
    few = open_arena(path, CAPACITY_BYTES, SLAB_BYTES, smallest_bytes)
    slots = [store(few, 0, size_bytes)]
    assert table_path(path).stat().st_blocks * 512 - few.layout.generations_end <= 256 * 256 + 2 * 4096
    while few.has_room(size_bytes):
        slots.append(store(few, len(slots), size_bytes))
    few.close()
    again = open_arena(path, CAPACITY_BYTES, SLAB_BYTES, smallest_bytes)
    assert sorted(slot for slot, _ in again.adopted_slots()) == sorted(slots)
    assert again.check() == []
    again.close()


# -- owners ----------------------------------------------------------------------------------


def test_the_handed_out_descriptor_holds_no_lock(path: Path) -> None:
    """A client that keeps the descriptor it was passed does not keep the next daemon out."""
    first = make(path)
    kept = os.dup(first.fd)
    with pytest.raises(BusyError):
        make(path)
    first.close()
    second = make(path)
    second.close()
    os.close(kept)


# -- files -----------------------------------------------------------------------------------


def test_one_daemon_at_a_time(arena: Arena, path: Path) -> None:
    """A second open of a live arena is refused and disturbs nothing."""
    slot = store(arena, 0)
    with pytest.raises(BusyError, match=str(path)):
        make(path)
    with pytest.raises(BusyError):
        make(path, 2 * CAPACITY_BYTES)
    assert arena.verify(slot)


def test_only_the_owner_can_read_it(arena: Arena, path: Path) -> None:
    """The file has mode 0600 whatever the umask."""
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_settings_replace_it_with_one_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another capacity makes an empty arena, says so once, and spares the old mapping."""
    first = make(path)
    view = first.view(store(first, 0))
    first.close()
    second = make(path, 2 * CAPACITY_BYTES)
    assert not second.adopted and second.capacity_bytes == 2 * CAPACITY_BYTES
    assert second.stats().records == 0 and len(caplog.records) == 1
    assert bytes(view) == content(0, SIZE)
    view.release()
    second.close()


def test_a_replacement_that_cannot_be_spares_the_old(path: Path) -> None:
    """A capacity that the place has no room for is refused before the old arena is removed."""
    first = make(path)
    slot = store(first, 0)
    first.close()
    with pytest.raises(OpenError, match="iB free"):
        make(path, 1 << 50)
    again = make(path)
    assert again.adopted and again.verify(slot)
    again.close()


def write_at(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def become_link(path: Path) -> None:
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


FOREIGN = {
    "another magic": (lambda path: write_at(table_path(path), 0, b"SOMEBODY"), "not an arena's table"),
    "notes": (lambda path: table_path(path).write_bytes(b"notes"), "not an arena's table"),
    "empty": (lambda path: table_path(path).write_bytes(b""), "not an arena's table"),
    "no table": (lambda path: table_path(path).unlink(), "without a table"),
    "another file": (lambda path: (path.unlink(), path.touch(0o600)), "not the file that its table"),
    "readable table": (lambda path: table_path(path).chmod(0o644), "mode 0600"),
    "readable slabs": (lambda path: path.chmod(0o640), "mode 0600"),
    "directory": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    "link": (become_link, "not a regular file"),
    "linked table": (lambda path: become_link(table_path(path)), "not a regular file"),
    "fifo": (become_fifo, "not a regular file"),
    "fifo for a table": (lambda path: become_fifo(table_path(path)), "not a regular file"),
}


def test_an_arena_that_does_not_fit_is_refused(path: Path) -> None:
    """One that its file system has no room for raises, with what is free; no file appears."""
    with pytest.raises(OpenError, match="iB free"):
        open_arena(path, 1 << 50, SLAB_BYTES)
    assert list(path.parent.iterdir()) == []


def seen(path: Path) -> list[tuple[str, int, int, int, int]]:
    """Every file of the arena's directory as it is now, links not followed."""
    found = [(entry.name, entry.lstat()) for entry in sorted(path.parent.iterdir())]
    return [(name, s.st_ino, s.st_mode, s.st_size, s.st_mtime_ns) for name, s in found]


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_refused_untouched(path: Path, kind: str) -> None:
    """Whatever is not an arena of ours is named in one message and left as it was."""
    change, words = FOREIGN[kind]
    make(path).close()
    change(path)
    before = seen(path)
    with pytest.raises(NotOursError, match=words) as caught:
        make(path)
    assert str(path.with_suffix("")) in str(caught.value) and "\n" not in str(caught.value)
    assert seen(path) == before


USELESS = {
    "next version": (
        lambda path: write_at(table_path(path), 8, struct.pack("<I", ARENA_VERSION + 1)),
        f"format version {ARENA_VERSION + 1}",
    ),
    "version 3": (lambda path: write_at(table_path(path), 8, struct.pack("<I", 3)), "format version 3"),
    "damaged header": (lambda path: write_at(table_path(path), 17, b"\xff"), "damaged"),
    "short table": (lambda path: os.truncate(table_path(path), 8192), "damaged"),
    "short slabs": (lambda path: os.truncate(path, SLAB_BYTES), "long"),
}


@pytest.mark.parametrize("kind", USELESS)
def test_an_arena_that_cannot_be_adopted_starts_cold(
    path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version, or damage to our own files, costs the records and one line, not the start."""
    change, words = USELESS[kind]
    arena = make(path)
    store(arena, 0)
    arena.close()
    change(path)
    again = make(path)
    assert not again.adopted and again.stats().records == 0 and again.check() == []
    (line,) = caplog.messages
    assert words in line and "its records are lost" in line and str(path) in line
    store(again, 0)
    again.close()


def test_half_an_arena_is_made_anew(path: Path) -> None:
    """A table without slabs, which a kill in the middle of making or removing leaves, is in nobody's way."""
    make(path).close()
    path.unlink()
    again = make(path)
    assert not again.adopted
    again.close(unlink=True)
    assert list(path.parent.iterdir()) == []


def test_looking_changes_nothing(path: Path) -> None:
    """The layout of an arena can be asked for without a lock; where there is none it is None."""
    assert existing_layout(path) is None
    arena = make(path)
    assert existing_layout(path) == arena.layout
    arena.close()
    write_at(table_path(path), 8, struct.pack("<I", ARENA_VERSION + 1))
    with pytest.raises(OpenError, match=f"format version {ARENA_VERSION + 1}"):
        existing_layout(path)


def test_a_directory_of_everybody_is_refused(path: Path) -> None:
    """Where another user could replace the files no arena is made, unless the directory is sticky."""
    path.parent.chmod(0o777)
    with pytest.raises(OpenError, match="mode 777"):
        make(path)
    assert list(path.parent.iterdir()) == []
    path.parent.chmod(0o1777)
    make(path).close()


def test_a_missing_directory_is_an_open_error(path: Path) -> None:
    """A place that does not exist is reported with its path."""
    with pytest.raises(OpenError, match="nowhere"):
        make(path.parent / "nowhere" / "x.arena")


# -- memory ----------------------------------------------------------------------------------


def test_backing_keeps_records_and_fills_the_file(arena: Arena, path: Path) -> None:
    """Touching every slab allocates them, reports progress to the end, and changes no record."""
    slot = store(arena, 0)
    seen: list[tuple[int, int]] = []
    assert arena.back(threading.Event(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (CAPACITY_BYTES, CAPACITY_BYTES)
    assert path.stat().st_blocks * 512 >= CAPACITY_BYTES and arena.verify(slot)


def test_backing_stops_when_told(path: Path) -> None:
    """A set stop event ends it before the first slab, and what has no memory is not handed out."""
    arena = open_arena(path, 512 << 20)
    backed, stop = arena.backed_bytes, threading.Event()
    stop.set()
    assert not arena.back(stop) and arena.backed_bytes == backed < arena.capacity_bytes
    taken = len(arena.reserve_run([bytes([n + 1]) for n in range(8)], [b""] * 8, 64 << 20, 0))
    assert taken == backed >> 26 and arena.check() == []
    arena.close()


def test_closing_beside_a_backing_is_safe(path: Path) -> None:
    """A close while another thread backs slabs waits for its slab and ends it."""
    arena = open_arena(path, 512 << 20)
    started = threading.Event()
    done: list[bool] = []
    thread = threading.Thread(
        target=lambda: done.append(arena.back(threading.Event(), progress=lambda *_: started.set()))
    )
    thread.start()
    assert started.wait(30)
    arena.close()
    thread.join(30)
    assert len(done) == 1 and arena.mapping.closed
