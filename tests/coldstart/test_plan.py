"""Plans: arithmetic against figures that were seen, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldstart.fleet import rates
from coldstart.fleet.plan import Machines, Plan, Ready, Stage, plan
from kvstore.units import format_rate, parse_rate
from tests.running import kvstore

R1_BYTES = 688_600_000_000
WORDS = ("--size", "640GiB", "--nic", "100Gbps", "--nvme", "14GBps", "--store", "200Gbps")


def stage(planned: Plan, name: str) -> Stage:
    (found,) = (stage for stage in planned.stages if stage.name == name)
    return found


def ready(planned: Plan, place: str, cache_hit: bool) -> Ready:
    (found,) = (one for one in planned.ready if (one.place, one.cache_hit) == (place, cache_hit))
    return found


def one_node(nic: str, nvme: str = "100GBps", nodes: int = 1) -> Machines:
    return Machines(nodes, 8, parse_rate(nvme), parse_rate("10Tbps"), parse_rate(nic))


@pytest.mark.parametrize(("nic", "seen_s"), [("100Gbps", 69), ("200Gbps", 34), ("400Gbps", 17)])
def test_what_was_seen_of_networks_comes_out(nic: str, seen_s: float) -> None:
    """DeepSeek-R1 through one card, as it was seen of 100, 200 and 400 Gb/s."""
    fetch = stage(plan(R1_BYTES, one_node(nic)), "bucket to NVMe")
    assert fetch.seconds == pytest.approx(seen_s, rel=0.03)
    assert fetch.limit == "network card"


@pytest.mark.parametrize(("nvme", "seen_s"), [("14GBps", 55), ("28GBps", 27), ("56GBps", 14)])
def test_what_was_seen_of_drives_comes_out(nvme: str, seen_s: float) -> None:
    """The same from two, four and eight drives of 7 GB/s, which were read without being verified: within a ninth."""
    load = stage(plan(R1_BYTES, one_node("400Gbps", nvme)), "NVMe to devices")
    assert load.seconds == pytest.approx(seen_s, rel=0.11)
    assert load.limit == ("NVMe" if seen_s > 14 else load.limit)


def test_dram_to_eight_devices_is_12_to_15_s() -> None:
    """As it was seen of the same model."""
    assert 12 <= stage(plan(R1_BYTES, one_node("400Gbps")), "DRAM to devices").seconds <= 15


def test_nodes_share_the_store() -> None:
    """Ten times the nodes take ten times as long once the store is what limits, and cost as many copies."""
    few, many = (plan(R1_BYTES, Machines(nodes, 8, 1e12, 25e9, 12.5e9)) for nodes in (10, 100))
    assert stage(many, "bucket to NVMe").seconds == pytest.approx(10 * stage(few, "bucket to NVMe").seconds)
    assert stage(many, "bucket to NVMe").limit == "store, shared by 100 nodes"
    assert many.bucket_bytes == 100 * R1_BYTES


def test_what_is_ready_is_the_sum_of_its_stages() -> None:
    """Loading while it is fetched costs the longer of both, and a cache that hits saves the compilation."""
    planned = plan(R1_BYTES, one_node("100Gbps", "14GBps"))
    fetch, load = stage(planned, "bucket to NVMe").seconds, stage(planned, "NVMe to devices").seconds
    start, compiling = stage(planned, "engine start").seconds, stage(planned, "compile").seconds
    assert ready(planned, "bucket", True).seconds == pytest.approx(fetch + load + start)
    assert ready(planned, "bucket, loading meanwhile", True).seconds == pytest.approx(
        max(fetch, load) + start
    )
    assert ready(planned, "nvme", False).seconds == pytest.approx(load + start + compiling)
    assert ready(planned, "nvme", False).bottleneck.startswith("compile")
    assert "compile" not in ready(planned, "dram", True).stages


def test_rates_are_read_as_data_sheets_write_them() -> None:
    """A small b is a bit, a large one a byte; decimal unless it says otherwise."""
    assert parse_rate("100Gbps") == parse_rate("12.5 GB/s") == parse_rate("12.5GBps") == 12.5e9
    assert parse_rate("1MiB/s") == 1 << 20
    assert format_rate(parse_rate("100Gbps")) == "12.5 GB/s" and format_rate(999_900_000) == "1 GB/s"
    for wrong in ("100", "100G", "7GB", "Gbps", "-1Gbps", "1e9B/s"):
        with pytest.raises(ValueError, match="not a rate"):
            parse_rate(wrong)


def test_the_command_plans_for_a_size() -> None:
    """Without a bucket: a table for people, the same figures for programs, and options that replace constants."""
    shown = kvstore("model", "plan", *WORDS, "--nodes", "50", "--devices", "8")
    assert shown.returncode == 0, shown.stderr
    assert "store, shared by 50 nodes" in shown.stdout and "31.2 TiB read from the bucket" in shown.stdout
    told = kvstore("model", "plan", *WORDS, "--start", "10s", "--compile", "2min", "-o", "json")
    document = json.loads(told.stdout)
    seconds = {one["name"]: one["seconds"] for one in document["stages"]}
    assert seconds["engine start"] == 10 and seconds["compile"] == 120
    assert document["size_bytes"] == 640 << 30 and document["machines"]["nic"] == 12.5e9


def test_a_machine_is_measured(tmp_path: Path) -> None:
    """Disk and memory are, where no option says them, and nothing is left on the disk."""
    words = ("--size", "1GiB", "--nic", "10Gbps", "--store", "10Gbps", "--measure", "--directory", tmp_path)
    told = kvstore("model", "plan", *words, "-o", "json")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert set(document["measured"]) == {"memory", "nvme"}
    assert document["machines"]["nvme"] == document["measured"]["nvme"] > 1e6
    assert not list(tmp_path.iterdir())


def test_measuring_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control-C in the middle of a copy is Control-C, and no error about the memory that is given back."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rates, "copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rates.memory_rate()


def test_a_directory_that_is_not_there() -> None:
    """One line without Python's words, exit code 3."""
    ended = kvstore("model", "plan", *WORDS[:-4], *WORDS[-2:], "--measure", "--directory", "/nowhere")
    said = "kvstore: model plan: --directory /nowhere: No such file or directory\n"
    assert (ended.returncode, ended.stderr) == (3, said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "1GiB"], "--nic, --nvme, --store: say it"),
        ([], "NAME or --size"),
        (["a", "--size", "1GiB"], "NAME or --size"),
        ([*WORDS, "--nic", "100Gb"], "not a rate"),
        ([*WORDS, "--nodes", "0"], "whole numbers from 1 to"),
        ([*WORDS, "--measure"], ""),
        ([*WORDS, "--directory", "/"], "is for --measure"),
        (
            ["--size", "1GiB", "--measure", "--directory", "/nowhere"],
            "--nic, --store: say it",
        ),  # and before it measures
        ([*WORDS, "--start", "2d"], "allowed are"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(words: list[str], said: str) -> None:
    """It says what is allowed; measuring memory alone is right."""
    ended = kvstore("model", "plan", *words)
    if not said:
        assert ended.returncode == 0 and "measured: memory" in ended.stdout
        return
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert said in ended.stderr
