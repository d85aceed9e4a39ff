"""Fixtures: a machine of one's own, and cgroups with a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.start.machine import Machine, make_group, make_machine, remove_group


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Empty /run, /dev/shm and /var/lib, for root and nobody."""
    made = make_machine(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """Makes cgroups with a limit in bytes. Ask for it before `machine`: they go last."""
    made: list[Path] = []

    def make(limit_bytes: int) -> Path:
        made.append(make_group(limit_bytes))
        return made[-1]

    yield make
    for directory in made:
        remove_group(directory)
