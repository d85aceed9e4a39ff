"""Take a revision away, with its compile caches.

  kvstore model rm NAME@REVISION
  kvstore model rm NAME --all          all revisions of a model

Nobody finds it any more; nodes that have it keep it. Its chunks take room until `kvstore model gc`. A manifest that cannot be read
is removed like any other. In a region a removal stays for --days: mirrors bring it to the regions that copy from there, none of them
brings the revision back, and nobody publishes it under that name again.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.constants import DAY_S
from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket, this_user
from kvstore.tools.cli.options import add_model_name, days
from kvstore.tools.cli.output import presented, say

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, metavar="NAME@REVISION", help="which")
    parser.add_argument("--all", action="store_true", help="all revisions of NAME")
    parser.add_argument(
        "--days",
        type=days,
        default=30.0,
        metavar="DAYS",
        help="in a region: how long it may not come back (default 30)",
    )
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    if ("@" in args.name) == args.all:
        wanted = "with --all, a name without revision" if args.all else "NAME@REVISION, or --all of them"
        raise CliError(f"model rm {args.name}: allowed is {wanted}", exit_code=USAGE)
    removed: list[str] = []
    document: dict[str, Any] = {"bucket": "", "removed": removed}
    with presented(args, document, removed, show):
        asked_of_bucket(args, lambda objects: _remove(objects, args, document))
    return OK


async def _remove(objects: Objects, args: argparse.Namespace, document: dict[str, Any]) -> None:
    """document: is filled."""
    from coldstart.published.models import find, remove
    from replication.erasure.removed_models import Removal
    from replication.feed.announcing import is_region
    from replication.formats.keeping import store_now_s
    from replication.models.published import in_order, published

    there = in_order(await published(objects, args.name)) if args.all else []
    chosen = there or [await find(objects, args.name)]
    by, in_region = this_user()[:200], await is_region(objects)
    now_s = await store_now_s(objects) if in_region else 0.0
    document["bucket"] = objects.where
    for each in chosen:
        removal = Removal(each.model, each.revision, now_s, by, int(now_s + args.days * DAY_S) + 1)
        await remove(objects, each, removal if in_region else None)
        document["removed"].append(f"{each.model}@{each.revision}")


def show(document: dict[str, Any]) -> None:
    for name in document["removed"]:
        say(f"removed {name} from {document['bucket']}")
    print("kvstore model gc gives back the room of what no other revision has")
