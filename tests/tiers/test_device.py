"""What an NVMe device promises of its records and slots, also on a disk that lies, fails or is full."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.tiers.devices import PER_SLAB, SIZE, SLAB_BYTES, Clock, FaultyIO, flip, opened, put, put_slot, read
from tests.tiers.records import content, key, record
from tiers.base import Get, Put
from tiers.constants import ROW_BYTES
from tiers.nvme import device as device_module
from tiers.nvme import device_slabs
from tiers.nvme.device import DEVICE_ASIDE_MAX, NVME_RETRY_S
from tiers.nvme.direct import DiskIO

ROWS_PER_SLAB = SLAB_BYTES // (16 << 10)


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, SIZE, SLAB_BYTES])
def test_a_read_returns_what_was_written(tmp_path: Path, size_bytes: int, shift: int) -> None:
    """A read returns exactly the bytes that were written, for any size and address."""
    device, _ = opened(tmp_path)
    item, data = record(7, size_bytes)
    view = memoryview(mmap.mmap(-1, size_bytes + 8192))[shift : shift + size_bytes]
    view[:] = data
    slot = device.pool.take(device.slot_bytes(size_bytes))
    assert slot is not None and device.write([(slot, item, view)]) == [Put.STORED]
    assert read(device, slot, 7, size_bytes) is Get.HIT
    view[:] = bytes(size_bytes)
    assert device.read([(slot, item.key, view)]) == [(Get.HIT, item.checksum)] and view == data
    assert device.check() == []
    device.close()


def test_a_batch_is_answered_item_by_item(tmp_path: Path) -> None:
    """Neighbouring and scattered slots of one batch are written and read, each with its own answer."""
    device, _ = opened(tmp_path, io=(disk := FaultyIO()))
    slots = device.pool.take_run(device.slot_bytes(SIZE), 12)
    disk.writes = 0
    batch = [(slot, *record(n, SIZE)) for n, slot in enumerate(slots)]
    assert device.write(batch) == [Put.STORED] * 12
    assert disk.writes == 12 + 2  # one row write for each of the two slabs
    into = [memoryview(bytearray(SIZE)) for _ in slots]
    mixed = [5, 0, 11, 1]
    answers = device.read([(slots[n], key(n) if n else key(99), into[n]) for n in mixed])
    assert [answer for answer, _ in answers] == [Get.HIT, Get.MISS, Get.HIT, Get.HIT]
    assert all(into[n] == content(n, SIZE) for n in mixed if n)
    assert [row.key if row else None for row in device.rows([slots[3], slots[9], 2 << 16])] == [
        key(3),
        key(9),
        None,
    ]
    device.close()


def test_a_read_believes_nothing_but_the_row(tmp_path: Path) -> None:
    """Another key, another size, an empty slot and a slot written again are misses, never hits."""
    device, _ = opened(tmp_path)
    slot = put_slot(device, 1)
    assert read(device, slot, 2) is Get.MISS
    assert read(device, slot, 1, SIZE - 1) is Get.MISS
    assert read(device, slot + 1, 1) is Get.MISS
    device.pool.give(slot)
    assert put_slot(device, 2) == slot
    assert (read(device, slot, 1), read(device, slot, 2)) == (Get.MISS, Get.HIT)
    device.close()


def test_records_outlive_their_process_with_all_that_the_row_says(tmp_path: Path) -> None:
    """The scan of the next life tells the slot and all of the record, and the slots are in use."""
    device, _ = opened(tmp_path, slabs=6)
    slots = {number: put_slot(device, number, 20_000 * number) for number in range(1, 6)}
    device.close()
    device, rows = opened(tmp_path, slabs=6)
    assert {row.key: row for row in rows} == {
        item.key: (slot, *astuple(item))
        for slot, item in ((slot, record(n, 20_000 * n)[0]) for n, slot in slots.items())
    }
    assert all(read(device, slot, n, 20_000 * n) is Get.HIT for n, slot in slots.items())
    assert put_slot(device, 9) not in slots.values() and device.check() == []
    device.close()


def test_an_evicted_record_costs_no_io_and_is_found_again(tmp_path: Path) -> None:
    """A slot given back keeps its row until it is used: the next life has the record again."""
    device, _ = opened(tmp_path, io=(disk := FaultyIO()))
    slots = [put_slot(device, n) for n in range(4)]
    disk.writes = 0
    device.pool.give_run(slots)
    assert disk.writes == 0
    assert put_slot(device, 9) == slots[0]
    device.close()
    device, rows = opened(tmp_path)
    assert {row.key for row in rows} == {key(9), key(1), key(2), key(3)}
    assert all(read(device, slots[n], n) is Get.HIT for n in (1, 2, 3))
    device.close()


def test_cleared_records_stay_away(tmp_path: Path) -> None:
    """In this life and in the next one."""
    device, _ = opened(tmp_path)
    slots = [put_slot(device, n) for n in range(6)]
    assert device.clear([slots[0], slots[2]])
    assert {read(device, slots[n], n) for n in (0, 2)} == {Get.MISS}
    device.close()
    device, rows = opened(tmp_path)
    assert {row.key for row in rows} == {key(1), key(3), key(4), key(5)} and device.check() == []
    device.close()


def test_rows_of_free_slots_are_found_and_cleared(tmp_path: Path) -> None:
    """Those that are meant, unless their slot was written again since they were read."""
    device, _ = opened(tmp_path)
    slots = [put_slot(device, n) for n in range(6)]
    device.pool.give_run(slots)
    namespace = key(0)[:16]
    assert not any(device.rows_of(lambda digest: digest != namespace))
    rows = [row for piece in device.rows_of(lambda digest: digest == namespace) for row in piece]
    assert [row.key for row in rows] == list(map(key, range(6)))
    assert put_slot(device, 9) == slots[0]
    assert device.clear_rows([rows[n] for n in (0, 1, 2, 5)])
    device.close()
    device, left = opened(tmp_path)
    assert {row.key for row in left} == {key(9), key(3), key(4)}
    device.close()


def test_a_record_is_stored_again_at_another_time(tmp_path: Path) -> None:
    """Where its slot has it still, and never earlier than before; what else its row says stays."""
    device, _ = opened(tmp_path)
    slots = [put_slot(device, n) for n in range(4)]
    (before,) = {row.stored_s for row in device.rows(slots) if row is not None}
    device.restamp({slots[0]: key(0), slots[1]: key(9), slots[3]: key(3)}, before + 7)
    device.restamp({slots[0]: key(0)}, before + 3)
    device.close()
    device, rows = opened(tmp_path)
    assert {row.key: row.stored_s - before for row in rows} == {key(0): 7, key(1): 0, key(2): 0, key(3): 7}
    assert [read(device, slots[n], n) for n in range(4)] == [Get.HIT] * 4
    device.close()


def test_a_slab_taken_over_has_no_rows_of_its_former_class(tmp_path: Path) -> None:
    """A slab cut anew forgets evicted records of its former class before the first byte is written."""
    device, _ = opened(tmp_path, slabs=1)
    small = [put_slot(device, n, 10_000) for n in range(ROWS_PER_SLAB)]
    device.pool.give_run(small)
    assert put_slot(device, 100) == small[0]
    assert {read(device, slot, n, 10_000) for n, slot in enumerate(small)} == {Get.MISS}
    assert device.check() == []
    device.close()
    device, rows = opened(tmp_path, slabs=1)
    assert [row.key for row in rows] == [key(100)]
    device.close()


def test_a_flipped_byte_in_any_column_is_corrupt(tmp_path: Path) -> None:
    """Each column of a record is looked at, also by the next process."""
    device, _ = opened(tmp_path)
    for number, at in ((1, 0), (1, SIZE // 4), (1, SIZE // 2), (1, SIZE - 1), (2, 0), (2, 1), (0, 7)):
        slot = put_slot(device, number)
        device.close()
        flip(tmp_path / "slab-000000.kvs", slot * device.slot_bytes(SIZE) + at)
        device, rows = opened(tmp_path)
        assert [row.slot for row in rows] == [slot]
        assert read(device, slot, number) is Get.CORRUPT
        device.pool.give(slot)
    device.close()


def test_a_flipped_bit_in_a_slab_costs_one_record(tmp_path: Path) -> None:
    """Bytes that are not those of the row are corrupt once, then gone for good; the others are hits."""
    device, _ = opened(tmp_path)
    slots = [put_slot(device, n) for n in range(PER_SLAB)]
    flip(tmp_path / "slab-000000.kvs", 3 * 25 * 4096 + 77_777)
    answers = [read(device, slot, n) for n, slot in enumerate(slots)]
    assert answers.count(Get.CORRUPT) == 1 and answers.count(Get.HIT) == PER_SLAB - 1
    bad = answers.index(Get.CORRUPT)
    assert read(device, slots[bad], bad) is Get.MISS and device.counters.corrupt == 1
    device.close()
    device, rows = opened(tmp_path)
    assert len(rows) == PER_SLAB - 1
    device.close()


@pytest.mark.parametrize("at", [0, 7, 8, 12, 20, 33, 60, 120, 190])
def test_a_flipped_bit_in_the_table_costs_one_row(tmp_path: Path, at: int) -> None:
    """A bit flipped anywhere in a row makes it a miss, now and after a start that counts and says so."""
    device, _ = opened(tmp_path)
    slots = [put_slot(device, n) for n in range(5)]
    flip(tmp_path / "slots.table", 2 * ROW_BYTES + at)
    answers = [read(device, slot, n) for n, slot in enumerate(slots)]
    assert answers == [Get.HIT, Get.HIT, Get.MISS, Get.HIT, Get.HIT]
    device.close()
    device, rows = opened(tmp_path)
    assert len(rows) == 4 and device.counters.rows_damaged == 1
    assert put_slot(device, 50) == slots[2] and read(device, slots[2], 50) is Get.HIT
    device.close()


def test_a_row_in_another_place_is_not_believed(tmp_path: Path) -> None:
    """A sound row copied to another slot's place, or from another directory, is damaged."""
    first, _ = opened(tmp_path / "a")
    slots = [put_slot(first, n) for n in range(2)]
    first.close()
    other, _ = opened(tmp_path / "b")
    put_slot(other, 0)
    other.close()
    rows = (tmp_path / "a" / "slots.table").read_bytes()
    with (tmp_path / "a" / "slots.table").open("r+b") as file:
        file.seek(ROW_BYTES)
        file.write(rows[:ROW_BYTES])
    (tmp_path / "b" / "slots.table").write_bytes(rows)
    device, found = opened(tmp_path / "a")
    assert [row.slot for row in found] == slots[:1] and device.counters.rows_damaged == 1
    device.close()
    device, found = opened(tmp_path / "b")
    assert found == [] and device.counters.rows_damaged == 2
    device.close()


