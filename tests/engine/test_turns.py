"""The event loop is never held for long: counted in lines of Python, which no busy machine changes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.bench import crowded

LINES_MAX = 60_000  # some 3 ms of a slow core; whoever walks over all of something has more


class Counted(crowded.Held):
    """most: lines of the longest turn of each kind of work."""

    def __init__(self) -> None:
        super().__init__()
        self.most: dict[str, int] = {}

    @contextmanager
    def turn(self, work: str) -> Iterator[None]:
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
        self.most[work] = max(lines, self.most.get(work, 0))

    def age(self) -> None:
        """The test's own garbage is left alone."""


def test_no_turn_grows_with_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adoption, a gap at the root of all chains, slabs taken over, lowered quotas, pins, a client that dies with all its leases, long
    prompts on NVMe, a device that trips: each is many turns, none of them longer than the bound, with others between."""
    monkeypatch.setattr(crowded, "SLAB_BYTES", 16 << 20)
    monkeypatch.setattr(crowded, "PROMPT_BLOCKS", 16_384)
    held = Counted()
    crowded.work_through(8_000, Path(f"/dev/shm/kvstore-test-turns-{os.getpid()}.arena"), held)
    assert {work: lines for work, lines in held.most.items() if lines > LINES_MAX} == {}
    assert {
        "adoption",
        "gap",
        "slab_takeover",
        "quota",
        "dying_session",
        "retention",
        "nvme_lookup",
    } <= held.most.keys()
