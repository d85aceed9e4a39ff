"""Erase what is stored of a tenant, a namespace or a prefix, in the buckets of all regions and on all their nodes.

  kvstore region erase --tenant acme                        everything of a tenant
  kvstore region erase --namespace 3fa2…                    everything of a namespace (its whole digest: kvstore status -o json)
  kvstore region erase --prefix 5f0c…e1 --namespace 3fa2…   a prefix that ends with this block, and all that goes on behind it
  kvstore region erase --tenant acme --region eu            in one region only
  kvstore region erase --tenant acme --wait                 until it is gone from the buckets and all nodes; or say what is left, and why
  kvstore region erase --tenant acme --dry-run              erase nothing, say what would go
  kvstore region erase --ls                                 what is erased and watched for now, and in which regions
  kvstore region erase --cancel TOMBSTONE                   take one back: what nodes have not erased by then stays, and is kept again

On a terminal it says what goes, and asks; elsewhere --yes is required. A tenant or namespace of which neither the regions nor the daemon
here know anything is refused, with --region too: what other regions know may come; --force erases it all the same, and asks none.

A tombstone is put into each bucket. Nodes and mirrors read it within a minute: they drop what it names from their tiers and
from the bucket, and until its time is over they neither keep nor copy anything that it names. Erasing again erases what came since, and
prolongs it. A
region that does not answer now is named; erase again when it does (a mirror brings it the tombstones of the others, too). What is
erased cannot be brought back: --cancel is in time for regions whose nodes have not read it, and ends the watch in all others.

Exit code 0 when every bucket has the tombstone (with --wait: when it is gone), 1 when one refused, something is left or you said no, 2 for wrong words, 3 when nobody of that name, no such
prefix or no such tombstone is known, 4 when a bucket did not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.constants import DAY_S
from kvstore.tools.cli import FAILED, NOT_FOUND, OK, USAGE, CliError
from kvstore.tools.cli.asking import agreed, must_ask
from kvstore.tools.cli.buckets import away_of, code_of, code_said, in_each
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, days, duration, is_of_node
from kvstore.tools.cli.output import Figure, present, print_table, say
from kvstore.tools.cli.prefixes import whole_or_found
from kvstore.units import NOTHING, format_bytes, format_time, plural

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from kvstore.tools.cli.commands.region_known import Known
    from replication.formats.tombstones import Tombstone
    from tiers.bucket.objects import Objects

WAIT = "5min"  # for nodes and keepers, if nothing else is said
GONE = "gone"
READ, BACK, BACK_BEFORE, NOT_THERE = "read", "taken back", "was taken back before", "not there"
DONE = ("ready", READ, BACK, BACK_BEFORE, NOT_THERE)  # of what another node was asked


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="everything of this tenant")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="DIGEST",
        help="32 hex digits; may be given several times",
    )
    parser.add_argument(
        "--prefix",
        default="",
        metavar="HASH",
        help="hash of the last block of a prefix, in hex; a beginning of it where the daemon of this node knows it",
    )
    parser.add_argument(
        "--region", action="append", default=[], metavar="NAME", help="only here (default: everywhere)"
    )
    parser.add_argument(
        "--days",
        type=days,
        default=30.0,
        metavar="DAYS",
        help="how long nothing of it is kept or copied (default 30)",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--wait",
        nargs="?",
        const=WAIT,
        metavar="TIME",
        help=f"until it is gone, for so long at most (default {WAIT})",
    )
    parser.add_argument("--force", action="store_true", help="even if nobody of that name is known")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="erase nothing, say what would go")
    what.add_argument("--ls", action="store_true", help="list what is erased and watched for now")
    what.add_argument("--cancel", default="", metavar="TOMBSTONE", help="take one back, as --ls names it")
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    of_node = is_of_node(args)
    if args.ls or args.cancel:
        return _of_tombstones(args)
    tombstone, asks = _tombstone(args, of_node), must_ask(args)
    wait_s = duration(f"{args.called}: --wait", args.wait, 1.0, DAY_S) if args.wait else None
    if of_node:
        return _of_node(args, asks, wait_s)
    deployment, regions = _regions(args)
    rows: list[dict[str, Any]] = []
    if asks or args.dry_run or not args.force:
        rows, codes = _looked_at(args, deployment, regions, tombstone)
        if args.dry_run:
            present(args, _facts(tombstone, rows, codes, dry_run=True), _show)
            return max(codes.values())
    what = f"{_subject(args)} in {', '.join(regions)} and on all nodes there, {_size(rows)}"
    if asks and not agreed(f"This erases {what}. It cannot be brought back.", "Erase it?"):
        raise CliError(f"{args.called}: nothing was erased")

    stones: list[Tombstone] = []

    async def bury_in(objects: Objects) -> str:
        from msgspec.structs import replace

        from replication.formats.keeping import store_now_s
        from replication.formats.tombstones import bury

        now_s = await store_now_s(objects)  # whatever the clock of this machine says
        until_s, serial = int(now_s + args.days * DAY_S), max(tombstone.serial, int(1000 * now_s))
        buried = await bury(objects, replace(tombstone, watched_until_s=until_s, serial=serial))
        stones.append(buried)
        if wait_s is None:
            return "buried"
        from kvstore.tools.cli.commands.region_erased import until_gone

        return "; ".join(await until_gone(objects, buried, wait_s)) or GONE

    rows, codes = in_each(deployment, regions, bury_in)
    code = max(codes.values())
    if wait_s is not None:
        code = max(code, _of_versions(deployment, tombstone, rows))
    latest = max(stones, key=lambda one: one.watched_until_s, default=tombstone)
    present(args, _facts(latest, rows, codes), _show)
    return code


def _of_versions(deployment: Deployment, tombstone: Tombstone, rows: Sequence[dict[str, Any]]) -> int:
    """The exit code where something is left. Old versions of what is deleted go, too; those that stay count, and are said."""
    from coldstart.fleet.bucket_admin import Bucket, BucketError
    from coldstart.fleet.old_versions import delete_old
    from kvstore.tools.cli.commands.region_init import kept_by

    for row in rows:
        place = deployment.regions[row["region"]]
        if row["state"] == GONE and (kept := kept_by(place)):
            try:
                left = delete_old(Bucket(place.url, place.options()), place.open(), tombstone)
            except BucketError as error:
                left = str(error)
            row["state"] = f"the bucket: {left}; {kept}" if left else GONE
    return OK if all(row["state"] == GONE for row in rows) else FAILED


def _regions(args: argparse.Namespace) -> tuple[Deployment, list[str]]:
    deployment = load_deployment(args)
    for name in args.region:
        deployment.place(name, f"{args.called}: --region")
    return deployment, args.region or list(deployment.regions)


def _looked_at(
    args: argparse.Namespace, deployment: Deployment, regions: Sequence[str], tombstone: Tombstone
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What each region has of it, and the exit code that this asks for, by region. Raises CliError where nobody knows it."""
    from kvstore.tools.cli.commands.region_known import known_here, known_in

    found: list[Known] = [known_here(args, tombstone)]

    async def look(name: str) -> tuple[dict[str, Any], int]:
        from replication.errors import ReplicationError
        from tiers.errors import TierError

        try:
            known = await known_in(deployment, name, tombstone)
        except (ReplicationError, TierError) as error:
            return {"region": name, "state": str(error), "packs": None, "bytes": None}, code_of(error)
        found.append(known)
        return {"region": name, "state": "ready", "packs": known.packs, "bytes": known.bytes}, OK

    async def looks(names: Sequence[str]) -> list[tuple[dict[str, Any], int]]:
        return [await look(name) for name in names]

    looked = asyncio.run(looks(regions))
    rows, codes = [row for row, _ in looked], {row["region"]: code for row, code in looked}
    if not args.force and not any(known.is_known for known in found):  # else from where it is read or copied
        looked += asyncio.run(looks([name for name in deployment.regions if name not in regions]))
    if not args.force and not any(known.is_known for known in found):
        tenants = sorted({tenant for known in found for tenant in known.tenants if tenant})
        others = f": tenants are {', '.join(tenants[:8])}" if tenants else ""
        unread = [line for known in found for line in known.unread]
        lacking = [f"{row['region']}: {row['state']}" for row, code in looked if code]
        away = "".join(f"; {line}" for line in (*lacking, *unread))
        raise CliError(
            f"{args.called}: {_subject(args)}: nothing of it is known{others}{away} (--force erases it all the same)",
            exit_code=max(code for _, code in looked) or (FAILED if unread else NOT_FOUND),
        )
    return rows, codes