def test_a_torn_table_keeps_what_is_sound(tmp_path: Path) -> None:
    """Random bytes over a part of the table, and a table cut short, cost only the rows they hit."""
    device, _ = opened(tmp_path)
    for number in range(2 * PER_SLAB):
        put_slot(device, number)
    device.close()
    with (tmp_path / "slots.table").open("r+b") as file:
        file.seek(100)
        file.write(os.urandom(ROW_BYTES))  # two rows
        file.truncate(ROWS_PER_SLAB * ROW_BYTES + 4 * ROW_BYTES + 50)
    device, rows = opened(tmp_path)
    assert len(rows) == PER_SLAB - 2 + 4 and device.counters.rows_damaged == 3
    assert [put(device, n) in (Put.NO_ROOM, Put.FAILED) for n in range(100, 110)] == [False] * 10
    assert device.check() == []
    device.close()


def test_a_cut_and_a_missing_slab_cost_only_their_records(tmp_path: Path) -> None:
    """Rows whose bytes are beyond the end of a slab file are dropped and counted; the slab fills again."""
    device, _ = opened(tmp_path, slabs=2)
    for number in range(2 * PER_SLAB):
        put_slot(device, number)
    device.close()
    os.truncate(tmp_path / "slab-000000.kvs", 4 * 25 * 4096 + 500)
    (tmp_path / "slab-000001.kvs").unlink()
    device, rows = opened(tmp_path, slabs=2)
    assert len(rows) == 4 and device.counters.rows_lost == 2 * PER_SLAB - 4
    assert [isinstance(put(device, n), int) for n in range(100, 100 + 2 * PER_SLAB - 4)].count(False) == 0
    assert device.check() == []
    device.close()


