"""Durable files: a small file is replaced whole, or stays as it was, whatever happens meanwhile.

write NAME.tmp ─▶ sync ─▶ rename to NAME ─▶ sync the directory
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """On disk when this returns. One writer at a time; blocks on the disk. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
