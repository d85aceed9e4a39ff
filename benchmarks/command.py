"""Runs a benchmark as a command: its options, a directory of its own that goes at the end, and a table or JSON.

words ─▶ options ─▶ measure(args, directory) ─▶ report ─▶ show(report), or JSON with -o json
                         ╰─ BenchError, DaemonError: one line on stderr, exit code 1
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchError
from kvstore.tools.bench.daemon import DaemonError
from kvstore.tools.cli.output import print_json, print_table
from tiers.scratch import scratch_directory

Report = dict[str, Any]


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options that all of them have."""
    parser = argparse.ArgumentParser(
        prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser


def run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace, Path], Report],
    show: Callable[[Report], None],
    words: Sequence[str] | None = None,
) -> int:
    """Measure and print; 0 when everything was measured, whatever the figures are. An option --directory says where its own
    directory goes."""
    args = parser.parse_args(words)
    place = getattr(args, "directory", None)
    with scratch_directory("kvb-", Path(place) if place else None) as scratch:
        try:
            report = measure(args, scratch)
        except (BenchError, DaemonError) as error:
            say(parser.prog, str(error))
            return 1
    if args.output == "json":
        print_json(report)
    else:
        show(report)
    return 0


def as_table(title: str) -> Callable[[Report], None]:
    """Shows a report as one table of its fields."""
    return lambda report: print_table(title, ["field", "value"], list(report.items()))


def say(name: str, line: str) -> None:
    """Progress, on stderr."""
    print(f"{name}: {line}", file=sys.stderr, flush=True)


def free_port() -> int:
    """Of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
