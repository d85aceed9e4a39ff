"""Seen: a set of numbers."""

from __future__ import annotations

import random

from replication.catalogue.seen import Seen


def test_seen_is_a_set_of_numbers() -> None:
    """As a set of Python's, near zero and far away, at the borders of its pieces."""
    chance = random.Random(2)
    numbers = [0, 1, 7, 8, 65_535, 65_536, 10**12, *(chance.randrange(1 << 20) for _ in range(2000))]
    seen, model = Seen(), set()
    for number in numbers:
        seen.add(number)
        model.add(number)
    for number in [*numbers, *range(3000), *(number + 1 for number in numbers)]:
        assert (number in seen) == (number in model)
