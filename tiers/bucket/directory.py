"""Lists and sweeps a directory that serves as an object store.

obstore is not used here: its listing ends at the first name that no object can have (bytes that are no text, a line break,
a link to itself), and it never shows a file that was left half written.

    Root          the directory itself, as long as it is there
    each_object   every object below a folder; what cannot be one, or may not be looked at, is passed over
    folder_names  the folders right below one
    sweep         removes what killed processes left: "<name>#<number>", written in the folder of an object before it is renamed

Blocks on the file system: call it from a thread.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from tiers.bucket.objects import ObjectInfo

_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=+-]+")  # of a name, between two "/"
_STAGED = re.compile(r"[A-Za-z0-9._=+-]+#[0-9]{1,10}")
_FOLDERS_DEEP_MAX = 8  # names of ours have four
# Of one file or folder, not of the place: the others are as good as ever.
_OF_ONE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EIO, errno.ELOOP))


class Root:
    """The directory of a store. Where it is not, nothing is read or written: what lies at its path after an unmount is an
    empty directory of another disk, or nothing, which a write would make anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._inode = os.stat(path).st_ino  # not the device: a network's has another one after each mount

    def wrong(self) -> str:
        """Why it is away, in words; "" where it is there. Another one with something in it is what took its place. Blocks on the
        file system."""
        try:
            inode = os.stat(self.path).st_ino
            if inode != self._inode:
                with os.scandir(self.path) as entries:
                    if next(entries, None) is None:
                        return "another directory is there, an empty one: is it mounted?"
                self._inode = inode
        except PermissionError:
            return ""  # whatever is asked for says so
        except OSError as error:
            return f"the directory: {error.strerror}: is it mounted?"
        return ""


def each_object(root: str, prefix: str) -> Iterator[ObjectInfo]:
    """In any order. prefix: "a/b/", or "" for all. Raises OSError where the folder itself cannot be read, or the place fails."""
    for folder, entry in _walked(root, prefix, ()):
        try:
            found = entry.stat()
        except OSError as error:
            if error.errno not in _OF_ONE:
                raise
            continue  # it went away, or may not be looked at
        if _PART.fullmatch(entry.name) and entry.is_file():
            e_tag = f'"{found.st_ino:x}-{found.st_mtime_ns // 1000:x}-{found.st_size:x}"'
            changed_s = found.st_mtime_ns // 1000 / 1e6  # as obstore says it
            yield ObjectInfo(folder + entry.name, found.st_size, e_tag, changed_s)


def folder_names(root: str, prefix: str) -> list[str]:
    """In order. Raises OSError as `each_object`."""
    try:
        with os.scandir(os.path.join(root, prefix)) as entries:
            return sorted(
                entry.name for entry in entries if _PART.fullmatch(entry.name) and _is_folder(entry)
            )
    except FileNotFoundError:
        return []


def sweep(root: str, older_s: float) -> int:
    """Remove what was left half written so long before the latest change of a folder: by the clock of the files, and
    never more than has passed. A writer that is still at it finds its file gone, and writes it again. Returns how many."""
    staged: list[tuple[str, float]] = []
    latest_s = 0.0
    for _, entry in _walked(root, "", ()):
        try:
            if _is_folder(entry):
                latest_s = max(latest_s, entry.stat().st_mtime)
            elif _STAGED.fullmatch(entry.name):
                staged.append((entry.path, entry.stat(follow_symlinks=False).st_mtime))
        except OSError:
            continue
    count = 0
    for path, changed_s in staged:
        if changed_s < latest_s - older_s:
            try:
                os.unlink(path)
                count += 1
            except OSError:
                continue  # another process has removed it, or only another user may
    return count


def _walked(
    root: str, prefix: str, above: tuple[tuple[int, int], ...]
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a folder, with the name of its folder; folders before what is in them. above: those that it is in."""
    path = os.path.join(root, prefix)
    try:
        itself = os.stat(path)
        with os.scandir(path) as entries:
            found = list(entries)
    except FileNotFoundError:
        return  # a folder is what objects have in their names: there are none
    folder = itself.st_dev, itself.st_ino
    if folder in above or len(above) > _FOLDERS_DEEP_MAX:
        return  # a link upwards
    for entry in found:
        yield prefix, entry
        if _PART.fullmatch(entry.name) and _is_folder(entry):
            try:
                yield from _walked(root, f"{prefix}{entry.name}/", (*above, folder))
            except OSError as error:
                if error.errno not in _OF_ONE:
                    raise


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
