"""Printing for people and for programs: JSON, and tables that fit where they go.

On a terminal tables are drawn with rich; in a pipe they are plain columns, so that grep,
awk and a log file see neither boxes nor wrapped lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def print_json(value: Mapping[str, Any], indent: int | None = 2) -> None:
    """One JSON document on stdout. Keys keep their order; bytes never appear."""
    print(json.dumps(value, indent=indent, ensure_ascii=False), flush=True)


def printable(text: str) -> str:
    """A name that a client chose, without what could steer a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def is_terminal() -> bool:
    return sys.stdout.isatty()


class Figure(str):
    """A number in words, "12.3 %": set to the right in tables."""

    __slots__ = ()


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A titled table; numbers right, text left. What could steer a terminal is taken out of every cell."""
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[n], (int, float, Figure)) for row in rows)
        for n in range(len(columns))
    ]
    if is_terminal():
        _draw(title, columns, texts, right)
        return
    widths = [max(len(line[n]) for line in [list(columns), *texts]) for n in range(len(columns))]
    print(title)
    for line in [list(columns), *texts]:
        cells = (
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)
        )
        print("  " + "  ".join(cells).rstrip())
    print()


def _draw(title: str, columns: Sequence[str], texts: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for column, at_right in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if at_right else "left", overflow="fold")
    for line in texts:
        table.add_row(*map(Text, line))  # Text: a bracket in a name is a bracket, not markup
    Console().print(table)


@contextlib.contextmanager
def progress_bars(of_bytes: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (what, done, total); bars on stderr when that is a terminal, else nothing. of_bytes: they tell
    bytes and the rate, too."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    columns = Progress.get_default_columns()
    if of_bytes:
        columns = (*columns, DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
