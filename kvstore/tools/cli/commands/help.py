"""This overview, or the options of one command.

  kvstore help                         all commands
  kvstore help status                  the same as kvstore status --help
  kvstore help config set              the same as kvstore config set --help

Exit code 2 for words that are no command.
"""

from __future__ import annotations

import argparse

from kvstore.tools.cli import COMMANDS, OK, overview, parser_of, unknown_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="?", metavar="COMMAND", help="one of those that kvstore help lists")
    parser.add_argument("verb", nargs="?", metavar="VERB", help="of a command that has some")


def run(args: argparse.Namespace) -> int:
    if args.command is None:
        print(overview())
        return OK
    if args.command not in COMMANDS:
        raise unknown_command(args.command)
    parser = parser_of(args.command)
    if args.verb is None:
        parser.print_help()
    else:
        parser.parse_args([args.verb, "--help"])
    return OK
