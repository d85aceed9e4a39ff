"""The files of a model that is to be published: of a directory, or of a snapshot in a cache of Hugging Face.

    DIR/                               models--org--name/
      config.json                        blobs/<digest>                   the files
      a/model.safetensors                snapshots/<commit>/config.json   links to them
                                         refs/main                        which commit

Links to files are followed as long as they stay inside: of a snapshot, inside of models--org--name; of any other directory,
inside of that. What is read is looked at once it is open: a folder that is exchanged for a link meanwhile leads nowhere. Names that begin with a dot are left out: what tools keep there is no part of a model. Whatever is neither a
file nor a folder ends in `FilesWrong`, and so does what can be seen to be fetched by half: a safetensors file that is cut off, a
link to nothing, an index that names a file which is not there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from coldstart.errors import FilesWrong
from coldstart.published.cutting import SAFETENSORS, Header, read_header
from replication.formats.manifests import MANIFEST_FILES_MAX, MIB, wrong_of_path
from tiers.reading import Unreadable, read_json, read_text

CACHED: Final = "models--"  # how Hugging Face calls the directory of a model in its cache
SNAPSHOTS: Final = "snapshots"
REF_BYTES_MAX: Final = 1024
INDEX_BYTES_MAX: Final = 256 * MIB


class TreeFile(NamedTuple):
    """path: in the model, with "/" between folders. place: where it lies, without links. identity: changes when it does."""

    path: str
    place: Path
    size_bytes: int
    identity: tuple[int, ...]


class Tree(NamedTuple):
    """directory: whose files they are. left_out: how many names began with a dot."""

    directory: Path
    files: list[TreeFile]
    left_out: int


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


def find_files(directory: Path, below: Path | None = None) -> Tree:
    """In the order of their paths. below: the directory that nothing of it may be outside of. Blocks on the file system. Raises
    FilesWrong."""
    try:
        inside, root = _places(directory.resolve(strict=True))
        if below is not None and not root.is_relative_to(below.resolve(strict=True)):
            raise FilesWrong(f"{root}: it is not below {below}")
        files, left_out = _walked(inside, root)
    except (OSError, RuntimeError) as error:  # of links in a circle
        raise FilesWrong(f"{directory}: {getattr(error, 'strerror', None) or error}") from error
    if not files:
        raise FilesWrong(f"{directory}: no files are there")
    if len(files) > MANIFEST_FILES_MAX:
        raise FilesWrong(f"{directory}: {len(files)} files: at most {MANIFEST_FILES_MAX} are allowed")
    _require_shards(files)
    return Tree(inside, sorted(files), left_out)


@contextmanager
def opened(file: TreeFile) -> Iterator[int]:
    """A descriptor of it, for reading; the file is the one that was found, before and behind. Raises FilesWrong."""
    try:
        fd = os.open(file.place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FilesWrong(f"{file.place}: {error.strerror}") from error
    try:
        _require_same(file, fd)
        yield fd
        _require_same(file, fd)
    except OSError as error:
        raise FilesWrong(f"{file.place}: {error.strerror}") from error
    finally:
        os.close(fd)


def _require_same(file: TreeFile, fd: int) -> None:
    """Of the same content, and where no link led to on the way."""
    if _identity(os.fstat(fd)) != file.identity or os.readlink(f"/proc/self/fd/{fd}") != str(file.place):
        raise FilesWrong(f"{file.place}: it is changed while it is read: publish what is complete")


def header_of(file: TreeFile, fd: int) -> Header | None:
    """None of a file that is not called .safetensors. Raises FilesWrong where one is none."""
    if not file.path.endswith(SAFETENSORS):
        return None
    header = read_header(fd)
    if header is None:
        raise FilesWrong(
            f"{file.place}: {file.size_bytes} bytes are no whole safetensors file: was it fetched completely?"
        )
    return header


def _places(directory: Path) -> tuple[Path, Path]:
    """The directory whose files are meant, and the one that no link may leave. Raises FilesWrong, OSError."""
    above = directory.parent
    if above.name == SNAPSHOTS and above.parent.name.startswith(CACHED):
        return directory, above.parent
    snapshots = directory / SNAPSHOTS
    if not directory.name.startswith(CACHED) or not snapshots.is_dir():
        return directory, directory
    there = sorted(one.name for one in snapshots.iterdir() if one.is_dir())
    try:
        chosen = read_text(directory / "refs" / "main", REF_BYTES_MAX).strip()
    except Unreadable:
        chosen = there[0] if len(there) == 1 else ""
    if chosen not in there:
        names = ", ".join(there[:8]) or "none"
        raise FilesWrong(f"{directory}: which of its snapshots? name one of {snapshots}: {names}")
    return snapshots / chosen, directory


def _walked(inside: Path, root: Path) -> tuple[list[TreeFile], int]:
    files, folders, left_out = [], [""], 0
    while folders:
        folder = folders.pop()
        for entry in os.scandir(inside / folder):
            path = folder + entry.name
            if entry.name.startswith("."):
                left_out += 1
            elif wrong := wrong_of_path(path):
                raise FilesWrong(f"{inside}: {wrong}")
            elif entry.is_dir(follow_symlinks=False):
                folders.append(f"{path}/")
            else:
                files.append(_file(path, Path(entry.path), root))
    return files, left_out


def _file(path: str, named: Path, root: Path) -> TreeFile:
    try:
        place = named.resolve(strict=True)
        found = os.stat(place, follow_symlinks=False)
    except (OSError, RuntimeError):
        raise FilesWrong(f"{named}: it is a link that leads nowhere: was it fetched completely?") from None
    if not place.is_relative_to(root):
        raise FilesWrong(f"{named}: it is a link that leads outside of {root}, to {place}")
    if not stat.S_ISREG(found.st_mode):
        raise FilesWrong(
            f"{named}: it is {_kind(found.st_mode)}: allowed are files, folders, and links to files"
        )
    return TreeFile(path, place, found.st_size, _identity(found))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a link to a folder",
        stat.S_IFSOCK: "a socket",
        stat.S_IFIFO: "a pipe",
        stat.S_IFBLK: "a device",
        stat.S_IFCHR: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _require_shards(files: list[TreeFile]) -> None:
    """Every file that an index names is there. An index that says nothing of the kind is the engine's business; so is one of pickles that
    nobody wanted beside safetensors."""
    paths = {file.path for file in files}
    has_safetensors = any(path.endswith(SAFETENSORS) for path in paths)
    for file in files:
        if not file.path.endswith(".index.json"):
            continue
        try:
            named = set(read_json(file.place, INDEX_BYTES_MAX, _Index).weight_map.values())
        except Unreadable:
            continue
        folder = file.path.rpartition("/")[0]
        missing = sorted(name for name in named if (f"{folder}/{name}" if folder else name) not in paths)
        is_unwanted = len(missing) == len(named) and not any(name.endswith(SAFETENSORS) for name in named)
        if missing and not (is_unwanted and has_safetensors):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise FilesWrong(
                f"{file.place}: it names {missing[0][:100]}{more}, not there: was all of it fetched?"
            )
