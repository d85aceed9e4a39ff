"""A model in this node's DRAM: every process here maps it, in milliseconds.

  kvstore model load NAME              bring it there from its files on this disk, or straight from the bucket where they are not
  kvstore model load NAME@REVISION     NAME alone: the revision that it stands for on this disk, else the one published last
  kvstore model load NAME -o json      what was done, for programs
  kvstore model unload NAME            give its memory back to KV: the revision that the name stands for, or the only one in DRAM

KV gives way; what engines use, or users pinned, stays, and is waited for. Models may have models.dram_bytes: those that were used
longest ago leave, pinned and used ones never. Each chunk is verified; interrupted or killed, it goes on where it was when it is
run again within ten minutes. It stays over restarts of engines and of the daemon.

Exit code 1 where it does not fit, the files are damaged, or a process uses what should leave; 3 where there is no such model,
or it is not in DRAM; 4 where no daemon answers, or the bucket does not.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import NOT_FOUND, OK, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket
from kvstore.tools.cli.commands.model_local import add_local_arguments, asked_of_home, home_of, in_words
from kvstore.tools.cli.options import add_model_name, load_config, socket_path
from kvstore.tools.cli.output import present, progress_bars
from kvstore.tools.cli.prefixes import asked_of_daemon

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coldstart.disk.home import Home
    from coldstart.disk.sources import Source
    from replication.formats.manifests import Manifest
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    if parser.prog.endswith(" unload"):
        add_local_arguments(parser)
        return
    add_model_name(
        parser,
        metavar="NAME[@REVISION]",
        help="which; NAME alone: what it stands for here, else what was published last",
    )
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    return _load(args) if args.verb == "load" else _unload(args)


def _load(args: argparse.Namespace) -> int:
    begun_s = time.monotonic()
    home = home_of(args)
    manifest, by_source = asked_of_daemon(
        "model load", lambda: asked_of_home(lambda: _from_nearest(args, home))
    )
    document = {
        "model": manifest.model,
        "revision": manifest.revision,
        "bytes": manifest.size_bytes,
        "by_source": by_source,
        "seconds": round(time.monotonic() - begun_s, 3),
    }
    return present(args, document, show)


def show(document: dict[str, Any]) -> None:
    by_source = document["by_source"]
    how = in_words(by_source, 0, document["seconds"]) if by_source else "there already"
    print(f"{document['model']}@{document['revision']} is in DRAM: {how}")


def _from_nearest(args: argparse.Namespace, home: Home) -> tuple[Manifest, dict[str, int]]:
    """From this disk; what is not there, from the bucket. What was loaded, and bytes by source."""
    from coldstart.disk.home import parse_name
    from coldstart.disk.sources import Local
    from coldstart.errors import ModelMissing
    from coldstart.loading.resident import STREAMS

    try:
        use = home.use(*parse_name(args.name))
    except ModelMissing:
        if not (args.to or args.region or load_config(args).config.region):
            raise
        return asked_of_bucket(args, lambda objects: _from_bucket(args, home, objects))
    with use:
        sources = [Local({use.path: use.manifest})]
        return use.manifest, asyncio.run(_brought(args, use.manifest, sources, STREAMS))


async def _from_bucket(
    args: argparse.Namespace, home: Home, objects: Objects
) -> tuple[Manifest, dict[str, int]]:
    from coldstart.disk.filling import STREAMS
    from coldstart.disk.sources import Bucket, Local
    from coldstart.published.models import read

    manifest = await read(objects, args.name)
    others = Local({one.path: one.manifest for one in home.revisions()})
    return manifest, await _brought(args, manifest, [others, Bucket(objects)], STREAMS)


async def _brought(
    args: argparse.Namespace, manifest: Manifest, sources: Sequence[Source], streams: int
) -> dict[str, int]:
    """Bytes by source; none where it is in DRAM already."""
    from coldstart.loading.resident import CONTENT_BYTES, fill, layout_of
    from kvstore.client import models

    content, size_bytes, done_bytes = manifest.content[:CONTENT_BYTES], layout_of(manifest).size_bytes, 0
    with (
        models.fill(manifest.model, manifest.revision, content, size_bytes, socket_path(args)) as filling,
        progress_bars(of_bytes=True) as bars,
    ):
        if filling.is_whole:
            return {}

        def came(chunk_bytes: int) -> None:
            nonlocal done_bytes
            done_bytes += chunk_bytes
            bars(args.name, done_bytes, manifest.size_bytes)

        return dict(await fill(filling, manifest, sources, came, streams=streams))


def _unload(args: argparse.Namespace) -> int:
    from coldstart.disk.home import name_of, parse_name
    from kvstore.client import models

    model, named = asked_of_home(lambda: parse_name(args.name))
    path = socket_path(args)

    def dropped() -> str:
        there = [found["revision"] for found in models.listed(path) if found["name"] == model]
        revision = named or _revision(args, model, there)
        models.drop(model, revision, path)
        return revision

    revision = asked_of_daemon("model unload", dropped)
    print(f"{name_of(model, revision)} is not in DRAM any more")
    return OK


def _revision(args: argparse.Namespace, model: str, resident: list[str]) -> str:
    """Which one the name alone stands for. Raises CliError."""
    if not resident:
        raise CliError(f"model unload: {model}: not in DRAM (kvstore status)", exit_code=NOT_FOUND)
    if len(resident) == 1:
        return resident[0]
    home = home_of(args)
    return asked_of_home(lambda: home.find(model)).manifest.revision
