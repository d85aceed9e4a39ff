"""Where the arena file lies, and on which pages.

    hugetlbfs with enough free pages  ▶  tmpfs mounted with huge=always  ▶  /dev/shm
    "hugetlb"                            "huge tmpfs"                       "4 KiB"

Huge pages about double the speed of copies and of disk reads into the arena, so the best
place that can be had is taken. An arena that this instance left behind is found first: a
warm cache on small pages is worth more than a cold one on huge pages. A mount that we may not write
to, because it is another user's, is passed over.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tiers.constants import SLAB_ALIGN_BYTES
from tiers.errors import OpenError, SettingError
from tiers.nvme.direct import free_bytes
from tiers.parsing import mount_path
from tiers.sizes import format_bytes

HugePages = Literal["auto", "on", "off"]
PageKind = Literal["hugetlb", "huge tmpfs", "4 KiB"]

HUGE_PAGE_BYTES: Final = 2 << 20
SHM: Final = Path("/dev/shm")
HUGE_TMPFS: Final = Path("/run/kvstore/huge")
_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_OPTIONS: Final = ("huge=always", "huge=within_size", "huge=advise")  # we do advise, see advise_huge
_HUGE_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_MADV_POPULATE_WRITE: Final = 23
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)  # CDLL, not PyDLL: calls run without the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


@dataclass(slots=True, frozen=True)
class Mount:
    """One line of the mount table. source: for people."""

    path: Path
    kind: str
    options: frozenset[str]
    source: str = ""


def mounts(table: Path = Path("/proc/self/mounts")) -> list[Mount]:
    """Every mount of this process's namespace, in mount order."""
    found = []
    for line in table.read_bytes().rstrip(b"\n").split(b"\n"):
        path = mount_path(line.split(b" ")[1])
        source, _, kind, options = line.decode(errors="backslashreplace").split(" ")[:4]
        found.append(Mount(Path(path), kind, frozenset(options.split(",")), source))
    return found


def page_kind(directory: Path) -> PageKind:
    """Which pages a file in this directory gets. The kernel may still fall back to small ones."""
    mount = mount_of(directory)
    if mount is None:
        return "4 KiB"
    if mount.kind == "hugetlbfs":
        return "hugetlb"
    is_huge = mount.kind == "tmpfs" and not mount.options.isdisjoint(_HUGE_OPTIONS)
    return "huge tmpfs" if is_huge and not _huge_denied() else "4 KiB"


def arena_name(instance: str) -> str:
    return f"kvstore-{instance}.arena"


def find_arena(preferred: Path | None, huge_pages: HugePages, instance: str) -> Path | None:
    """The arena that this instance left behind, where it would be used again; None where there is none."""
    name = arena_name(instance)
    return next(
        (place / name for place in places(preferred, huge_pages) if os.path.exists(place / name)), None
    )


def choose_arena_path(
    preferred: Path | None, huge_pages: HugePages, size_bytes: int, instance: str, may_mount: bool = True
) -> Path:
    """Where the arena of this instance goes. `preferred` is a directory and rules out all others.

    may_mount: a huge tmpfs at /run/kvstore/huge, when we are root. Raises SettingError where
    `huge_pages` is "on" and no huge pages can be had.
    """
    name = arena_name(instance)
    found = find_arena(preferred, huge_pages, instance)
    if found is not None:
        return found
    for place in places(preferred, huge_pages):
        if place != SHM and has_pages(place, size_bytes):
            return place / name
    if may_mount and preferred is None and huge_pages != "off" and mount_huge_tmpfs(HUGE_TMPFS):
        return HUGE_TMPFS / name
    if may_mount and huge_pages == "on":
        raise SettingError(
            f"huge_pages is on, but {format_bytes(size_bytes)} of huge pages cannot be had: reserve "
            f"{-(-size_bytes // SLAB_ALIGN_BYTES)} pages (vm.nr_hugepages) and mount hugetlbfs, or mount a "
            f'tmpfs with huge=always at {HUGE_TMPFS}, or allow "auto" or "off"'
        )
    return (preferred or SHM) / name


def arena_directories() -> list[Path]:
    """Every directory that arenas are made in unless a setting names another one."""
    mounted = [mount.path for mount in mounts() if mount.kind == "hugetlbfs" or mount.path == HUGE_TMPFS]
    return [SHM, *dict.fromkeys(mounted)]


