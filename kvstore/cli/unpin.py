"""Let a pinned prefix be evicted again; nothing leaves because of it.

  kvstore unpin 5f0c…e1                   wherever it is pinned
  kvstore unpin 5f0c…e1 --namespace 3fa2

Exit code 3 when it is not pinned.
"""

from __future__ import annotations

import argparse

from kvstore.cli.pin import set_pin
from kvstore.cli.prefixes import add_arguments_for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments_for(parser, prefix="1")


def run(args: argparse.Namespace) -> int:
    return set_pin(args, "unpin", False)
