"""The page of a replay: sound, with every policy, and with the figures of the JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.traffic import SHAPES, as_line
from kvstore.policies.names import OURS
from kvstore.tools.cli import main
from kvstore.tools.pages import Document, replay_page
from kvstore.tools.replay.policies import BOUND, EVERYTHING, POLICIES
from kvstore.units import percent
from tests.browser import Browser, Page, in_a_browser
from tests.pages import opened, read_page, text, texts


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "a<b>&.jsonl"
    path.write_text("\n".join(map(as_line, SHAPES["chat"](1, 3000))))
    return path


def made_up(ours: tuple[float, float] = (0.3, 0.3)) -> Document:
    """A replay at two capacities, where lru hits 0.2 and 0.4."""
    ratios = {(OURS, 0.1): ours[0], (OURS, 0.2): ours[1], ("lru", 0.1): 0.2, ("lru", 0.2): 0.4}
    return {
        "trace": {"requests": 1, "block_refs": 10, "unique_blocks": 5, "block_bytes": None},
        "results": [
            {"policy": name, "capacity_blocks": 1, "capacity_fraction": fraction, "hit_ratio": ratio}
            for (name, fraction), ratio in ratios.items()
        ],
        "envelope": {"0.1": 0.2, "0.2": 0.4},
    }


def shown(browser: Browser, file: Path, document: Document) -> Page:
    """The page of a replay, in a browser."""
    file.write_text(replay_page(document, ["t"], True))
    return opened(browser, file)


def test_every_policy_has_its_sentence() -> None:
    """Whoever has never heard of a policy reads on the page what it does."""
    content = replay_page(made_up(), ["t"], False)
    assert all(f"<dt>{name}</dt><dd>" in content for name in (*POLICIES, BOUND, EVERYTHING, "envelope"))


def test_the_page_has_the_figures_of_the_document(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--html beside -o json: the same hit ratios, every policy named, names of files as text."""
    file = tmp_path / "page.html"
    assert main(["replay", str(trace), "--capacity", "5%,20%", "-o", "json", "--html", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    told = read_page(file.read_text())
    assert told["document"] == document
    assert told["traces"] == ["a<b>&.jsonl"] and told["lasted_s"] > 0


@in_a_browser
@pytest.mark.parametrize(("width", "dark"), [(1300, False), (1300, True), (820, False), (420, False)])
def test_the_page_shows_every_figure(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], browser: Browser, width: int, dark: bool
) -> None:
    """All policies at three capacities, each in the table and the plot, and names of files as text."""
    file = tmp_path / "page.html"
    assert main(["replay", str(trace), "--capacity", "2%,5%,20%", "-o", "json", "--html", str(file)]) == 0
    document = json.loads(capsys.readouterr().out)
    page = opened(browser, file, width, dark)
    rows = page.value(
        "Object.fromEntries([...document.querySelectorAll('#table-figures tbody tr')].map((row) => "
        "[row.cells[0].textContent, [...row.cells].map((one) => one.textContent)]))"
    )
    for result in document["results"]:
        assert percent(result["hit_ratio"]) in rows[result["policy"]]
    for fraction, best in document["envelope"].items():
        assert percent(best) in rows["envelope"], fraction
    assert "a<b>&.jsonl" in text(page, "#period") and "recorded in " in text(page, "#tiles")
    names = texts(page, ".legend .name")
    assert names[0] == "kvstore (ours)" and {"envelope", "belady (bound)", "infinite (bound), level"} <= set(
        names
    )
    lines = page.value("document.querySelectorAll('.plot svg .line').length")
    assert lines == len(names) == len(rows)
    assert texts(page, "#policies dt") == list(rows)


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


@in_a_browser
@pytest.mark.parametrize(
    ("policies", "lines"),
    [([OURS], ["thick"]), (["lru", BOUND], ["dashed", "dotted"]), ([BOUND], ["dotted"]), ([EVERYTHING], [])],
)
def test_a_page_of_few_policies_is_sound(
    trace: Path, tmp_path: Path, policies: list[str], lines: list[str], browser: Browser
) -> None:
    """No envelope or no bound: nothing is divided by nothing, and no line is spoken of that is not there."""
    file = tmp_path / "page.html"
    words = [word for name in policies for word in ("--policy", name)]
    for capacities, drawn in ("10%", []), ("10%,20%", lines):
        assert main(["replay", str(trace), "--capacity", capacities, *words, "--html", str(file)]) == 0
        page = opened(browser, file)
        said = text(page, "main")
        assert [line for line in ("thick", "dashed", "dotted") if f"{line} line" in said] == drawn
        assert page.value("document.querySelector('#plot').checkVisibility()") is bool(drawn)
        cards = "[...document.querySelectorAll('.card, .tile')].filter((one) => one.checkVisibility() && !one.innerText)"
        assert page.value(f"{cards}.length") == 0


def test_a_page_that_cannot_be_written_costs_no_replay(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path is looked at before the work."""
    assert main(["replay", str(trace), "--html", str(tmp_path / "none" / "x.html")]) == 3
    assert "no such directory" in capsys.readouterr().err


@in_a_browser
@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ((0.3, 0.3), "ours hits more at 10 % capacity and less at 20 % capacity."),
        ((0.2, 0.4), "ours hits as much at 10 % and 20 % capacity."),
        ((0.1, 0.1), "ours hits less at 10 % and 20 % capacity."),
    ],
)
def test_one_that_is_behind_is_said_to_be(
    browser: Browser, tmp_path: Path, ours: tuple[float, float], said: str
) -> None:
    """The sentence at the top follows the figures, in both directions, and so do the points in the table."""
    page = shown(browser, tmp_path / "page.html", made_up(ours))
    assert text(page, "#verdict") == f"Against lru {said}"
    points = [f"{100 * (one - best):+.1f}" for one, best in zip(ours, (0.2, 0.4), strict=True)]
    assert [texts(page, "#table-figures .marked td")[n] for n in (2, 4)] == points
    assert "without the partly filled last blocks" in text(page, "#period")


@in_a_browser
def test_a_capacity_can_be_pointed_at(browser: Browser, tmp_path: Path) -> None:
    """With the keyboard, too: its hit rates are in the legend, and its name is over the plot."""
    page = shown(browser, tmp_path / "page.html", made_up())
    page.value("document.querySelector('.plot svg').focus()")
    page.press("Home")
    assert text(page, ".at") == "10 %"
    values = dict(zip(texts(page, ".legend .name"), texts(page, ".legend b"), strict=True))
    assert values == {"kvstore (ours)": "30.0 %", "envelope": "20.0 %", "lru": "20.0 %"}