def test_a_slab_cut_while_open_is_corrupt_then_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab file that vanishes under an open device costs its records and is made anew for the next."""
    monkeypatch.setattr(device_slabs, "NVME_SLAB_FDS_MAX", 0)  # else the open descriptor still reads it
    device, _ = opened(tmp_path, slabs=1)
    slot = put_slot(device, 0)
    (tmp_path / "slab-000000.kvs").unlink()
    assert read(device, slot, 0) is Get.CORRUPT
    again = put_slot(device, 1)
    assert read(device, again, 1) is Get.HIT
    device.close()


def test_rows_of_two_classes_in_one_slab_are_sorted_out(tmp_path: Path) -> None:
    """Where a power cut left rows of two classes in a slab, one class is kept and the other cleared."""
    device, _ = opened(tmp_path, slabs=1)
    slots = [put_slot(device, n) for n in range(3)]
    device._cut[0] = device.slot_bytes(10_000)  # as if the rows had not been cleared
    item, view = record(50, 10_000)
    assert device.write([(40, item, view)]) == [Put.STORED]
    device.close()
    device, rows = opened(tmp_path, slabs=1)
    assert [row.slot for row in rows] == slots and device.counters.rows_lost == 1
    assert device.check() == []
    device.close()


def test_lowering_the_capacity_drops_what_lies_beyond(tmp_path: Path) -> None:
    """With fewer slabs the records beyond are gone, their files too, and raising it again revives nothing."""
    device, _ = opened(tmp_path, slabs=3)
    for number in range(3 * PER_SLAB):
        put_slot(device, number)
    device.close()
    device, rows = opened(tmp_path, slabs=1)
    assert len(rows) == PER_SLAB
    assert [path.name for path in tmp_path.glob("slab-*")] == ["slab-000000.kvs"]
    device.close()
    device, rows = opened(tmp_path, slabs=3)
    assert len(rows) == PER_SLAB
    device.close()


def test_a_failed_write_stores_nothing_and_its_slot_rests(tmp_path: Path) -> None:
    """A slot whose write failed is a miss and is not handed out again before many others were."""
    device, _ = opened(tmp_path, io=(disk := FaultyIO()))
    held = put_slot(device, 0)
    disk.failing = 1.0
    assert put(device, 1) is Put.FAILED and read(device, held, 0) is Get.FAILED
    assert not device.clear([held])
    assert device.counters.io_errors >= 3
    disk.failing = 0.0
    assert put_slot(device, 1) == held + 2  # held + 1 rests
    assert read(device, held + 1, 1) is Get.MISS
    for _ in range(DEVICE_ASIDE_MAX):
        device.set_aside(device.pool.take_run(device.slot_bytes(10), 1)[0])
    assert put_slot(device, 2) == held + 1
    assert device.check() == []
    device.close()


def test_slabs_are_backed_ahead_and_never_beyond_the_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only backed slabs are handed out, a few ahead of need, until the capacity is reached and not a byte more."""
    monkeypatch.setattr(device_module, "DEVICE_SPARE_SLABS", 2)
    device, _ = opened(tmp_path, slabs=6)
    assert len(list(tmp_path.glob("slab-*"))) == 2
    count = 0
    while isinstance(put(device, count), int):
        count += 1
    assert count == 6 * PER_SLAB
    assert sum(path.stat().st_size for path in tmp_path.glob("slab-*")) == device.stats().capacity_bytes
    assert device.stats().used_bytes == count * device.slot_bytes(SIZE) and device.check() == []
    device.close()


