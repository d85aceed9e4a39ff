"""The page of a replay: sound, with every policy, and with the figures of the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.traffic import SHAPES, as_line
from kvstore.cli import main
from kvstore.pages.replay import POLICIES as TOLD
from kvstore.pages.replay import ratios_of, replay_page
from kvstore.policies.names import OURS
from kvstore.replay.policies import BOUND, EVERYTHING, POLICIES
from kvstore.units import percent
from tests.pages import read_page


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a<b>&.jsonl"
    path.write_text("\n".join(map(as_line, SHAPES["chat"](1, 3000))))
    return path


def test_every_policy_has_its_sentence() -> None:
    """Whoever has never heard of a policy reads on the page what it does."""
    assert set(TOLD) >= {*POLICIES, BOUND, EVERYTHING, "envelope"}


def test_the_page_has_the_figures_of_the_document(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--html beside -o json: the same hit ratios, every policy named, names of files as text."""
    file = tmp_path / "page.html"
    assert main(["replay", str(trace), "--capacity", "5%,20%", "-o", "json", "--html", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    page = read_page(file.read_text())
    for result in document["results"]:
        assert percent(result["hit_ratio"]) in page.texts and result["policy"] in page.texts
    assert any("a<b>&.jsonl" in text for text in page.texts)
    assert any(text.startswith("recorded in ") for text in page.texts)
    for name in ("kvstore (ours)", "belady (bound)", "infinite (bound), level"):
        assert page.texts.count(name) == 1  # in the legend


def test_several_policies_in_one_option(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--policy takes names with commas and may be repeated; an unknown one is one line and exit code 2."""
    words = ["replay", str(trace), "--capacity", "10%", "-o", "json"]
    assert main([*words, "--policy", "lru, kvstore", "--policy", "lfu"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["policy"] for result in results] == ["kvstore", "lru", "lfu"]
    for wrong, said in (("lru,moon", "moon"), ("lru,", "(nothing)")):
        assert main([*words, "--policy", wrong]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith(f"kvstore: replay: --policy {said}: known are all, kvstore, lru, ")
        assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("policies", "lines"),
    [([OURS], ["thick"]), (["lru", BOUND], ["dashed", "dotted"]), ([BOUND], ["dotted"]), ([EVERYTHING], [])],
)
def test_a_page_of_few_policies_is_sound(
    trace: Path, tmp_path: Path, policies: list[str], lines: list[str]
) -> None:
    """No envelope or no bound: nothing is divided by nothing, and no line is spoken of that is not there."""
    file = tmp_path / "page.html"
    words = [word for name in policies for word in ("--policy", name)]
    for capacities, drawn in ("10%", []), ("10%,20%", lines):
        assert main(["replay", str(trace), "--capacity", capacities, *words, "--html", str(file)]) == 0
        texts = " ".join(read_page(file.read_text()).texts)
        assert [line for line in ("thick", "dashed", "dotted") if f"{line} line" in texts] == drawn


def test_a_page_that_cannot_be_written_costs_no_replay(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is looked at before the work."""
    assert main(["replay", str(trace), "--html", str(tmp_path / "none" / "x.html")]) == 3
    assert "no such directory" in capsys.readouterr().err


def test_one_that_is_behind_is_said_to_be() -> None:
    """The sentence at the top follows the figures, in both directions."""
    document = {
        "trace": {"requests": 1, "block_refs": 10, "unique_blocks": 5},
        "results": [
            {"policy": name, "capacity_blocks": 1, "capacity_fraction": fraction, "hit_ratio": ratio}
            for name, fraction, ratio in (
                (OURS, 0.1, 0.3),
                (OURS, 0.2, 0.3),
                ("lru", 0.1, 0.2),
                ("lru", 0.2, 0.4),
            )
        ],
        "envelope": {"0.1": 0.2, "0.2": 0.4},
    }
    content = replay_page(document, ["t"], True)
    assert "ours hits more at 10 % capacity and less at 20 % capacity." in content
    assert ratios_of(document)["envelope"] == {0.1: 0.2, 0.2: 0.4}
