"""Let a pinned prefix be evicted again; nothing leaves because of it.

  kvstore unpin 5f0c…e1                   wherever it is pinned
  kvstore unpin 5f0c…e1 --namespace 3fa2

Exit code 3 when it is not pinned.
"""

from __future__ import annotations

import argparse

from kvstore.cli.pin import set_pin
from kvstore.cli.prefixes import add_common_arguments, add_namespace_argument, add_prefix_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prefix_argument(parser)
    add_namespace_argument(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return set_pin(args, "unpin", False)
