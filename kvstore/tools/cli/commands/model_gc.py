"""Delete the chunks that no revision names.

  kvstore model gc                     those that are older than an hour
  kvstore model gc --dry-run           only say how much that is

Publishing meanwhile waits until this is over, and loses nothing: what it has announced is kept. A manifest that cannot
be read stops it before anything is deleted.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import duration
from kvstore.tools.cli.output import Progress, later, present, progress_bars
from kvstore.units import count, exact_duration, format_bytes, plural

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects

GRACE = "1h"
GRACE_S_MAX = 365 * 86_400


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grace", default=GRACE, metavar="TIME", help=f"chunks stay at least so long (default {GRACE})"
    )
    parser.add_argument("--dry-run", action="store_true", help="delete nothing")
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    wanted_s = grace_s(args)
    with progress_bars() as bars:
        document = asked_of_bucket(
            args, lambda objects: _collected(objects, wanted_s, args.dry_run, later(bars))
        )
    return present(args, document, show)


def grace_s(args: argparse.Namespace) -> float:
    return duration("model gc: --grace", args.grace, 0, GRACE_S_MAX)


async def _collected(objects: Objects, grace_s: float, dry_run: bool, progress: Progress) -> dict[str, Any]:
    from coldstart.published.collecting import collect

    done = await collect(objects, grace_s, progress, dry_run)
    return {"bucket": objects.where, "dry_run": dry_run, "grace_s": grace_s, **done._asdict()}


def show(document: dict[str, Any]) -> None:
    verb = "would delete" if document["dry_run"] else "deleted"
    print(
        f"{document['bucket']}: {plural(document['manifests'], 'manifest')} and what is being published name"
        f" {plural(document['named'], 'chunk')}"
    )
    print(f"{verb} {plural(document['deleted'], 'chunk')} ({format_bytes(document['deleted_bytes'])})")
    if document["young"]:
        print(f"kept {count(document['young'])} that are younger than {exact_duration(document['grace_s'])}")
    if document["left"]:
        print(f"left {count(document['left'])}: no time, or the store does not let them go: run it again")
