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
from pathlib import Path

import pytest

from tests.tiers.arena_filler import CLIENT
from tests.tiers.factories import CAPACITY_BYTES, SLAB_BYTES, content, record
from tiers import locks
from tiers.arena import Arena, open_arena
from tiers.constants import OWNER_MAX
from tiers.errors import BusyError, NotOursError, OpenError, RecordSizeError, TierError, VersionError

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
    slot = write(arena, number, 0, size_bytes)
    arena.commit(slot, record(number, size_bytes)[0].checksum)
    return slot


def write(arena: Arena, number: int, owner: int, size_bytes: int = SIZE) -> int:
    item, data = record(number, size_bytes)
    slot = arena.reserve(item.key, item.parent, size_bytes, owner)
    assert slot is not None
    arena.view(slot)[:] = data
    return slot


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
    for commit in (True, False, True):
        slot = store(arena, 0) if commit else write(arena, 0, 0)
        (stored,) = struct.unpack_from("<Q", arena.mapping, arena.generation_offset(slot))
        assert stored == arena.generation(slot)
        seen.append((slot, stored))
        arena.free(slot)
    assert len(set(seen)) == 3 and len({slot for slot, _ in seen}) == 1


def test_small_records_use_the_smallest_slot(arena: Arena) -> None:
    """A one-byte record takes a slot of slot_bytes_min, so the table has a row for every slot."""
    slots = [store(arena, number, 1) for number in range(SLAB_BYTES // arena.layout.slot_bytes_min + 1)]
    assert len({arena.generation_offset(slot) for slot in slots}) == len(slots)
    assert arena.stats().used_bytes == len(slots) * arena.layout.slot_bytes_min
    assert max(arena.generation_offset(slot) for slot in slots) < arena.layout.data_offset


def test_a_full_arena_says_so(arena: Arena) -> None:
    """Without a free slot reserve answers None, and one free makes room for one."""
    slots = [store(arena, number, SLAB_BYTES) for number in range(4)]
    assert not arena.has_room(1) and arena.reserve(b"k", b"", 1, 0) is None
    arena.free(slots[2])
    assert arena.has_room(SLAB_BYTES) and arena.reserve(b"k", b"", SLAB_BYTES, 0) is not None
    with pytest.raises(RecordSizeError):
        arena.reserve(b"k", b"", 0, 0)


def test_reclaim_never_names_a_slot_being_written(arena: Arena) -> None:
    """The slab to take over is the emptiest one of another class in which nobody writes."""
    slots = [store(arena, number, SLAB_BYTES // 2) for number in range(8)]
    assert arena.reclaim(SLAB_BYTES // 2) == []  # the smallest slab of another class does not exist
    arena.free(slots[1])
    written = write(arena, 100, 5, SLAB_BYTES // 2)
    for slot in (slots[0], slots[3]):
        arena.free(slot)
    proposed = arena.reclaim(SLAB_BYTES)
    assert proposed == [slots[2]] and written not in proposed
    arena.free(slots[2])
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


# -- adoption --------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_kill_9_at_any_instant(path: Path) -> None:
    """After kill -9 every READY record verifies, nothing stays WRITING, and no generation goes back."""
    generations: dict[int, int] = {}
    adopted = 0
    for seed in range(10):
        with process("fill", str(path), str(seed)) as child:
            time.sleep(0.03 + 0.017 * seed)
            child.kill()
            assert child.stdout is not None
            lines = child.stdout.read().splitlines(keepends=True)
        for line in lines:
            if line.startswith("slot") and line.endswith("\n"):
                _, slot, generation = line.split()
                generations[int(slot)] = max(int(generation), generations.get(int(slot), 0))
        arena = make(path)
        assert arena.adopted and arena.quarantined_slots == 0 and arena.check() == []
        slots = arena.adopted_slots()
        assert all(arena.verify(slot) for slot, _ in slots)
        assert arena.torn_rows <= 1 and arena.stats().records == len(slots)
        for number, known in generations.items():
            assert arena.generation(number) >= known
        adopted += len(slots)
        arena.close()
    assert adopted > 100 and len(generations) > 10


@pytest.mark.timeout(120)
def test_kill_9_beside_a_living_client(path: Path) -> None:
    """While a client lives, what it was writing when the daemon died stays in quarantine, and only that."""
    make(path).close()
    for seed in range(6):
        with process("hold", str(path), str(CLIENT)):
            with process("fill", str(path), str(seed)):
                time.sleep(0.05 + 0.013 * seed)
            arena = make(path)
            waiting = arena.quarantined_slots
            assert waiting <= 1 and arena.sweep() == 0 and arena.check() == []
            used = sum(entry.used for entry in arena.stats().classes)
            assert used == len(arena.adopted_slots()) + waiting
        assert arena.sweep() == waiting and arena.quarantined_slots == 0
        assert arena.check() == []
        arena.close()


def test_killed_writes_wait_for_a_living_owner(path: Path) -> None:
    """WRITING slots of a dead daemon are freed at once, unless their owner's lock is still held."""
    first = make(path)
    store(first, 0)
    daemon_slot, dead, alive = write(first, 1, 0), write(first, 2, 5), write(first, 3, 6)
    with process("hold", str(path), "6"):
        first.close()
        second = make(path)
        assert second.quarantined_slots == 1 and second.stats().records == 1
        assert second.generation(daemon_slot) == 1 and second.generation(dead) == 1
        assert second.generation(alive) == 0
        while (slot := second.reserve(b"k", b"", SIZE, 0)) is not None:
            assert slot != alive
        assert second.sweep() == 0
    assert second.sweep() == 1
    assert second.quarantined_slots == 0 and second.generation(alive) == 1
    assert second.reserve(b"k", b"", SIZE, 0) == alive
    assert second.check() == []
    second.close()


def test_torn_rows_are_dropped(path: Path) -> None:
    """A READY row that was half-written, or whose generation was raised already, is not adopted."""
    first = make(path)
    slots = [store(first, number) for number in range(4)]
    rows = [first.generation_offset(slot) for slot in slots]
    generation = first.generation(slots[1])
    first.mapping[rows[0] + 40] ^= 1  # a byte of the key
    struct.pack_into("<Q", first.mapping, rows[1], generation + 1)  # killed in the middle of a free
    first.mapping[rows[2] - 8] ^= 1  # the row hash itself
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == [slots[3]] and second.torn_rows == 3
    assert second.generation(slots[1]) == generation + 2
    assert second.check() == []
    second.close()


def test_a_copied_row_is_not_believed(path: Path) -> None:
    """A row that appears under another slot's number does not match its hash."""
    first = make(path)
    slots = [store(first, number) for number in range(2)]
    one, two = (first.generation_offset(slot) - 16 for slot in slots)
    first.mapping[two : two + 256] = first.mapping[one : one + 256]
    first.close()
    second = make(path)
    assert [slot for slot, _ in second.adopted_slots()] == slots[:1]
    second.close()


def test_check_finds_what_is_wrong(path: Path) -> None:
    """The books do not balance when a row changes behind the arena's back."""
    arena = make(path)
    row = arena.generation_offset(store(arena, 0)) - 16
    for state in (0, 1, 9):
        arena.mapping[row] = state
        assert arena.check() != []
    arena.mapping[row] = 2
    arena.mapping[row + 60] ^= 1
    assert any("damaged row" in line for line in arena.check())
    arena.close()


def test_adoption_reads_only_what_was_written(path: Path) -> None:
    """A large arena with one record has a table of holes, and adopting it does not fill them."""
    large = open_arena(path, 1 << 30)
    slot = store(large, 0)
    large.close()
    again = open_arena(path, 1 << 30)
    assert [found for found, _ in again.adopted_slots()] == [slot]
    assert path.stat().st_blocks * 512 < 4 << 20 < again.layout.data_offset
    again.close()


# -- owners ----------------------------------------------------------------------------------


def test_owner_numbers_are_not_reused_too_soon(arena: Arena, path: Path) -> None:
    """A number is not handed out while claimed, locked by somebody, or in quarantine."""
    fd = os.open(path, os.O_RDWR)
    claimed = arena.claim_owner()
    assert locks.try_lock(fd, claimed + 1)
    assert arena.claim_owner() == claimed + 2
    slot = write(arena, 0, claimed)
    assert locks.try_lock(fd, claimed)
    arena.abandon_owner(claimed)
    assert arena.sweep() == 0 and arena.quarantined_slots == 1
    others = [arena.claim_owner() for _ in range(OWNER_MAX - 3)]
    assert len(set(others)) == len(others) and claimed not in others and claimed + 1 not in others
    with pytest.raises(TierError, match="owner numbers"):
        arena.claim_owner()
    os.close(fd)
    assert arena.sweep() == 1 and arena.generation(slot) == 1
    assert {arena.claim_owner(), arena.claim_owner()} == {claimed, claimed + 1}


def test_short_connections_do_not_use_up_the_numbers(arena: Arena) -> None:
    """Whoever wrote nothing, or ended what it wrote, waits in no quarantine."""
    for number in range(2 * OWNER_MAX):
        owner = arena.claim_owner()
        if number % 2:
            arena.free(write(arena, number, owner))
        arena.abandon_owner(owner)
    assert arena.check() == []


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
    with pytest.raises(OpenError, match="bytes free"):
        make(path, 1 << 50)
    again = make(path)
    assert again.adopted and again.verify(slot)
    again.close()


def flip_magic(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"SOMEBODY")


def next_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 2))


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(17)
        file.write(b"\xff")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - SLAB_BYTES)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (flip_magic, NotOursError, "not an arena"),
        (next_version, VersionError, "format version 2"),
        (damage_header, NotOursError, "header is damaged"),
        (truncate, NotOursError, "header is damaged"),
        (lambda path: path.write_bytes(b"notes"), NotOursError, "not an arena"),
        (lambda path: path.write_bytes(b""), NotOursError, "not an arena"),
        (lambda path: path.chmod(0o644), NotOursError, "mode 0600"),
        (lambda path: (path.unlink(), path.mkdir()), NotOursError, "not a regular file"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/null")), NotOursError, "not a regular file"),
        (become_fifo, NotOursError, "not a regular file"),
    ],
)
def test_foreign_files_are_refused_untouched(path: Path, change, error, words) -> None:  # type: ignore[no-untyped-def]
    """Whatever is not an arena of this version is named in one message and left as it was."""
    make(path).close()
    change(path)
    before = os.lstat(path), path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    with pytest.raises(error, match=words) as caught:
        make(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    after = os.lstat(path), path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    assert [getattr(after[0], name) for name in ("st_ino", "st_mode", "st_size", "st_mtime_ns")] == [
        getattr(before[0], name) for name in ("st_ino", "st_mode", "st_size", "st_mtime_ns")
    ]
    assert after[1] == before[1]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((SLAB_BYTES - 1, SLAB_BYTES), "capacity_bytes"),
        ((CAPACITY_BYTES, SLAB_BYTES + 4096), "slab_bytes"),
        ((CAPACITY_BYTES, 0), "slab_bytes"),
        ((CAPACITY_BYTES, SLAB_BYTES, 5000), "slot_bytes_min"),
        ((CAPACITY_BYTES, SLAB_BYTES, 2 * SLAB_BYTES), "slot_bytes_min"),
        ((1 << 50, SLAB_BYTES), "bytes free"),
    ],
)
def test_wrong_settings_are_named(path: Path, settings: tuple[int, ...], key: str) -> None:
    """A setting that cannot work raises, naming the setting and what is allowed; no file appears."""
    with pytest.raises(OpenError, match=key):
        open_arena(path, *settings)
    assert list(path.parent.iterdir()) == []


def test_a_missing_directory_is_an_open_error(path: Path) -> None:
    """A place that does not exist is reported with its path."""
    with pytest.raises(OpenError, match="nowhere"):
        make(path.parent / "nowhere" / "x.arena")


# -- prefault --------------------------------------------------------------------------------


def test_prefault_keeps_records_and_fills_the_file(arena: Arena, path: Path) -> None:
    """Touching every slab allocates them, reports progress to the end, and changes no record."""
    slot = store(arena, 0)
    seen: list[tuple[int, int]] = []
    assert arena.prefault(threading.Event(), lambda done, total: seen.append((done, total)))
    assert seen[-1] == (CAPACITY_BYTES, CAPACITY_BYTES)
    assert path.stat().st_blocks * 512 >= CAPACITY_BYTES and arena.verify(slot)


def test_prefault_stops_when_told(arena: Arena) -> None:
    """A set stop event ends it before the first piece."""
    stop = threading.Event()
    stop.set()
    assert not arena.prefault(stop)


def test_closing_beside_a_prefault_is_safe(path: Path) -> None:
    """A close while another thread prefaults waits for its piece and ends it."""
    arena = open_arena(path, 256 << 20)
    started = threading.Event()
    done: list[bool] = []
    thread = threading.Thread(
        target=lambda: done.append(arena.prefault(threading.Event(), lambda *_: started.set()))
    )
    thread.start()
    assert started.wait(30)
    arena.close()
    thread.join(30)
    assert len(done) == 1 and arena.mapping.closed
