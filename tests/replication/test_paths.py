"""Lives along a prefix: nothing outlives what it hangs on, whoever asks for what, in whichever order, on whichever node."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.formats.region import init_region
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader

SPEC = NamespaceSpec(digest(b"paths"), 64, 16, 16)
DEPTH = 6
SETTLED_S = 30.0  # until all nodes have read what was announced
DAY_S = 24 * 3600


def header(depth: int) -> PackHeader:
    """The pack at this depth of one prompt; two blocks each."""
    blocks = [digest(f"block {2 * depth + index}".encode()) for index in range(-1, 2)]
    return PackHeader(SPEC, blocks[0] if depth else b"", b"".join(blocks[1:]), 2 * digest(bytes(64)))


def key(depth: int) -> bytes:
    return SPEC.digest + header(depth).hash_at(1)


async def node(objects: MemoryObjects, number: int) -> RegionNode:
    clock = asyncio.get_running_loop().time
    return await RegionNode.join(
        objects, "acme", "na", Path(str(number)), str(number), random.Random(number), clock
    )


@pytest.mark.parametrize("seed", range(20))
def test_nothing_outlives_what_it_hangs_on(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Two nodes persist and renew packs of one prompt with lives drawn at random, 0 (for ever) among them: when both have read
    all, each pack is kept at least as long as what hangs on it, and as long as anybody asked."""
    monkeypatch.setattr(Catalogue, "open", lambda path, identity: Catalogue(MemoryRows()))
    draw = random.Random(seed)

    async def region() -> None:
        objects = MemoryObjects()
        await init_region(objects, "acme", "na", asyncio.get_running_loop().time)
        nodes = [await node(objects, number) for number in range(2)]
        living = [asyncio.ensure_future(one.run()) for one in nodes]
        asked = [1] * DEPTH
        for depth in range(DEPTH):
            asked[depth] = draw.choice((0, draw.randint(DAY_S, 9 * DAY_S)))
            records = [memoryview(bytes(64))] * 2
            assert await draw.choice(nodes).persist(header(depth), records, 0, asked[depth])
            await asyncio.sleep(SETTLED_S)
        for _ in range(8):
            depth, until_s = draw.randrange(DEPTH), draw.randint(DAY_S, 20 * DAY_S)
            asked[depth] = max(asked[depth], until_s) if asked[depth] else 0
            await draw.choice(nodes).renew({key(depth): until_s})
            await asyncio.sleep(draw.choice((0.0, SETTLED_S)))
        await asyncio.sleep(SETTLED_S)
        for one in nodes:
            spots = one.catalogue.find([key(depth) for depth in range(DEPTH)])
            ends = [spot.announced.kept_until_s or float("inf") for spot in spots if spot is not None]
            assert len(ends) == DEPTH and ends == sorted(ends, reverse=True)
            assert all(end >= (until_s or float("inf")) for end, until_s in zip(ends, asked, strict=True))
        for task in living:
            task.cancel()

    run(region())
