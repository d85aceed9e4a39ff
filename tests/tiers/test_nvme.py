"""What the NVMe tier does when the disk lies, fails or is full."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.config import Config
from kvstore.storage import open_nvme
from tests.tiers.factories import content, key, record
from tiers import direct, nvme_slabs
from tiers.base import Get, Put
from tiers.constants import NVME_RETRY_S
from tiers.direct import DiskIO
from tiers.errors import OpenError, TierError
from tiers.nvme import NvmeTier, capacity_for
from tiers.rows import Row, Rows, RowsError

SLAB_BYTES = 1 << 20
SIZE = 100_000
PER_SLAB = SLAB_BYTES // (25 * 4096)


class FaultyIO(DiskIO):
    """A disk that fails with a seeded chance, lacks O_DIRECT, or has only so much room."""

    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.failing = 0.0
        self.no_direct = False
        self.no_room = False

    def _maybe_fail(self) -> None:
        if self.chance.random() < self.failing:
            raise OSError(errno.EIO, "injected")

    def open(self, path: Path, flags: int) -> int:
        if self.no_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._maybe_fail()
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, size_bytes: int) -> None:
        if self.no_room:
            os.ftruncate(fd, size_bytes // 2)  # a half-done allocation
            raise OSError(errno.ENOSPC, "injected")
        super().fallocate(fd, size_bytes)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


Opener = Callable[..., NvmeTier]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens a tier of some slabs, scanned once; its books must balance at the end."""
    opened: list[NvmeTier] = []

    def opening(slabs: int = 3, path: Path = tmp_path / "disk", **more: object) -> NvmeTier:
        tier = NvmeTier([path], capacity_for(slabs, SLAB_BYTES), SLAB_BYTES, **more)  # type: ignore[arg-type]
        opened.append(tier)
        for _ in tier.scan_rows():
            continue
        return tier

    yield opening
    for tier in opened:
        tier.close()


def read(tier: NvmeTier, number: int, size_bytes: int = SIZE) -> Get:
    """What a get answers; a hit must have the right bytes."""
    into = bytearray(size_bytes)
    ((answer, _checksum),) = tier.get([(key(number), memoryview(into))])
    assert answer is not Get.HIT or into == content(number, size_bytes)
    return answer


def put(tier: NvmeTier, number: int) -> Put:
    (answer,) = tier.put([record(number, SIZE)])
    return answer


def test_a_flipped_bit_is_corrupt_counted_and_its_slot_reused(opener: Opener, tmp_path: Path) -> None:
    """One flipped bit costs one record: corrupt once, counted, its slot free for the next."""
    tier = opener(slabs=1)
    assert [put(tier, n) for n in range(PER_SLAB)] == [Put.STORED] * PER_SLAB
    assert put(tier, 99) is Put.NO_ROOM
    (slab,) = (tmp_path / "disk").glob("slab-*.kvs")
    data = bytearray(slab.read_bytes())
    data[3 * 25 * 4096 + 77_777] ^= 4
    slab.write_bytes(data)
    answers = [read(tier, n) for n in range(PER_SLAB)]
    assert sorted(a.value for a in answers) == ["corrupt"] + ["hit"] * (PER_SLAB - 1)
    assert tier.counters().corrupt == 1
    assert read(tier, answers.index(Get.CORRUPT)) is Get.MISS
    assert tier.check() == []
    assert put(tier, 99) is Put.STORED and read(tier, 99) is Get.HIT
    assert tier.check() == []


@pytest.mark.parametrize("reopened", [False, True])
def test_a_cut_slab_costs_only_what_was_cut(opener: Opener, tmp_path: Path, reopened: bool) -> None:
    """Records beyond the end of a cut slab file are never hits, those before it are, and the slab fills again."""
    tier = opener(slabs=1)
    for number in range(PER_SLAB):
        put(tier, number)
    os.truncate(tmp_path / "disk" / "slab-000000.kvs", 4 * 25 * 4096 + 500)
    if reopened:
        tier.close()
        tier = opener(slabs=1)
        assert tier.counters().rows_lost == PER_SLAB - 4
    wanted = {Get.MISS} if reopened else {Get.CORRUPT}
    assert [read(tier, n) for n in range(4)] == [Get.HIT] * 4
    assert {read(tier, n) for n in range(4, PER_SLAB)} == wanted
    assert tier.stats().records == 4
    assert [put(tier, n) for n in range(100, 100 + PER_SLAB - 4)] == [Put.STORED] * (PER_SLAB - 4)
    assert {read(tier, n) for n in [*range(4), *range(100, 100 + PER_SLAB - 4)]} == {Get.HIT}
    assert tier.check() == []
    assert (tmp_path / "disk" / "slab-000000.kvs").stat().st_size == SLAB_BYTES


