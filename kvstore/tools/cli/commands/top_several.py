"""`kvstore top --socket a,b`: several daemons side by side, a line each, asked at the same time so that none waits for another."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.constants import STATUS_TIMEOUT_S
from kvstore.tools.cli import OK, UNREACHABLE, USAGE, CliError
from kvstore.tools.cli.output import is_terminal, print_json
from kvstore.tools.cli.streams import drawing
from kvstore.tools.problems import how_it_is
from kvstore.units import NOTHING, format_bytes, format_duration, printable, short_count

if TYPE_CHECKING:
    from kvstore.protocol import answers

SOCKETS_MAX = 64
COLUMNS_PLAIN, ROWS_PLAIN = 140, 1000
COLUMNS = ("node", "state", "up", "hits now", "15 min", "tokens/s", "loaded", "DRAM", "NVMe", "sessions")
DROPPED = ("up", "15 min", "loaded", "sessions")  # where it is narrow
WIDE = 110
ENDS = ("q", "Q", "\x03", "\x04")
KEYS = "q ends it"
PATH_CHARS = 28


class One:
    """One of them. document: that of `kvstore top -o json`, {} before there are two answers. away: why it does not answer, else ""."""

    def __init__(self, path: str) -> None:
        from kvstore.client import Client

        self.path, self.away, self.document = path, "", dict[str, Any]()
        self._client = Client(path, STATUS_TIMEOUT_S, label="kvstore top", attach=False)
        self._old: answers.Live | None = None

    def look(self) -> None:
        """Ask once more. Raises nothing."""
        from kvstore.errors import ClientError
        from kvstore.protocol.frames import NO_MINUTES
        from kvstore.tools.web.figures import MINUTES_BACK_S, figures, is_same_life

        old = self._old
        try:
            new = self._client.live(NO_MINUTES if old is None else max(0.0, old["now_s"] - MINUTES_BACK_S))
        except ClientError as error:
            self.away = str(error)
            return
        self.away, self._old = "", new
        if old is not None and is_same_life(old, new):
            self.document = figures(old, new)

    def close(self) -> None:
        self._client.close()


def several(args: argparse.Namespace, paths: Sequence[str], interval_s: float, once: bool) -> int:
    """Until somebody ends it, or one interval; the exit code."""
    paths = list(dict.fromkeys(filter(None, paths)))
    if not 1 <= len(paths) <= SOCKETS_MAX:
        raise CliError(
            f"top: --socket: {len(paths)} sockets, allowed are 1 to {SOCKETS_MAX}", exit_code=USAGE
        )
    ones = [One(path) for path in paths]
    with ThreadPoolExecutor(len(ones)) as threads, contextlib.suppress(KeyboardInterrupt):
        list(threads.map(One.look, ones))
        if all(one.away for one in ones):
            raise CliError(*(f"top: {one.away}" for one in ones), exit_code=UNREACHABLE)
        if once:
            time.sleep(interval_s)
            list(threads.map(One.look, ones))
            _print_once(args, ones)
        else:
            _watch(ones, threads, interval_s)
    for one in ones:
        one.close()
    return UNREACHABLE if once and any(one.away for one in ones) else OK


def _watch(ones: Sequence[One], threads: ThreadPoolExecutor, interval_s: float) -> None:
    from kvstore.tools.cli.full_screen import full_screen

    console = Console(file=drawing(sys.stdout))
    with full_screen(console) as terminal:
        next_s = time.monotonic() + min(1.0, interval_s)
        while True:
            if time.monotonic() >= next_s:
                list(threads.map(One.look, ones))
                next_s = time.monotonic() + interval_s
            terminal.draw(Group(_table(ones, console.width), Text(), _line(KEYS)))
            if any(key in ENDS for key in terminal.wait(next_s - time.monotonic())):
                return


def _print_once(args: argparse.Namespace, ones: Sequence[One]) -> None:
    if args.output == "json":
        print_json(
            {
                "nodes": [
                    {"socket": one.path, "away": one.away, "figures": one.document or None} for one in ones
                ]
            }
        )
        return
    width = None if is_terminal() else COLUMNS_PLAIN
    console = Console(file=drawing(sys.stdout), width=width, height=ROWS_PLAIN, color_system=None)
    with console.capture() as page:
        console.print(_table(ones, console.width))
    print("\n".join(line.rstrip() for line in page.get().splitlines()))


def _table(ones: Sequence[One], width: int) -> RenderableType:
    """A line each, and below what needs attention."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [n for n, name in enumerate(COLUMNS) if width >= WIDE or name not in DROPPED]
    for name in (COLUMNS[n] for n in shown):
        table.add_column(
            name, justify="left" if name in ("node", "state") else "right", no_wrap=True, overflow="ellipsis"
        )
    lines: list[Text] = []
    for one in ones:
        cells = _cells(one)
        table.add_row(*(_line(cells[n]) for n in shown))
        name = _short(one.path)
        lines += [
            _line(f"! {name}: {text}")
            for text in ([one.away] if one.away else one.document.get("attention", ()))
        ]
    return Group(table, *([Text(), *lines] if lines else []))


def _cells(one: One) -> list[str]:
    found = one.document
    if not found:
        return [_short(one.path), "AWAY" if one.away else "…", *[NOTHING] * (len(COLUMNS) - 2)]
    state = "AWAY" if one.away else how_it_is(found["problems"])
    hits = found["hits"][0]
    fills = {tier["name"]: tier for tier in found["tiers"]}
    return [
        f"{found['host']} {_short(one.path)}",
        state,
        format_duration(found["uptime_s"]),
        _percent(hits["now"]),
        _percent(hits["15_min"]),
        short_count(found["tokens_per_s"]),
        f"{format_bytes(int(found['loaded_bytes_per_s']))}/s",
        *(_fill(fills.get(name)) for name in ("dram", "nvme")),
        str(found["sessions_total"]),
    ]


def _short(path: str) -> str:
    """The end of a path: sockets of one machine begin alike."""
    return path if len(path) <= PATH_CHARS else f"…{path[1 - PATH_CHARS :]}"


def _fill(tier: dict[str, Any] | None) -> str:
    if tier is None or not tier["capacity_bytes"]:
        return NOTHING
    return (
        f"{_percent(tier['used_bytes'] / tier['capacity_bytes'])} of {format_bytes(tier['capacity_bytes'])}"
    )


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")
