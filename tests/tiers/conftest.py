"""Places for the tiers under test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)
