"""The `kvstore` command: one module a command, found by name, imported only when it is used.

    kvstore status -o json
            │
            └─▶ COMMANDS["status"] ─▶ import kvstore.cli.status ─▶ add_arguments(parser), run(args)

Adding a command is one line in COMMANDS and one module with two functions:

    def add_arguments(parser: argparse.ArgumentParser) -> None
    def run(args: argparse.Namespace) -> int          # the exit code

Data goes to stdout, everything else to stderr. Exit codes: 0 ok, 1 failed, 2 wrong usage
or configuration, 3 not found, 4 no daemon answers. What a user can get wrong is raised as
CliError and printed as one line; a traceback means a bug of ours.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

OK, FAILED, USAGE, NOT_FOUND, UNREACHABLE = 0, 1, 2, 3, 4
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

COMMANDS = {
    "serve": "run the daemon",
    "status": "what a running daemon holds: tiers, sessions, namespaces, hits",
    "report": "what the cache gave back, by tier, model, tenant, hour, and why not when it did not",
    "explain": "where a prompt would hit, block by block, and why not",
    "retention": "what is pinned, what expires, and who may hold how much",
    "pin": "keep a prefix from being evicted",
    "unpin": "let a pinned prefix be evicted again",
    "ttl": "drop blocks so long after they were stored: of a prefix, a namespace, a tenant",
    "quota": "how many bytes a namespace or a tenant may hold in each tier",
    "fsck": "prove that the books balance; verify and repair stored records",
    "config": "show or check the configuration, with where each value comes from",
    "demo": "show it: real engines, restarts, crashes and damage, the same prompts",
    "replay": "what each eviction policy would have hit on recorded traffic",
    "bench": "what this machine does with our tiers, beside its limits",
    "version": "versions of kvstore and of what it runs on",
}


class CliError(Exception):
    """Something the user can put right. Printed line by line, without a traceback."""

    def __init__(self, *problems: str, exit_code: int = FAILED) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems
        self.exit_code = exit_code


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the nearest valid word."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("kvstore ")
        raise CliError(f"{command}: {message} (see {self.prog} --help)", exit_code=USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Entry point of the `kvstore` script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except CliError as error:
        for problem in error.problems:
            print(f"kvstore: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    if command not in COMMANDS:
        return _no_command(words)
    module = importlib.import_module(f"kvstore.cli.{command}")
    parser = Parser(
        prog=f"kvstore {command}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words[1:])))


def _no_command(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help", "help"):
        print(_overview())
        return OK
    if first in ("-V", "--version"):
        from kvstore import __version__

        print(f"kvstore {__version__}")
        return OK
    if not first:
        raise CliError(f"no command: known are {', '.join(COMMANDS)} (see kvstore --help)", exit_code=USAGE)
    close = difflib.get_close_matches(first, COMMANDS, 1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(COMMANDS)}"
    raise CliError(
        f"unknown {'option' if first.startswith('-') else 'command'} {first}: {hint}", exit_code=USAGE
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvstore COMMAND [options]     (kvstore COMMAND --help tells the options)",
            "",
            "A KV-cache daemon for inference engines, and the tools to look after it.",
            "",
            *lines,
            "",
            "exit codes: 0 ok, 1 failed, 2 wrong usage or configuration, 3 not found, 4 no daemon answers",
        ]
    )
