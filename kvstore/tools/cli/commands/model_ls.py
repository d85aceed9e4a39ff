"""Which models and revisions there are, the latest first.

  kvstore model ls                     of all models
  kvstore model ls NAME                the revisions of one
  kvstore model ls --local             what is on this node's disk, and under way there
  kvstore model ls -o json             the same for programs; docs/cli.md lists the fields

Exit code 1 where a manifest cannot be read, 3 where there is no such model.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import plain_name
from kvstore.tools.cli.output import Figure, present, print_table
from kvstore.units import NOTHING, format_bytes, format_time

if TYPE_CHECKING:
    from replication.models.published import Published
    from tiers.bucket.objects import Objects

READ_AT_ONCE = 16


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default="", type=plain_name, metavar="NAME", help="a model (default: all)"
    )
    parser.add_argument("--local", action="store_true", help="on this node's disk, instead of in a bucket")
    add_bucket_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    if args.local:
        from kvstore.tools.cli.commands.model_local import show_local

        return show_local(args)
    document = asked_of_bucket(args, lambda objects: _listed(objects, args.name))
    present(args, document, show)
    return FAILED if any(row["problem"] for row in document["revisions"]) else OK


async def _listed(objects: Objects, name: str) -> dict[str, Any]:
    from coldstart.published.models import find
    from replication.models.published import in_order, published
    from tiers.together import each

    found = await published(objects, name)
    if name and not found:
        await find(objects, name)  # says what there is
    rows = dict(filter(None, await each(lambda one: _row(objects, one), found, READ_AT_ONCE)))
    return {"bucket": objects.where, "revisions": [rows[one] for one in in_order(rows)]}


async def _row(objects: Objects, one: Published) -> tuple[Published, dict[str, Any]] | None:
    """With when it was published, as its manifest says it; None where it was removed meanwhile."""
    from replication.errors import Damaged
    from replication.formats.manifests import read_manifest
    from tiers.errors import ObjectMissing, ObjectRefused

    facts: dict[str, Any] = dict.fromkeys(("bytes", "files", "chunks", "published_by", "source"))
    problem = ""
    try:
        manifest = await read_manifest(objects, one.model, one.revision)
    except ObjectMissing:
        return None
    except (Damaged, ObjectRefused) as error:
        problem = str(error)
    else:
        one = one.said(manifest)
        facts = {
            "bytes": manifest.size_bytes,
            "files": len(manifest.files),
            "chunks": len(manifest.chunks),
            "published_by": manifest.published_by,
            "source": manifest.source,
        }
    row = {"model": one.model, "revision": one.revision, "published_s": one.published_s}
    return one, {**row, **facts, "problem": problem}


def show(document: dict[str, Any]) -> None:
    rows = [
        [
            row["model"],
            row["revision"],
            Figure(NOTHING if row["bytes"] is None else format_bytes(row["bytes"])),
            Figure(NOTHING if row["files"] is None else row["files"]),
            format_time(row["published_s"]),
            row["problem"] or row["published_by"],
        ]
        for row in document["revisions"]
    ]
    if not rows:
        print(f"No model is in {document['bucket']}.")
        return
    columns = ["model", "revision", "size", "files", "published", "by"]
    print_table(f"models in {document['bucket']}", columns, rows, drop=("files", "by"))
