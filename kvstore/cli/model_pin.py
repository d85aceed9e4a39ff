"""Keep a model on this node's disk, whatever comes and however long it is not used, until `kvstore model unpin NAME`."""

from __future__ import annotations

import argparse

from kvstore.cli.model_local import add_local_arguments, changed, home_of


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    return changed(args, home_of(args).pin, "is pinned")
