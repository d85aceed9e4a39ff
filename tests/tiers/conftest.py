"""Places for the tiers under test: real shared memory for the arena, a disk for the rest."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.factories import FACTORIES, Factory
from tiers.base import Tier


@pytest.fixture
def shm() -> Iterator[Path]:
    """An empty directory in shared memory."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=FACTORIES, ids=lambda factory: str(factory.name))
def factory(request: pytest.FixtureRequest) -> Factory:
    chosen: Factory = request.param
    return chosen


@pytest.fixture
def directory(factory: Factory, tmp_path: Path, shm: Path) -> Path:
    """Where the tier under test keeps its files."""
    return shm if factory.in_shared_memory else tmp_path


@pytest.fixture
def tier(factory: Factory, directory: Path) -> Iterator[Tier]:
    """An open tier; its books must balance when the test is over."""
    opened = factory.open_ready(directory)
    yield opened
    assert opened.check() == []
    opened.close()
