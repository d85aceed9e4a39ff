"""A model in this node's DRAM: every process here maps it, in milliseconds.

  kvstore model load NAME              bring it there from its files on this disk: the revision that the name stands for here
  kvstore model load NAME@REVISION
  kvstore model load NAME -o json      what was done, for programs
  kvstore model unload NAME            give its memory back to KV: the revision that the name stands for, or the only one in DRAM

KV gives way; what engines use, or users pinned, stays, and is waited for. Models may have models.dram_bytes: those that were used
longest ago leave, pinned and used ones never. Each chunk is verified; interrupted or killed, it goes on where it was when it is
run again within ten minutes. It stays over restarts of engines and of the daemon.

Exit code 1 where it does not fit, the files are damaged, or a process uses what should leave; 3 where it is not on this disk, or
not in DRAM; 4 where no daemon answers.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from kvstore.cli import NOT_FOUND, OK, CliError
from kvstore.cli.model_local import add_local_arguments, asked_of_home, home_of, in_words
from kvstore.cli.options import add_output_argument, socket_path
from kvstore.cli.output import present, progress_bars
from kvstore.cli.prefixes import asked_of_daemon

if TYPE_CHECKING:
    from coldstart.home import Use


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_local_arguments(parser)
    if parser.prog.endswith(" load"):
        add_output_argument(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    return _load(args) if args.verb == "load" else _unload(args)


def _load(args: argparse.Namespace) -> int:
    from coldstart.home import parse_name

    begun_s = time.monotonic()
    home = home_of(args)
    with asked_of_home(lambda: home.use(*parse_name(args.name))) as use:
        by_source = asked_of_daemon("model load", lambda: asked_of_home(lambda: _brought(args, use)))
        manifest = use.manifest
    document = {
        "model": manifest.model,
        "revision": manifest.revision,
        "bytes": manifest.size_bytes,
        "by_source": by_source,
        "seconds": round(time.monotonic() - begun_s, 3),
    }
    return present(args, document, _show)


def _show(document: dict[str, Any]) -> None:
    by_source = document["by_source"]
    how = in_words(by_source, 0, document["seconds"]) if by_source else "there already"
    print(f"{document['model']}@{document['revision']} is in DRAM: {how}")


def _brought(args: argparse.Namespace, use: Use) -> dict[str, int]:
    """Bytes by source; none where it is in DRAM already."""
    from coldstart.resident import CONTENT_BYTES, fill, layout_of
    from coldstart.sources import Local
    from kvstore.client import models

    manifest, size_bytes = use.manifest, layout_of(use.manifest).size_bytes
    content, done_bytes = manifest.content[:CONTENT_BYTES], 0
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

        return dict(asyncio.run(fill(filling, manifest, [Local({use.path: manifest})], came)))


def _unload(args: argparse.Namespace) -> int:
    from coldstart.home import name_of, parse_name
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
