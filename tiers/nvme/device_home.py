"""Whose directory is it? The marker file and the lock of one NVMe device.

    DIR/kvstore.json      magic, version, instance, slab_bytes, slot_bytes_min, disk
    DIR/lock              flock'd by the process that has it open
    DIR/slots.table       which record lies in which slot
    DIR/slab-000000.kvs   slabs

A directory is taken only when it is empty or carries our marker, and everything is asked
before anything is written: files of others, a newer format and a directory that
another process holds are left exactly as they were. A directory of an older format, made
with other settings, or whose marker is damaged, starts cold: a new instance, so that none of its rows is
believed.

Other users must not be able to write into the directory, so they cannot plant a link in it; no
link inside is followed all the same. Everything here blocks on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from tiers.errors import (
    NEVER_HEALS,
    BusyError,
    DamagedError,
    NotOursError,
    OpenError,
    SettingError,
    VersionError,
)
from tiers.files import replace_file
from tiers.nvme.device_table import NAME as TABLE
from tiers.reading import Unreadable, as_json, read_bytes

NVME_MAGIC: Final = "kvstore nvme directory"
DEVICE_VERSION: Final = 3  # 2 had no columns in its rows

_log = logging.getLogger(__name__)

MARKER = "kvstore.json"
LOCK = "lock"
_MARKER_BYTES_MAX = 4096
_HARMLESS = frozenset({LOCK, MARKER + ".tmp", "lost+found"})  # a claim cut short; a fresh ext4


@dataclass(slots=True, frozen=True)
class Marker:
    """What a directory was made for. instance: a new one for each life that starts cold. disk: who it is, for good; "" of
    an older program."""

    version: int
    instance: str
    slab_bytes: int
    slot_bytes_min: int
    disk: str = ""


class _Magic(msgspec.Struct):
    magic: str


class Home:
    """A claimed directory: marked as ours and locked until `release` or the process ends."""

    def __init__(
        self,
        path: Path,
        slab_bytes: int,
        slot_bytes_min: int,
        disk: str = "",
        original: str = "",
        may_change: bool = True,
    ) -> None:
        """Claim `path`, making it if needed. disk: who it is to be where it does not say so itself; "" for a new one. original: of
        which directory it is a copy, so that it is to be a new one. may_change: if not, it is only locked, and has to be ours. Raises
        an OpenError; then nothing was changed."""
        try:
            if may_change:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_access(path)
            with contextlib.suppress(DamagedError):
                read_marker(path)  # a directory that is not ours gets no lock file
            self._lock_fd = _lock(path, os.O_RDWR | os.O_CREAT if may_change else os.O_RDONLY)
            try:
                wanted = Marker(DEVICE_VERSION, _new(), slab_bytes, slot_bytes_min, disk)
                self.marker = self._claim(path, wanted, original) if may_change else marker_of_ours(path)
            except BaseException:
                self.release()
                raise
        except OSError as error:
            raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error

    def release(self) -> None:
        os.close(self._lock_fd)

    def is_in_place(self, path: Path) -> bool:
        """Whether what was claimed still lies there. Blocks on the disk. Raises OSError."""
        os.lstat(path / MARKER)
        return os.path.samestat(os.lstat(path / LOCK), os.fstat(self._lock_fd))

    @staticmethod
    def _claim(path: Path, wanted: Marker, original: str) -> Marker:
        try:
            found = read_marker(path)
            changed = _difference(found, wanted) if found is not None else ""
        except DamagedError:
            found, changed = None, f"its {MARKER} is damaged"
        if original:
            _log.warning("nvme directory %s: a copy of %s, and a disk of its own from now on", path, original)
        said = found.disk if found is not None and not original else ""
        wanted = replace(wanted, disk=said or wanted.disk or _new())
        if found is not None and not changed:
            if said:
                return found
            wanted = replace(wanted, instance=found.instance)
        else:
            if changed:
                _log.warning("nvme directory %s: %s: it starts cold", path, changed)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path / TABLE)  # it says which records there are; slabs are used again
        content = json.dumps({"magic": NVME_MAGIC, **asdict(wanted)}, indent=1) + "\n"
        replace_file(path / MARKER, content.encode())
        return wanted


def _new() -> str:
    return str(uuid.uuid4())


def require_place(path: Path) -> None:
    """Refuse a directory that cannot be made or holds files of others: a mistyped path, most likely.

    What is damaged in a directory of ours is no reason. Blocks on the disk. Raises OpenError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_access(path)
        if not (path / MARKER).exists():
            read_marker(path)
            if os.statvfs(path).f_flag & os.ST_RDONLY:  # one of ours may be on a disk that has just failed
                raise SettingError(f"nvme directory {path}: on a file system that is mounted read-only here")
    except OSError as error:
        kind = SettingError if error.errno in NEVER_HEALS else OpenError
        raise kind(f"nvme directory {path}: {error.strerror or error}") from error


