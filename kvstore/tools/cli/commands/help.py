"""This overview, or the options of one command.

  kvstore help                         all commands
  kvstore help status                  the same as kvstore status --help

Exit code 2 for a word that is no command.
"""

from __future__ import annotations

import argparse

from kvstore.tools.cli import COMMANDS, OK, overview, parser_of, unknown_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of those that kvstore help lists")


def run(args: argparse.Namespace) -> int:
    if args.command is None:
        print(overview())
    elif args.command in COMMANDS:
        parser_of(args.command).print_help()
    else:
        raise unknown_command(args.command)
    return OK