def _subject(args: argparse.Namespace) -> str:
    words = [f"tenant {args.tenant}"] if args.tenant else []
    words += [f"namespace {digest[:12]}" for digest in args.namespace]
    return ("a prefix of " if args.prefix else "") + ", ".join(words)


def _size(rows: Sequence[dict[str, Any]]) -> str:
    there = [row for row in rows if row["packs"] is not None]
    packs, size = sum(row["packs"] for row in there), sum(row["bytes"] for row in there)
    return f"{plural(packs, 'pack')} ({format_bytes(size)}) of the buckets" if there else "whatever is there"


def _facts(
    tombstone: Tombstone, rows: list[dict[str, Any]], codes: Mapping[str, int], dry_run: bool = False
) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "tombstone": tombstone.id,
        "prefix": tombstone.block_hash.hex(),
        "watched_until_s": tombstone.watched_until_s,
        "regions": rows,
        "away": away_of(codes),
    }


def _show(document: dict[str, Any]) -> None:
    if document["prefix"]:
        print(f"prefix {document['prefix']}\n")
    rows = document["regions"]
    title = (
        "nothing is erased: it would be" if document.get("dry_run") else f"tombstone {document['tombstone']}"
    )
    print_table(title, list(rows[0]), [[_cell(*pair) for pair in row.items()] for row in rows])


