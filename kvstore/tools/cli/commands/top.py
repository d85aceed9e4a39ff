"""What a running daemon does, live: rates, hits and why not, tiers, latencies, and who asks.

  kvstore top                    on the whole terminal, every second; q or Control-C ends it, p pauses
  kvstore top --interval 5s      every five seconds
  kvstore top --once             once, over one interval; also where stdout is no terminal
  kvstore top --socket a,b       several daemons of this machine, a line each (kvstore region nodes has those of a region)
  kvstore top -o json            for programs: one document over one interval; docs/cli.md lists the fields

Figures under "now" are of the last interval; 1, 5 and 15 minutes are whole minutes by the clock and the one under way. A
share is of the tokens that engines asked for, those in their own caches aside. A daemon that goes away is waited for.
Exit code 0, 4 when no daemon answers from the start, or while the interval of --once goes by.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.constants import STATUS_TIMEOUT_S
from kvstore.tools.cli import FAILED, OK, USAGE, CliError
from kvstore.tools.cli.options import (
    add_config_arguments,
    add_node_arguments,
    duration,
    is_of_node,
    socket_path,
)
from kvstore.tools.cli.output import is_terminal, print_json
from kvstore.tools.cli.prefixes import ask
from kvstore.tools.cli.streams import can_draw, drawing
from kvstore.units import format_duration, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore.client import Client
    from kvstore.protocol import answers

WATCH_INTERVAL_S_MIN, WATCH_INTERVAL_S_MAX = 0.1, 3600.0
NODE_INTERVAL_S_MIN, NODE_INTERVAL_S_MAX = 1.0, 60.0

COLUMNS_PLAIN = 100  # where there is no terminal to fit
ROWS_PLAIN = 1000
ENDS = ("q", "Q", "\x03", "\x04")
PAUSES = ("p", "P", " ")
BEFORE_MAX = 20  # lines of what needed attention and does not any more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", default="1s", metavar="TIME", help="between two looks (default 1s)")
    parser.add_argument("--once", action="store_true", help="two looks, one interval apart, and no more")
    add_config_arguments(parser, "screen", "json")
    add_node_arguments(parser)


def run(args: argparse.Namespace) -> int:
    interval_s = duration("top: --interval", args.interval, WATCH_INTERVAL_S_MIN, WATCH_INTERVAL_S_MAX)
    once = args.once or args.output == "json" or not is_terminal() or not can_draw()
    if is_of_node(args):
        return _of_node(args, interval_s, once)
    if args.socket is not None and "," in str(args.socket):
        from kvstore.tools.cli.commands.top_several import several

        return several(args, str(args.socket).split(","), interval_s, once)
    if once:
        return _once(args, interval_s)
    from rich.console import Console

    from kvstore.client import Client

    path = socket_path(args)
    ask(args, "top", _look)  # no daemon, or one that knows no such request
    asking = Client(path, STATUS_TIMEOUT_S, label="kvstore top", attach=False)
    with contextlib.suppress(KeyboardInterrupt), asking as client:
        _watch(client, Console(file=drawing(sys.stdout)), str(path), interval_s)
    return OK


def _look(client: Client, before: answers.Live | None = None) -> answers.Live:
    """The newest answer, with its minutes where there is one before it: its clock is the daemon's."""
    from kvstore.protocol.frames import NO_MINUTES
    from kvstore.tools.web.figures import MINUTES_BACK_S

    return client.live(max(0.0, before["now_s"] - MINUTES_BACK_S) if before is not None else NO_MINUTES)


