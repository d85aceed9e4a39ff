"""What nodes that come back no more have said of themselves does not stay for ever."""

from __future__ import annotations

import asyncio

import pytest

from replication.formats.nodes import NODE_FORMAT, NODES, Node, read_nodes
from tests.replication.mirrored import World, in_memory, simulate

__all__ = ["in_memory"]  # a fixture


def test_the_keeper_forgets_nodes_of_which_nothing_was_heard_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Machines come and go: what hundreds of them have said is deleted; what lives, is of a later version or none of ours, stays."""
    monkeypatch.setattr("replication.region.region_node.NODE_FORGOTTEN_S", 1200.0)
    monkeypatch.setattr("replication.region.region_node.SWEEP_STAGED_S", 300.0)

    async def main(world: World) -> None:
        eu = world.eu.objects
        names = [f"{number:016x}" for number in range(300)]
        for name in names:
            await NODE_FORMAT.put(eu, Node(writer=name, at_s=world.clock(), dram_bytes=1, nvme_bytes=1))
        content = eu.stored[NODES + names[0]]
        await eu.put(NODES + names[0], content[:6] + b"9" + content[7:])
        await eu.put(NODES + "a-note.txt", b"a note")
        await world.node()
        await asyncio.sleep(1100.0)
        assert len((await read_nodes(eu)).read) == 299
        alive = Node(writer=names[7], at_s=world.clock(), dram_bytes=1, nvme_bytes=1)
        await NODE_FORMAT.put(eu, alive)
        await asyncio.sleep(500.0)
        left = sorted(name for name in eu.stored if name.startswith(NODES))
        assert left == [NODES + names[0], NODES + names[7], NODES + "a-note.txt"]

    simulate(main)
