"""The nodes of a region, or of all, by what each has written into the region's bucket: every ten minutes, and soon when it has
other problems than it said.

  kvstore region nodes [NAME]          a line each, and its problems
  kvstore region nodes -o json         for programs; docs/cli.md lists the fields

Exit code 0 when all are well, 1 when one is silent, has problems or cannot be read, 2 for a wrong file or name, 4 when a bucket does not answer: the
nodes of other regions are shown all the same.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.tools.cli import FAILED, OK
from kvstore.tools.cli.buckets import code_of, opened
from kvstore.tools.cli.commands.region import add_region_arguments, load_deployment
from kvstore.tools.cli.output import Figure, present, print_table, say
from kvstore.units import NOTHING, format_bytes, format_duration, percent, plural

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from replication.formats.nodes import Node, Unread

OF_ITSELF = (
    "version",
    "up_s",
    "sessions",
    "dram_used_bytes",
    "nvme_used_bytes",
    "asked_tokens",
    "hit_tokens",
)
Document = dict[str, Any]


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    add_region_arguments(parser, "?")


def run_verb(args: argparse.Namespace) -> int:
    from replication.constants import NODE_FORGOTTEN_S

    deployment = load_deployment(args)
    if args.region:
        deployment.place(args.region, args.called)
    regions = [args.region] if args.region else list(deployment.regions)
    found, away = asyncio.run(_nodes(deployment, regions))
    latest = [node for node in found if node["age_s"] < NODE_FORGOTTEN_S]
    latest.sort(key=lambda node: (node["region"], node.get("host", ""), node["writer"]))
    unread = [{"region": region, "writer": "", "problem": str(error)} for region, error in away.items()]
    document: Document = {
        "deployment": deployment.deployment,
        "nodes": [node for node in latest if "problem" not in node],
        "forgotten": len(found) - len(latest),
        "unread": [*unread, *(node for node in latest if "problem" in node)],
    }
    present(args, document, _show)
    is_well = not document["unread"] and all(node["state"] in ("ok", "warnings") for node in latest)
    return max([OK if is_well else FAILED, *map(code_of, away.values())])


async def _nodes(
    deployment: Deployment, regions: Sequence[str]
) -> tuple[list[Document], dict[str, Exception]]:
    """What was found, with a `problem` where it cannot be read, and why of a region nothing was. Raises what the bucket of a region does
    that is asked alone."""
    from replication.errors import ReplicationError
    from replication.formats.keeping import clock_of
    from replication.formats.nodes import read_nodes
    from tiers.errors import TierError
    from tiers.together import together

    away: dict[str, Exception] = {}

    async def nodes_of(region: str) -> list[Document]:
        try:
            objects = await opened(deployment, region)
            nodes, now_s = await read_nodes(objects), (await clock_of(objects))()
        except (ReplicationError, TierError) as error:
            if len(regions) == 1:
                raise
            away[region] = error
            return []
        return [
            *(_facts(region, node, now_s) for node in nodes.read),
            *(_of_unread(region, node, now_s) for node in nodes.unread),
        ]

    return [node for nodes in await together(map(nodes_of, regions)) for node in nodes], away


def _of_unread(region: str, node: Unread, now_s: float) -> Document:
    age_s = round(max(0.0, now_s - node.at_s), 1)
    return {"region": region, "writer": node.writer, "age_s": age_s, "problem": node.reason}


def _facts(region: str, node: Node, now_s: float) -> Document:
    from msgspec.structs import asdict

    about = node.condition
    asked_tokens = about.asked_tokens if about is not None else 0
    return {
        "region": region,
        "writer": node.writer,
        "host": about.host if about is not None else "",
        "age_s": round(max(0.0, now_s - node.at_s), 1),
        "state": _state(node, now_s),
        "dram_bytes": node.dram_bytes,
        "nvme_bytes": node.nvme_bytes,
        "load_bytes_per_s": node.load_bytes_per_s,
        **{name: getattr(about, name) if about is not None else None for name in OF_ITSELF},
        "hit_ratio": round(about.hit_tokens / asked_tokens, 4)
        if about is not None and asked_tokens
        else None,
        "problems": [asdict(one) for one in about.problems] if about is not None else [],
    }


def _state(node: Node, now_s: float) -> str:
    from replication.constants import NODE_SILENT_S

    if now_s - node.at_s > NODE_SILENT_S:
        return "silent"
    levels = {one.level for one in node.condition.problems} if node.condition is not None else set()
    return "problems" if "problem" in levels else "warnings" if levels else "ok"


def _show(document: Document) -> None:
    rows = [
        [
            node["region"],
            node["host"] or node["writer"],
            node["state"],
            Figure(format_duration(node["age_s"])),
            Figure(NOTHING if node["hit_ratio"] is None else percent(node["hit_ratio"])),
            Figure(_of(node["dram_used_bytes"], node["dram_bytes"])),
            Figure(_of(node["nvme_used_bytes"], node["nvme_bytes"])),
            Figure(NOTHING if node["sessions"] is None else node["sessions"]),
            Figure(
                f"{format_bytes(int(node['load_bytes_per_s']))}/s" if node["load_bytes_per_s"] else NOTHING
            ),
            Figure(NOTHING if node["up_s"] is None else format_duration(node["up_s"])),
            node["version"] or NOTHING,
        ]
        for node in document["nodes"]
    ]
    columns = [
        "region",
        "node",
        "state",
        "heard of",
        "hit rate",
        "DRAM",
        "NVMe",
        "sessions",
        "bucket loads",
        "up",
    ]
    drop = ("version", "up", "bucket loads", "sessions", "NVMe", "DRAM")
    print_table(f"nodes of {document['deployment']}, as each said itself", [*columns, "version"], rows, drop)
    for node in document["nodes"]:
        for line in _lines(node):
            say(f"  {node['host'] or node['writer']}: {line}", 4)
    for one in document["unread"]:
        node = f"node {one['writer']} cannot be read: " if one["writer"] else ""
        say(f"{one['region']}: {node}{one['problem']}")
    if document["forgotten"]:
        say(f"{plural(document['forgotten'], 'node')} of which nothing was heard for a week: not shown")


def _lines(node: Document) -> Iterable[str]:
    """What is wrong with it, as far as it said so."""
    if node["state"] == "silent":
        yield f"nothing was heard of it for {format_duration(node['age_s'])}; what it said last:"
    for one in node["problems"]:
        yield f"{' '.join(filter(None, (one['kind'], one['subject'])))}: {one['text']}"


def _of(used: int | None, capacity: int) -> str:
    if not capacity:
        return NOTHING
    return (
        format_bytes(capacity) if used is None else f"{percent(used / capacity)} of {format_bytes(capacity)}"
    )
