"""Scratch directories: for as long as a block, and removed however it ends.

    name ─▶ make ─▶ block ─▶ remove

The name is known before the directory is there, and what removes it is in force by then: a signal in that moment, which leaves
behind what `tempfile` makes, leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """parent: by default where temporary files go. What cannot be removed stays. Raises OSError."""
    path = (parent or Path(tempfile.gettempdir())) / f"{prefix}{os.urandom(5).hex()}"
    try:
        path.mkdir(0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
