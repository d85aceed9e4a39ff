"""vLLM's own tests, run with ours in the place of theirs; and that such a run finds what it is for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm

from tests.running import ROOT
from tests.vllm.theirs.table import VERSIONS, Table, TableError

pytestmark = pytest.mark.vllm

VERSION = ".".join(vllm.__version__.split(".")[:2])
TREE = ROOT / f".cache/vllm-{VERSION}.0"
UTILS = "v1/kv_connector/unit/utils.py"
TIMEOUT_S = 800.0


def run(tree: Path, table: Path, out: Path) -> tuple[dict[str, Any], str]:
    """The results of their tests below `tree`, and what pytest printed."""
    if not (TREE / "tests" / UTILS).is_file():
        pytest.skip(f"the source of vLLM {VERSION} is not here: make vllm-source vllm-source-033")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.vllm.theirs.run", str(tree), str(out), "--tb=short"],
        cwd=ROOT,
        env={**os.environ, "THEIRS_TABLE": str(table)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert out.is_file(), ended.stdout[-4000:]
    results: dict[str, Any] = json.loads(out.read_text())
    assert bool(ended.returncode) == bool(results["faults"] or results["wrong"]), ended.stdout[-4000:]
    return results, ended.stdout


def test_they_pass_with_ours(tmp_path: Path) -> None:
    """Every test that the table runs passes and calls ours; every other is left out for a reason that holds."""
    table = Table(VERSION)
    results, said = run(TREE, Path(__file__).with_name("table.toml"), tmp_path / "results.json")
    assert not results["faults"] and not results["wrong"], said[-20000:]
    ran = {
        (path, re.sub(r"\[.*", "", case))
        for path, case in (name.split("::", 1) for name in results["passed"])
    }
    assert ran == {
        (path, re.sub(r"\[.*", "", test)) for (path, test), entry in table.entries.items() if not entry.why
    }


THEIRS = """
from unittest.mock import Mock

import pytest
from .utils import create_request, create_scheduler, create_vllm_config, create_model_runner_output

def loader():
    return create_scheduler(create_vllm_config(), num_blocks=100)

def ask(scheduler, tokens=40, **more):
    request = create_request(num_tokens=tokens, block_size=16, **more)
    scheduler.add_request(request)
    return request, scheduler.schedule()

def test_loads():
    scheduler = loader()
    request, _ = ask(scheduler, do_remote_prefill=True)
    assert request.num_computed_tokens == 32

def test_calls_nothing():
    loader()

def test_hides_a_bug():
    scheduler = loader()
    scheduler.connector._scheduler.matched_tokens = None
    ask(scheduler)

def test_says_what_ours_cannot():
    scheduler = loader()
    scheduler.connector.get_num_new_matched_tokens = Mock(return_value=(7, True))
    ask(scheduler)

def test_skips_itself():
    pytest.skip("not today")

@pytest.mark.parametrize("tokens", [40, 72])
def test_is_left_out_and_works(tokens):
    ask(loader(), tokens)

def test_is_left_out_and_fails():
    assert False

def test_is_not_in_the_table():
    pass
"""

TABLE = f"""
[reasons]
because = "because it was left out"
[[module]]
path = "v1/kv_connector/unit/test_made_up.py"
run = [
    "test_loads", "test_calls_nothing", "test_hides_a_bug", "test_says_what_ours_cannot", "test_skips_itself",
    "test_is_left_out_and_works[72]", "test_of_yesterday {VERSION}", "test_of_another_version {{other}}",
]
[[module.left_out]]
why = "because"
tests = ["test_is_left_out_and_works", "test_is_left_out_and_fails"]
"""


def test_a_run_finds_what_is_wrong(tmp_path: Path) -> None:
    """A test fails the run that says nothing of ours, whose bug of ours was kept from vLLM, that was skipped, that works
    though it is left out, or that nobody has decided about."""
    unit = tmp_path / "tests/v1/kv_connector/unit"
    unit.mkdir(parents=True)
    for folder in (unit, *list(unit.parents)[:3]):
        (folder / "__init__.py").touch()
    if (TREE / "tests" / UTILS).is_file():
        (unit / "utils.py").symlink_to(TREE / "tests" / UTILS)
    (unit / "test_made_up.py").write_text(THEIRS)
    (unit / "test_undecided.py").write_text("from vllm.config import KVTransferConfig\n")
    table = tmp_path / "table.toml"
    (other,) = set(VERSIONS) - {VERSION}
    table.write_text(TABLE.replace("{other}", other))
    results, _ = run(tmp_path, table, tmp_path / "results.json")
    wrong = {name.split("::")[1]: why for name, why in results["wrong"].items()}
    assert set(results["passed"]) == {
        "v1/kv_connector/unit/test_made_up.py::" + name
        for name in ("test_loads", "test_is_left_out_and_works[40]", "test_is_left_out_and_works[72]")
    }
    assert wrong.pop("test_calls_nothing") == "objected: no hook of ours was called"
    assert "ours failed" in (why := wrong.pop("test_hides_a_bug")) and "not callable" in why
    assert "ours answers (0, False), the test's connector (7, True)" in wrong.pop(
        "test_says_what_ours_cannot"
    )
    assert wrong.pop("test_skips_itself").startswith("skipped:")
    assert wrong.pop("test_is_left_out_and_works[40]").startswith("passes with ours, and is left out:")
    assert not wrong
    first, second, third = sorted(results["faults"])
    assert "test_is_not_in_the_table is not in the table" in first
    assert "test_of_yesterday is in the table, and vLLM has no such test" in second
    assert "test_undecided.py is not in the table" in third


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"test_a"', '"test_a", "test_a"', "test_a stands there twice"),
        ('why = "because"', 'why = "whim"', "left out for whim, which is no reason"),
        ('["test_b"]', '["test_b 0.99"]', "must be one of 0.32, 0.33"),
        ("[reasons]", '[reasons]\nunused = "nothing"', "nothing is left out for unused"),
    ],
)
def test_a_table_that_is_not_well_formed(tmp_path: Path, before: str, after: str, said: str) -> None:
    """What the table says twice, for no reason, of no version or for nobody is an error that names it."""
    text = '[reasons]\nbecause = "it is so"\n[[module]]\npath = "test_x.py"\nrun = ["test_a"]\n'
    text += '[[module.left_out]]\nwhy = "because"\ntests = ["test_b"]\n'
    path = tmp_path / "table.toml"
    path.write_text(text)
    assert Table(VERSION, path).entries[("test_x.py", "test_b")].why == "it is so"
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(TableError, match=said):
        Table(VERSION, path)


def test_the_documents_count_what_the_table_says() -> None:
    """docs/vllm.md says how many of vLLM's own tests run with ours, of each version."""
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    counts = []
    for version in VERSIONS:
        entries = Table(version).entries
        tests = {(path, test.split("[")[0]) for path, test in entries}
        run = {(path, test.split("[")[0]) for (path, test), entry in entries.items() if not entry.why}
        counts.append(f"{len(run)} of {len(tests)} of {version}")
    assert " and ".join(counts) in text.replace("\n", " "), counts