def test_no_room_for_a_slab_is_full_until_room_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused allocation leaves the pool as it is, warns once, keeps no half file and is tried again later."""
    monkeypatch.setattr(device_module, "DEVICE_SPARE_SLABS", 1)
    disk, clock = FaultyIO(), Clock()
    device, _ = opened(tmp_path, io=disk, clock=clock)
    disk.no_room = True
    with caplog.at_level(logging.WARNING):
        slots = [put_slot(device, n) for n in range(PER_SLAB)]
        assert put(device, 50) is Put.NO_ROOM
        for number in range(3):
            clock.now += NVME_RETRY_S
            device.pool.give(slots[number])
            assert put_slot(device, 60 + number) == slots[number]
    assert len(caplog.records) == 1 and device.counters.allocate_failures == 4
    assert (tmp_path / "slab-000001.kvs").stat().st_size == 0
    disk.no_room = False
    clock.now += NVME_RETRY_S
    device.pool.give(slots[5])
    put_slot(device, 70)
    assert put_slot(device, 71) >= 1 << 16 and device.check() == []
    device.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB that can really be filled."""
    mount = tmp_path / "mount"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=0700", "none", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_is_survived(small_disk: Path) -> None:
    """On a really full file system what is backed is used and rows still have room; it grows when room returns."""
    clock = Clock()
    device, _ = opened(small_disk / "kv", slabs=90, clock=clock)
    slots: list[int] = []
    while isinstance(slot := put(device, len(slots)), int):
        slots.append(slot)
    assert slot is Put.NO_ROOM and PER_SLAB < len(slots) < 50 * PER_SLAB  # the headroom was left alone
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DiskIO().free_bytes(small_disk))
    device.pool.give_run(slots)
    again = [
        put_slot(device, 1000 + n, 30_000) for n in range(50)
    ]  # other rows, on a disk without a free byte
    assert {read(device, slot, 1000 + n, 30_000) for n, slot in enumerate(again)} == {Get.HIT}
    device.close()
    device, rows = opened(small_disk / "kv", slabs=90, clock=clock)
    assert {key(1000 + n) for n in range(50)} <= {row.key for row in rows}
    filler.unlink()
    clock.now += NVME_RETRY_S
    held = device.stats().capacity_bytes
    device.close()
    (small_disk / "kv" / "slab-000003.kvs").unlink()
    device, rows = opened(small_disk / "kv", slabs=90, clock=clock)
    assert device.stats().capacity_bytes == held and isinstance(put(device, 5), int) and device.check() == []
    device.close()


def test_descriptors_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slabs there are, few files stay open, and all records can be read."""
    monkeypatch.setattr(device_slabs, "NVME_SLAB_FDS_MAX", 2)
    device, _ = opened(tmp_path, slabs=8)
    before = len(os.listdir("/proc/self/fd"))
    slots = [put_slot(device, n, SLAB_BYTES) for n in range(8)]
    assert {read(device, slot, n, SLAB_BYTES) for n, slot in enumerate(slots)} == {Get.HIT}
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    device.close()
