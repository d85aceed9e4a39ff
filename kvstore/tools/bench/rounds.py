"""Rounds: timings taken in turn, and what is made of them.

    A B C   A B C   A B C …        one column a figure, one line a round

A ratio is made inside each round, from neighbours in time, and then the median is taken:
what slows the machine for a second slows both sides of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Rounds:
    """Seconds per name and round, of works that move `size_bytes` each. The first `warm_up` rounds do not count."""

    def __init__(self, size_bytes: int, warm_up: int = 0) -> None:
        self._size_bytes = size_bytes
        self._warm_up = warm_up
        self._seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = work()
        self._seconds.setdefault(name, []).append(time.perf_counter() - started)
        return result

    def add(self, name: str, seconds: float) -> None:
        """A timing that was taken elsewhere."""
        self._seconds.setdefault(name, []).append(seconds)

    def median_s(self, name: str) -> float:
        return statistics.median(self._measured(name))

    def gbps(self, name: str) -> float:
        """Median throughput, 10⁹ bytes a second."""
        return round(self._size_bytes / 1e9 / statistics.median(self._measured(name)), 3)

    def ratio(self, name: str, limit: str) -> float:
        """Median of the rounds' throughput ratios."""
        pairs = zip(self._measured(name), self._measured(limit), strict=True)
        return round(statistics.median(theirs / ours for ours, theirs in pairs), 3)

    def _measured(self, name: str) -> list[float]:
        return self._seconds[name][self._warm_up :]


def percentile_us(seconds: Sequence[float], share: float) -> float:
    """The value that `share` of the timings do not exceed, in µs."""
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e6, 1)
