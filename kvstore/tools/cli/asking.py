"""Asking whoever sits there before something is dropped or erased for good."""

from __future__ import annotations

import argparse
import sys

from kvstore.tools.cli import USAGE, CliError


def must_ask(args: argparse.Namespace) -> bool:
    """Whether somebody is to be asked. Raises CliError where there is nobody."""
    if args.yes or args.dry_run:
        return False
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            f"{args.called}: nobody to ask: this is no terminal; give --yes or --dry-run", exit_code=USAGE
        )
    return True


def agreed(what: str, question: str) -> bool:
    """Whether whoever sits there says yes."""
    print(what, file=sys.stderr)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
