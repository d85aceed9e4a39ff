"""The budget on disk: no kill makes it larger, and a clean stop costs nothing of it."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.constants import DAY_S, HOUR_S
from kvstore.health.write_budget import WRITE_BUDGET_STRETCH_SHARE, WriteBudget
from kvstore.health.write_budget_file import WriteBudgetFile
from tests.engine.fakes import SteppedIo
from tests.engine.test_write_budget import most_in_a_day

BLOCK_BYTES = 1000
BUDGET_BYTES = 200 * BLOCK_BYTES
BURST_BYTES = BUDGET_BYTES * HOUR_S / (DAY_S + HOUR_S)


class Daemons:
    """One after another over the same file. Each has a clock of its own; the wall clock goes on."""

    def __init__(self, path: Path, budget_bytes: int = BUDGET_BYTES) -> None:
        self.path = path
        self.budget_bytes = budget_bytes
        self.wall_s = 1_700_000_000.0
        self.written: list[tuple[float, int]] = []  # what really went to the disk, and when
        self.promised = 0  # blocks let in and not written yet
        self.start()

    def start(self) -> None:
        self.booted_s = self.wall_s - random.Random(int(self.wall_s)).random() * 1e6
        self.io = SteppedIo()
        self.promised = 0
        booted_s = self.booted_s
        self.file = WriteBudgetFile(
            self.path, lambda: self.wall_s - booted_s, lambda: self.wall_s, f"{booted_s}"
        )
        self.write_budget: WriteBudget = self.file.open(self.budget_bytes)

    def stop(self) -> None:
        self.write(self.promised)
        self.io.run()
        self.file.close(self.write_budget)
        self.start()

    def offer(self) -> bool:
        if not self.write_budget.admits(1.0, BLOCK_BYTES):
            return False
        self.promised += 1
        return True

    def write(self, blocks: int) -> None:
        for _ in range(min(blocks, self.promised)):
            self.promised -= 1
            self.write_budget.wrote(BLOCK_BYTES)
            self.written.append((self.wall_s, BLOCK_BYTES))

    def tick(self, how_far: str = "tick") -> None:
        """The file is to be written; perhaps it is; perhaps it is known that it was."""
        self.file.keep(self.write_budget, self.io)
        if how_far == "tick":
            self.io.run()
        elif how_far == "written" and self.io.waiting:
            self.io.half_step()


@pytest.fixture
def daemons(tmp_path: Path) -> Daemons:
    return Daemons(tmp_path / "write_budget.json")


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.floats(0.1, 3 * HOUR_S),
            st.integers(0, 40),  # offers
            st.integers(0, 40),  # writes that end
            st.sampled_from(["", "tick", "tick", "asked for", "written", "stop", "kill"]),
        ),
        min_size=1,
        max_size=80,
    )
)
def test_no_day_exceeds_the_budget_whoever_is_killed(steps: list[tuple[float, int, int, str]]) -> None:
    """Bursts, pauses, stops, and kills between any two steps, also while the file is being written."""
    with tempfile.TemporaryDirectory() as directory:
        daemons = Daemons(Path(directory) / "write_budget.json")
        for pause_s, offers, writes, event in steps:
            daemons.wall_s += pause_s
            for _ in range(offers):
                daemons.wall_s += 0.5
                daemons.offer()
            daemons.write(writes)
            if event == "kill":  # what was let in may have reached the disk
                daemons.written += [(daemons.wall_s, BLOCK_BYTES)] * daemons.promised
                daemons.start()
            elif event == "stop":
                daemons.stop()
            elif event:
                daemons.tick(event)
        assert most_in_a_day(daemons.written) <= BUDGET_BYTES


def test_kills_in_a_row_spend_what_is_written_ahead_only(daemons: Daemons) -> None:
    """Sixty starts, in each as much as it can: together no more than the day's budget."""
    for _ in range(60):
        while daemons.offer():
            daemons.write(1)
        daemons.wall_s += 1
        daemons.start()
    assert most_in_a_day(daemons.written) <= BUDGET_BYTES
    assert len(daemons.written) > 0.9 * BUDGET_BYTES / BLOCK_BYTES
    assert not daemons.offer()
    daemons.wall_s += DAY_S + HOUR_S
    daemons.start()
    assert daemons.offer()