def _cell(name: str, value: Any) -> object:
    if value is None:
        return Figure(NOTHING)
    return Figure(format_bytes(value)) if name == "bytes" else value


def _of_node(args: argparse.Namespace, asks: bool, wait_s: float | None) -> int:
    """In the regions that another node knows."""
    from kvstore.tools.cli.nodes import node_of, run_there

    erasure = {
        "prefix": args.prefix,
        "namespaces": args.namespace,
        "tenant": args.tenant,
        "regions": args.region,
        "days": math.ceil(args.days),
        "only_known": not args.force,
    }
    if args.dry_run:
        with node_of(args, args.called) as node:
            return _presented(args, node.plan_erasure(erasure), _show)
    what = f"This erases {_subject(args)} in the regions that {args.node} knows, and on all their nodes."
    if asks and not agreed(f"{what} It cannot be brought back.", "Erase it?"):
        raise CliError(f"{args.called}: nothing was erased")
    return run_there(args, args.called, lambda node: node.erase_regions(**erasure, wait=wait_s), _show)


def _presented(
    args: argparse.Namespace, document: dict[str, Any], show: Callable[[dict[str, Any]], object]
) -> int:
    """What another node says, and the exit code that fits it."""
    present(args, document, show)
    return code_said(document, all(row["state"] in DONE for row in document["regions"]))


# -- what is erased --


