"""A policy whose time is taken decides as it would without a clock beside it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.bench.timed import Timed
from benchmarks.envelope import generated
from kvstore.policies.names import OURS
from kvstore.tools.replay import cell
from kvstore.tools.replay.policies import POLICIES


@pytest.mark.parametrize("name", [OURS, "arc", "lru"])
def test_a_timed_policy_decides_the_same_in_less_than_the_time_of_all(tmp_path: Path, name: str) -> None:
    """What happened reaches the policy, or hits would differ; what that took is part of what all took."""
    trace = generated(tmp_path, "shift", 1, 3000)
    slots = trace.unique_blocks // 20
    timed = Timed(POLICIES[name]())
    timed.run_clock(True)
    started_s = time.process_time()
    assert cell.run(trace, slots, timed) == cell.run(trace, slots, POLICIES[name]())
    assert 0 < timed.spent_s < time.process_time() - started_s


@pytest.mark.parametrize("name", [OURS, "lru"])
def test_while_the_clock_is_stopped_nothing_is_counted_and_the_policy_decides_still(
    tmp_path: Path, name: str
) -> None:
    """Started and stopped between requests, as the benchmark does."""
    trace = generated(tmp_path, "shift", 1, 3000)
    slots = trace.unique_blocks // 20
    timed = Timed(POLICIES[name]())
    spent_s: list[float] = []

    def switch(number: int) -> None:
        spent_s.append(timed.spent_s)
        timed.run_clock(number % 2 == 0)  # for the next request

    assert cell.run(trace, slots, timed, switch) == cell.run(trace, slots, POLICIES[name]())
    assert all(spent_s[at] == spent_s[at - 1] for at in range(2, len(spent_s), 2))
    assert all(spent_s[at] > spent_s[at - 1] for at in range(1, len(spent_s), 2))