def test_a_clean_stop_gives_back_what_was_written_ahead(daemons: Daemons) -> None:
    """Of many stops nothing is lost; of a kill no more than what was ahead."""
    for _ in range(10):
        daemons.stop()
    assert daemons.write_budget.spent_bytes == 0
    daemons.offer()
    daemons.stop()
    assert daemons.write_budget.spent_bytes == BLOCK_BYTES
    daemons.start()
    ahead_bytes = daemons.write_budget.spent_bytes - BLOCK_BYTES
    assert 0 < ahead_bytes <= BURST_BYTES * WRITE_BUDGET_STRETCH_SHARE + 1


def test_a_budget_that_is_written_in_time_is_all_used(daemons: Daemons) -> None:
    """With a tick a minute, the file costs nothing of a day's budget."""
    for _ in range(24 * 60):
        daemons.wall_s += 60
        daemons.offer()
        daemons.write(1)
        daemons.tick()
    assert 0.9 * BUDGET_BYTES < most_in_a_day(daemons.written) <= BUDGET_BYTES


def test_nothing_is_let_in_while_the_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once; when the disk has room again, so has the budget."""
    home = tmp_path / "gone"
    daemons = Daemons(home / "write_budget.json")
    for _ in range(3):
        daemons.tick()
        assert not daemons.offer()
    assert caplog.text.count("cannot be") == 1
    home.mkdir()
    daemons.tick()
    assert daemons.offer()


def test_a_damaged_file_counts_as_a_budget_spent(daemons: Daemons, caplog: pytest.LogCaptureFixture) -> None:
    """It is put aside; a day later there is a budget again."""
    daemons.path.write_bytes(b'{"spent": "much"}')
    daemons.start()
    assert "not known" in caplog.text and daemons.path.with_suffix(".unreadable").exists()
    assert not daemons.offer()
    daemons.wall_s += DAY_S + HOUR_S
    daemons.tick()
    assert daemons.offer()


def test_a_wall_clock_that_is_set_back_forgets_nothing(daemons: Daemons) -> None:
    """What was spent in a future that is no more counts as spent now."""
    while daemons.offer():
        daemons.write(1)
    spent_bytes = daemons.write_budget.spent_bytes
    daemons.stop()
    daemons.wall_s -= 10 * DAY_S
    daemons.start()
    assert daemons.write_budget.spent_bytes >= spent_bytes


@pytest.mark.parametrize("set_s", [-3 * DAY_S, 3 * DAY_S])
def test_a_wall_clock_that_is_set_gives_no_second_budget(tmp_path: Path, set_s: float) -> None:
    """Started again in the same boot, a daemon goes by the clock that nobody sets."""
    wall_s = 1_700_000_000.0
    file = WriteBudgetFile(tmp_path / "budget.json", lambda: 500.0, lambda: wall_s, "this boot")
    budget = file.open(BUDGET_BYTES)
    budget.wrote(10 * BLOCK_BYTES, was_promised=False)
    file.close(budget)
    wall_s += set_s
    for now_s, spent in ((600.0, 10), (600.0 + DAY_S + HOUR_S, 0)):
        again = WriteBudgetFile(tmp_path / "budget.json", partial(float, now_s), lambda: wall_s, "this boot")
        budget = again.open(BUDGET_BYTES)
        budget.allowance_bytes(now_s)
        assert budget.spent_bytes == spent * BLOCK_BYTES
        again.close(budget)


def test_without_a_budget_there_is_no_file(tmp_path: Path) -> None:
    """0 is no limit, and nothing is written about it."""
    daemons = Daemons(tmp_path / "write_budget.json", 0)
    assert all(daemons.offer() for _ in range(1000))
    daemons.tick()
    daemons.stop()
    assert not list(tmp_path.iterdir())
