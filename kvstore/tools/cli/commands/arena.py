"""Arenas that lie in shared memory, and how to give one back.

  kvstore arena ls                     whose they are, how large, and whether a daemon uses them
  kvstore arena rm INSTANCE …          free the memory of these; their records in DRAM are lost

An arena stays in memory when its daemon stops, so that the next one is warm. One whose data directory is
gone is never used again. INSTANCE is any unique beginning of its name. One that a daemon uses is not removed.

Exit code 0 when done, 1 when one is in use or cannot be removed, 3 when there is no such arena.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvstore.tools.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.options import add_config_arguments, load_config
from kvstore.tools.cli.output import Figure, print_json, print_table
from kvstore.units import format_bytes

if TYPE_CHECKING:
    from tiers.dram.arenas_left import Found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "rm"), metavar="ls|rm", help="list them, or remove some")
    parser.add_argument("instances", metavar="INSTANCE", nargs="*", default=[], help="which to remove")
    add_config_arguments(parser, "text", "json")


def run(args: argparse.Namespace) -> int:
    if (args.action == "rm") != bool(args.instances):
        wanted = "which? `kvstore arena ls` lists them" if args.action == "rm" else "takes no INSTANCE"
        raise CliError(f"arena {args.action}: {wanted}", exit_code=USAGE)
    found = _found(args)
    if args.action == "ls":
        return _list(found, args.output)
    chosen = [_chosen(found, name) for name in args.instances]
    return _remove(list(dict.fromkeys(chosen)), args.output)


def _found(args: argparse.Namespace) -> list[Found]:
    from tiers.dram.arenas_left import find_arenas, hidden
    from tiers.dram.pages import arena_directories

    directories = arena_directories()
    own = load_config(args).config.dram.directory
    if own != "auto":
        directories.append(own)
    for directory in hidden(directories):
        print(f"kvstore: {directory}: another user's, what lies there is not seen", file=sys.stderr)
    return find_arenas(directories)


def _list(found: list[Found], output: str) -> int:
    if output == "json":
        print_json({"arenas": [{**asdict(arena), "path": str(arena.path)} for arena in found]})
        return OK
    if not found:
        print("No arena that this user may see lies in memory.")
        return OK

    from kvstore.tools.doctor.findings import user_name

    rows = [
        (
            arena.instance,
            user_name(arena.uid),
            arena.state,
            Figure(format_bytes(arena.capacity_bytes)),
            Figure(format_bytes(arena.held_bytes)),
            arena.path.parent,
        )
        for arena in found
    ]
    print_table("arenas", ["instance", "user", "state", "capacity", "in memory", "directory"], rows)
    return OK


def _chosen(found: list[Found], name: str) -> Found:
    fitting = [arena for arena in found if arena.instance.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise CliError(f"arena rm: {name}: no such arena; `kvstore arena ls` lists them", exit_code=NOT_FOUND)
    raise CliError(f"arena rm: {name}: {len(fitting)} arenas begin so; write more of it", exit_code=USAGE)


def _remove(chosen: list[Found], output: str) -> int:
    from tiers.dram.arenas_left import remove_arena
    from tiers.errors import OpenError

    removed, problems = [], []
    for arena in chosen:
        try:
            freed_bytes = remove_arena(arena.path)
        except OpenError as error:
            problems.append(str(error))
            continue
        removed.append({"instance": arena.instance, "freed_bytes": freed_bytes})
        if output == "text":
            print(f"removed {arena.instance}: {format_bytes(freed_bytes)} free")
    if output == "json":
        print_json({"removed": removed, "problems": problems})
    if problems:
        raise CliError(*problems, exit_code=FAILED)
    return OK
