"""A model on this node's disk: where it lies, and whether it stays.

  kvstore model path NAME              its directory, for an engine: vllm serve "$(kvstore model path NAME)"; counts as a use
  kvstore model pin NAME               keep it, whatever comes and however long it is not used
  kvstore model unpin NAME             let it leave again, when others need its room
  kvstore model evict NAME             take it off this disk

Exit code 1 where it is pinned or a process uses it, 3 where it is not here, or not whole: kvstore model preload NAME.
"""

from __future__ import annotations

import argparse

from kvstore.tools.cli import OK
from kvstore.tools.cli.commands.model_local import add_local_arguments, asked_of_home, home_of

DONE = {"pin": "is pinned", "unpin": "is not pinned any more", "evict": "is not on this disk any more"}


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    print(asked_of_home(lambda: _done(args)))
    return OK


def _done(args: argparse.Namespace) -> str:
    """What is said of it."""
    from coldstart.disk.home import name_of, parse_name

    home, (model, revision) = home_of(args), parse_name(args.name)
    if args.verb == "path":
        with home.use(model, revision) as use:
            return str(use.path)
    return f"{name_of(model, getattr(home, args.verb)(model, revision))} {DONE[args.verb]}"
