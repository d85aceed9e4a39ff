"""`make demo-coldstart` as a user runs it, small: a real vLLM, real processes, moto as the S3 servers; and when it is ended early."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.coldstart.phases import Show, Stage
from tests.demo.test_demo import ROOT, demo, environment_in, in_shared_memory, is_running

SMALL = ("--size", "40MiB", "--moto")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cold_start(tmp_path: Path) -> None:
    """From NVMe, DRAM, the bucket, and another region without the first one the tokens are those of the directory, and no byte comes
    twice; what was preloaded before the kill is kept."""
    done = demo(tmp_path, *SMALL, "-o", "json", module="examples.coldstart")
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    assert (document["ok"], document["problems"], document["server"]) == (True, [], "moto")
    stages = {stage["name"]: stage for stage in document["stages"]}
    loads = {name: stage for name, stage in stages.items() if stage["tokens_equal"] is not None}
    assert len(loads) == 5 and all(stage["tokens_equal"] and stage["ready_s"] > 0 for stage in loads.values())
    weights = stages["load from NVMe"]["sources"]["disk"]
    assert 40 << 20 < weights <= document["model_bytes"]
    assert stages["load from DRAM"]["sources"] == {"DRAM": weights}
    for name in ("load from the bucket", "mirror to EU", "load from EU, NA off"):
        assert (
            weights <= stages[name]["sources"]["bucket"] <= document["model_bytes"]
            and not stages[name]["twice"]
        )
    kept = stages["preload, resumed"]["sources"]
    assert 0 < kept["there already"] < document["model_bytes"] == kept["there already"] + kept["bucket"]
    assert not list(tmp_path.glob("kvstore-*"))


def test_what_did_not_come_out_as_it_must_is_said(tmp_path: Path) -> None:
    """Other tokens, chunks that came twice though nothing was killed, bytes that came from elsewhere: a line each."""
    show = Show(tmp_path, tmp_path, 1, lambda text: None, real_server=False)
    show._add(Stage("killed", 1.0, {"bucket": 5}, twice=16, tokens_equal=True), "bucket", 16)
    assert not show.problems
    show._add(Stage("damaged", 1.0, {"bucket": 5}, twice=1, tokens_equal=False), "DRAM")
    assert [line.partition(": ")[2][:10] for line in show.problems] == [
        "the tokens",
        "1 chunks c",
        "nothing ca",
    ]


def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while an engine is being made ends all processes, and takes the directory and the shared memory away."""
    (tmp_path / "vllm.py").write_text("__import__('time').sleep(60)\n")
    command = [sys.executable, "-m", "examples.coldstart", *SMALL]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment_in(tmp_path), cwd=ROOT
    )
    assert process.stderr is not None
    while "a fresh engine" not in (line := process.stderr.readline()):
        assert line
    [directory] = tmp_path.glob("kvstore-coldstart-*")
    assert in_shared_memory(directory)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stderr.close()
    assert not directory.exists() and not in_shared_memory(directory) and not is_running(str(directory))


def test_a_size_that_is_too_small_is_said_in_one_line(tmp_path: Path) -> None:
    """Before anything is started."""
    done = demo(tmp_path, "--size", "1MiB", module="examples.coldstart")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "32 MiB is the least" in done.stderr
