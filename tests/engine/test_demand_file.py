"""Demand on disk: what a stop writes is what the next start knows."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from kvstore.durable import demand_file
from kvstore.durable.demand import DEMAND_PART_BYTES, Demand
from kvstore.durable.demand_file import DemandFile
from tiers.files import replace_in_parts


def test_a_slow_write_does_not_undo_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is busy keeps a thread with an old snapshot for long; the stop's own is the one that stays."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path, parts: Iterable[tuple[int, bytes]]) -> None:
        if not begun.is_set():
            begun.set()
            go_on.wait(30)
        replace_in_parts(path, parts)

    monkeypatch.setattr(demand_file, "replace_in_parts", slow)
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


def test_it_is_saved_in_small_parts(tmp_path: Path) -> None:
    """Copying all of it at once would hold the event loop; what is asked for between two parts breaks no file."""
    demand = Demand(1 << 16)
    for name in range(1, 5000):
        demand.asked(name * 7919, 1000, lambda count, pause_s: count + 1)
    sizes = []

    def parts() -> Iterator[tuple[int, bytes]]:
        for number, (at, part) in enumerate(demand.parts()):
            demand.asked(number << 20, 2000, lambda count, pause_s: count + 1)
            sizes.append(len(part))
            yield at, part

    replace_in_parts(tmp_path / "demand.bin", parts())
    assert max(sizes) <= DEMAND_PART_BYTES and sum(sizes) == demand.snapshot_bytes
    known = Demand(1 << 16)
    assert known.restore((tmp_path / "demand.bin").read_bytes())
    place = known.asked(7919, 3000, lambda count, pause_s: count + 1)
    assert known.count[place] == 2.0
