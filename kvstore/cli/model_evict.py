"""Take a model off this node's disk. One that is pinned, or that a process uses, stays: exit code 1."""

from __future__ import annotations

import argparse

from kvstore.cli.model_local import add_local_arguments, changed, home_of


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    return changed(args, home_of(args).evict, "is not on this disk any more")
