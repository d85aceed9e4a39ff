"""Give back the DRAM that a model has: KV may have it again. One that a process uses stays: exit code 1.

  kvstore model unload NAME              the revision that the name stands for here, or the only one in DRAM
  kvstore model unload NAME@REVISION

Exit code 3 where it is not in DRAM, 4 where no daemon answers.
"""

from __future__ import annotations

import argparse

from kvstore.cli import NOT_FOUND, OK, CliError
from kvstore.cli.model_local import add_local_arguments, asked_of_home, home_of
from kvstore.cli.options import socket_path
from kvstore.cli.prefixes import asked_of_daemon


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.home import name_of, parse_name
    from kvstore.client import models

    model, named = asked_of_home(lambda: parse_name(args.name))
    path = socket_path(args)

    def dropped() -> str:
        there = [found["revision"] for found in models.listed(path) if found["name"] == model]
        revision = named or _revision(args, model, there)
        models.drop(model, revision, path)
        return revision

    revision = asked_of_daemon("model unload", dropped)
    print(f"{name_of(model, revision)} is not in DRAM any more")
    return OK


def _revision(args: argparse.Namespace, model: str, resident: list[str]) -> str:
    """Which one the name alone stands for. Raises CliError."""
    if not resident:
        raise CliError(f"model unload: {model}: not in DRAM (kvstore status)", exit_code=NOT_FOUND)
    if len(resident) == 1:
        return resident[0]
    home = home_of(args)
    return asked_of_home(lambda: home.find(model)).manifest.revision
