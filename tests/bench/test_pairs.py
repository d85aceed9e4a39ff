"""The statistics of paired measurements, and what the miss benchmark refuses to report."""

from __future__ import annotations

import argparse
import random

import pytest

from benchmarks import miss_overhead
from benchmarks.errors import BenchError
from benchmarks.pairs import overhead


def test_common_slowness_cancels() -> None:
    """Both sides slow down together by up to ten times: the 2 % between them are still found."""
    rng = random.Random(7)
    baseline = [rng.uniform(1, 10) for _ in range(40)]
    found = overhead(baseline, [1.02 * seconds for seconds in baseline])
    assert (found.percent, found.low, found.high) == (2, 2, 2)


def test_noise_widens_the_interval() -> None:
    """Noise of 5 % around no difference: the interval holds zero and is wider than with noise of 1 %."""

    def interval(noise: float) -> tuple[float, float]:
        rng = random.Random(11)
        found = overhead([1.0] * 60, [rng.gauss(1, noise) for _ in range(60)])
        return found.low, found.high

    wide, narrow = interval(0.05), interval(0.01)
    assert wide[0] < 0 < wide[1]
    assert wide[1] - wide[0] > narrow[1] - narrow[0]


def test_a_connector_that_does_nothing_is_no_result() -> None:
    """Fewer blocks saved than computed, or one hit, is an error and not a good figure."""
    args = argparse.Namespace(pairs=1, batches=1, prompt_tokens=64)
    blocks = 2 * (4 + 8 * 4)  # of 64 tokens: pairs with their warm-up, and batches with theirs

    def require(committed: int, hits: int) -> None:
        counters = {"committed": committed, "lookup_hit_blocks": hits}
        miss_overhead._require_misses_and_saves({"counters": counters}, args)

    require(blocks, 0)
    with pytest.raises(BenchError, match="were saved"):
        require(blocks // 2, 0)
    with pytest.raises(BenchError, match="not unique"):
        require(blocks, 1)


def test_the_model_is_not_a_toy() -> None:
    """At least a hundred million parameters, or a miss would be measured against next to nothing."""
    assert miss_overhead._parameters() >= 100_000_000
