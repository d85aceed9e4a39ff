"""Where the arena goes, on which pages, and how it gets its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.daemon.disks.filesystem import FileSystem
from tests.tiers.records import commit, reserve
from tiers.checksum import digest
from tiers.dram import arena as arena_module
from tiers.dram import pages
from tiers.dram.arena import Arena, open_arena
from tiers.errors import OpenError

SLAB_BYTES = 2 << 20
NEEDED_BYTES = 10 << 20
Mounter = Callable[[str, str], Path]


@pytest.fixture
def mounter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mounter]:
    """Mounts a file system under the test's own directory; unmounts it afterwards."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        directory = tmp_path / f"mount{len(mounted)}"
        directory.mkdir()
        if libc.mount(b"test", str(directory).encode(), kind.encode(), 0, options.encode()) != 0:
            pytest.skip(f"cannot mount {kind} here: {os.strerror(ctypes.get_errno())}")
        mounted.append(directory)
        return directory

    only_ours(monkeypatch, tmp_path)
    monkeypatch.setattr(pages, "HUGE_TMPFS", tmp_path / "huge")
    yield mount
    for directory in [*mounted, tmp_path / "huge"]:
        libc.umount2(str(directory).encode(), 2)


def only_ours(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Let the code under test see no mounts of the machine but /dev/shm, and those of this test."""
    real = pages.mounts
    monkeypatch.setattr(
        pages, "mounts", lambda: [m for m in real() if m.path == pages.SHM or m.path.is_relative_to(root)]
    )


def choose(huge: pages.HugePages, preferred: Path | None = None, size_bytes: int = NEEDED_BYTES) -> Path:
    return pages.choose_arena_path(preferred, huge, size_bytes, "test-pages")


def require_huge_pages() -> None:
    path = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not path.exists() or int(path.read_text()) << 21 < NEEDED_BYTES:
        pytest.skip("no free huge pages on this machine")


def test_off_means_plain_shared_memory() -> None:
    """With huge_pages off the arena lies in /dev/shm, named after its instance."""
    assert choose("off") == Path("/dev/shm/kvstore-test-pages.arena")


def test_on_without_huge_pages_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With huge_pages on and none to be had, the error names the settings that would give some."""
    only_ours(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for preferred in (None, tmp_path):
        with pytest.raises(OpenError, match=r"vm.nr_hugepages.*huge=always.*auto"):
            choose("on", preferred)


def test_auto_falls_back_to_small_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With huge_pages auto and none to be had, /dev/shm is used."""
    only_ours(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert choose("auto").parent == pages.SHM


def test_a_preferred_directory_rules_out_others(tmp_path: Path) -> None:
    """A configured directory is used, and its pages are told."""
    assert choose("auto", tmp_path) == tmp_path / "kvstore-test-pages.arena"
    assert pages.page_kind(tmp_path) == "4 KiB"


def test_hugetlbfs_is_used_while_it_has_pages(mounter: Mounter) -> None:
    """Free huge pages come first; when there are too few, the arena goes elsewhere."""
    require_huge_pages()
    directory = mounter("hugetlbfs", "pagesize=2M")
    assert choose("auto") == choose("on") == directory / "kvstore-test-pages.arena"
    assert pages.page_kind(directory) == "hugetlb"
    assert pages.page_kind(choose("auto", size_bytes=1 << 50).parent) != "hugetlb"


def test_auto_mounts_a_huge_tmpfs(mounter: Mounter, tmp_path: Path) -> None:
    """Where we may mount, a tmpfs with huge=always is made once and used from then on."""
    mounter("tmpfs", "size=1m")  # skips where mounting is not allowed
    place = choose("auto")
    assert place == tmp_path / "huge" / "kvstore-test-pages.arena"
    assert pages.page_kind(place.parent) == "huge tmpfs"
    assert choose("on") == place
    assert sum(mount.path == tmp_path / "huge" for mount in pages.mounts()) == 1
    assert (tmp_path / "huge").stat().st_mode & 0o777 == 0o700


def test_an_arena_left_behind_is_found_first(
    mounter: Mounter, monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    """A warm arena on small pages is preferred to an empty one on huge pages."""
    mounter("tmpfs", "size=1m")
    monkeypatch.setattr(pages, "SHM", shm)
    real = pages.mounts
    monkeypatch.setattr(pages, "mounts", lambda: [*real(), pages.Mount(shm, "tmpfs", frozenset())])
    open_arena(choose("off"), 4 * SLAB_BYTES, SLAB_BYTES).close()
    assert choose("auto").parent == shm


@pytest.mark.parametrize(("kind", "options"), [("hugetlbfs", "pagesize=2M"), ("tmpfs", "huge=always")])
def test_an_arena_works_on_huge_pages(mounter: Mounter, kind: str, options: str) -> None:
    """On either kind of huge pages an arena is made, pre-faulted, filled, and adopted again."""
    if kind == "hugetlbfs":
        require_huge_pages()
    path = mounter(kind, options) / "x.arena"
    arena = open_arena(path, 4 * SLAB_BYTES, SLAB_BYTES)
    assert arena.page_kind == ("hugetlb" if kind == "hugetlbfs" else "huge tmpfs")
    assert arena.back(threading.Event())
    slot = reserve(arena, b"key", b"", 100_000, 0)
    assert slot is not None
    commit(arena, slot, digest(arena.view(slot)))
    arena.close()
    again = open_arena(path, 4 * SLAB_BYTES, SLAB_BYTES)
    assert [found for found, _ in again.adopted_slots()] == [slot] and again.verify(slot)
    again.close(unlink=True)


def fill(directory: Path) -> Path:
    """Take all that is left of a file system."""
    path = directory / "somebody else's"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(64 << 10)):
                pass
        except OSError:
            return path
    return path


@contextmanager
def backing(arena: Arena) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=arena.back, args=(stop,))
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(30)


def test_memory_that_runs_out_makes_the_arena_smaller(
    mounter: Mounter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tmpfs that somebody else fills: only slabs with memory are handed out, every byte of them can be written,
    one line says so, and what becomes free later is used."""
    monkeypatch.setattr(arena_module, "ARENA_OPEN_BYTES", SLAB_BYTES)
    monkeypatch.setattr(arena_module, "ARENA_RETRY_S", 0.05)
    directory = mounter("tmpfs", "size=16m")
    arena = open_arena(directory / "x.arena", 4 * SLAB_BYTES, SLAB_BYTES)
    slots = arena.reserve_run([b"first"], [b""], 1 << 20, 0)
    theirs = fill(directory)
    with backing(arena) as thread:
        while not caplog.messages:
            time.sleep(0.01)
        slots += arena.reserve_run([b"%d" % n for n in range(20)], [b""] * 20, 1 << 20, 0)
        assert len(slots) == 2 and arena.backed_bytes == SLAB_BYTES and arena.check() == []
        for slot in slots:
            arena.view(slot)[:] = bytes(1 << 20)  # SIGBUS, were the memory not there
        arena.commit_run(slots, bytes(32))
        theirs.unlink()
        thread.join(30)
        assert arena.backed_bytes == arena.capacity_bytes
        assert len(arena.reserve_run([b"%d" % n for n in range(20)], [b""] * 20, 1 << 20, 0)) == 6
    assert [line for line in caplog.messages if "no memory" in line] == caplog.messages[:1]
    arena.close()


def test_rows_without_memory_are_no_room(mounter: Mounter) -> None:
    """Where a slab has its memory but the rows of its slots find none, the arena has no room; it does not die."""
    directory = mounter("tmpfs", "size=12m")
    arena = open_arena(directory / "x.arena", 4 * SLAB_BYTES, SLAB_BYTES)
    theirs = fill(directory)
    assert reserve(arena, b"k", b"", 1, 0) is None and arena.check() == []
    theirs.unlink()
    slot = reserve(arena, b"k", b"", 1, 0)
    assert slot is not None
    commit(arena, slot, digest(arena.view(slot)))
    arena.close()
    fill(directory)
    again = open_arena(directory / "x.arena", 4 * SLAB_BYTES, SLAB_BYTES)
    assert again.verify(slot) and again.check() == []
    again.close()


def test_a_cut_file_is_found_out_without_dying(shm: Path) -> None:
    """When a client cuts the slabs off, records do not verify, slots are still freed and handed out, and
    `is_whole` and `check` say so."""
    arena = open_arena(shm / "x.arena", 4 * SLAB_BYTES, SLAB_BYTES)
    slots = arena.reserve_run([b"a", b"b"], [b"", b"a"], 1 << 20, 0)
    arena.commit_run(slots, digest(arena.view(slots[0])) * 2)
    assert arena.is_whole() and arena.verify(slots[0])
    os.ftruncate(arena.fd, 4096)
    assert not arena.is_whole() and not arena.verify(slots[0]) and "length" in " ".join(arena.check())
    arena.free_run(slots)
    assert len(arena.reserve_run([b"a", b"b"], [b"", b"a"], 1 << 20, 0)) == 2
    arena.close()


def test_what_a_client_may_not_do_fails(shm: Path) -> None:
    """Through the descriptors that readers get, nothing can be mapped for writing, written or cut off."""
    arena = open_arena(shm / "x.arena", 4 * SLAB_BYTES, SLAB_BYTES)
    for fd in (arena.read_only_fd, arena.generations_fd):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(fd, 4096)
        mmap.mmap(fd, 4096, prot=mmap.PROT_READ).close()
    arena.close()


def test_old_kernels_get_their_memory_too(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel does not know MADV_POPULATE_WRITE, the pages are allocated all the same."""
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 12345)
    path = shm / "x.arena"
    arena = open_arena(path, 4 * SLAB_BYTES, SLAB_BYTES)
    assert arena.back(threading.Event())
    assert path.stat().st_blocks * 512 >= 4 * SLAB_BYTES
    arena.close()


def test_any_mount_path_is_read(tmp_path: Path) -> None:
    """The mount table's escapes are undone, and nothing else: it may hold any bytes, and stops no start."""
    table = tmp_path / "mounts"
    table.write_bytes(
        b"none /mnt/a\\040b tmpfs rw,huge=always 0 0\n/dev/\xff /mnt/caf\xc3\xa9\\134\xff\x85\r ext4 rw 0 0\n"
    )
    assert pages.mounts(table) == [
        pages.Mount(Path("/mnt/a b"), "tmpfs", frozenset({"rw", "huge=always"}), "none"),
        pages.Mount(
            Path(os.fsdecode(b"/mnt/caf\xc3\xa9\\\xff\x85\r")), "ext4", frozenset({"rw"}), "/dev/\\xff"
        ),
    ]
    found = FileSystem("", "ext4", "/dev/sda", pages.mounts(table)[1].path)
    assert msgspec.json.decode(msgspec.json.encode(found.said)) == "ext4 /dev/sda at /mnt/café\\\\xff\\x85\r"
