"""`make demo-regions`, small and fast: real processes, moto, and what the report says."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import pytest

from benchmarks.regions import __main__ as command
from benchmarks.regions import report, workload
from benchmarks.regions.phases import Show
from benchmarks.regions.serving import TooLate
from kvstore.errors import ReplayError

SPEED = 10.0


def test_made_up_conversations_are_like_recorded_ones() -> None:
    """About a third of the blocks were asked for before, three quarters of them are asked for once, and a seed is a workload."""
    prompts = workload.conversations(command.SEED, command.DURATION_S, command.ARRIVALS_PER_S)
    figures = workload.figures(prompts)
    assert 0.30 < figures.seen_share < 0.45 and 0.70 < figures.once_share < 0.85
    assert prompts == workload.conversations(command.SEED, command.DURATION_S, command.ARRIVALS_PER_S)
    assert prompts != workload.conversations(command.SEED + 1, command.DURATION_S, command.ARRIVALS_PER_S)


def test_recorded_requests_keep_their_blocks(tmp_path: Path) -> None:
    """Equal ids are equal blocks, in both halves; what is no trace is refused with file and line."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1000, "hash_ids": [1, 2]}\n{"timestamp": 3500, "hash_ids": [1, 3]}\n')
    first, second = workload.halves(workload.recorded(trace))
    assert [prompt.at_s for prompt in first + second] == [0.0, 0.0]
    assert first[0].hashes[0] == second[0].hashes[0] and first[0].hashes[1] != second[0].hashes[1]
    assert {len(block_hash) for prompt in first + second for block_hash in prompt.hashes} == {32}
    trace.write_text('{"timestamp": 1000, "hash_ids": [1, 2]}\nno trace\n')
    with pytest.raises(ReplayError, match=r"trace\.jsonl:2"):
        workload.recorded(trace)


def test_a_machine_that_does_not_keep_up_is_given_half_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, down to real time, and then it goes on however late it is; a speed that was asked for stays."""
    tried: list[tuple[float, bool]] = []

    def show(args: argparse.Namespace, prompts: object, late_s_max: float) -> int:
        tried.append((args.speed, math.isfinite(late_s_max)))
        if math.isfinite(late_s_max):
            raise TooLate(3.0)
        return 0

    monkeypatch.setattr(command, "_show", show)
    assert command.main(["--moto"]) == 0 and command.main(["--speed", "7"]) == 0
    assert tried == [(5, True), (2, True), (1, False), (7, False)]


def test_who_is_late_stops(tmp_path: Path) -> None:
    """With the first prompt that is later than may be; nothing of it stays behind."""
    prompts = workload.conversations(seed=3, duration_s=60.0, arrivals_per_s=0.5)
    halves = workload.halves(prompts)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arenas, pytest.raises(TooLate):
        Show(
            tmp_path, Path(arenas), halves, SPEED, lambda text: None, real_server=False, late_s_max=-1.0
        ).carry_out()


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """A new cluster in EU has from the bucket of EU what NA computed, every byte of it right, with NA switched off."""
    prompts = workload.conversations(seed=3, duration_s=240.0, arrivals_per_s=0.5)
    said: list[str] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as arenas:
        shown = Show(
            tmp_path, Path(arenas), workload.halves(prompts), SPEED, said.append, real_server=False
        ).carry_out()
    found = report.document("made up", workload.figures(prompts), SPEED, shown, 1.0)
    runs = {row["run"]: row for row in found["runs"]}
    assert list(runs) == ["cold", "durable", "everything"]
    assert all(row["wrong_blocks"] == 0 for row in runs.values())
    assert (
        runs["everything"]["hit_share_all"]
        >= runs["durable"]["hit_share_all"]
        > runs["cold"]["hit_share_all"]
    )
    assert runs["everything"]["gain_share_all"] == 1.0 and runs["cold"]["gain_share_all"] == 0.0
    sizes = {(row["deployment"], row["region"]): row["pack_bytes"] for row in found["buckets"]}
    assert sizes["everything", "na"] == sizes["everything", "eu"] >= sizes["durable", "eu"] > 0
    mirrors = {(row["deployment"], row["region"]): row for row in found["mirrors"]}
    assert set(mirrors) == {("durable", "eu"), ("durable", "apac"), ("everything", "eu")}
    for at, row in mirrors.items():
        assert row["source"] == "na" and row["failed"] == row["lost"] == 0
        if at[0] != "durable":  # whose keepers are killed: in these few seconds nobody takes over
            assert row["copied_bytes"] > 0, row
            assert 0 <= row["lag_p50_s"] <= row["lag_p99_s"] <= row["lag_max_s"]
    assert {row["region"] for row in found["keepers"]} == {"na", "eu"}
    report.print_report(found)
    assert any("NA is switched off" in line for line in said)