def mount_huge_tmpfs(directory: Path) -> bool:
    """Mount a tmpfs with huge=always there; False where we may not or the kernel will not."""
    if os.geteuid() != 0 or any(mount.path == directory for mount in mounts()):
        return False
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    options = b"huge=always,size=100%,mode=0700"  # the arena's capacity is the limit, not the mount's
    if _libc.mount(b"kvstore", str(directory).encode(), b"tmpfs", flags, options) != 0:
        _log.info("cannot mount a huge tmpfs at %s: %s", directory, os.strerror(ctypes.get_errno()))
        return False
    return True


def room_of(directory: Path) -> tuple[int, int] | None:
    """(bytes in all, free bytes) of a file system; None for one without a limit. Raises OSError."""
    status = os.statvfs(directory)
    size_bytes = status.f_frsize
    return (status.f_blocks * size_bytes, status.f_bavail * size_bytes) if status.f_blocks else None


def require_room(directory: Path, size_bytes: int) -> None:
    """Raises OpenError where the file system is too small for the whole file."""
    if (free := free_bytes(directory)) < size_bytes:
        raise OpenError(
            f"arena: {directory} has {format_bytes(free)} free, {format_bytes(size_bytes)} are needed; "
            "lower the capacity"
        )


def advise_huge(mapping: mmap.mmap) -> None:
    """Ask for huge pages where the kernel gives them on request only; never an error."""
    _advise(mapping, mmap.MADV_HUGEPAGE)


def private_memory(size_bytes: int) -> memoryview:
    """New memory of this process, on huge pages where the kernel has some."""
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(mapping)
    return memoryview(mapping)


def whole_pages(size_bytes: int) -> int:
    """As many bytes in whole huge pages."""
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def advise_small(mapping: mmap.mmap) -> None:
    """Ask for small pages where the kernel gives huge ones unasked; never an error."""
    _advise(mapping, mmap.MADV_NOHUGEPAGE)


def _advise(mapping: mmap.mmap, advice: int) -> None:
    try:
        mapping.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: a kernel without transparent huge pages, or hugetlbfs
            raise


def populate(mapping: mmap.mmap, fd: int, start: int, length: int) -> None:
    """Give every page of a range its memory, here and in the file. Keeps what is stored.

    Runs without the GIL. Raises OSError (ENOMEM, EFAULT, ENOSPC) where the memory is not there.
    """
    pin = ctypes.c_char.from_buffer(mapping)  # the mapping cannot be closed meanwhile
    address = ctypes.addressof(pin)
    while _libc.madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
        number = ctypes.get_errno()
        if number == errno.EINVAL:  # Linux before 5.14
            os.posix_fallocate(fd, start, length)
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _candidates(huge_pages: HugePages) -> list[Path]:
    """Directories for the arena, best first."""
    if huge_pages == "off":
        return [SHM]
    table = mounts()
    places = [mount.path for mount in table if mount.kind == "hugetlbfs" and _is_2m(mount)]
    if any(mount.path == HUGE_TMPFS for mount in table):
        places.append(HUGE_TMPFS)
    return places if huge_pages == "on" else [*places, SHM]


def places(preferred: Path | None, huge_pages: HugePages) -> list[Path]:
    """Directories that may be used, best first."""
    candidates = [preferred] if preferred is not None else _candidates(huge_pages)
    return [
        place
        for place in candidates
        if os.access(place, os.W_OK | os.X_OK) and _allowed(page_kind(place), huge_pages)
    ]


def _huge_denied() -> bool:
    """Whether the machine's settings rule out huge pages in every tmpfs."""
    return not _THP.exists() or "[deny]" in _THP.read_text()


def _is_2m(mount: Mount) -> bool:
    return not any(option.startswith("pagesize=") and option != "pagesize=2M" for option in mount.options)


def _allowed(kind: PageKind, huge_pages: HugePages) -> bool:
    return huge_pages == "auto" or (kind == "4 KiB") == (huge_pages == "off")


def has_pages(directory: Path, size_bytes: int) -> bool:
    """Whether a new file of this size finds its memory here."""
    if page_kind(directory) == "hugetlb":
        free = int((_HUGE_POOL / "free_hugepages").read_text()) - int(
            (_HUGE_POOL / "resv_hugepages").read_text()
        )
        return free * SLAB_ALIGN_BYTES >= size_bytes
    return free_bytes(directory) >= size_bytes


def mount_of(directory: Path) -> Mount | None:
    """The mount that a directory lies on: the last one with the longest matching path."""
    resolved = directory.resolve()
    holding = [mount for mount in mounts() if resolved.is_relative_to(mount.path)]
    return (
        max(enumerate(holding), key=lambda item: (len(item[1].path.parts), item[0]))[1] if holding else None
    )
