"""All regions of the file, and whether each bucket is ready.

  kvstore region ls [-o json]

Exit code 0 when all are ready, 1 when one is not, 2 for a wrong file, 4 when a bucket does not answer.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli.buckets import away_of, code_said, in_each
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, is_of_node
from kvstore.tools.cli.output import present, print_table

if TYPE_CHECKING:
    from tiers.bucket.objects import Objects


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_regions_argument(parser)
    add_config_arguments(parser, "table", "json")


def run_verb(args: argparse.Namespace) -> int:
    if is_of_node(args):
        from kvstore.tools.cli.nodes import node_of

        with node_of(args, args.called) as node:
            document = node.list_regions()
    else:
        document = _found(args)
    present(args, document, _show)
    return code_said(document, all(row["state"] == "ready" for row in document["regions"]))


def _found(args: argparse.Namespace) -> dict[str, Any]:
    deployment = load_deployment(args)

    async def ready(_: Objects) -> str:
        return "ready"

    states, codes = in_each(deployment, deployment.regions, ready)
    rows = [
        {"region": row["region"], "url": deployment.regions[row["region"]].url, "state": row["state"]}
        for row in states
    ]
    return {"deployment": deployment.deployment, "regions": rows, "away": away_of(codes)}


def _show(document: dict[str, Any]) -> None:
    rows = document["regions"]
    print_table(f"regions of {document['deployment']}", list(rows[0]), [list(row.values()) for row in rows])
