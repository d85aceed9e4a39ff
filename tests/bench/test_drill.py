"""Faults of `make drill` on one node, one behind the other: each is named wherever somebody looks, and none of it is left at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.drill.__main__ import FAULTS
from benchmarks.drill.buckets import BucketRefuses
from benchmarks.drill.disks import DiskRemoved
from benchmarks.drill.drill import GONE_S_MAX, LINES_MAX, NAMED_S_MAX, PAUSE_S, count_lines, kinds, named
from benchmarks.drill.fault import Fault
from benchmarks.drill.machine import ClockWrong, DaemonStopped
from benchmarks.drill.node import Node
from benchmarks.drill.surfaces import SURFACES

SHARE = (DiskRemoved, BucketRefuses, ClockWrong, DaemonStopped)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, for disks that hang and clocks that are wrong")
    with Node(tmp_path / "n", ("na",)) as made:
        yield made


def until(true: Callable[[], bool], what: str, within_s: float) -> None:
    """Asked twice a second: each time a process or two have to answer."""
    give_up_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < give_up_s, f"it did not happen: {what}"
        time.sleep(PAUSE_S)


def _names(fault: Fault, where: str, node: Node) -> bool:
    return named(fault, SURFACES[where](node)) is not None


def test_a_share_of_the_drill(node: Node) -> None:
    """Six of its faults: status, top, page, metrics and doctor name each, with what to do; each goes from the page when it is over,
    and at the end from everywhere; the log has few lines of all of them together, and no byte that an engine got was wrong."""
    faults = [fault() for fault in SHARE]
    for fault in faults:
        fault.prepare(node)
    node.start()
    assert node.traffic.warm.wait(NAMED_S_MAX)
    before = {where: kinds(SURFACES[where](node)) for where in ("page", "doctor")}
    assert not before["page"], before
    log = len(node.daemon.log())
    for fault in faults:
        fault.break_(node)
        for where in ("page", *SURFACES):
            until(partial(_names, fault, where, node), f"{where} names: {fault.name}", NAMED_S_MAX)
        fault.mend(node)
        until(lambda: not kinds(SURFACES["page"](node)), f"the page forgets: {fault.name}", GONE_S_MAX)
    for where in SURFACES:
        assert kinds(SURFACES[where](node)) <= before.get(where, set()), where
    lines, hour = count_lines(node.daemon.log()[log:], 3600.0)
    assert lines <= 40 and hour <= len(SHARE) * LINES_MAX, node.daemon.log()[log:]
    assert node.traffic.failure is None


def test_there_are_twenty() -> None:
    """Of as many names, each with a cause that can be told from others, or a daemon that is silent."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) == 20
    assert all(bool(fault.causes) != fault.silent for fault in FAULTS)
