"""Latencies: how often something took how long, cheap enough to be counted on every request.

    seconds │ < 1 µs │ < 2 µs │ < 4 µs │ … │ < 67 s │ the rest
    count   │   n0   │   n1   │   n2   │ … │  n26   │   n27

Each bound is twice the one before, so that a bucket is found by the number of bits of the microseconds,
and any share of the counts is known to a factor of two. Counts only grow; a reader that wants those of a
while takes the difference of two answers.
"""

from __future__ import annotations

from kvstore.protocol import answers

BOUNDS = 27  # of buckets; one more counts the rest
BOUNDS_S = tuple(2**bits / 1e6 for bits in range(BOUNDS))


class Histogram:
    """Durations of one kind since the daemon started. Called from one thread."""

    __slots__ = ("_by_bits", "sum_s")

    def __init__(self) -> None:
        self._by_bits = [0] * 64  # more than are reported: no duration needs to be compared with a limit
        self.sum_s = 0.0

    @property
    def count(self) -> int:
        return sum(self._by_bits)

    @property
    def buckets(self) -> list[int]:
        """One count for each of BOUNDS_S, and one for the rest."""
        return [*self._by_bits[:BOUNDS], sum(self._by_bits[BOUNDS:])]

    def add(self, seconds: float) -> None:
        """Something took so long; not negative."""
        self._by_bits[int(seconds * 1e6).bit_length()] += 1
        self.sum_s += seconds

    def as_dict(self) -> answers.Histogram:
        """As it is in answers; the fields are documented in docs/cli.md."""
        return {"count": self.count, "sum_s": round(self.sum_s, 6), "buckets": self.buckets}
