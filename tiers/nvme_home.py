"""Whose directory is it? The marker file and the lock of one NVMe directory.

    DIR/kvstore.json      magic, version, instance, slab_bytes, slot_bytes_min
    DIR/lock              flock'd by the process that has it open
    DIR/rows/             RocksDB
    DIR/slab-000000.kvs   slabs

A directory is taken only when it is empty or carries our marker, and everything is asked
before anything is written: somebody else's files, another format version and a directory
that another process holds are left exactly as they were.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from tiers.constants import NVME_MAGIC, NVME_VERSION
from tiers.errors import BusyError, NotOursError, OpenError, VersionError

MARKER = "kvstore.json"
LOCK = "lock"
_TEMPORARY = MARKER + ".tmp"
_HARMLESS = frozenset({LOCK, _TEMPORARY, "lost+found"})  # a claim cut short; a fresh ext4


@dataclass(slots=True, frozen=True)
class Marker:
    """What a directory was made for."""

    instance: str
    slab_bytes: int
    slot_bytes_min: int


class Home:
    """A claimed directory: marked as ours and locked until `release` or the process ends."""

    def __init__(self, path: Path, slab_bytes: int, slot_bytes_min: int) -> None:
        """Claim `path`, making it if needed. Raises an OpenError; then nothing was changed."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.marker = _read(path)
            _compare(path, self.marker, slab_bytes, slot_bytes_min)
            self._lock_fd = _lock(path)
        except OSError as error:
            raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error
        try:
            self.marker = _read(path)  # another process may have made it just before our lock
            _compare(path, self.marker, slab_bytes, slot_bytes_min)
            if self.marker is None:
                self.marker = Marker(str(uuid.uuid4()), slab_bytes, slot_bytes_min)
                _write(path, self.marker)
        except OSError as error:
            self.release()
            raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        os.close(self._lock_fd)


def read_marker(path: Path) -> Marker:
    """The marker of an existing directory. Raises an OpenError; changes nothing."""
    try:
        marker = _read(path)
    except OSError as error:
        raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error
    if marker is None:
        raise OpenError(f"nvme directory {path}: it is empty")
    return marker


def _read(path: Path) -> Marker | None:
    """The marker, or None in an empty directory. Raises NotOursError, VersionError, OSError."""
    try:
        text = (path / MARKER).read_bytes()
    except FileNotFoundError:
        foreign = sorted(set(os.listdir(path)) - _HARMLESS)
        if foreign:
            raise NotOursError(
                f"nvme directory {path}: holds {foreign[0]!r} but no {MARKER}; name an empty one"
            ) from None
        return None
    try:
        found = json.loads(text)
        if found["magic"] != NVME_MAGIC:
            raise ValueError(f"magic {found['magic']!r}")
        version = int(found["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotOursError(f"nvme directory {path}: its {MARKER} is not ours: {error}") from error
    if version != NVME_VERSION:
        raise VersionError(
            f"nvme directory {path}: format version {version}; this program reads {NVME_VERSION}"
        )
    try:
        return Marker(str(found["instance"]), int(found["slab_bytes"]), int(found["slot_bytes_min"]))
    except (ValueError, KeyError, TypeError) as error:
        raise OpenError(f"nvme directory {path}: its {MARKER} is damaged: {error!r}") from error


def _compare(path: Path, marker: Marker | None, slab_bytes: int, slot_bytes_min: int) -> None:
    if marker is None:
        return
    for name, wanted in (("slab_bytes", slab_bytes), ("slot_bytes_min", slot_bytes_min)):
        made = getattr(marker, name)
        if made != wanted:
            raise OpenError(
                f"nvme directory {path}: {name} = {wanted}, but it was made with {made}: "
                f"set {name} back to {made}, or empty the directory to start over"
            )


def _write(path: Path, marker: Marker) -> None:
    text = json.dumps({"magic": NVME_MAGIC, "version": NVME_VERSION, **asdict(marker)}, indent=1) + "\n"
    temporary = path / _TEMPORARY
    with open(temporary, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / MARKER)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _lock(path: Path) -> int:
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise BusyError(f"nvme directory {path}: another process has it open") from error
        raise
    return fd
