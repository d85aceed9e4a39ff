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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK, UNREACHABLE, USAGE, CliError
from kvstore.tools.cli.commands.top_watched import Watched
from kvstore.tools.cli.options import (
    add_config_arguments,
    add_node_arguments,
    duration,
    is_of_node,
    socket_path,
)
from kvstore.tools.cli.output import is_terminal, print_json
from kvstore.tools.cli.prefixes import failure_of
from kvstore.tools.cli.streams import can_draw, drawing
from kvstore.units import format_duration, format_time

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


WATCH_INTERVAL_S_MIN, WATCH_INTERVAL_S_MAX = 0.1, 3600.0
NODE_INTERVAL_S_MIN, NODE_INTERVAL_S_MAX = 1.0, 60.0

SOCKETS_MAX = 64
COLUMNS_PLAIN, COLUMNS_SEVERAL = 100, 140  # where there is no terminal to fit
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
    daemons = [Watched(path) for path in _paths(args)]
    with ThreadPoolExecutor(len(daemons)) as threads:

        def look() -> None:
            """At all of them, so that none waits for another."""
            list(threads.map(Watched.look, daemons))

        look()
        _require_one(daemons)
        if once:
            time.sleep(interval_s)
            look()
            return _once(args, daemons)
        with contextlib.suppress(KeyboardInterrupt):
            _watch(daemons, look, interval_s)
    for daemon in daemons:
        daemon.close()
    return OK


def _paths(args: argparse.Namespace) -> list[str]:
    """Of the sockets. Raises CliError."""
    given = [] if args.socket is None else str(args.socket).split(",")
    if len(given) <= 1:
        return [str(socket_path(args))]
    paths = list(dict.fromkeys(filter(None, given)))
    if not 1 <= len(paths) <= SOCKETS_MAX:
        raise CliError(
            f"top: --socket: {len(paths)} sockets, allowed are 1 to {SOCKETS_MAX}", exit_code=USAGE
        )
    return paths


def _require_one(daemons: Sequence[Watched]) -> None:
    """Raises CliError where none of them answers."""
    failed = [failure_of("top", one.error) for one in daemons if one.error is not None]
    if len(failed) == len(daemons):
        raise CliError(*map(str, failed), exit_code=max(error.exit_code for error in failed))


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
            document = next(documents)
            return _print_once(args, document, lambda console: screen(console, document))
        console = Console(file=drawing(sys.stdout))
        with contextlib.suppress(KeyboardInterrupt), full_screen(console) as terminal:
            for document in documents:
                terminal.draw(screen(console, document, ""))
                if any(key in ENDS for key in terminal.wait(0)):
                    break
    return OK


def _once(args: argparse.Namespace, daemons: Sequence[Watched]) -> int:
    from kvstore.tools.cli.commands.top_screen import screen
    from kvstore.tools.cli.commands.top_several import several

    if len(daemons) > 1:
        nodes = [{"socket": one.path, "away": one.away, "figures": one.document or None} for one in daemons]
        _print_once(args, {"nodes": nodes}, lambda console: several(daemons, console.width), COLUMNS_SEVERAL)
        return UNREACHABLE if any(one.error for one in daemons) else OK
    _require_one(daemons)
    document = daemons[0].document
    if not document:
        raise CliError("top: the daemon was restarted between the two looks", exit_code=FAILED)
    return _print_once(args, document, lambda console: screen(console, document))


def _print_once(
    args: argparse.Namespace,
    document: dict[str, Any],
    drawn: Callable[[Console], RenderableType],
    columns: int = COLUMNS_PLAIN,
) -> int:
    """columns: where there is no terminal to fit."""
    from rich.console import Console

    if args.output == "json":
        print_json(document)
        return OK
    width = None if is_terminal() else columns
    console = Console(file=drawing(sys.stdout), width=width, height=ROWS_PLAIN, color_system=None)
    with console.capture() as page:
        console.print(drawn(console))
    print("\n".join(line.rstrip() for line in page.get().splitlines()))
    return OK


def _watch(daemons: Sequence[Watched], look: Callable[[], None], interval_s: float) -> None:
    """Until somebody ends it. What cannot be asked is told, and asked again."""
    from rich.console import Console

    from kvstore.tools.cli.commands.top_screen import connecting, screen
    from kvstore.tools.cli.commands.top_several import several
    from kvstore.tools.cli.full_screen import full_screen

    console, first = Console(file=drawing(sys.stdout)), daemons[0]
    before, is_paused = Before(), False
    next_s = time.monotonic() + min(interval_s, 1.0)
    with full_screen(console) as terminal:
        while True:
            if time.monotonic() >= next_s and not is_paused:
                look()
                if first.document and not first.error:
                    before.note(first.document["attention"], first.document["now_s"])
                is_early = not (first.document or first.error)
                next_s = time.monotonic() + (min(interval_s, 1.0) if is_early else interval_s)
            keys = f"q ends it   p {'goes on: PAUSED' if is_paused else 'pauses'}   every {format_duration(interval_s)}"
            if len(daemons) > 1:
                terminal.draw(several(daemons, console.width, keys))
            else:
                terminal.draw(
                    screen(console, first.document, first.away, before.lines(), keys)
                    if first.document
                    else connecting(first.path, first.away)
                )
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
