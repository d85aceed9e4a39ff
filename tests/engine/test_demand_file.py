"""Demand on disk: what a stop writes is what the next start knows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvstore.durable import demand_file
from kvstore.durable.demand import Demand
from kvstore.durable.demand_file import DemandFile
from tiers.files import replace_file


def test_a_slow_write_does_not_undo_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is busy keeps a thread with an old snapshot for long; the stop's own is the one that stays."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path, content: bytes) -> None:
        if not begun.is_set():
            begun.set()
            go_on.wait(30)
        replace_file(path, content)

    monkeypatch.setattr(demand_file, "replace_file", slow)
    demand = Demand(1024)
    file = DemandFile(tmp_path / "demand.bin", demand)
    early = threading.Thread(target=file.save)
    early.start()
    assert begun.wait(30)
    demand.asked(7, 1000, lambda count, pause_s: count + 1)
    last = threading.Thread(target=file.save)
    last.start()
    last.join(0.2)
    go_on.set()
    early.join(30)
    last.join(30)
    known = Demand(1024)
    DemandFile(tmp_path / "demand.bin", known).open()
    place = known.asked(7, 1001, lambda count, pause_s: count + 1)
    assert known.count[place] == 2.0
