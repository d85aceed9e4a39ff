"""Where a model lies on this node, for an engine: vllm serve "$(kvstore model path NAME)".

Exit code 3 where it is not here, or not whole: kvstore model preload NAME.
"""

from __future__ import annotations

import argparse

from kvstore.cli import OK
from kvstore.cli.model_local import add_local_arguments, asked_of_home, home_of


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.home import parse_name

    home = home_of(args)
    with asked_of_home(lambda: home.use(*parse_name(args.name))) as use:
        print(use.path)
    return OK
