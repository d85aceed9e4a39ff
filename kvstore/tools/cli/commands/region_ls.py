"""All regions of the file, and whether each bucket is ready.

  kvstore region ls [-o json]

Exit code 0 when all are ready, 1 when one is not, 2 for a wrong file, 4 when a bucket does not answer.
"""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.tools.cli import UNREACHABLE
from kvstore.tools.cli.buckets import asked, code_of, code_said, opened
from kvstore.tools.cli.commands.region import add_regions_argument, load_deployment
from kvstore.tools.cli.options import add_config_arguments, is_of_node
from kvstore.tools.cli.output import present, print_table


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
    from replication.errors import ReplicationError
    from tiers.errors import TierError
    from tiers.together import together

    deployment = load_deployment(args)

    away: list[str] = []

    async def state(name: str) -> str:
        try:
            await opened(deployment, name)
        except (ReplicationError, TierError) as error:
            if code_of(error) == UNREACHABLE:
                away.append(name)
            return str(error)
        return "ready"

    async def states() -> list[str]:
        return await together(map(state, deployment.regions))

    found = dict(zip(deployment.regions, asked(states), strict=True))
    rows = [{"region": name, "url": deployment.regions[name].url, "state": found[name]} for name in found]
    return {"deployment": deployment.deployment, "regions": rows, "away": sorted(away)}


def _show(document: dict[str, Any]) -> None:
    rows = document["regions"]
    print_table(f"regions of {document['deployment']}", list(rows[0]), [list(row.values()) for row in rows])
