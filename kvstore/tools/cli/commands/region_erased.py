"""Whether what was erased is gone, by what the keeper of a region and its nodes say in the bucket (`kvstore region erase --wait`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvstore.units import format_duration, plural

if TYPE_CHECKING:
    from replication.formats.nodes import Node
    from replication.formats.tombstones import Tombstone
    from tiers.bucket.objects import Objects

LOOK_S: Final = 2.0  # between two looks
NODES_TOLD: Final = 4  # of those that are not done


async def until_gone(objects: Objects, tombstone: Tombstone, wait_s: float) -> list[str]:
    """What is left of it in a region after so long, and why, a line each; nothing as soon as it is gone. Raises ObjectError."""
    from replication.formats.keeping import clock_of

    loop, clock = asyncio.get_running_loop(), await clock_of(objects)
    end_s = loop.time() + wait_s
    while left := await what_is_left(objects, tombstone, clock()):
        if loop.time() + LOOK_S > end_s:
            break
        await asyncio.sleep(LOOK_S)
    return left


async def what_is_left(objects: Objects, tombstone: Tombstone, now_s: float) -> list[str]:
    """now_s: unix seconds. Raises ObjectError."""
    from replication.formats.nodes import read_nodes

    nodes = [_of_node(node, tombstone, now_s) for node in await read_nodes(objects)]
    slow = [line for line in nodes if line]
    more = [f"and {plural(len(slow) - NODES_TOLD, 'node')} more"] if len(slow) > NODES_TOLD else []
    return [*await _of_bucket(objects, tombstone), *slow[:NODES_TOLD], *more]


async def _of_bucket(objects: Objects, tombstone: Tombstone) -> list[str]:
    from replication.formats.carried_out import read_carried_out

    said = await read_carried_out(objects, tombstone.id)
    if said is None or said.serial < tombstone.serial:
        return ["the bucket: no keeper has looked through it yet"]
    if not said.left:
        return []
    return [f"the bucket: {plural(said.left, 'object')} cannot be deleted: {'; '.join(said.why)}"]


def _of_node(node: Node, tombstone: Tombstone, now_s: float) -> str:
    """ "" where nothing is left, or where nobody has heard of the node for so long that it is taken for switched off: it erases at its
    next start."""
    from replication.constants import CLOCK_SKEW_S, NODE_INTERVAL_S

    name = node.condition.host if node.condition is not None else node.writer
    age_s = now_s - node.at_s
    if age_s > 2 * NODE_INTERVAL_S + CLOCK_SKEW_S:
        return ""
    said = next((one for one in node.erased if one.tombstone == tombstone.id), None)
    if said is None or said.serial < tombstone.serial:
        return f"node {name}: has not erased it yet; heard of {format_duration(max(0.0, age_s))} ago"
    if said.is_looking:
        return f"node {name}: is erasing it"
    return f"node {name}: {plural(said.in_use, 'block')} in use" if said.in_use else ""
