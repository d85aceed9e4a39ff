"""Print what a shell needs to complete these commands and their options.

  kvstore completion bash > /etc/bash_completion.d/kvstore
  kvstore completion zsh > /usr/share/zsh/site-functions/_kvstore
  kvstore completion fish > ~/.config/fish/completions/kvstore.fish

It is complete as it is: no command is started while a shell completes. Names that only a daemon knows
(namespaces, tenants, prefixes) are not completed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.tools.cli import COMMANDS, OK, Parser, module_of

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="for which shell")


def run(args: argparse.Namespace) -> int:
    import shtab

    parser = Parser(prog="kvstore", description="A KV-cache daemon for inference engines, and its tools.")
    commands = parser.add_subparsers()
    for name, summary in COMMANDS.items():
        of_command = commands.add_parser(name, help=summary, description=summary)
        module_of(name).add_arguments(of_command)
        for action in [action for each in _parsers(of_command) for action in each._actions]:
            _mark_paths(action, shtab.FILE, shtab.DIRECTORY)
            if name == "help" and action.dest == "command":
                action.choices = list(COMMANDS)
    print(shtab.complete(parser, args.shell))
    return OK


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A command's own, and those of its verbs, with all that they take."""
    yield parser
    for action in parser._actions:
        for verb in action.choices.values() if isinstance(action.choices, dict) else ():
            verb.fill()
            yield verb


def _mark_paths(action: argparse.Action, file: Any, directory: Any) -> None:
    """Where the name of a file or a directory is wanted, the shell offers those."""
    if action.type is Path:
        action.complete = directory if action.metavar == "DIR" else file  # type: ignore[attr-defined]
