"""`kvstore region erase --wait`: it is over when the keeper and all nodes say so, and else says what is left and why."""

from __future__ import annotations

from msgspec.structs import replace

from kvstore.tools.cli.commands.region_erased import until_gone, what_is_left
from replication.constants import NODE_SILENT_S
from replication.formats.carried_out import CARRIED_OUT_FORMAT, CarriedOut
from replication.formats.nodes import NODE_FORMAT, NODES, Node, NodeErased
from replication.formats.tombstones import Tombstone
from tests.objects import MemoryObjects
from tests.replication.virtual_loop import run

NOW_S = 1e6
STONE = Tombstone(tenant="acme", watched_until_s=1 << 31, serial=7)
NODE = Node(writer="1" * 16, at_s=NOW_S, dram_bytes=0, nvme_bytes=0)


def test_it_says_what_is_left() -> None:
    """A bucket that no keeper has looked through for this erasing, objects that stay, a node that has not read it, is at it, has
    blocks in use, or says what cannot be read; not one that is switched off. Then nothing."""

    async def each() -> None:
        objects = MemoryObjects(clock=lambda: NOW_S)

        async def left() -> list[str]:
            return await what_is_left(objects, STONE, NOW_S)

        assert await left() == ["the bucket: no keeper has looked through it yet"]
        await CARRIED_OUT_FORMAT.put(objects, CarriedOut(STONE.id, 6, NOW_S))
        assert await left() == ["the bucket: no keeper has looked through it yet"]
        await CARRIED_OUT_FORMAT.put(objects, CarriedOut(STONE.id, 7, NOW_S, 1, ("packs/a: a lock",)))
        assert await left() == ["the bucket: 1 object left: packs/a: a lock"]
        await CARRIED_OUT_FORMAT.put(objects, CarriedOut(STONE.id, 7, NOW_S))
        await NODE_FORMAT.put(objects, replace(NODE, writer="2" * 16, at_s=NOW_S - 86400))
        for erased, said in (
            ((), "has not erased it yet"),
            ((NodeErased(STONE.id, 6, 0, False),), "has not erased it yet"),
            ((NodeErased(STONE.id, 7, 2, True),), "is erasing it"),
            ((NodeErased(STONE.id, 7, 2, False),), "2 blocks in use"),
        ):
            await NODE_FORMAT.put(objects, replace(NODE, erased=erased))
            [line] = await left()
            assert line.startswith(f"node {NODE.writer}: ") and said in line
            [later] = await until_gone(objects, STONE, 60.0)
            assert later.partition("; heard")[0] == line.partition("; heard")[0]
        await NODE_FORMAT.put(objects, done := replace(NODE, erased=(NodeErased(STONE.id, 7, 0, False),)))
        await objects.put(NODES + "3" * 16, b"cut off")
        [line] = await left()
        assert line.startswith(f"node {'3' * 16}: what it says cannot be read, written 0 s ago: ")
        assert await what_is_left(objects, STONE, NOW_S + NODE_SILENT_S + 1) == []
        await objects.delete([NODES + "3" * 16])
        await NODE_FORMAT.put(objects, done)
        assert await left() == [] == await until_gone(objects, STONE, 0.0)

    run(each())
