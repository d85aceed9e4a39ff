"""Endurance: never more than the budget, and what is let in is what is worth most."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.constants import DAY_S, HOUR_S
from kvstore.endurance import Endurance

BLOCK_BYTES = 1000


class Disk:
    """Offers blocks and remembers when what was written."""

    def __init__(self, bytes_per_day: int) -> None:
        self.now_s = 0.0
        self.written: list[tuple[float, int]] = []
        self.budget = bytes_per_day
        self.restart()

    def restart(self) -> None:
        """A new daemon hears by the hour what the old one spent."""
        hours: dict[int, int] = {}
        for at_s, size_bytes in self.written:
            if at_s > self.now_s - DAY_S - HOUR_S:
                hours[int(at_s // HOUR_S)] = hours.get(int(at_s // HOUR_S), 0) + size_bytes
        spent = [(min(self.now_s, (hour + 1) * HOUR_S), size) for hour, size in hours.items()]
        self.endurance = Endurance(self.budget, lambda: self.now_s, spent)

    def offer(self, worth: float, size_bytes: int = BLOCK_BYTES) -> bool:
        admitted = self.endurance.admits(worth, size_bytes)
        if admitted:
            self.written.append((self.now_s, size_bytes))
        return admitted

    def most_in_a_day(self) -> int:
        most, first, inside = 0, 0, 0
        for at_s, size_bytes in self.written:
            inside += size_bytes
            while self.written[first][0] <= at_s - DAY_S:
                inside -= self.written[first][1]
                first += 1
            most = max(most, inside)
        return most


def test_without_a_budget_everything_is_let_in() -> None:
    """0 is no limit."""
    endurance = Endurance(0, lambda: 0.0)
    assert all(endurance.admits(0.0, 1 << 40) for _ in range(1000))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.1, 3 * HOUR_S), st.integers(1, 60), st.booleans()), min_size=1, max_size=60
    ),
    seed=st.integers(0, 99),
)
def test_no_day_exceeds_the_budget(steps: list[tuple[float, int, bool]], seed: int) -> None:
    """Bursts, pauses and restarts at any time: within any 24 hours the budget holds."""
    disk, draw = Disk(100 * BLOCK_BYTES), random.Random(seed)
    for pause_s, offers, restart in steps:
        disk.now_s += pause_s
        if restart:
            disk.restart()
        for _ in range(offers):
            disk.now_s += 0.5
            disk.offer(draw.random())
    assert disk.most_in_a_day() <= disk.budget


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7])
def test_a_budget_is_spent_on_what_is_worth_most(share: float) -> None:
    """Two days of steady offers: most of the budget is used, and by the most worthy blocks."""
    offers_per_day = 20_000
    disk, draw = Disk(int(share * offers_per_day * BLOCK_BYTES)), random.Random(1)
    let_in, left_out = [], []
    for _ in range(2 * offers_per_day):
        disk.now_s += DAY_S / offers_per_day
        worth = draw.random() ** 3
        (let_in if disk.offer(worth) else left_out).append(worth)
    assert len(let_in) > 0.9 * share * 2 * offers_per_day
    everything = sorted(let_in + left_out)
    line = everything[int((1 - share) * len(everything))]
    wrong = sum(worth < line * 0.8 for worth in let_in) / len(let_in)
    assert wrong < 0.1, wrong


def test_equal_worths_are_thinned_out_evenly() -> None:
    """A policy that cannot tell blocks apart spends the budget all day, not in the first hour."""
    offers_per_day = 20_000
    disk = Disk(offers_per_day // 4 * BLOCK_BYTES)
    for _ in range(offers_per_day):
        disk.now_s += DAY_S / offers_per_day
        disk.offer(1.0)
    hours = [0] * 24
    for at_s, _ in disk.written:
        hours[min(int(at_s // HOUR_S), 23)] += 1
    assert min(hours[2:]) > 0.5 * max(hours[2:])


def test_the_line_follows_the_traffic() -> None:
    """When everything offered becomes worth less, the budget is still used."""
    offers_per_day = 20_000
    disk, draw = Disk(offers_per_day // 5 * BLOCK_BYTES), random.Random(2)
    written = []
    for day in range(3):
        for _ in range(offers_per_day):
            disk.now_s += DAY_S / offers_per_day
            disk.offer(draw.random() * (1.0, 0.02, 1.0)[day])
        written.append(len(disk.written))
    days = [written[0], written[1] - written[0], written[2] - written[1]]
    assert min(days) > 0.8 * offers_per_day / 5, days
