"""Folders of a models' directory: locks on them, whether they may leave, and removing them.

A lock (flock) is on a folder itself: it moves with it, and ends with its process. So whoever has got one looks whether the folder
still lies where it was. What is a file or a link where a folder should be is nobody's, and said: it is neither waited for nor followed.
"""

from __future__ import annotations

import ctypes
import fcntl
import filecmp
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coldstart.errors import FilesWrong

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE

log = logging.getLogger("coldstart.folders")


def names_in(folder: Path) -> list[str]:
    """What lies in it; [] where it is not there, or goes in this moment."""
    with suppress(OSError):
        return os.listdir(folder)
    return []


def is_folder(path: Path) -> bool:
    """A real one: we make no links."""
    return path.is_dir() and not path.is_symlink()


def not_ours(path: Path) -> FilesWrong:
    return FilesWrong(f"{path}: no directory of ours, but a file or a link: remove it")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """By nobody else meanwhile: waits for those that have it. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def shared(path: Path) -> int | None:
    """A descriptor of a revision's directory, whose lock keeps it where it is; None where it is gone. Blocks while somebody is
    about to move it. Raises FilesWrong, OSError."""
    return _with_lock(path, fcntl.LOCK_SH)


def held(path: Path) -> int | None:
    """A descriptor of this directory, which nobody else has a lock on; None where somebody has, or it is not there. Raises
    FilesWrong, OSError."""
    return _with_lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _with_lock(path: Path, how: int) -> int | None:
    """None for what may be otherwise in a moment; who asks again for ever, because something is a file or a link, hears it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise not_ours(path) from error
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, how)
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            return fd
    os.close(fd)
    return None


@contextmanager
def holding(path: Path) -> Iterator[bool]:
    """Whether nobody else has a lock on this directory: then we have it meanwhile."""
    fd = held(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_held(path: Path, or_missing: bool = True) -> bool:
    """By somebody else. or_missing: or gone."""
    if not or_missing and not os.path.lexists(path):
        return False
    with holding(path) as is_free:
        return not is_free


def may_leave(path: Path) -> bool:
    """Nobody has it, and it can be removed; what nobody here can remove is somebody's own, and is said in the log."""
    try:
        check_rights(path)
        return not is_held(path)
    except (OSError, FilesWrong) as error:
        log.warning("passed over, as it cannot leave: %s", error)
        return False


def is_same(one: Path, other: Path) -> bool:
    """Whether two folders have the same files, byte by byte."""
    with suppress(OSError):
        found = _files(one)
        return found == _files(other) and all(
            filecmp.cmp(one / name, other / name, shallow=False) for name in found
        )
    return False


def _files(root: Path) -> dict[str, tuple[int, int]]:
    """Of which kind each is, and how long."""
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    found = {os.path.relpath(path, root): os.lstat(path) for path in paths}
    return {name: (stat.S_IFMT(one.st_mode), one.st_size) for name, one in found.items()}


def put_in_place(new: Path, place: Path) -> None:
    """What was there, if anything, is removed. There is one at every instant, where the file system can exchange two. Raises OSError."""
    if not os.path.lexists(place):
        os.rename(new, place)
    elif not _exchanged(new, place):
        os.rename(place, aside := new.with_name(f"~{new.name}"))
        os.rename(new, place)
        remove(aside)


def _exchanged(one: Path, other: Path) -> bool:
    """False where there is no such call, or not for this file system. What was at the other path is at this one then."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return call is not None and not call(
        _HERE, os.fsencode(one), _HERE, os.fsencode(other), ctypes.c_uint(_EXCHANGE)
    )


def check_rights(path: Path) -> None:
    """Raises FilesWrong where we may not remove it with all that is below it."""
    for folder in (str(path.parent), *(inner for inner, _, _ in os.walk(path))):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise FilesWrong(f"{folder}: no right to write there")


def remove_all(path: Path) -> None:
    """Raises FilesWrong, which names it: what is below it says only how it is called itself."""
    try:
        remove(path)
    except OSError as error:
        raise FilesWrong(
            f"{path}: cannot be removed ({error.filename}: {error.strerror}): remove it"
        ) from error


def allocated_bytes(path: Path) -> int:
    total_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total_bytes += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total_bytes


def make_way(target: Path, folders: set[Path]) -> None:
    """For a file of its own: links on its way, what is no folder there, and a file that has other names, too, are removed, so that
    nothing is written elsewhere. folders: those that are known to be some."""
    folder, missing = target.parent, list[Path]()
    while folder not in folders:
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink(missing_ok=True)
            folder.mkdir()
        folders.add(folder)
    with suppress(FileNotFoundError):
        found = target.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            remove(target)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
