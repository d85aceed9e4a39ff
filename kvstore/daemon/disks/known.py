"""What the data directory remembers of the NVMe directories: who each was, and on which file system.

    disks.json    directory, disk (its id, from its marker), file system          one row a directory
         │
         ▼  before a device is opened, in its own thread
    not in there ─▶ new: it is taken, or made
    the same id, or that of another row (two mounts were swapped) ─▶ taken
    the id of a directory that is still there: a copy ─▶ taken, with an id of its own
    gone │ empty │ another id │ on another file system ─▶ left alone, and nothing is made there

A disk that is not mounted leaves an empty directory, or none, on the file system below it: what was made there would fill
that one, and hide what the disk holds. So it waits until the disk is back, or somebody says that it will not be:
`kvstore disks --accept` remembers what is there now, `--forget` nothing.

Where two directories have changed places, so do their rows: no id and no directory is lost by it, whichever of them is
opened first. The file is replaced whole. One that is damaged is put aside: then all directories are new.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvstore.daemon.disks.filesystem import FileSystem, differ, file_system
from tiers.errors import DamagedError, OpenError
from tiers.files import put_aside, replace_file
from tiers.nvme.device_home import read_marker
from tiers.reading import Unreadable, read_json, require_damaged

DISKS_FILE_BYTES_MAX: Final = 1 << 20
DISKS_KNOWN_MAX: Final = 256

log = logging.getLogger("kvstore.daemon.disks")


class Row(msgspec.Struct, frozen=True):
    """disk: its id; "": whatever is there, as somebody said. identity: of its file system, "" where that has none. on: that
    file system, for people."""

    directory: str
    disk: str
    identity: str
    on: str


class _File(msgspec.Struct):
    disks: list[Row]
    format: Literal[1] = 1


class NotItself(OpenError):
    """The directory is known, and what is there now is something else. state: in a word."""

    def __init__(self, directory: str, state: str, why: str) -> None:
        super().__init__(f"nvme directory {directory}: {why}")
        self.state = state


class Known:
    """Of one data directory, the memory of its devices. Thread-safe; all but `rows`, `state` and `forget` block on a disk."""

    def __init__(self, path: Path, directories: Sequence[Path] = (), may_write: bool = True) -> None:
        """directories: those in the settings. may_write: put a damaged file aside. Raises OpenError."""
        self._path = path
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._rows = {row.directory: row for row in _read(path, may_write)}
        self._directories = frozenset(map(str, directories))
        self._states: dict[str, str] = {}

    def rows(self) -> list[Row]:
        with self._lock:
            return list(self._rows.values())

    def __contains__(self, directory: object) -> bool:
        with self._lock:
            return str(directory) in self._rows

    def state(self, directory: Path) -> str:
        """Why the directory was not recognised, in a word; "" where it was."""
        return self._states.get(str(directory), "")

    def recognise(self, path: Path) -> tuple[str, str]:
        """Who a directory is to be where it does not say so itself, "": a new one; and of which one it is a copy. In the thread of its
        device. Raises NotItself where it is known and is not what it was, or another OpenError.
        """
        try:
            found = self._recognise(path)
        except NotItself as error:
            self._states[str(path)] = error.state
            raise
        except OSError as error:
            raise OpenError(f"nvme directory {path}: {error.strerror or error}") from error
        self._states.pop(str(path), None)
        return found

    def _recognise(self, path: Path) -> tuple[str, str]:
        directory = str(path)
        with self._lock:
            row = self._rows.get(directory)
            by_disk = {each.disk: each for each in self._rows.values() if each.disk}
        if row is None:
            with contextlib.suppress(OpenError, OSError):  # whatever it is, opening says it
                marker = read_marker(path)
                return "", self._original(path, marker.disk) if marker is not None else ""
            return "", ""
        there = file_system(path)
        if not path.is_dir():
            if row.disk:
                raise NotItself(directory, "gone", f"is gone; {_was(row, there)}")
            return "", ""
        try:
            marker = read_marker(path)
        except DamagedError:
            _require_same(row, there)
            return row.disk, ""
        if marker is None and row.disk:
            raise NotItself(directory, "empty", f"is empty now; {_was(row, there)}")
        found = marker.disk if marker is not None else ""
        original = self._original(path, found)
        if row.disk and found != row.disk and original:
            raise NotItself(directory, "another", f"is a copy of {original} now; {_was(row, there)}")
        if row.disk and found != row.disk and found not in by_disk:
            raise NotItself(directory, "another", f"is another directory of kvstore now; {_was(row, there)}")
        _require_same(row if original or not row.disk else by_disk.get(found, row), there, directory)
        return "", original

    def _original(self, path: Path, disk: str) -> str:
        """The directory that was known before this one, and still is this disk. Blocks on that one, too."""
        for row in self.rows():
            if row.directory == str(path) and row.disk == disk:
                break
            with contextlib.suppress(OpenError, OSError):
                is_other = row.disk == disk != "" and not os.path.samefile(row.directory, path)
                marker = read_marker(Path(row.directory)) if is_other else None
                if marker is not None and marker.disk == disk:
                    return row.directory
        return ""

    def opened(self, path: Path, disk: str) -> None:
        """A device has it open: from now on it is the one that is known there. In the thread of that device."""
        try:
            there = file_system(path)
            if self._note(Row(str(path), disk, there.identity, there.said)):
                self.save()
        except OSError as error:
            text = "which disk %s is could not be written to the data directory: %s"
            log.error(text, path, error.strerror or error)

    def _note(self, new: Row) -> bool:
        """Returns whether something is to be saved."""
        with self._lock:
            before = self._rows.get(new.directory)
            if before == new:
                return False
            others = (row for row in self._rows.values() if row.directory != new.directory)
            moved = next((row for row in others if row.disk == new.disk), None)
            self._rows[new.directory] = new
            if moved is not None:
                log.info("%s is the disk that was at %s", new.directory, moved.directory)
                if before is not None and before.disk:  # they changed places
                    self._rows[moved.directory] = msgspec.structs.replace(before, directory=moved.directory)
                elif moved.directory not in self._directories:
                    del self._rows[moved.directory]
            self._drop_oldest()
        return True

    def accept(self, path: Path) -> FileSystem:
        """What is there now is right, or will be made there. Blocks on the disk. Raises OSError."""
        there = file_system(path)
        row = Row(str(path), "", there.identity, there.said)
        with self._lock:
            self._rows[row.directory] = row
        return there

    def forget(self, directory: str) -> bool:
        """False where it is not known."""
        with self._lock:
            return self._rows.pop(directory, None) is not None

    def save(self) -> None:
        """On disk when this returns. Raises OSError."""
        with self._saving:
            replace_file(self._path, msgspec.json.format(msgspec.json.encode(_File(self.rows()))))

    def _drop_oldest(self) -> None:
        others = [directory for directory in self._rows if directory not in self._directories]
        for directory in others[: max(0, len(self._rows) - DISKS_KNOWN_MAX)]:
            del self._rows[directory]


def _was(row: Row, there: FileSystem) -> str:
    return f"it was on {row.on}" if row.on == there.said else f"it was on {row.on}, and here is {there.said}"


def _require_same(row: Row, there: FileSystem, directory: str = "") -> None:
    if differ(row.identity, there.identity):
        directory = directory or row.directory
        why = f"is on another file system now: {there.said}, and no longer {row.on}"
        raise NotItself(directory, "elsewhere", why)


def _read(path: Path, may_write: bool) -> list[Row]:
    try:
        return read_json(path, DISKS_FILE_BYTES_MAX, _File, follow=False).disks
    except Unreadable as error:
        if not error.is_missing:
            require_damaged(error)
            if may_write:
                kept = put_aside(path)
                log.warning(
                    "%s: put aside as %s; all NVMe directories are taken as they are", error, kept.name
                )
        return []
