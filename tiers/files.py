"""Durable files: a small file is replaced whole, or stays as it was, whatever happens meanwhile.

    new NAME.tmp ─▶ write ─▶ sync ─▶ rename to NAME ─▶ sync the directory

The temporary file is always a new one: a link that was planted under its name is
removed, not followed. Mode 0600, whatever the umask, unless others may read it. A large one is written in parts that are made one
after the other, so that whoever makes them holds up no other thread for long.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """On disk when this returns. One writer at a time; blocks on the disk. Raises OSError."""
    replace_in_parts(path, [(0, content)], mode)


def replace_in_parts(path: Path, parts: Iterable[tuple[int, bytes]], mode: int = 0o600) -> None:
    """The same. parts: where each begins, and its bytes."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # what a kill left, or was planted
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            for at, content in parts:
                file.seek(at)
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def put_aside(path: Path) -> Path:
    """A damaged file goes out of the way, for whoever wants to look at it. Returns where it is then, as far as it could be moved."""
    aside = path.with_suffix(".unreadable")
    with suppress(OSError):
        path.replace(aside)
    return aside


def sync_directory(path: Path) -> None:
    """What was put into it, renamed or removed is on disk when this returns. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
