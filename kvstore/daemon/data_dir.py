"""The data dir: who this daemon is, and that there is only one of it.

    data_dir/
      kvstore-data.json    format version and instance id; its presence makes the directory ours
      lock                 flock'ed while a daemon runs; holds its pid, for the message
      namespaces.json      readable names of namespaces (kvstore/index/namespaces.py)
      retention.json       pins, TTLs and quotas, and the clock of TTLs (kvstore/retention/rules.py)
      disks.json           which NVMe directories there are, and who they were (kvstore/daemon/disks/known.py)
      models_disk.json     on which mount models were (kvstore/daemon/disks/models_disk.py)
      uncleared.json       what disks have still to clear (kvstore/commands/uncleared.py)
      serving.json         there while a daemon serves (kvstore/daemon/last_run.py)
      write_budget.json       what was spent of the NVMe write budget (kvstore/health/write_budget_file.py)
      totals.sqlite        totals of every hour, for reports (kvstore/ledger/totals.py)
      erased.bin           tombstones that this node was told of (kvstore/commands/erased_file.py)
      demand.bin           how often prefixes were asked for lately (kvstore/durable/demand.py)
      catalogue/           what is durable in the region: a copy of its feed (replication/catalogue/catalogue.py)
      read_through/        the same of each region that is read through
      mirror/              of `kvstore mirror`, which has a directory of its own: the same of its sources

The instance id names the arena in shared memory, so it decides what a restarted daemon
adopts. Where the mark is damaged, it is put aside and the daemon is a new instance: nothing in here is
worth refusing to start for. A directory with foreign files in it is refused before anything is written: a
mistyped path must not scatter our files over somebody's home. So is one that other users may
write to: they could plant links for us to follow.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import uuid
from pathlib import Path

from kvstore.constants import DATA_DIR_MARK_BYTES_MAX
from kvstore.errors import DataDirBusy, DataDirError, DataDirNotOurs
from kvstore.protocol import places
from tiers.files import put_aside, replace_file
from tiers.reading import Unreadable, read_json

DATA_DIR_FORMAT = 1  # bumped when the layout of the data dir changes

log = logging.getLogger("kvstore.daemon.data_dir")

MAGIC = "kvstore data dir"
MARK, LOCK = "kvstore-data.json", "lock"
# Of a kill during the first start; a fresh ext4; models that were preloaded before it.
_UNMARKED = frozenset({LOCK, MARK + ".tmp", "lost+found", "models"})


class DataDir:
    """An exclusively held data dir. Made by `hold`; let go by `close` or the end of the process."""

    def __init__(self, path: Path, instance: str, lock_fd: int) -> None:
        self.path = path
        self.instance = instance
        self.namespaces_path = path / "namespaces.json"
        self.rules_path = path / "retention.json"
        self.write_budget_path = path / "write_budget.json"
        self.totals_path = path / "totals.sqlite"
        self.demand_path = path / "demand.bin"
        self.erased_path = path / "erased.bin"
        self.uncleared_path = path / "uncleared.json"
        self.serving_path = path / "serving.json"
        self.disks_path = path / "disks.json"
        self.catalogue_path = path / "catalogue"
        self._lock_fd = lock_fd

    def missing(self) -> str:
        """What is wrong, where the directory, its mark or its lock is gone; else "". Blocks on the file system."""
        try:
            for name in (MARK, LOCK):
                status = os.lstat(self.path / name)
            if os.path.samestat(status, os.fstat(self._lock_fd)):
                return ""
            return f"data_dir {self.path}: another one is in its place: nothing of this daemon is kept"
        except FileNotFoundError:
            where = self.path / name if self.path.is_dir() else self.path
            return f"data_dir {where} is gone; what this daemon knows may not be there at the next start"
        except OSError as error:
            return f"data_dir {self.path}: {error.strerror}"

    def close(self) -> None:
        """Let go of the directory. Idempotent."""
        if self._lock_fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = -1


def hold(path: Path, create: bool = True) -> DataDir:
    """Take the data dir for this process, making it if `create`.

    Raises DataDirBusy (with the pid that holds it), DataDirNotOurs, DataDirError; after
    any of these nothing in it was changed.
    """
    try:
        _prepare(path, create)
        lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _failed(path, error) from error
    try:
        if not stat.S_ISREG(os.fstat(lock_fd).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path / LOCK))
        _lock(path, lock_fd)
        instance = _read_mark(path) or _write_mark(path, create)
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock_fd)
        raise _failed(path, error) from error
    except BaseException:
        os.close(lock_fd)
        raise
    return DataDir(path, instance, lock_fd)


def _failed(path: Path, error: OSError) -> DataDirError:
    heals = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
    named = Path(os.fsdecode(error.filename)).name if error.filename else path.name
    where = f"{path}: {named}" if named in (MARK, LOCK) else path
    return DataDirError(f"data_dir {where}: {error.strerror or error}", heals)


def _require_private(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & 0o022:
        raise DataDirError(
            f"data_dir {path}: others may write to it (mode {stat.S_IMODE(mode):o}); run chmod go-w {path}"
        )


def _prepare(path: Path, create: bool) -> None:
    """Make sure that the directory is there and ours, or empty and ours to take."""
    if create:
        if path.parent == Path(places.default_data_dir()).parent:
            places.make_directory(str(path.parent))
        elif not path.parent.is_dir():
            raise DataDirError(
                f"data_dir {path}: {path.parent} is not there; make it, or set another data_dir",
                is_missing=True,
            )
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    if not path.is_dir():
        if path.exists():
            raise DataDirError(f"data_dir {path}: not a directory")
        raise DataDirError(f"data_dir {path}: not found", is_missing=True)
    _require_private(path)
    if os.path.lexists(path / MARK):
        _read_mark(path)
        return
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in _UNMARKED)
    if foreign:
        raise DataDirNotOurs(
            f"data_dir {path}: not empty and not ours (it holds {foreign[0]!r}); "
            "allowed is an empty or missing directory, or one that kvstore made"
        )
    if not create:
        raise DataDirNotOurs(f"data_dir {path}: empty, kvstore never ran here")


def _lock(path: Path, lock_fd: int) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock_fd, 32, 0).strip()
        raise DataDirBusy(path, int(text) if text.isdigit() else None) from None


def _read_mark(path: Path) -> str | None:
    """The instance id, None if the directory is not marked yet, or not any more. Raises DataDirNotOurs, OSError."""
    mark = path / MARK
    try:
        content = read_json(mark, DATA_DIR_MARK_BYTES_MAX, dict[str, object], follow=False)
        magic, version, instance = content["magic"], content["format"], content["instance"]
        if magic == MAGIC and version == DATA_DIR_FORMAT:
            uuid.UUID(str(instance))
    except (Unreadable, ValueError, KeyError) as error:
        if isinstance(error, Unreadable) and error.may_be_sound:
            raise OSError(error.number, f"{MARK}: {error.why}") from error
        return None  # there is none, or it is damaged
    if magic != MAGIC:
        raise DataDirNotOurs(f"data_dir {path}: {MARK} was not written by kvstore")
    if version != DATA_DIR_FORMAT:
        raise DataDirNotOurs(
            f"data_dir {path}: format {version}, allowed is {DATA_DIR_FORMAT}; use the version that made it"
        )
    return str(instance)


def _write_mark(path: Path, create: bool) -> str:
    """Make an empty, locked directory ours, or one whose mark is damaged: write, sync, rename, sync the directory."""
    if os.path.lexists(path / MARK):
        if not create:
            raise DataDirNotOurs(f"data_dir {path}: {MARK} is damaged; the next start makes a new one")
        log.warning(
            "data_dir %s: %s is damaged, and kept as %s: this is a new instance now; the arena of the old one "
            "stays in memory until `kvstore arena rm`",
            path,
            MARK,
            put_aside(path / MARK).name,
        )
    instance = uuid.uuid4().hex
    mark = {"magic": MAGIC, "format": DATA_DIR_FORMAT, "instance": instance}
    replace_file(path / MARK, json.dumps(mark).encode())
    return instance