def _of_tombstones(args: argparse.Namespace) -> int:
    """List them, or take one back."""
    if args.tenant or args.namespace or args.prefix:
        raise CliError(
            f"{args.called}: --ls and --cancel take no --tenant, --namespace or --prefix", exit_code=USAGE
        )
    if args.cancel and not re.fullmatch(r"[0-9a-f]{32}", args.cancel):
        raise CliError(
            f"{args.called}: --cancel {args.cancel}: a tombstone has 32 hex digits, as --ls shows them",
            exit_code=USAGE,
        )
    if is_of_node(args):
        return _of_tombstones_there(args)
    deployment, regions = _regions(args)
    if args.cancel:
        return _cancel(args, deployment, regions)
    found: dict[str, dict[str, Any]] = {}

    async def read(objects: Objects) -> str:
        from replication.formats.keeping import clock_of
        from replication.formats.tombstones import read_tombstones

        now_s = (await clock_of(objects))()
        for one in (await read_tombstones(objects)).by_key.values():
            if now_s < one.watched_until_s:
                row = found.setdefault(one.id, _row(one))
                row["watched_until_s"] = max(row["watched_until_s"], one.watched_until_s)
                row["regions"].append(objects.where)
        return READ

    rows, codes = in_each(deployment, regions, read)
    document = {"tombstones": list(found.values()), "regions": rows, "away": away_of(codes)}
    present(args, document, _show_tombstones)
    return max(codes.values())


def _of_tombstones_there(args: argparse.Namespace) -> int:
    """The same, of the regions that another node knows."""
    from kvstore.tools.cli.nodes import node_of

    with node_of(args, args.called) as node:
        if args.cancel:
            return _presented(args, node.cancel_erasure(args.cancel, args.region), _show)
        return _presented(args, node.list_erasures(args.region), _show_tombstones)


def _row(one: Tombstone) -> dict[str, Any]:
    return {
        "tombstone": one.id,
        "tenant": one.tenant or None,
        "namespaces": [digest.hex() for digest in one.namespaces],
        "prefix": one.block_hash.hex(),
        "erased_s": one.serial / 1000,
        "watched_until_s": one.watched_until_s,
        "regions": [],
    }


def _show_tombstones(document: dict[str, Any]) -> None:
    rows = [
        [
            one["tombstone"],
            one["tenant"] or "",
            ", ".join(digest[:12] for digest in one["namespaces"]),
            one["prefix"][:12],
            format_time(one["watched_until_s"]),
            ", ".join(one["regions"]),
        ]
        for one in document["tombstones"]
    ]
    columns = ["tombstone", "tenant", "namespaces", "prefix", "watched until", "in"]
    print_table("erased, and watched for", columns, rows, ("in", "namespaces"))
    for row in document["regions"]:
        if row["state"] != READ:
            say(f"{row['region']}: {row['state']}")


def _cancel(args: argparse.Namespace, deployment: Deployment, regions: Sequence[str]) -> int:
    from replication.formats.tombstones import take_back

    async def back(objects: Objects) -> str:
        there = await take_back(objects, args.cancel)
        if there is None:
            return NOT_THERE
        return BACK_BEFORE if there.is_taken_back else BACK

    rows, codes = in_each(deployment, regions, back)
    if all(row["state"] == NOT_THERE for row in rows):
        raise CliError(f"{args.called}: --cancel {args.cancel}: no such tombstone", exit_code=NOT_FOUND)
    document = {"tombstone": args.cancel, "prefix": "", "regions": rows, "away": away_of(codes)}
    present(args, document, _show)
    return max(codes.values())


def _tombstone(args: argparse.Namespace, of_node: bool) -> Tombstone:
    """of_node: the beginning of a hash is completed there. Raises CliError."""
    from replication.formats.tombstones import Tombstone

    for digest in args.namespace:
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise CliError(
                f"{args.called}: --namespace {digest}: a whole digest is required, 32 hex digits",
                exit_code=USAGE,
            )
    if not args.tenant and not args.namespace:
        hint = "; what engines without a tenant stored is erased by --namespace"
        raise CliError(f"{args.called}: --tenant NAME or --namespace is required{hint}", exit_code=USAGE)
    return Tombstone(
        tenant=args.tenant,
        namespaces=tuple(sorted(map(bytes.fromhex, args.namespace))),
        block_hash=whole_or_found(args, args.called, args.prefix) if args.prefix and not of_node else b"",
        watched_until_s=int(time.time() + args.days * DAY_S),
        serial=time.time_ns() // 1_000_000,
    )
