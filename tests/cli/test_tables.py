"""Tables fit the terminal: words stay whole at 80 columns, and at 60 the least important columns go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvstore.client import Client
from kvstore.tools.cli.output import CELL_BORDER, WORD_WIDTH_MIN, Figure, fitted, print_table
from tests.cli.terminal import on_terminal
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]
MODEL = "meta-llama/Llama-3.1-70B-Instruct"


@pytest.mark.parametrize("seed", range(100))
def test_columns_are_left_out_before_words_are_broken(seed: int) -> None:
    """Whatever a table has: it is never wider than the room; no column is narrower than its longest word while one of
    those that may go is shown; and those that may go do so in their order."""
    chance = random.Random(seed)

    def cell() -> str:
        return " ".join("x" * chance.randrange(1, 16) for _ in range(chance.randrange(1, 5)))

    names = [f"c{n} {'y' * chance.randrange(1, 9)}" for n in range(chance.randrange(1, 9))]
    rows = [[cell() for _ in names] for _ in range(chance.randrange(4))]
    drop = chance.sample(names[1:], chance.randrange(len(names)))
    room = chance.choice((40, 60, 80, 200))
    widths = fitted(names, rows, room, drop)
    used = sum(width + CELL_BORDER for width in widths.values()) + 1
    words = {
        n: max(len(w) for text in [names[n], *(row[n] for row in rows)] for w in text.split()) for n in widths
    }
    lines = {n: max(len(text) for text in [names[n], *(row[n] for row in rows)]) for n in widths}
    gone = [n for n in range(len(names)) if n not in widths]
    assert {names[n] for n in gone} == set(drop[: len(gone)])
    assert all(width <= lines[n] for n, width in widths.items())
    if len(gone) < len(drop):
        assert all(width >= words[n] for n, width in widths.items())
    narrow = (WORD_WIDTH_MIN + CELL_BORDER) * len(widths) + 1
    assert used <= max(room, narrow)
    if room == 200 and sum(map(len, names)) + sum(lines.values()) + 4 * len(names) < 200:
        assert widths == lines  # nothing is wrapped without need


def test_figures_are_not_broken() -> None:
    """A share of a size is one thing: its column goes before it is broken into four lines."""
    names, row = (
        ["region", "heard of", "DRAM", "NVMe"],
        ["na", "18.3 s", "0.0 % of 16 MiB", "0.0 % of 788 GiB"],
    )
    assert fitted(names, [row], 50, ["NVMe"]) == {0: 6, 1: 8, 2: 15}
    assert fitted(names, [row], 80, ["NVMe"]) == {0: 6, 1: 8, 2: 15, 3: 16}


def test_a_terminal_that_no_table_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where columns would be broken into single letters, or vanish, each cell has a line of its own, with its name."""
    monkeypatch.setattr("kvstore.tools.cli.output.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    names = ["from", "to", "state", "segments behind", "oldest age", "failed", "lost"]
    print_table("mirrors", names, [["na", "eu", "ok", 0, Figure("20.2 s"), 0, ""]], drop=("lost",))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        ["mirrors"], ["from", "na"], ["to", "eu"], ["state", "ok"], ["segments", "behind", "0"],
        ["oldest", "age", "20.2", "s"], ["failed", "0"], [],
    ]  # fmt: skip


def test_status_and_retention_fit(place: Place, serve: Serve) -> None:
    """At 80 and 60 columns no line of a table is longer, no name is broken, and what is left out is said; a pipe has all
    of it. The fields of a namespace are few, however many it has."""
    serve(place)
    fields = {"model": MODEL, "tenant": "acme-production", "group": "0", "spec": "FullAttentionSpec " * 40}
    with Client(place.socket, timeout_s=30, label="engine of the first rank") as client:
        space = client.namespace(b"a" * 16, 100_000, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [bytes(100_000)]) == 1
    kvstore("pin", "6868", "--socket", place.socket)
    kvstore("quota", "--tenant", "acme-production", "--dram", "1GiB", "--socket", place.socket)
    for columns in (80, 60):
        for command in ("status", "retention"):
            code, shown = on_terminal(columns, command, "--socket", place.socket)
            assert all(
                len(line) <= columns or len(line.split()[-1]) > columns - 14 for line in shown.splitlines()
            )
            table = [line for line in shown.splitlines() if line[:1] in "│┃┏└┡"]
            assert code == 0 and table
            assert max(map(len, table)) <= columns, shown
            assert MODEL in shown and (
                columns == 80 or "a wider terminal, a pipe or -o json has these, too" in shown
            )
            assert "│ 616161616" in shown or "│ 6868686868 " in shown  # ten digits
    piped = kvstore("status", "--socket", place.socket).stdout
    assert "FullAttentionSpec" not in piped and "acme-production" in piped
    assert " UTC\n" in piped.splitlines(keepends=True)[0]
    assert "68" * 32 in kvstore("retention", "--socket", place.socket).stdout
