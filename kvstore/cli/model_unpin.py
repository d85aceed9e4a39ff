"""Let a pinned model leave this node's disk again, when others need its room."""

from __future__ import annotations

import argparse

from kvstore.cli.model_local import add_local_arguments, changed, home_of


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    return changed(args, home_of(args).unpin, "is not pinned any more")
