"""The settings that a running daemon works with, where each comes from, and which may change while it serves.

  kvstore config get                   all of them
  kvstore config get log               those of a section
  kvstore config get log.level         one
  kvstore config get -o json           for programs

`kvstore config show` tells what a daemon would start with; this asks the one that runs.
Exit code 0, 2 for a key that there is not, 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.tools.cli.commands.config import as_written
from kvstore.tools.cli.options import add_config_arguments
from kvstore.tools.cli.output import present, print_table
from kvstore.tools.cli.prefixes import ask

WHEN = {True: "at once", False: "restart"}


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", default="", metavar="KEY", help="a key, or a section of them")
    add_config_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    settings: list[dict[str, Any]] = ask(args, args.called, lambda client: client.settings(args.key))
    return present(args, {"settings": settings}, _print)


def _print(document: dict[str, Any]) -> None:
    settings = document["settings"]
    rows = [(s["key"], as_written(s["key"], s["value"]), WHEN[s["changeable"]], s["where"]) for s in settings]
    print_table("settings in force", ["key", "value", "changes", "from"], rows, ("from",))