def _of_node(args: argparse.Namespace, interval_s: float, once: bool) -> int:
    """Its documents as they come; the first one there is, where one is enough."""
    from rich.console import Console

    from kvstore.tools.cli.commands.top_screen import screen
    from kvstore.tools.cli.full_screen import full_screen
    from kvstore.tools.cli.nodes import node_of

    if not NODE_INTERVAL_S_MIN <= interval_s <= NODE_INTERVAL_S_MAX:
        raise CliError("top: --interval: with --node allowed are 1s to 1min", exit_code=USAGE)
    with node_of(args, "top") as node, contextlib.closing(node.watch_figures(interval_s)) as documents:
        if once:
            return _print_once(args, next(documents))
        console = Console(file=drawing(sys.stdout))
        with contextlib.suppress(KeyboardInterrupt), full_screen(console) as terminal:
            for document in documents:
                terminal.draw(screen(console, document, ""))
                if any(key in ENDS for key in terminal.wait(0)):
                    break
    return OK


def _once(args: argparse.Namespace, interval_s: float) -> int:
    from kvstore.tools.web.figures import figures, is_same_life

    first = ask(args, "top", _look)
    time.sleep(interval_s)
    second = ask(args, "top", lambda client: _look(client, first))
    if not is_same_life(first, second):
        raise CliError("top: the daemon was restarted between the two looks", exit_code=FAILED)
    return _print_once(args, figures(first, second))


def _print_once(args: argparse.Namespace, document: dict[str, Any]) -> int:
    from rich.console import Console

    from kvstore.tools.cli.commands.top_screen import screen

    if args.output == "json":
        print_json(document)
        return OK
    width = None if is_terminal() else COLUMNS_PLAIN
    console = Console(file=drawing(sys.stdout), width=width, height=ROWS_PLAIN, color_system=None)
    with console.capture() as page:
        console.print(screen(console, document))
    print("\n".join(line.rstrip() for line in page.get().splitlines()))
    return OK


def _watch(client: Client, console: Console, path: str, interval_s: float) -> None:
    """Until somebody ends it. What cannot be asked is told, and asked again."""
    from kvstore.client import ClientError
    from kvstore.tools.cli.commands.top_screen import connecting, screen
    from kvstore.tools.cli.full_screen import full_screen
    from kvstore.tools.web.figures import figures, is_same_life

    old: answers.Live | None = None
    document: dict[str, Any] | None = None
    next_s, away, is_paused, before = 0.0, "", False, Before()
    with full_screen(console) as terminal:
        while True:
            if time.monotonic() >= next_s and not is_paused:
                try:
                    new, away = _look(client, old), ""
                except ClientError as error:
                    new, away = None, str(error)
                if new is not None:
                    if old is not None and is_same_life(old, new):
                        document = figures(old, new)
                        before.note(document["attention"], new["now_s"])
                    old = new
                is_early = document is None and new is not None
                next_s = time.monotonic() + (min(interval_s, 1.0) if is_early else interval_s)
            keys = f"q ends it   p {'goes on: PAUSED' if is_paused else 'pauses'}   every {format_duration(interval_s)}"
            what = (
                screen(console, document, away, before.lines(), keys) if document else connecting(path, away)
            )
            terminal.draw(what)
            for key in terminal.wait(next_s - time.monotonic() if not is_paused else interval_s):
                if key in ENDS:
                    return
                is_paused ^= key in PAUSES


class Before:
    """What needed attention since this began, and when it was seen first and last. A line counts as the same as another one that
    differs from it in numbers, and in for how long it was so."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Any]] = {}  # first, last, the line
        self._now: set[str] = set()

    def note(self, lines: Sequence[str], now_s: float) -> None:
        """What needs it at this moment."""
        self._now = set()
        for line in lines:
            kind = re.sub(r"[0-9.]+", "#", re.sub(r" \(for [^()]*\)$", "", line))
            self._now.add(kind)
            first_s = self._seen.pop(kind, [now_s])[0]
            self._seen[kind] = [first_s, now_s, line]
        while len(self._seen) > BEFORE_MAX:
            del self._seen[next(iter(self._seen))]

    def lines(self) -> list[str]:
        """Those that do not any more, the latest first."""
        gone = [seen for kind, seen in reversed(self._seen.items()) if kind not in self._now]
        return [f"{_clock(first_s)} to {_clock(last_s)}  {line}" for first_s, last_s, line in gone]


def _clock(at_s: float) -> str:
    return format_time(at_s, True).split()[-1]
