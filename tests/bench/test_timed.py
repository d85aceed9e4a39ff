"""A policy whose time is taken decides as it would without a clock beside it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.envelope import generated
from kvstore.bench.timed import Timed
from kvstore.policies.names import OURS
from kvstore.replay import cell
from kvstore.replay.policies import POLICIES


@pytest.mark.parametrize("name", [OURS, "arc", "lru"])
def test_a_timed_policy_decides_the_same_in_less_than_the_time_of_all(tmp_path: Path, name: str) -> None:
    """What happened reaches the policy, or hits would differ; what that took is part of what all took."""
    trace = generated(tmp_path, "shift", 1, 3000)
    slots = trace.unique_blocks // 20
    timed = Timed(POLICIES[name]())
    started_s = time.process_time()
    assert cell.run(trace, slots, timed) == cell.run(trace, slots, POLICIES[name]())
    assert 0 < timed.spent_s < time.process_time() - started_s
