"""One revision: what it is, and its files.

kvstore model show NAME              the one that was published last
kvstore model show NAME@REVISION
kvstore model show NAME -o json      the same for programs, with digests; docs/cli.md lists the fields
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.options import add_model_name
from kvstore.tools.cli.output import Figure, present, print_table, say
from kvstore.units import count, format_bytes, format_time, plural

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_name(parser, metavar="NAME[@REVISION]", help="which")
    add_bucket_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    return present(args, asked_of_bucket(args, lambda objects: _shown(objects, args.name)), show)


async def _shown(objects: Objects, name: str) -> dict[str, Any]:
    from coldstart.published.models import find, read
    from replication.formats.manifests import CACHES
    from replication.models.published import latest_first

    one = await find(objects, name)
    manifest = await read(objects, f"{one.model}@{one.revision}")
    caches = await latest_first(objects, f"{one.model}/{one.revision}", CACHES)
    return {
        "bucket": objects.where,
        "model": one.model,
        "revision": one.revision,
        "content": manifest.content.hex(),
        "published_s": one.said(manifest).published_s,
        "published_by": manifest.published_by,
        "source": manifest.source,
        "bytes": manifest.size_bytes,
        "chunks": len(manifest.chunks),
        "chunk_bytes": sum(chunk.size_bytes for chunk in manifest.chunks),
        "caches": [cache.key for cache in caches],
        "files": [
            {
                "path": file.path,
                "bytes": file.size_bytes,
                "sha256": file.sha256.hex(),
                "chunks": len(file.chunks),
            }
            for file in manifest.files
        ],
    }


def show(document: dict[str, Any]) -> None:
    say(f"{document['model']}@{document['revision']} in {document['bucket']}")
    say(
        f"published {format_time(document['published_s'])} by {document['published_by']}, from {document['source']}"
    )
    print(
        f"{plural(len(document['files']), 'file')}, {format_bytes(document['bytes'])}; {plural(document['chunks'], 'chunk')},"
        f" {format_bytes(document['chunk_bytes'])}; compile caches: {count(len(document['caches']))}"
    )
    rows = [
        [file["path"], Figure(format_bytes(file["bytes"])), file["chunks"], file["sha256"][:16]]
        for file in document["files"]
    ]
    print_table("files", ["path", "size", "chunks", "sha256"], rows, drop=("chunks",))
