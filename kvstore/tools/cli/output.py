"""Printing for people and for programs: JSON, and tables that fit where they go.

On a terminal tables are drawn with rich, as wide as it is: text is wrapped between words, and where that
is not enough columns are left out. In a pipe they are plain columns, so that grep, awk and a log file see
neither boxes nor wrapped lines, and all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kvstore.tools.cli import OK, child
from kvstore.tools.cli.streams import drawing
from kvstore.units import harmless, printable

D = TypeVar("D", bound=Mapping[str, Any])


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON document on stdout, harmless to a terminal and exact all the same. Keys keep their order; bytes never appear."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    print(text if text == harmless(text) else json.dumps(value, indent=2), flush=True)


def present(args: argparse.Namespace, document: D, show: Callable[[D], object]) -> int:
    """The document for programs (-o json), or what `show` prints of it for people. The exit code OK."""
    if args.output == "json":
        print_json(document)
    else:
        show(document)
    return OK


@contextlib.contextmanager
def presented(
    args: argparse.Namespace, document: D, done: Sequence[object], show: Callable[[D], object]
) -> Iterator[None]:
    """The document behind work that fills it; where that fails in the middle, before its error. done: what of the document was done.
    Who has asked through another node gets one of both: the error."""
    try:
        yield
    except Exception:
        if done and not child.is_one:
            present(args, document, show)
        raise
    present(args, document, show)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def say(line: str = "", indent: int = 2) -> None:
    """A line for people, whoever wrote it: on a terminal broken between words, and what follows is set in; whole in a pipe."""
    print(*(wrapped(line, indent) if is_terminal() else [printable(line)]), sep="\n")


def wrapped(line: str, indent: int) -> list[str]:
    """Lines as wide as the terminal, at least one; those behind the first are set in."""
    import shutil
    from textwrap import wrap

    columns = max(40, shutil.get_terminal_size().columns)
    hang = " " * indent
    lines = wrap(
        printable(line), columns, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


Progress = Callable[[str, int, int], None]  # shows what, how much is done, how much there is
BARS_AFTER_S = 2.0
CELL_BORDER = 3  # of each column: a line and two blanks
HASH_DIGITS_SHOWN = 10  # of a block hash on a terminal: enough among millions
WORD_WIDTH_MIN = 10  # neither words nor short cells are broken into pieces shorter than this


class Figure(str):
    """A number in words, "12.3 %": set to the right in tables."""

    __slots__ = ()


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], drop: Sequence[str] = ()
) -> None:
    """A titled table; numbers right, text left. What could steer a terminal is taken out of all of it.

    drop: names of columns that a narrow terminal does without, in the order in which they go.
    """
    title, columns = printable(title), list(map(printable, columns))
    texts = [[printable(str(cell)) for cell in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[n], (int, float, Figure)) for row in rows)
        for n in range(len(columns))
    ]
    if is_terminal():
        _draw(title, columns, texts, right, drop)
        return
    widths = [max(len(line[n]) for line in [list(columns), *texts]) for n in range(len(columns))]
    print(title)
    for line in [list(columns), *texts]:
        cells = (
            cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)
        )
        print("  " + "  ".join(cells).rstrip())
    print()


def fitted(
    columns: Sequence[str], texts: Sequence[Sequence[str]], room: int, drop: Sequence[str]
) -> dict[int, int]:
    """Which columns fit so many characters, by number, with the width of each: none narrower than its longest word
    and none wider than its longest line. Columns of `drop` are left out as far as that takes.

    Where even the others do not fit, the widest ones get what is left, and words are broken.
    """
    from rich.cells import cell_len

    cells = [[name, *(line[n] for line in texts)] for n, name in enumerate(columns)]
    most = [max(map(cell_len, column)) for column in cells]
    least = [max(cell_len(word) for text in column for word in _pieces(text)) for column in cells]
    kept = list(range(len(columns)))
    waiting = [columns.index(name) for name in drop if name in columns]

    def over() -> int:
        return sum(least[n] + CELL_BORDER for n in kept) + 1 - room

    while over() > 0 and waiting:
        kept.remove(waiting.pop(0))
    while over() > 0 and max(least[n] for n in kept) > WORD_WIDTH_MIN:
        least[max(kept, key=lambda n: least[n])] -= 1
    widths = {n: max(1, least[n]) for n in kept}
    free = -over()
    for n in sorted(kept, key=lambda n: most[n] - least[n]):
        more = max(0, min(free, most[n] - widths[n]))
        widths[n] += more
        free -= more
    return widths


def _pieces(text: str) -> list[str]:
    """What is not broken: words, and short cells, such as a figure with its unit, or "5 % of 16 GiB"."""
    is_short = len(text) <= (2 if text[:1].isdigit() else 1) * WORD_WIDTH_MIN
    return [text] if is_short else text.split() or [""]


def _draw(
    title: str,
    columns: Sequence[str],
    texts: Sequence[Sequence[str]],
    right: Sequence[bool],
    drop: Sequence[str],
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=drawing(sys.stdout))
    widths = fitted(columns, texts, console.width, drop)
    if sum(widths.values()) + len(widths) * CELL_BORDER >= console.width:
        _list(title, columns, texts)
        return
    table = Table(title=Text(title, "bold"), title_justify="left")
    for n, width in widths.items():
        table.add_column(
            Text(columns[n]), justify="right" if right[n] else "left", width=width, overflow="fold"
        )
    for line in texts:
        table.add_row(*(Text(line[n]) for n in widths))  # Text: a bracket in a name is a bracket, not markup
    console.print(table)
    if len(widths) < len(columns):
        hidden = ", ".join(name for n, name in enumerate(columns) if n not in widths)
        say(f"(a wider terminal, a pipe or -o json has these, too: {hidden})")


def _list(title: str, columns: Sequence[str], texts: Sequence[Sequence[str]]) -> None:
    """The same for a terminal that no table fits: a line for each cell that is not empty, a paragraph for each row."""
    named = max(map(len, columns)) + 4
    say(title)
    for row in texts:
        for name, cell in zip(columns, row, strict=True):
            if cell:
                say(f"  {name}".ljust(named) + cell, indent=named)
        print()


@contextlib.contextmanager
def progress_bars(of_bytes: bool = False) -> Iterator[Progress]:
    """A function to call with (what, done, total); bars on stderr when that is a terminal, lines of a child of ours, else nothing.
    of_bytes: they tell bytes and the rate, too."""
    if not sys.stderr.isatty():
        yield child.progress_lines(of_bytes) if child.is_one else lambda what, done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import DownloadColumn, Progress, TaskID, TransferSpeedColumn

    columns = Progress.get_default_columns()
    if of_bytes:
        columns = (*columns, DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=drawing(sys.stderr)), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(escape(printable(what)), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show


def later(bars: Progress) -> Progress:
    """The same bars, of what takes longer than a moment."""
    begun_s = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        if time.monotonic() - begun_s >= BARS_AFTER_S:
            bars(what, done, total)

    return show
