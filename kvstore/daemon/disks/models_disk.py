"""Where models were mounted, as the data directory remembers it: a disk that is not mounted is not filled in its stead.

    models_disk.json     models.dir, and the mount that it was on when a model was preloaded there

Without its mount that directory is empty, or not there: what a daemon preloads by itself would fill the file system below, mostly `/`.
A disk that was formatted anew, and is mounted in the same place, is taken; so is a directory that has models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from kvstore.daemon.disks.filesystem import file_system
from tiers.files import replace_file
from tiers.reading import Unreadable, read_json

MODELS_DISK: Final = "models_disk.json"
_FILE_BYTES_MAX: Final = 64 << 10


class _Row(msgspec.Struct, frozen=True):
    directory: str
    mount: str


def wrong_of_models_disk(data_dir: Path, models: Path) -> str:
    """Why nothing may be brought there, in words; "" where it may. Blocks on the disk. Raises OSError."""
    file = data_dir / MODELS_DISK
    row = _read(file)
    if row is None or row.directory != str(models) or any(models.glob("models--*")):
        return ""
    there = file_system(models)
    if there.mount.is_relative_to(row.mount):
        return ""
    return (
        f"models.dir {models}: nothing is mounted at {row.mount} any more, and here is {there.said}:"
        f" mount it, or remove {file}, to take what is there now"
    )


def remember_models_disk(data_dir: Path, models: Path) -> None:
    """A model has come there. Blocks on the disk. Raises OSError."""
    row = _Row(str(models), str(file_system(models).mount))
    if _read(data_dir / MODELS_DISK) != row:
        replace_file(data_dir / MODELS_DISK, msgspec.json.encode(row))


def _read(file: Path) -> _Row | None:
    """None where there is none, or it cannot be read: then nothing is known."""
    try:
        return read_json(file, _FILE_BYTES_MAX, _Row, follow=False)
    except Unreadable:
        return None
