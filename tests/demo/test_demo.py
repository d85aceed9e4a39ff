"""`make demo` as a user runs it: the whole of it once, and then with an engine that is broken.

The broken engines are a module named vllm that shadows the real one. Daemon, processes and
judgement are the real ones, so these runs need no model and take a second each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import read_page

ROOT = Path(__file__).parents[2]
PHASES = ["cold", "engine restart", "daemon kill -9", "arena lost", "corrupt block", "prefill, decode"]

FAKE_VLLM = """
import os
from types import SimpleNamespace as Space

class SamplingParams:
    def __init__(self, **settings):
        self.settings = settings

class LLM:
    def __init__(self, **settings):
        core = Space(step_fn=None, scheduler=Space(has_requests=lambda: False))
        self.llm_engine = Space(engine_core=Space(engine_core=core, shutdown=lambda: None))

    def get_metrics(self):
        return []

    def generate(self, prompts, params, use_tqdm):
        tokens = TOKENS
        return [Space(prompt_token_ids=[1] * 64, num_cached_tokens=0, metrics=Space(first_token_latency=0.001),
                      outputs=[Space(token_ids=tokens)])]
"""


def demo(directory: Path, *arguments: str, module: str = "examples.demo") -> subprocess.CompletedProcess[str]:
    """Run the command with its files in `directory`, where a vllm.py shadows the installed one."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment_in(directory),
        cwd=ROOT,
    )


def environment_in(directory: Path) -> dict[str, str]:
    """Ours, with this directory's modules first, and temporary files there."""
    return {**os.environ, "PYTHONPATH": str(directory), "TMPDIR": str(directory)}


def in_shared_memory(directory: Path) -> list[Path]:
    """What the run in that directory keeps in shared memory."""
    return list(Path("/dev/shm").glob(f"{directory.name}-*"))


def is_running(word: str) -> bool:
    """Whether a process has this word in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if word in path.read_text():
                return True
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The real demo, once, as `python -m examples.demo -o json` prints it; "page" is what --html wrote."""
    directory = tmp_path_factory.mktemp("demo")
    done = demo(directory, "-o", "json", "--html", str(directory / "page.html"))
    assert done.returncode == 0, done.stderr[-4000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "page": (directory / "page.html").read_text()}


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_every_phase_gives_the_cold_output(whole: dict[str, Any]) -> None:
    """All six phases run, in order, and no output token differs from the cold run's."""
    assert [phase["name"] for phase in whole["phases"]] == PHASES
    assert all(phase["outputs_equal"] for phase in whole["phases"])
    assert whole["ok"] is True
    assert whole["problems"] == []


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_hits_come_from_the_tier_that_is_left(whole: dict[str, Any]) -> None:
    """Cold has none; a restart of engine or daemon hits DRAM only; without its arena NVMe only."""
    cold, engine, daemon, arena, _, decode = whole["phases"]
    assert set(cold["cached_tokens"].values()) == {0}
    for phase in (engine, daemon, decode):
        assert phase["cached_tokens"]["dram"] > 0.9 * phase["prompt_tokens"], phase
        assert phase["cached_tokens"]["nvme"] == 0, phase
    assert arena["cached_tokens"]["nvme"] > 0.9 * arena["prompt_tokens"], arena
    assert arena["cached_tokens"]["dram"] == 0, arena


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_damaged_record_is_a_counted_miss(whole: dict[str, Any]) -> None:
    """The damaged block is counted once, and fewer tokens come from NVMe than without the damage."""
    arena, corrupt = whole["phases"][3], whole["phases"][4]
    assert [phase["corrupt_blocks"] for phase in whole["phases"]] == [0, 0, 0, 0, 1, 0]
    assert 0 < corrupt["cached_tokens"]["nvme"] < arena["cached_tokens"]["nvme"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_document_has_the_promised_fields(whole: dict[str, Any]) -> None:
    """Each phase carries every field of the contract, with sane figures."""
    for phase in whole["phases"]:
        assert set(phase) >= {"name", "prompt_tokens", "cached_tokens", "ttft_ms", "outputs_equal"}
        assert set(phase["cached_tokens"]) == {"dram", "nvme"}
        assert phase["prompt_tokens"] == whole["phases"][0]["prompt_tokens"] > 3 * 1024
        assert 0 < phase["ttft_ms"] < 60_000


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_report_of_the_phases_is_a_page(whole: dict[str, Any]) -> None:
    """--html: the table, then what the daemon's books say of the phases, with hits in both tiers."""
    page = read_page(whole["page"])
    assert [row[0] for row in page["first"]["rows"]] == PHASES
    outcomes = page["document"]["totals"]["outcomes"]
    assert outcomes["dram"] > 0 and outcomes["nvme"] > 0


def test_an_engine_that_cannot_be_imported_fails_the_demo(tmp_path: Path) -> None:
    """The exit code is 1, the reason is in the document, and nothing stays in shared memory."""
    (tmp_path / "vllm.py").write_text("raise ImportError('broken on purpose')\n")
    done = demo(tmp_path, "-o", "json", "--keep")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["ok"] is False
    assert "broken on purpose" in document["problems"][0]
    [directory] = tmp_path.glob("kvstore-demo-*")
    assert not in_shared_memory(directory)


def test_outputs_that_differ_fail_the_demo(tmp_path: Path) -> None:
    """An engine that answers something else in every process is found out."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("TOKENS", "[os.getpid()]"))
    done = demo(tmp_path, "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert [phase["outputs_equal"] for phase in document["phases"][:2]] == [True, False]
    assert "engine restart: the output is not that of the cold run" in document["problems"]


def test_a_warm_phase_without_hits_fails_the_demo(tmp_path: Path) -> None:
    """Equal outputs alone do not pass: the tokens must have come from the cache."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("TOKENS", "[7, 7]"))
    done = demo(tmp_path, "-o", "json")
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert document["phases"][1]["outputs_equal"] is True
    assert "engine restart: no tokens came from dram" in document["problems"]


def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM in the middle ends daemon and engines, and takes the arena and the directory away."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("TOKENS", "__import__('time').sleep(60)"))
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.demo"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment_in(tmp_path),
        cwd=ROOT,
    )
    assert process.stderr is not None
    assert "cold" in process.stderr.readline()
    [directory] = tmp_path.glob("kvstore-demo-*")
    assert in_shared_memory(directory)
    assert is_running(str(directory))
    process.terminate()
    assert process.wait(60) == 130
    process.stderr.close()
    assert not directory.exists()
    assert not in_shared_memory(directory)
    assert not is_running(str(directory))


def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    """A wrong --model stops before anything is started, with exit code 3 and one line."""
    done = demo(tmp_path, "--model", str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert str(tmp_path) in done.stderr
    assert "config.json" in done.stderr
