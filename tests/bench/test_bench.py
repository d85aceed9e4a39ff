"""`python -m benchmarks` and `kvstore bench`: the whole of it with small sizes. No timing is judged: the machine is not ours alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.bench import PARTS as ALL_PARTS
from benchmarks.bench import plan as wide
from benchmarks.bench.figures import FIGURES
from kvstore.tools import cli
from kvstore.tools.bench import plan, runner
from kvstore.tools.bench.figures import Figure, flat, rows
from kvstore.tools.bench.machine import PACKAGES
from kvstore.tools.bench.rounds import Rounds, percentile_us
from kvstore.tools.cli.commands.bench import PARTS
from tiers.dram.pages import SHM
from tiers.errors import OpenError

MIB = 1 << 20
TINY = wide.Plan(
    block_bytes=64 << 10,
    blocks=16,
    small_block_bytes=4 << 10,
    small_blocks=256,
    arena_blocks=1024,  # 64 MiB: one slab
    dram_rounds=5,
    view_calls=5,
    lookup_calls=5,
    disk_bytes=2 * MIB,
    disk_rounds=5,
    disk_buffer_blocks=16,
    promote_groups=80,  # 80 MiB on NVMe, more than the arena holds
    promote_rounds=5,
    restart_blocks=2000,
    restart_rounds=1,
    policy_blocks=2000,
    policy_10m_blocks=0,  # the same code as with a million
    policy_operations=2000,
    rank_slabs=1,
    rank_prompts=3,
    warm_up_rounds=1,
    region_entries=2000,
    region_known_blocks=100_000,
    region_misses=200,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "QUICK", TINY)
    monkeypatch.setattr(wide, "QUICK", TINY)


@pytest.mark.usefixtures("tiny")
def test_all_figures_come_with_their_conditions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run prints every figure, its aim, and what it was measured on, and leaves no file behind."""
    parts = [word for name in ALL_PARTS for word in ("--only", name)]
    assert benchmarks.main(["--quick", "--dir", str(tmp_path), "-o", "json", *parts]) == cli.OK
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["policy_10m_skipped"] == "quick"
    for figure in FIGURES:
        if "10m" in figure.name:
            continue
        assert isinstance(document[figure.name], int | float), figure.name
        is_difference = (
            figure.name == "lookup_miss_extra_us"
        )  # of two times: a busy machine may turn it round
        assert document[figure.name] > 0 or is_difference, figure.name
        assert document.get(f"{figure.name}_aim") == figure.aim
    assert document["page_kind"] in ("hugetlb", "huge tmpfs", "4 KiB")
    for field in ("cpu", "cpus", "kernel", "filesystem", "run_s", *(f"{name}_version" for name in PACKAGES)):
        assert document[field], field
    assert document["restart_blocks"] == TINY.restart_blocks
    assert not any(isinstance(value, dict | list) for value in document.values())
    assert all(f"bench: {name}:" in output.err for name in ALL_PARTS)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("tiny")
def test_one_part_gives_its_figures_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--only lookup measures lookups and nothing else, and the table says whether the aim is met."""
    assert cli.main(["bench", "--quick", "--dir", str(tmp_path), "--only", "lookup"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert any("lookup_2048_blocks_p50_us" in line and "≤ 150" in line for line in lines)
    assert not any("nvme_write_gbps" in line or "restart" in line for line in lines)


def test_a_missing_directory_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dir that is not there costs one line and exit code 3."""
    missing = tmp_path / "missing"
    assert cli.main(["bench", "--dir", str(missing)]) == cli.NOT_FOUND
    assert capsys.readouterr().err == f"kvstore: bench: --dir {missing}: not a directory\n"


def test_a_full_disk_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where half of the free bytes is too little, the disk parts say so and write nothing."""
    from types import SimpleNamespace

    from kvstore.tools.bench import disk, promote

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    assert list(disk.measure(plan.FULL, tmp_path, tmp_path)) == ["disk_skipped"]
    assert list(promote.measure(plan.FULL, tmp_path, tmp_path)) == ["promote_skipped"]
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_there_is_said_before_it_is_touched() -> None:
    """A shared memory file system that is too small is an error in a line, not a death by SIGBUS."""
    from kvstore.tools.bench.memory import Region

    with pytest.raises(OpenError, match="iB free"):
        Region(1 << 20, 1 << 30, SHM)


def test_the_parts_of_the_command_are_those_of_the_runner() -> None:
    """--only offers exactly what can be measured, in the same order."""
    assert tuple(runner.PARTS) == PARTS


def test_a_ratio_is_the_median_of_the_rounds() -> None:
    """Two of three rounds ran at half the limit's speed: the ratio is 0.5, whatever the third did."""
    rounds = Rounds(1_000_000_000)
    rounds._seconds = {"limit": [1.0, 2.0, 4.0], "ours": [2.0, 4.0, 400.0]}
    assert rounds.ratio("ours", "limit") == 0.5
    assert rounds.gbps("limit") == 0.5
    assert rounds.gbps("ours") == 0.25


def test_a_percentile_is_one_of_the_timings() -> None:
    """Of 100 timings of 1 to 100 µs, p99 is the hundredth and p50 the fifty-first, in any order."""
    seconds = [n / 1e6 for n in range(100, 0, -1)]
    assert percentile_us(seconds, 0.99) == 100
    assert percentile_us(seconds, 0.5) == 51


def test_aims_are_met_on_their_own_side() -> None:
    """A throughput meets its aim from above, a latency from below, and what has no aim is not judged."""
    higher, lower = Figure("a", "", 0.9), Figure("b", "", 150, "lower")
    assert [higher.verdict(v) for v in (0.9, 0.89)] == ["met", "missed"]
    assert [lower.verdict(v) for v in (150, 151)] == ["met", "missed"]
    assert Figure("c", "").verdict(1.0) == ""


def test_aims_stand_beside_their_figures() -> None:
    """The document is flat, and conditions come after the figures; figures not measured are left out."""
    document = flat({"cpu": "x", "put_ratio": 0.9, "memcpy_gbps": 4.0})
    assert list(document.items()) == [
        ("memcpy_gbps", 4.0),
        ("put_ratio", 0.9),
        ("put_ratio_aim", 0.85),
        ("cpu", "x"),
    ]
    assert [line[0] for line in rows(document)] == ["memcpy_gbps", "put_ratio"]
