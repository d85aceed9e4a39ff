"""Give a setting of a running daemon another value, at once.

  kvstore config set log.level debug
  kvstore config set nvme.write_bytes_per_day 2TiB
  kvstore config set log.level debug -o json        for programs

Until the daemon restarts, or reads its configuration again (SIGHUP): nothing is written anywhere, and the line
to keep it is printed. `kvstore config get` lists which settings may change while serving. A value is written as in `--set`.
Exit code 0, 2 for a key or value that is not allowed or needs a restart (nothing has changed), 4 when no daemon answers.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.protocol.frames import SETTING_CHARS_MAX
from kvstore.tools.cli import USAGE, CliError
from kvstore.tools.cli.commands.config import as_written
from kvstore.tools.cli.options import add_config_arguments
from kvstore.tools.cli.output import present
from kvstore.tools.cli.prefixes import ask
from kvstore.units import printable


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", metavar="KEY", help="as kvstore config get lists them")
    parser.add_argument("value", metavar="VALUE", help="as in --set")
    add_config_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    for what, text, most in (
        ("KEY", args.key, SETTING_CHARS_MAX // 8),
        ("VALUE", args.value, SETTING_CHARS_MAX),
    ):
        if len(text) > most:
            raise CliError(
                f"{args.called}: {what}: {len(text)} characters, at most {most} are allowed", exit_code=USAGE
            )
    changed = ask(args, args.called, lambda client: client.change_setting(args.key, args.value))
    return present(args, changed, _print)


def _print(changed: dict[str, Any]) -> None:
    key, value = changed["key"], as_written(changed["key"], changed["value"])
    before = as_written(key, changed["before"])
    was = f"was {before}" if before != value else "as before"
    print(printable(f"{key} is {value} now ({was}), until a restart or a reload (SIGHUP)."))
    section, _, name = key.rpartition(".")
    line = f"{name} = {value}"
    print(printable(f"To keep it, write to {changed['file']}: {f'[{section}] ' if section else ''}{line}"))
    if changed["source_before"] in ("env", "flag"):
        place = {"env": "the environment", "flag": "the command line"}[changed["source_before"]]
        print(
            f"and take it out of {place} of the daemon ({changed['where_before']}), which wins over the file."
        )
