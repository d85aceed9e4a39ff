"""The write budget: never more than the budget, and what is let in is what is worth most."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.constants import DAY_S, HOUR_S
from kvstore.engine.engine import Engine
from kvstore.health.write_budget import WriteBudget
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tiers.base import Put
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

BLOCK_BYTES = 1000
MIB = 1 << 20
RECORD_BYTES = MIB // 2  # eight slots in an arena of two slabs


def most_in_a_day(written: Sequence[tuple[float, int]]) -> int:
    """Bytes in the fullest 24 hours. written: (when, bytes), in order."""
    most, first, inside = 0, 0, 0
    for at_s, size_bytes in written:
        inside += size_bytes
        while written[first][0] <= at_s - DAY_S:
            inside -= written[first][1]
            first += 1
        most = max(most, inside)
    return most


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
        self.write_budget = WriteBudget(self.budget, lambda: self.now_s, spent)

    def offer(self, worth: float, size_bytes: int = BLOCK_BYTES) -> bool:
        admitted = self.write_budget.admits(worth, size_bytes)
        if admitted:
            self.write_budget.wrote(size_bytes)
            self.written.append((self.now_s, size_bytes))
        return admitted


def test_without_a_budget_everything_is_let_in() -> None:
    """0 is no limit."""
    write_budget = WriteBudget(0, lambda: 0.0)
    assert all(write_budget.admits(0.0, 1 << 40) for _ in range(1000))


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
    assert most_in_a_day(disk.written) <= disk.budget


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


@pytest.mark.parametrize("records", [1, 2, 10, 40, 90, 1000])
def test_a_budget_of_few_records_is_spent(records: int) -> None:
    """However large a record is beside what a budget pays for in an hour, some are written, and most of the budget is used."""
    now_s, draw, written = 0.0, random.Random(records), []
    budget = records * BLOCK_BYTES
    write_budget = WriteBudget(budget, lambda: now_s, is_kept=True, record_bytes_max=BLOCK_BYTES)
    while now_s < 4 * DAY_S:
        now_s += DAY_S / max(200, 4 * records)
        if write_budget.wants_keeping:
            write_budget.kept(write_budget.ledger())
        size_bytes = draw.choice([BLOCK_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES // 2 + 1])
        if write_budget.admits(1.0, size_bytes):
            write_budget.wrote(size_bytes)
            written.append((now_s, size_bytes))
    assert most_in_a_day(written) <= budget
    assert sum(size_bytes for _, size_bytes in written) > 0.4 * 4 * budget


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


class Places:
    """An engine with eight slots of DRAM over a roomy NVMe tier, that may write `blocks` at first."""

    def __init__(self, path: Path, blocks: int) -> None:
        self.now_s = 0.0
        self.arena = open_arena(path, 4 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        budget = blocks * RECORD_BYTES * (DAY_S + HOUR_S) / HOUR_S + 1
        self.device = FaultyDevice(100)
        self.engine = Engine(
            self.arena,
            [Drive(self.device, self.io)],
            NamespaceRegistry(),
            self.io,
            clock=lambda: self.now_s,
            write_budget=WriteBudget(int(budget), lambda: self.now_s),
        )
        self.engine.adopt()
        self.io.run()
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(NamespaceSpec(bytes(16), RECORD_BYTES, 8, 16))

    def put(self, *numbers: int) -> None:
        answer = self.engine.reserve(self.session, self.space, names(*numbers), b"")
        sums = b"".join(
            digest(self.arena.mapping[s.offset : s.offset + RECORD_BYTES]) for s in granted(answer)
        )
        self.engine.commit(self.session, answer.lease, [s.position for s in granted(answer)], sums)
        self.io.run()

    def use(self, *numbers: int) -> None:
        answers: list[Acquired] = []
        self.engine.acquire(self.session, self.space, names(*numbers), answers.append)
        self.io.run()
        self.engine.release(self.session, answers[0].lease)
        self.engine.tick()
        self.io.run()

    def where(self, *numbers: int) -> list[int]:
        assert self.engine.check() == []
        return list(finish(self.engine.residency_steps(self.space, names(*numbers))))


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def test_beyond_the_budget_blocks_stay_in_dram_and_may_leave_it(tmp_path: Path) -> None:
    """Three of six blocks are written; the others make room without being written, and the books say why."""
    node = Places(tmp_path / "arena", 3)
    node.put(1, 2, 3, 4, 5, 6)
    assert node.where(1, 2, 3, 4, 5, 6) == [3, 3, 3, 1, 1, 1]
    node.put(11, 12, 13, 14, 15)
    assert node.engine.counters.demote_not_admitted == 8
    assert sum(map(bool, node.where(1, 2, 3, 4, 5, 6))) < 6
    found = node.engine.find([node.space], names(1, 2, 3, 4, 5, 6))
    node.engine.book([node.space], names(1, 2, 3, 4, 5, 6), found)
    told = node.engine.accounts.totals.since(0)[0].tokens
    assert told[outcomes.NOT_ADMITTED] == 16 * (6 - found.held) and told[outcomes.EVICTED_DRAM] == 0
    node.arena.close(unlink=True)


def test_what_is_used_again_is_offered_again(tmp_path: Path) -> None:
    """An hour later there is an allowance, and the next use of a refused block has it written."""
    node = Places(tmp_path / "arena", 2)
    node.put(1, 2, 3, 4)
    assert node.where(3, 4) == [1, 1]
    node.now_s += HOUR_S
    node.use(1, 2, 3, 4)
    assert node.where(3, 4) == [3, 3]
    node.arena.close(unlink=True)


def test_failed_writes_are_spent(tmp_path: Path) -> None:
    """A disk that fails may be worn by what it refuses to confirm: that counts, so it is not written to without end; what was not
    tried costs nothing, and when the disk works and the budget lets it, blocks are written."""
    node = Places(tmp_path / "arena", 3)
    tried, write = 0, node.device.write

    def counted(items: Any) -> Any:
        nonlocal tried
        tried += len(items)
        return write(items)

    node.device.write = counted  # type: ignore[method-assign]
    node.device.fault_rate = 1.0
    for number in range(0, 40, 4):
        node.put(*range(number, number + 4))
        node.now_s += 15
        node.engine.tick()
        node.io.run()
    assert tried >= 3 and node.engine.write_budget.spent_bytes == tried * RECORD_BYTES
    assert tried * RECORD_BYTES <= node.engine.write_budget.bytes_per_day
    node.device.fault_rate = 0.0
    node.now_s += HOUR_S
    for _ in range(3):
        node.now_s += 15
        node.engine.tick()
        node.io.run()
    before = node.engine.counters.demoted
    node.put(91, 92)
    assert node.where(91, 92) == [3, 3] and node.engine.counters.demoted == before + 2
    assert node.engine.write_budget.spent_bytes == tried * RECORD_BYTES
    node.arena.close(unlink=True)


def test_a_disk_without_room_spends_nothing(tmp_path: Path) -> None:
    """Nothing was written to it."""
    node = Places(tmp_path / "arena", 3)
    write = node.device.write
    node.device.write = lambda items: [Put.NO_ROOM] * len(items)  # type: ignore[method-assign]
    node.put(1, 2, 3)
    assert node.engine.counters.demote_failed == 3 and node.engine.write_budget.spent_bytes == 0
    node.device.write = write  # type: ignore[method-assign]
    node.now_s += 15
    node.engine.tick()
    node.io.run()
    assert node.where(1, 2, 3) == [3, 3, 3] and node.engine.write_budget.spent_bytes == 3 * RECORD_BYTES
    node.arena.close(unlink=True)


def test_who_may_not_use_nvme_does_not_use_up_the_budget(tmp_path: Path) -> None:
    """A tenant without a place on NVMe is refused there; the budget is for the others."""
    node = Places(tmp_path / "arena", 3)
    other = node.engine.register(NamespaceSpec(b"b" * 16, RECORD_BYTES, 8, 16, {"tenant": "b"}))
    node.engine.retention.quota("", "b", None, 0, lambda error, rules: None)
    node.io.run()
    mine, node.space = node.space, other
    node.put(1, 2, 3, 4, 5)
    node.space = mine
    node.put(6, 7, 8)
    assert node.where(6, 7, 8) == [3, 3, 3]
    node.arena.close(unlink=True)


def test_a_long_pause_is_not_followed_by_more_than_a_day(tmp_path: Path) -> None:
    """Bytes are spent when they are written: what failed, and was written two days later, counts in the day of its write."""
    node = Places(tmp_path / "arena", 4)
    tier = node.device
    tier.fault_rate = 1.0
    node.put(1, 2, 3, 4)
    node.now_s += 30 * HOUR_S
    node.engine.tick()
    node.io.run()
    tier.fault_rate = 0.0
    node.use(1, 2, 3, 4)
    node.now_s += 100
    for _ in range(3):
        node.engine.tick()
        node.now_s += 100
        node.io.run()
    assert node.where(1, 2, 3, 4) == [3, 3, 3, 3]
    node.engine.status()
    assert node.engine.write_budget.spent_bytes == 4 * RECORD_BYTES
    node.arena.close(unlink=True)
