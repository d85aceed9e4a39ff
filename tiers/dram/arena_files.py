"""The two files of an arena: made together, found again together, replaced together.

    kvstore-ID.arena   the slabs; clients get descriptors of it and may write
    kvstore-ID.table   header, generations, rows; clients may read its first part at most

The table file speaks for both: its header has the settings and the inode number of the
data file, and its lock is the daemon's. It appears first and goes last, so that a data file
without a table is not ours. Both appear under their names complete, and are never written
through a name. An arena that cannot be adopted, because it has other settings, another
format version, a damaged header or a data file of another length, is replaced with one
warning: it is a cache. So is whatever lies under the name of an instance and belongs to our user: an empty table, a
link, a directory (which is kept under another name). A file of another user is never touched.

Clients can shrink the data file: only a memfd can be sealed against that, and a memfd dies
with the last process that holds it, while an arena must outlive the daemon. So the daemon's
event loop never touches the data file's memory, system calls that do fail instead of
killing, and `is_whole` finds out.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import re
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from tiers import locks
from tiers.constants import ARENA_HEADER_BYTES, OWNER_DAEMON
from tiers.dram import pages
from tiers.dram.slot_table import Layout
from tiers.errors import NEVER_HEALS, BusyError, NotOursError, OpenError, SettingError
from tiers.sizes import format_bytes

ARENA_MAGIC: Final = b"KVSARENA"
ARENA_VERSION: Final = 4  # 3 had no columns in its rows
OPEN_ATTEMPTS_MAX: Final = 5  # the arena's file was replaced while we opened it; look again

_log = logging.getLogger(__name__)
# magic, version, capacity, slab, smallest slot, inode of the data file; then xxh64 of these
_HEADER = struct.Struct("<8sI4x4Q")
_HEADER_HASH = struct.Struct("<Q")
_INSTANCE = re.compile(r"kvstore-[0-9a-f]{32}\.arena")


@dataclass(slots=True)
class ArenaFiles:
    """An arena's open files. The descriptors are private: none of them is ever handed out."""

    path: Path
    layout: Layout
    table_fd: int  # holds the daemon's lock
    data_fd: int  # holds no lock
    adopted: bool

    def is_whole(self) -> bool:
        """Whether the data file is still as long as it was made."""
        return os.fstat(self.data_fd).st_size == self.layout.capacity_bytes

    def reopen(self, fd: int, flags: int) -> int:
        """A new open file of one of them, to hand out: locks and access modes are its own."""
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)

    def is_named(self) -> bool:
        """Whether the next daemon would find both. Blocks on the file system."""
        return _is_at(self.path, self.data_fd) and _is_at(table_path(self.path), self.table_fd)

    def unlink(self) -> None:
        """Remove both from the directory, unless others are in their place."""
        for path, fd in ((self.path, self.data_fd), (table_path(self.path), self.table_fd)):
            if _is_at(path, fd):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self.data_fd)
        os.close(self.table_fd)


def table_path(path: Path) -> Path:
    """The table file that belongs to a data file."""
    return path.with_suffix(".table")


def open_files(path: Path, layout: Layout) -> ArenaFiles:
    """Adopt the arena at `path`, or make one. The directory must exist and be shared memory.

    Raises BusyError (another daemon has it), NotOursError, or OpenError; after any of these
    the files are as they were.
    """
    for _ in range(OPEN_ATTEMPTS_MAX):
        try:
            files = _adopt(path, layout) or _create(path, layout)
        except NotOursError as error:
            if not _is_named_as_ours(path):
                raise
            _put_out_of_the_way(path, error)
            continue
        except OSError as error:
            kind = SettingError if error.errno in NEVER_HEALS else OpenError
            raise kind(f"arena {path}: {error.strerror}") from error
        if files is not None:
            return files
    raise BusyError(f"arena {path}: other processes keep replacing it")


def existing_layout(path: Path) -> Layout | None:
    """What the arena at `path` was made for, None when there is none. Changes nothing.

    Raises NotOursError or OpenError.
    """
    table = table_path(path)
    try:
        fd = _open(table)
        if fd is None:
            return None
        try:
            found = read_header(table, fd)
        finally:
            os.close(fd)
    except NotOursError as error:
        if _is_named_as_ours(path):
            raise OpenError(f"{error}; the next start replaces it") from error
        raise
    except OSError as error:
        raise OpenError(f"arena {path}: {error.strerror}") from error
    if isinstance(found, str):
        raise OpenError(f"arena {path}: {found}; the next start replaces it")
    return found[0]


def _is_named_as_ours(path: Path) -> bool:
    """Whether the name is one that only we give to files, and the files that are there are our user's."""
    if not _INSTANCE.fullmatch(path.name):
        return False
    return all(status.st_uid == os.geteuid() for status in map(_status, (path, table_path(path))) if status)


def _status(path: Path) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _put_out_of_the_way(path: Path, why: NotOursError) -> None:
    """A table that is none, a link, a directory: what the records were is not known any more. Raises BusyError, OpenError."""
    _log.warning("%s: replaced, its records are lost", why)
    try:
        for file in (table_path(path), path):
            status = _status(file)
            if status is None:
                continue
            if stat.S_ISREG(status.st_mode):
                fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    if locks.is_locked(fd, OWNER_DAEMON):
                        raise BusyError(f"arena {path}: another daemon is using it")
                finally:
                    os.close(fd)
            if stat.S_ISDIR(status.st_mode):
                file.rename(file.with_name(f"{file.name}.unreadable-{time.time_ns()}"))
            else:
                file.unlink()
    except OSError as error:
        raise OpenError(f"arena {path}: {error.strerror}") from error


