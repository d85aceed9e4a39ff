"""Finds the arenas that lie in this machine's memory, and removes one that no daemon uses.

    kvstore-ID.table   its lock says whether a daemon uses it
    kvstore-ID.arena   what it holds of the memory, until it is removed

An arena outlives its daemon on purpose. One whose data directory is gone is never adopted again, and
holds its memory until it is removed here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tiers import locks
from tiers.constants import OWNER_DAEMON
from tiers.dram.arena_files import read_header, table_path
from tiers.dram.pages import page_kind
from tiers.errors import BusyError, OpenError

State = Literal["in use", "left", "damaged", "unknown"]
_BEGIN: Final = "kvstore-"


@dataclass(slots=True, frozen=True)
class Found:
    """One arena. capacity_bytes: 0 where that cannot be read. held_bytes: memory that both files have."""

    instance: str
    path: Path
    uid: int
    state: State
    capacity_bytes: int
    held_bytes: int
    pages: str


def find_arenas(directories: Sequence[Path]) -> list[Found]:
    """All arenas in these directories; one that cannot be listed, because it is another user's, is passed over."""
    found = []
    for directory in dict.fromkeys(directories):
        try:
            names = {entry.name for entry in os.scandir(directory)}
        except OSError:
            continue
        instances = {
            name.removeprefix(_BEGIN).rpartition(".")[0]
            for name in names
            if name.startswith(_BEGIN) and name.endswith((".arena", ".table"))
        }
        found += [_found(directory, instance) for instance in sorted(instances)]
    return [arena for arena in found if arena is not None]


def hidden(directories: Sequence[Path]) -> list[Path]:
    """Those of them that this user may not look into: what lies there is not found."""
    found = []
    for directory in dict.fromkeys(directories):
        try:
            os.scandir(directory).close()
        except PermissionError:
            found.append(directory)
        except OSError:
            continue
    return found


def held_bytes(path: Path) -> int:
    """Memory that an arena's two files have."""
    return sum(status.st_blocks * 512 for status in _statuses(path))


def remove_arena(path: Path) -> int:
    """Give back an arena that no daemon uses; the bytes that are free now. Its records are lost.

    Raises BusyError, or OpenError; then nothing was changed.
    """
    size_bytes = held_bytes(path)
    fds = []
    try:
        for file in (table_path(path), path):
            if not os.path.lexists(file):
                continue
            fds.append(os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
            if not locks.try_lock(fds[-1], OWNER_DAEMON):
                raise BusyError(f"arena {path}: a daemon is using it; stop that one first")
        path.unlink(missing_ok=True)
        table_path(path).unlink(missing_ok=True)
    except OSError as error:
        raise OpenError(f"arena {path}: {error.strerror}") from error
    finally:
        for fd in fds:
            os.close(fd)
    return size_bytes


def _found(directory: Path, instance: str) -> Found | None:
    path = directory / f"{_BEGIN}{instance}.arena"
    statuses = _statuses(path)
    if not statuses:  # removed meanwhile
        return None
    return Found(instance, path, statuses[0].st_uid, *_look(path), held_bytes(path), page_kind(directory))


def _statuses(path: Path) -> list[os.stat_result]:
    found = []
    for file in (path, table_path(path)):
        try:
            found.append(os.stat(file, follow_symlinks=False))
        except FileNotFoundError:
            continue
    return found


def _look(path: Path) -> tuple[State, int]:
    """Whether a daemon has it, and its capacity in bytes."""
    try:
        fd = os.open(table_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "damaged", 0
    except OSError:
        return "unknown", 0
    header: object = "unreadable"
    try:
        is_used = locks.is_locked(fd, OWNER_DAEMON)
        with contextlib.suppress(OpenError, OSError):
            header = read_header(table_path(path), fd)
    finally:
        os.close(fd)
    capacity_bytes = header[0].capacity_bytes if isinstance(header, tuple) else 0
    if is_used:
        return "in use", capacity_bytes
    return ("left", capacity_bytes) if capacity_bytes and path.exists() else ("damaged", 0)
