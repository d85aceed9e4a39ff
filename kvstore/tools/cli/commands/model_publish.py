"""Publish a model: a directory, or a model in a cache of Hugging Face.

  kvstore model publish ./Qwen3-8B --name qwen3-8b
  kvstore model publish ~/.cache/huggingface/hub/models--Qwen--Qwen3-8B --name qwen3-8b --revision v2

Only what the bucket lacks is put: of a revision that changes a few tensors, those. Where it was killed, run it again. A revision
that is there with the same files is done (exit code 0), and what is missing of it is put; one with other files is left as it is.

With --with-cache DIR the compile caches that an engine made of it (`kvstore model env` names the directory) are published beside
the revision, signed: engines of an equal environment need not compile. --tp, --pp and --path are those of that engine.

Names that begin with a dot are left out. Files that are cut off, or change meanwhile, stop it: exit code 1, and nothing is published.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import NOT_FOUND, CliError
from kvstore.tools.cli.commands.model_bucket import add_bucket_arguments, asked_of_bucket, this_user
from kvstore.tools.cli.commands.model_env import add_environment_arguments, environment_of, signing_key
from kvstore.tools.cli.options import plain_name
from kvstore.tools.cli.output import Progress, later, present, progress_bars
from kvstore.units import count, format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from coldstart.published.tree import Tree
    from replication.formats.manifests import Manifest
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="the files, or a model in a cache of Hugging Face"
    )
    parser.add_argument(
        "--name", required=True, type=plain_name, metavar="NAME", help="of the model: a-z 0-9 . _ -"
    )
    parser.add_argument(
        "--revision", default="", type=plain_name, metavar="NAME", help="(default: 16 digits of its content)"
    )
    parser.add_argument("--by", default="", metavar="WHO", help="who publishes it (default: user@host)")
    parser.add_argument(
        "--again", action="store_true", help="put every chunk anew: after verify --deep found damage"
    )
    parser.add_argument(
        "--below", type=Path, metavar="DIR", help="refuse what lies elsewhere, links followed (default: /)"
    )
    parser.add_argument("--with-cache", type=Path, metavar="DIR", help="compile caches, too")
    add_environment_arguments(parser)
    add_bucket_arguments(parser, "text", "json")


def run_verb(args: argparse.Namespace) -> int:
    for path in filter(None, (args.directory, args.with_cache)):
        if not path.is_dir():
            raise CliError(f"model publish: {path}: no such directory", exit_code=NOT_FOUND)
    key = signing_key(args) if args.with_cache else b""
    with progress_bars(of_bytes=True) as bars:
        document = asked_of_bucket(args, lambda objects: _published(objects, args, key, later(bars)))
    return present(args, document, show)


async def _published(
    objects: Objects, args: argparse.Namespace, key: bytes, progress: Progress
) -> dict[str, Any]:
    """Whatever can be refused of the model or its caches is, before anything of either is put. key: of caches."""
    from coldstart.fleet.caches import signed
    from coldstart.published.publish import digested, manifest_of, publish
    from coldstart.published.tree import find_files
    from replication.models.published import published

    begun_s = time.monotonic()
    tree = find_files(args.directory, args.below)
    caches = find_files(args.with_cache) if args.with_cache else None
    await published(objects, args.name)  # a bucket that refuses says so before all files are read
    by = (args.by or this_user())[:200]

    async def made(tree: Tree, revision: str, about: dict[str, str]) -> Manifest:
        files, source = await digested(tree, progress), printable(str(tree.directory))[:1000]
        return manifest_of(files, args.name, revision, by, source, about)

    manifest = await made(tree, args.revision, {})
    of_caches = None
    if caches is not None:
        about = environment_of(args, manifest.model, manifest.revision)
        of_caches = signed(await made(caches, manifest.revision, about), key)
    stored = await publish(objects, tree, manifest, args.again, progress)
    if caches is not None and of_caches is not None:
        await publish(objects, caches, of_caches, args.again, progress)
    return {
        "bucket": objects.where,
        "model": stored.manifest.model,
        "revision": stored.manifest.revision,
        "was_there": stored.was_there,
        "bytes": stored.manifest.size_bytes,
        "files": len(stored.manifest.files),
        "chunks": len(stored.manifest.chunks),
        "put_chunks": stored.put,
        "put_bytes": stored.put_bytes,
        "left_out": tree.left_out,
        "with_cache": bool(args.with_cache),
        "took_s": round(time.monotonic() - begun_s, 3),
    }


def show(document: dict[str, Any]) -> None:
    name = f"{document['model']}@{document['revision']}"
    done = "was published before" if document["was_there"] else "is published"
    print(
        f"{name} {done}: {plural(document['files'], 'file')}, {format_bytes(document['bytes'])}, in {document['bucket']}"
    )
    print(
        f"put {plural(document['put_chunks'], 'chunk')} of {count(document['chunks'])}"
        f" ({format_bytes(document['put_bytes'])}) in {format_duration(document['took_s'])}"
    )
    if document["with_cache"]:
        print("its compile caches are published, too")
    if document["left_out"]:
        print(f"left out {plural(document['left_out'], 'name')} with a dot at the beginning")