def test_a_deleted_slab_is_a_miss_after_reopening(opener: Opener, tmp_path: Path) -> None:
    """Without its slab file a record is dropped at open, counted, and nothing else suffers."""
    tier = opener(slabs=2)
    for number in range(PER_SLAB * 2):
        put(tier, number)
    tier.close()
    (tmp_path / "disk" / "slab-000001.kvs").unlink()
    tier = opener(slabs=2)
    answers = [read(tier, n) for n in range(PER_SLAB * 2)]
    assert answers.count(Get.HIT) == answers.count(Get.MISS) == PER_SLAB
    assert tier.counters().rows_lost == PER_SLAB and tier.check() == []
    assert [put(tier, n) for n in range(100, 100 + PER_SLAB)] == [Put.STORED] * PER_SLAB


def test_a_deleted_slab_is_corrupt_while_open(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slab file that vanishes under a running tier costs its records and is made anew for the next."""
    monkeypatch.setattr(nvme_slabs, "NVME_SLAB_FDS_MAX", 0)  # else the open descriptor still reads it
    tier = opener(slabs=1)
    put(tier, 0)
    (tmp_path / "disk" / "slab-000000.kvs").unlink()
    assert read(tier, 0) is Get.CORRUPT
    assert put(tier, 1) is Put.STORED and read(tier, 1) is Get.HIT
    assert tier.check() == []


def test_lowering_the_capacity_drops_what_lies_beyond(opener: Opener, tmp_path: Path) -> None:
    """With fewer slabs than before, the records beyond are misses and their files are gone."""
    tier = opener(slabs=3)
    for number in range(PER_SLAB * 3):
        put(tier, number)
    tier.close()
    tier = opener(slabs=1)
    assert [read(tier, n) for n in range(PER_SLAB * 3)].count(Get.HIT) == PER_SLAB
    assert tier.stats().records == PER_SLAB and tier.check() == []
    assert [path.name for path in (tmp_path / "disk").glob("slab-*")] == ["slab-000000.kvs"]


def test_damaged_rows_are_dropped_and_counted(opener: Opener, tmp_path: Path) -> None:
    """Rows that are cut, name no slot, or share one are dropped; the sound ones stay."""
    tier = opener()
    put(tier, 0)
    tier.close()
    rows = Rows(tmp_path / "disk" / "rows")
    held = rows.get(key(0))
    assert held is not None
    rows._db.put(key(1), held[:10])
    rows._db.put(key(0) + b"\0", held)  # after the sound row in key order
    rows.apply(puts=[(key(3), Row(7 << 40, SIZE, b"c" * 16, b"")), (key(4), Row(1, 0, b"c" * 16, b""))])
    rows.close()
    tier = opener()
    assert [read(tier, n) for n in range(5)] == [Get.HIT] + [Get.MISS] * 4
    assert tier.counters().rows_damaged == 4
    assert tier.stats().records == 1 and tier.check() == []


def test_a_stale_row_is_not_believed(opener: Opener, tmp_path: Path) -> None:
    """A row that points to bytes of another key is corrupt, never a hit."""
    tier = opener()
    put(tier, 0)
    tier.close()
    rows = Rows(tmp_path / "disk" / "rows")
    rows.apply(puts=[(key(1), Row(1, SIZE, record(1, SIZE)[0].checksum, b""))])
    rows.close()
    tier = opener()
    assert (read(tier, 1), read(tier, 1), read(tier, 0)) == (Get.CORRUPT, Get.MISS, Get.HIT)
    assert tier.check() == []


def test_a_corrupt_record_may_be_met_before_the_first_scan_ends(opener: Opener, tmp_path: Path) -> None:
    """A get that drops a record while the scan is under way leaves books that balance."""
    tier = opener()
    for number in range(8):
        put(tier, number)
    tier.close()
    slab = tmp_path / "disk" / "slab-000000.kvs"
    slab.write_bytes(bytes(SLAB_BYTES))
    for before in (True, False):
        tier = NvmeTier([tmp_path / "disk"], capacity_for(3, SLAB_BYTES), SLAB_BYTES)
        rows = tier.scan_rows()
        if not before:
            next(rows)
        assert read(tier, 5 + before) is Get.CORRUPT
        list(rows)
        assert tier.stats().records == 7 - (not before) and tier.check() == []
        tier.close()


def test_injected_io_errors_never_lie(opener: Opener) -> None:
    """Under random EIO every acknowledged record is hit or failed, and the books balance."""
    disk, clock = FaultyIO(seed=7), Clock()
    tier = opener(io=disk, clock=clock)
    disk.failing = 0.3
    stored: set[int] = set()
    for number in range(60):
        answer = put(tier, number % 25)
        assert answer is not Put.STORED or read(tier, number % 25) in (Get.HIT, Get.FAILED)
        if answer is Put.STORED:
            stored.add(number % 25)
        else:
            stored.discard(number % 25)  # a put that failed may have cost the record it was to replace
        if number % 7 == 0:
            tier.delete([key(number % 25)])
            stored.discard(number % 25)
        assert tier.check() == []
    assert tier.counters().io_errors > 10
    disk.failing = 0.0
    assert {read(tier, n) for n in stored} == {Get.HIT}
    clock.now += NVME_RETRY_S
    tier.delete([key(n) for n in range(25)])
    put(tier, 0)  # the slots that failed come back with the next put
    assert tier.stats().classes[0].used == 1


def test_a_bad_slot_does_not_stop_the_others(opener: Opener) -> None:
    """After a write fails the next put uses another slot instead of failing there for ever."""
    disk = FaultyIO()
    tier = opener(io=disk, clock=Clock())
    disk.failing = 1.0
    assert put(tier, 0) is Put.FAILED
    disk.failing = 0.0
    assert put(tier, 0) is Put.STORED
    assert tier.directories[0].reserve(key(5), SIZE) == 2  # 0 is set aside, 1 is held
    tier.directories[0].store([(*record(5, SIZE), 2)])


def test_no_room_for_a_slab_is_full_until_room_returns(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refused allocation behaves as full, warns once, keeps no half file, and is tried again later."""
    disk, clock = FaultyIO(), Clock()
    tier = opener(io=disk, clock=clock)
    assert [put(tier, n) for n in range(PER_SLAB)] == [Put.STORED] * PER_SLAB
    disk.no_room = True
    with caplog.at_level(logging.WARNING):
        for number in range(50, 54):
            assert put(tier, number) is Put.NO_ROOM
            clock.now += NVME_RETRY_S
    assert len(caplog.records) == 1 and tier.counters().allocate_failures == 4
    assert (tmp_path / "disk" / "slab-000001.kvs").stat().st_size == 0
    assert read(tier, 50) is Get.MISS and tier.check() == []
    clock.now -= 1
    proposal = tier.reclaim(30_000)  # no slab is to be had, so another class must give way
    assert len(proposal) == PER_SLAB
    tier.delete([key(0)])
    assert put(tier, 60) is Put.STORED
    disk.no_room = False
    clock.now += NVME_RETRY_S
    assert put(tier, 61) is Put.STORED and read(tier, 61) is Get.HIT
    assert tier.check() == []


class WatchfulIO(DiskIO):
    """Notes the slots that are written while some row still points to them."""

    def __init__(self) -> None:
        self.tier: NvmeTier | None = None
        self.wrong: list[int] = []
        self.writes = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.tier is not None
        slots = [row.slot for _key, row in self.tier.directories[0].rows_of([key(n) for n in range(40)])]
        self.wrong += [slot for slot in slots if slot == offset // (25 * 4096)]  # all in slab 0
        self.writes += 1
        return super().pwritev(fd, buffers, offset)


def test_no_row_points_to_a_slot_that_is_written(opener: Opener) -> None:
    """A slot is written again only after the row that named it is gone: deleted, replaced or displaced when full."""
    disk = WatchfulIO()
    tier = disk.tier = opener(slabs=1, io=disk)
    for number in range(PER_SLAB):
        put(tier, number)
    for number in range(PER_SLAB):
        assert put(tier, number) is Put.STORED  # full: the old record makes room for the new
    tier.delete([key(n) for n in range(5)])
    assert [put(tier, n) for n in (20, 21, 7, 8, 22)] == [Put.STORED] * 5
    assert (disk.wrong, disk.writes) == ([], 2 * PER_SLAB + 5)


@pytest.mark.parametrize("broken", ["apply", "get"])
def test_a_refused_delete_raises_and_forgets_nothing(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Where rows cannot be written or read, a delete raises, everything stays, and a later one works."""

    def failing(*_args: object) -> None:
        raise RowsError("EIO")

    clock = Clock()
    tier = opener(clock=clock)
    put(tier, 0)
    put(tier, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Rows, broken, failing)
        with pytest.raises(TierError, match="nvme directory"):
            tier.delete([key(0), key(1)])
    assert (read(tier, 0), read(tier, 1), tier.stats().records) == (Get.HIT, Get.HIT, 2)
    clock.now += NVME_RETRY_S
    assert tier.delete([key(0), key(1), key(9)]) == 2
    assert read(tier, 0) is Get.MISS and tier.check() == []


def test_a_directory_that_refuses_a_delete_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several directories those that are well forget what they hold, and the delete still raises."""
    tier = NvmeTier([tmp_path / "a", tmp_path / "b"], capacity_for(3, SLAB_BYTES), SLAB_BYTES)
    tier.put([record(n, SIZE) for n in range(10)])
    sick = tier.directories[0]._rows
    real = Rows.apply

    def failing(rows: Rows, *args: object) -> None:
        if rows is sick:
            raise RowsError("EIO")
        real(rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "apply", failing)
    with pytest.raises(TierError, match="/a: "):
        tier.delete([key(n) for n in range(10)])
    assert [directory.stats()[0] for directory in tier.directories] == [5, 0]
    tier.close()


def test_rows_that_cannot_be_read_again_fail_puts_until_they_can(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a reopen fails puts answer FAILED, gets go on, nothing but delete raises, and a later reopen works."""

    def unwritable(*_args: object) -> None:
        raise RowsError("EIO")

    def unreadable(*_args: object) -> None:
        raise OpenError("EIO")

    clock = Clock()
    tier = opener(clock=clock)
    assert put(tier, 0) is Put.STORED
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "apply", unwritable)
        assert put(tier, 1) is Put.FAILED
        patch.setattr(Rows, "chunk", unreadable)
        for number in range(2, 6):
            clock.now += NVME_RETRY_S * (number % 2)
            assert put(tier, number) is Put.FAILED and read(tier, 0) is Get.HIT
            with pytest.raises(TierError):
                tier.delete([key(0)])
            assert (tier.reclaim(30_000), tier.delete([key(9)])) == ([], 0)
    assert put(tier, 6) is Put.FAILED  # well again, but it is not asked before the pause is over
    clock.now += NVME_RETRY_S
    assert put(tier, 6) is Put.STORED and read(tier, 0) is Get.HIT
    assert tier.stats().records == 2 and tier.check() == []


def test_a_first_pass_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that cannot find the free slots at all fails, and finds them after the pause."""

    def unreadable(*_args: object) -> None:
        raise OpenError("EIO")

    clock = Clock()
    tier = NvmeTier([tmp_path / "disk"], capacity_for(2, SLAB_BYTES), SLAB_BYTES, clock=clock)
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "chunk", unreadable)
        assert put(tier, 0) is Put.FAILED
    assert put(tier, 0) is Put.FAILED
    clock.now += NVME_RETRY_S
    assert put(tier, 0) is Put.STORED and read(tier, 0) is Get.HIT and tier.check() == []
    tier.close()


def test_new_records_avoid_a_directory_that_cannot_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the rows of one directory are broken, new records go to the others."""
    clock = Clock()
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = NvmeTier(paths, capacity_for(3, SLAB_BYTES), SLAB_BYTES, clock=clock)
    sick = tier.directories[0]._rows
    real = Rows.apply

    def failing(rows: Rows, *args: object) -> None:
        if rows is sick:
            raise RowsError("EIO")
        real(rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "apply", failing)
    answers = [put(tier, number) for number in range(12)]
    assert answers.count(Put.FAILED) == 1 and answers.count(Put.STORED) == 11
    assert [directory.stats()[0] for directory in tier.directories] == [0, 11]
    tier.close()


def test_what_an_event_loop_asks_does_not_wait_for_the_disk(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a row write hangs, stats, counters, reclaim and scans by key answer at once."""
    tier = opener()
    put(tier, 0)
    began, go = threading.Event(), threading.Event()
    real = Rows.apply

    def hanging(rows: Rows, *args: object) -> None:
        began.set()
        assert go.wait(30)
        real(rows, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Rows, "apply", hanging)
    writer = threading.Thread(target=put, args=(tier, 1))
    writer.start()
    assert began.wait(30)
    try:
        asked: list[object] = []

        def asking() -> None:
            asked.append(tier.stats().records)
            asked.append([item.key for item in tier.scan([key(0), key(1)])])
            asked.append(tier.reclaim(30_000))
            asked.append(tier.counters().io_errors)

        reader = threading.Thread(target=asking, daemon=True)
        reader.start()
        reader.join(10)
        assert asked == [1, [key(0)], [], 0]
    finally:
        go.set()
        writer.join()
    assert tier.stats().records == 2 and tier.check() == []


def test_the_daemon_opens_nvme_with_the_direct_of_its_config(tmp_path: Path) -> None:
    """nvme.direct reaches the tier."""
    settings = {"directories": [tmp_path / "disk"], "capacity_bytes": "1GiB", "direct": "off"}
    tier = open_nvme(Config.model_validate({"nvme": settings}))
    assert tier is not None and not tier.directories[0].direct
    tier.close()


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


def test_a_full_disk_is_survived(opener: Opener, small_disk: Path) -> None:
    """On a really full file system nothing is falsely stored, held records hit, and puts work once room returns."""
    clock = Clock()
    tier = opener(slabs=90, path=small_disk / "kv", clock=clock)
    count = 0
    while put(tier, count) is Put.STORED:
        count += 1
    assert PER_SLAB < count < 50 * PER_SLAB  # the headroom for rows was left alone
    filler = small_disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DiskIO().free_bytes(small_disk))
    answers = set()
    for number in range(3000):  # rows must go to a log that cannot grow
        with contextlib.suppress(TierError):
            tier.delete([key(number % count)])
        answers.add(put(tier, number % count))
        if Put.FAILED in answers:
            break
    assert Put.FAILED in answers
    held = [n for n in range(count) if read(tier, n) is Get.HIT]
    assert len(held) >= count - 1
    assert put(tier, 5000) is Put.FAILED or put(tier, 5000) is Put.NO_ROOM
    assert read(tier, 5000) is Get.MISS
    filler.unlink()
    clock.now += NVME_RETRY_S
    tier.delete([key(held[0])])
    assert put(tier, 5000) is Put.STORED and read(tier, 5000) is Get.HIT
    assert {read(tier, n) for n in held[1:]} == {Get.HIT}
    assert tier.check() == []
    tier.close()


def test_without_o_direct_it_is_buffered_with_one_warning(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    """Where O_DIRECT is refused, records go through the page cache, and one line says so."""
    disk = FaultyIO()
    disk.no_direct = True
    with caplog.at_level(logging.WARNING):
        tier = opener(io=disk)
        for number in range(PER_SLAB + 2):
            assert put(tier, number) is Put.STORED and read(tier, number) is Get.HIT
    assert not tier.directories[0].direct
    assert [r.message for r in caplog.records if "O_DIRECT" in r.message] == [
        r.message for r in caplog.records
    ]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("shift", [0, 1, 512])
@pytest.mark.parametrize("size_bytes", [1, 4096, 4097, SIZE])
def test_any_alignment_moves_the_right_bytes(opener: Opener, shift: int, size_bytes: int) -> None:
    """Views at any address, and read-only ones, are written and read back unchanged."""
    tier = opener()
    item, data = record(0, size_bytes)
    buffer = memoryview(mmap.mmap(-1, size_bytes + 8192))
    view = buffer[shift : shift + size_bytes]
    view[:] = data
    assert tier.put([(item, view)]) == [Put.STORED]
    view[:] = bytes(size_bytes)
    ((answer, checksum),) = tier.get([(item.key, view)])
    assert (answer, checksum, bytes(view)) == (Get.HIT, item.checksum, bytes(data))
    assert (
        bytes(buffer[:shift]) == bytes(shift) and bytes(buffer[shift + size_bytes :]).count(0) == 8192 - shift
    )


def test_descriptors_are_bounded(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many slabs there are, few files stay open, and all records can be read."""
    monkeypatch.setattr(nvme_slabs, "NVME_SLAB_FDS_MAX", 2)
    tier = opener(slabs=12)
    before = len(os.listdir("/proc/self/fd"))
    count = 12 * PER_SLAB
    assert {put(tier, n) for n in range(count)} == {Put.STORED}
    assert {read(tier, n) for n in range(count)} == {Get.HIT}
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert direct.PROBE not in os.listdir(tier.directories[0].path)


def test_three_disks_share_the_load(tmp_path: Path) -> None:
    """New records spread over all directories, and without one of them only its own are missed."""
    paths = [tmp_path / f"disk-{n}" for n in range(3)]
    capacity_bytes = capacity_for(3, SLAB_BYTES)
    tier = NvmeTier(paths, capacity_bytes, SLAB_BYTES)
    tier.put([record(n, SIZE) for n in range(60)])
    each = [directory.stats()[0] for directory in tier.directories]
    assert each == [20, 20, 20]
    tier.close()
    tier = NvmeTier(paths[:2], capacity_bytes, SLAB_BYTES)
    answers = [read(tier, n) for n in range(60)]
    assert (answers.count(Get.HIT), answers.count(Get.MISS)) == (40, 20)
    assert tier.check() == []
    tier.close()
