"""Make the bucket of a region ready, once; says so again if it is.

  kvstore region init NAME
  kvstore region init NAME --create    make the bucket itself, too (S3, with boto3), and have the store abort what uploads left

Exit code 1 when the bucket belongs to others or refuses, 2 for a wrong file or name, 4 when it does not answer.
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvstore.tools.cli import CliError
from kvstore.tools.cli.buckets import asked
from kvstore.tools.cli.commands.region import add_region_arguments, load_deployment
from kvstore.tools.cli.output import present, say

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Place


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--create", action="store_true", help="make the bucket, too (S3)")
    add_region_arguments(parser)


def run_verb(args: argparse.Namespace) -> int:
    from replication.formats.region import init_region

    deployment = load_deployment(args)
    place = deployment.place(args.region, args.called)
    did = _created(place) if args.create else {}
    made = asked(lambda: init_region(place.open(), deployment.deployment, args.region, time.time))
    facts = {"deployment": made.deployment, "region": made.region, "url": place.url, "made_s": made.made_s}
    return present(args, {**facts, **did, "keeps": kept_by(place)}, _show)


def kept_by(place: Place) -> str:
    """What the bucket keeps of what is deleted, in words; "" for nothing, or where nobody can say."""
    if not place.url.startswith("s3://") or find_spec("boto3") is None:
        return ""
    from coldstart.fleet.bucket_admin import Bucket, BucketError

    try:
        return Bucket(place.url, place.options()).state().keeps
    except BucketError:
        return ""


def _show(facts: dict[str, object]) -> None:
    print(f"{facts['url']} is region {facts['region']} of deployment {facts['deployment']}")
    if "bucket_made" in facts:
        print("its bucket was made" if facts["bucket_made"] else "its bucket was there")
    if facts["keeps"]:
        say(f"its bucket: {facts['keeps']}")


def _created(place: Place) -> dict[str, object]:
    """The bucket is there, and what uploads leave goes by itself. Raises CliError."""
    from coldstart.fleet.bucket_admin import Bucket, BucketError

    try:
        bucket = Bucket(place.url, place.options())
        return {"bucket_made": bucket.create(), "rule_made": bucket.abort_leftovers()}
    except BucketError as error:
        raise CliError(f"region init: --create: {error}") from error
