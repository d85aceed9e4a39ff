"""Whether the bucket has what its manifests name.

  kvstore model verify                 of all models: every chunk is there, as long as it should be
  kvstore model verify NAME[@REVISION] of one
  kvstore model verify --deep          every byte is read, and compared with the digests

What is missing or damaged is said with the files and revisions that have it. `kvstore model publish` of the same files puts
what is missing; with --again also what is damaged.

Exit code 0 where all is sound, 1 where it is not.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import add_model_name
from kvstore.tools.cli.output import Progress, later, present, progress_bars, say
from kvstore.units import format_bytes, plural

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects

FINDINGS_SAID = 1000  # in the JSON; all are counted
LINES_SAID = 20  # for people
FILES_SAID = 3  # of a finding, for people


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(
        parser, nargs="?", default="", metavar="NAME[@REVISION]", help="which (default: all models)"
    )
    parser.add_argument("--deep", action="store_true", help="read every byte")
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    with progress_bars() as bars:
        document = asked_of_bucket(args, lambda objects: _verified(objects, args, later(bars)))
    present(args, document, show)
    return OK if document["ok"] else FAILED


async def _verified(objects: Objects, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    from coldstart.published.checking import verify
    from coldstart.published.models import find
    from replication.formats.manifests import CACHES
    from replication.models.published import published

    if args.name:
        one = await find(objects, args.name)
        revisions = [one, *await published(objects, f"{one.model}/{one.revision}", CACHES)]
    else:
        revisions = [*await published(objects), *await published(objects, folder=CACHES)]
    report = await verify(objects, revisions, args.deep, progress)
    return {
        "bucket": objects.where,
        "ok": not report.findings,
        **{name: getattr(report, name) for name in ("revisions", "chunks", "bytes", "read_bytes")},
        "found": len(report.findings),
        "findings": [finding._asdict() for finding in report.findings[:FINDINGS_SAID]],
    }


def show(document: dict[str, Any]) -> None:
    print(
        f"{document['bucket']}: {plural(document['revisions'], 'manifest')}, {plural(document['chunks'], 'chunk')}"
        f" ({format_bytes(document['bytes'])}), {format_bytes(document['read_bytes'])} of them read"
    )
    for finding in document["findings"][:LINES_SAID]:
        files = ", ".join(finding["files"][:FILES_SAID])
        more = f" and {len(finding['files']) - FILES_SAID} more" if len(finding["files"]) > FILES_SAID else ""
        said = f"  {finding['kind']}: {finding['name']}: {finding['reason']}"
        say(f"{said}{': in ' if files else ''}{files}{more}", 4)
    if document["found"] > LINES_SAID:
        print(f"  and {document['found'] - LINES_SAID} more")
    print("sound" if document["ok"] else plural(document["found"], "problem"))
