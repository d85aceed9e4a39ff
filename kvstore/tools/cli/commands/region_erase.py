"""Erase what is stored of a tenant, a namespace or a prefix, in the buckets of all regions and on all their nodes.

  kvstore region erase --tenant acme                        everything of a tenant
  kvstore region erase --namespace 3fa2…                    everything of a namespace (its whole digest: kvstore status -o json)
  kvstore region erase --prefix 5f0c…e1 --namespace 3fa2…   a prefix that ends with this block, and all that goes on behind it
  kvstore region erase --tenant acme --region eu            in one region only

A tombstone is put into each bucket. Nodes and mirrors read it within a minute: they drop what it names from their tiers and
from the bucket, and until its time is over they neither keep nor copy anything that it names. Erasing again erases again, and prolongs it. A
region that does not answer now is named; erase again when it does (a mirror brings it the tombstones of the others, too).

Exit code 0 when every bucket has the tombstone, 1 when one refused, 2 for wrong names, 3 when nothing that the daemon here knows
begins like the prefix, 4 when a bucket did not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import time
from typing import TYPE_CHECKING, Any

from kvstore.constants import DAY_S
from kvstore.tools.cli import OK, USAGE, CliError
from kvstore.tools.cli.buckets import code_of, opened, place_of
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, is_of_node
from kvstore.tools.cli.output import present, print_table
from kvstore.tools.cli.prefixes import whole_or_found

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from replication.formats.tombstones import Tombstone

DAYS_MAX = 3650


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
        "--days", type=float, default=30.0, help="how long nothing of it is kept or copied (default 30)"
    )
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    if is_of_node(args):
        return _of_node(args)
    tombstone = _tombstone(args)
    deployment = load_deployment(args)
    for name in args.region:
        place_of(deployment, name, f"{args.called}: --region")
    regions = args.region or list(deployment.regions)
    states = asyncio.run(_bury(deployment, regions, tombstone))
    rows = [{"region": name, "state": state} for name, (state, _) in zip(regions, states, strict=True)]
    told = {"tombstone": tombstone.id, "prefix": tombstone.block_hash.hex()}
    present(args, {**told, "watched_until_s": tombstone.watched_until_s, "regions": rows}, _show)
    return max(code for _, code in states)


def _show(document: dict[str, Any]) -> None:
    if document["prefix"]:
        print(f"prefix {document['prefix']}\n")
    rows = [list(row.values()) for row in document["regions"]]
    print_table(f"tombstone {document['tombstone']}", ["region", "state"], rows)


def _of_node(args: argparse.Namespace) -> int:
    """In the regions that another node knows."""
    from kvstore.tools.cli.nodes import run_there

    what = (args.prefix, args.namespace, args.tenant, args.region, math.ceil(args.days))
    return run_there(args, args.called, lambda node: node.erase_regions(*what), _show)


def _tombstone(args: argparse.Namespace) -> Tombstone:
    from replication.formats.tombstones import Tombstone

    for digest in args.namespace:
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise CliError(
                f"{args.called}: --namespace {digest}: a whole digest is required, 32 hex digits",
                exit_code=USAGE,
            )
    if not args.tenant and not args.namespace:
        raise CliError(f"{args.called}: --tenant or --namespace is required", exit_code=USAGE)
    if not 0 < args.days <= DAYS_MAX:
        raise CliError(
            f"{args.called}: --days {args.days:g}: allowed are more than 0, up to {DAYS_MAX}", exit_code=USAGE
        )
    return Tombstone(
        tenant=args.tenant,
        namespaces=tuple(sorted(map(bytes.fromhex, args.namespace))),
        block_hash=whole_or_found(args, args.called, args.prefix) if args.prefix else b"",
        watched_until_s=int(time.time() + args.days * DAY_S),
        serial=time.time_ns() // 1_000_000,
    )


async def _bury(deployment: Deployment, regions: list[str], tombstone: Tombstone) -> list[tuple[str, int]]:
    """What to say of each region, and the exit code it asks for."""
    from replication.errors import ReplicationError
    from replication.formats.tombstones import bury
    from tiers.errors import TierError
    from tiers.together import together

    async def one(name: str) -> tuple[str, int]:
        try:
            await bury(await opened(deployment, name), tombstone)
        except (ReplicationError, TierError) as error:
            return str(error), code_of(error)
        return "buried", OK

    return await together(map(one, regions))
