"""Whether what was erased is gone, by what the keeper of a region and its nodes say in the bucket (`kvstore region erase --wait`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvstore.units import format_duration, plural

if TYPE_CHECKING:
    from replication.formats.nodes import Node, Unread
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

    nodes = await read_nodes(objects)
    lines = [_of_node(node, tombstone, now_s) for node in nodes.read if not _is_off(node, now_s)]
    lines += [_of_unread(node, now_s) for node in nodes.unread if not _is_off(node, now_s)]
    slow = [line for line in lines if line]
    more = [f"and {plural(len(slow) - NODES_TOLD, 'node')} more"] if len(slow) > NODES_TOLD else []
    return [*await _of_bucket(objects, tombstone), *slow[:NODES_TOLD], *more]


async def _of_bucket(objects: Objects, tombstone: Tombstone) -> list[str]:
    from replication.formats.carried_out import CARRIED_OUT, CARRIED_OUT_FORMAT

    said = await CARRIED_OUT_FORMAT.hint(objects, CARRIED_OUT + tombstone.id)
    if said is None or said.serial < tombstone.serial:
        return ["the bucket: no keeper has looked through it yet"]
    if not said.left:
        return []
    return [f"the bucket: {plural(said.left, 'object')} left: {'; '.join(said.why)}"]


def _of_node(node: Node, tombstone: Tombstone, now_s: float) -> str:
    """ "" where nothing is left."""
    name = node.condition.host if node.condition is not None else node.writer
    said = next((one for one in node.erased if one.tombstone == tombstone.id), None)
    if said is None or said.serial < tombstone.serial:
        return f"node {name}: has not erased it yet; heard of {_ago(node, now_s)}"
    if said.is_looking:
        return f"node {name}: is erasing it"
    return f"node {name}: {plural(said.in_use, 'block')} in use" if said.in_use else ""


def _of_unread(node: Unread, now_s: float) -> str:
    return f"node {node.writer}: what it says cannot be read, written {_ago(node, now_s)}: {node.reason}"


def _is_off(node: Node | Unread, now_s: float) -> bool:
    """Nobody has heard of it for so long that it is taken for switched off: it erases at its next start."""
    from replication.constants import NODE_SILENT_S

    return now_s - node.at_s > NODE_SILENT_S


def _ago(node: Node | Unread, now_s: float) -> str:
    return f"{format_duration(max(0.0, now_s - node.at_s))} ago"