def read_marker(path: Path) -> Marker | None:
    """The marker of a directory, or None in an empty one.

    Raises NotOursError, VersionError, DamagedError (ours, by the other files there), OSError.
    """
    try:
        content = read_bytes(path / MARKER, _MARKER_BYTES_MAX, follow=False)
    except Unreadable as error:
        if not error.is_missing:
            raise _damaged_or_not_ours(path, error) from error
        foreign = sorted(set(os.listdir(path)) - _HARMLESS)
        if foreign:
            raise NotOursError(
                f"nvme directory {path}: holds {foreign[0]!r} but no {MARKER}; name an empty one"
            ) from None
        return None
    try:
        magic = as_json(path / MARKER, content, _Magic).magic
    except Unreadable as error:
        raise _damaged_or_not_ours(path, error) from error
    if magic != NVME_MAGIC:
        raise NotOursError(f"nvme directory {path}: its {MARKER} is not ours: magic {magic!r}")
    try:
        marker = as_json(path / MARKER, content, Marker)
    except Unreadable as error:
        raise _damaged_or_not_ours(path, error) from error
    if marker.version > DEVICE_VERSION:
        raise VersionError(
            f"nvme directory {path}: format version {marker.version}; this program reads {DEVICE_VERSION}"
        )
    return marker


def marker_of_ours(path: Path) -> Marker:
    """That of a directory whose records this program can read. Raises OpenError, OSError."""
    marker = read_marker(path)
    if marker is None:
        raise NotOursError(f"nvme directory {path}: is empty")
    if marker.version != DEVICE_VERSION:
        raise VersionError(
            f"nvme directory {path}: format version {marker.version}; a start begins cold with version {DEVICE_VERSION}"
        )
    return marker


def _damaged_or_not_ours(path: Path, error: Unreadable) -> OpenError:
    """By the other files in its directory."""
    if (path / TABLE).exists():
        return DamagedError(f"nvme directory {path}: its {MARKER} is damaged: it starts cold")
    return NotOursError(f"nvme directory {path}: its {MARKER} is not ours: {error.why}")


def _difference(found: Marker, wanted: Marker) -> str:
    """What differs between two markers, for people; "" where nothing that matters does."""
    if found.version != wanted.version:
        return f"has format version {found.version}, not {wanted.version}"
    for name in ("slab_bytes", "slot_bytes_min"):
        made, asked = getattr(found, name), getattr(wanted, name)
        if made != asked:
            return f"was made with {name} = {made}, not {asked}"
    return ""


def _check_access(path: Path) -> None:
    """Raises OpenError where another user may write into the directory, and so plant links there."""
    found = os.stat(path)
    if found.st_uid not in (0, os.geteuid()):
        raise SettingError(f"nvme directory {path}: belongs to user {found.st_uid}; it must be ours")
    if found.st_mode & 0o022:
        mode = found.st_mode & 0o777
        raise SettingError(f"nvme directory {path}: others may write into it (mode {mode:o}); chmod go-w")


def _lock(path: Path, flags: int) -> int:
    fd = os.open(path / LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise BusyError(f"nvme directory {path}: another process has it open") from error
        raise
    return fd
