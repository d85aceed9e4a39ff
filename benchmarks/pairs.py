"""Paired measurements: the same work by A and by B, next to each other in time.

The pairs' own quotients are what counts, so that what slows the machine for a second slows
both sides of one pair. The interval is a bootstrap of their median: it says what another run
on this machine could have said, and nothing about other machines.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 5000
SEED = 1


@dataclass(slots=True, frozen=True)
class Overhead:
    """How much more B takes than A, in per cent of A: the median pair, and its 95 % interval."""

    percent: float
    low: float
    high: float


def overhead(baseline: Sequence[float], measured: Sequence[float]) -> Overhead:
    """Of seconds, pair by pair. At least one pair, as many of each."""
    extra = [100 * (b / a - 1) for a, b in zip(baseline, measured, strict=True)]
    rng = random.Random(SEED)
    medians = sorted(statistics.median(rng.choices(extra, k=len(extra))) for _ in range(RESAMPLES))
    low, high = medians[int(RESAMPLES * 0.025)], medians[int(RESAMPLES * 0.975)]
    return Overhead(round(statistics.median(extra), 3), round(low, 3), round(high, 3))