def _adopt(path: Path, layout: Layout) -> ArenaFiles | None:
    """The arena at the path; None when there is none (any more)."""
    table = table_path(path)
    with contextlib.ExitStack() as opened:
        table_fd = _open(table)
        if table_fd is None:
            if os.path.lexists(path):
                raise NotOursError(f"arena {path}: a file without a table: not ours; move it away")
            return None
        opened.callback(os.close, table_fd)
        header = read_header(table, table_fd)
        if not locks.try_lock(table_fd, OWNER_DAEMON):
            raise BusyError(f"arena {path}: another daemon is using it")
        if not _is_at(table, table_fd):
            return None
        data_fd = _open(path)
        if data_fd is not None:
            opened.callback(os.close, data_fd)
        why = header if isinstance(header, str) else _misfit(path, data_fd, *header, layout)
        if why is None and data_fd is not None:
            opened.pop_all()
            return ArenaFiles(path, layout, table_fd, data_fd, adopted=True)
        if data_fd is not None:
            _log.warning("arena %s: %s: replaced, its records are lost", path, why)
            pages.require_room(path.parent, layout.capacity_bytes - os.fstat(data_fd).st_blocks * 512)
            path.unlink()
        table.unlink()
        return None


def _misfit(path: Path, data_fd: int | None, found: Layout, inode: int, layout: Layout) -> str | None:
    """Why the arena cannot be adopted; None: it can, or there is no data file. Raises NotOursError."""
    if data_fd is None:
        return None
    status = os.fstat(data_fd)
    if status.st_ino != inode:
        raise NotOursError(f"arena {path}: not the file that its table belongs to; move it away")
    if found != layout:
        return f"was made for {found.settings}, now {layout.settings}"
    if status.st_size != layout.capacity_bytes:
        return f"it is {format_bytes(status.st_size)} long now, it had {format_bytes(layout.capacity_bytes)}"
    return None


def _open(path: Path) -> int | None:
    """A file of ours, open for both; None when there is none. Raises NotOursError, OSError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise NotOursError(f"arena {path}: not a regular file") from error
        raise
    status = os.fstat(fd)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise NotOursError(f"arena {path}: not a regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise NotOursError(f"arena {path}: must belong to user {os.geteuid()} with mode 0600")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_header(table: Path, fd: int) -> tuple[Layout, int] | str:
    """The settings and the data file's inode, or why the arena cannot be used. Raises NotOursError."""
    head = os.pread(fd, _HEADER.size + _HEADER_HASH.size, 0)
    if len(head) < _HEADER.size + _HEADER_HASH.size or not head.startswith(ARENA_MAGIC):
        raise NotOursError(f"arena {table}: not an arena's table; move it away or choose another place")
    _, version, capacity, slab, slot_min, inode = _HEADER.unpack_from(head)
    if version != ARENA_VERSION:
        return f"format version {version}, this program uses {ARENA_VERSION}"
    found = Layout(capacity, slab, slot_min)
    sound = xxhash.xxh64_intdigest(head[: _HEADER.size]) == _HEADER_HASH.unpack_from(head, _HEADER.size)[0]
    if not sound or os.fstat(fd).st_size != found.table_bytes:
        return "its table is damaged"
    return found, inode


def _is_at(path: Path, fd: int) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _create(path: Path, layout: Layout) -> ArenaFiles | None:
    """A new arena that appears complete and locked; None when another process was faster."""
    with contextlib.ExitStack() as opened:
        directory_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, directory_fd)
        _require_safe(path.parent, directory_fd)
        pages.require_room(path.parent, layout.capacity_bytes + layout.generations_end)
        with contextlib.ExitStack() as made:
            data_fd = _nameless(path.parent, layout.capacity_bytes)
            made.callback(os.close, data_fd)
            table_fd = _nameless(path.parent, layout.table_bytes)
            made.callback(os.close, table_fd)
            _write_header(table_fd, layout, os.fstat(data_fd).st_ino)
            locks.try_lock(table_fd, OWNER_DAEMON)
            if not _link(table_fd, table_path(path), directory_fd):
                return None
            if not _link(data_fd, path, directory_fd):
                table_path(path).unlink()
                raise NotOursError(f"arena {path}: another file has just appeared there")
            made.pop_all()
        return ArenaFiles(path, layout, table_fd, data_fd, adopted=False)


def _require_safe(directory: Path, directory_fd: int) -> None:
    """Raises OpenError where another user could replace our files."""
    mode = os.fstat(directory_fd).st_mode
    if mode & 0o022 and not mode & stat.S_ISVTX:
        raise OpenError(
            f"arena: others may write to {directory} (mode {stat.S_IMODE(mode):o}): "
            "allowed is a directory of ours only, or a sticky one like /dev/shm"
        )


def _nameless(directory: Path, size_bytes: int) -> int:
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_header(fd: int, layout: Layout, inode: int) -> None:
    """Header and generations get their memory here: what clients map is never a hole."""
    os.posix_fallocate(fd, 0, layout.generations_end)
    fields = _HEADER.pack(
        ARENA_MAGIC, ARENA_VERSION, layout.capacity_bytes, layout.slab_bytes, layout.slot_bytes_min, inode
    )
    with mmap.mmap(fd, layout.generations_end) as mapping:  # hugetlbfs has no write
        mapping[: _HEADER.size + _HEADER_HASH.size] = fields + _HEADER_HASH.pack(
            xxhash.xxh64_intdigest(fields)
        )


def _link(fd: int, path: Path, directory_fd: int) -> bool:
    """Give a nameless file its name; False if the name is taken."""
    try:
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=directory_fd, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


assert _HEADER.size + _HEADER_HASH.size <= ARENA_HEADER_BYTES
