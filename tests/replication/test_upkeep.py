"""Packs whose life is over are promised by nobody."""

from __future__ import annotations

import asyncio
import random

from replication.catalogue import Catalogue
from replication.erasure import Erasure
from replication.feed import FeedWriter
from replication.region import Region
from replication.region_node import RegionNode
from replication.tail import Tail
from replication.upkeep import Upkeep
from tests.objects import MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Objects
from tiers.packs import PackHeader

SPEC = NamespaceSpec(digest=b"a namespace of 1", record_bytes=64, hash_bytes=16, block_tokens=256)
RECORD = bytes(64)
SKEW_S = 60.0


async def node(objects: Objects, number: int) -> RegionNode:
    clock, chance = asyncio.get_running_loop().time, random.Random(number)
    catalogue = Catalogue(MemoryRows())
    writer = FeedWriter(objects, f"{number:016x}", clock, chance)
    await writer.open()
    tail = Tail(objects, catalogue, clock, chance)
    upkeep = Upkeep(objects, catalogue, lambda: tail.status().writers, SKEW_S, clock, chance)
    region = Region(format=1, deployment="acme", region="na", made_s=0.0)
    return RegionNode(objects, region, catalogue, writer, tail, upkeep, Erasure(objects, catalogue, clock))


def test_who_joins_late_promises_nothing_that_is_over() -> None:
    """A feed tells of a pack that is over and of one that is not: a node that joins knows of the second one only, within a
    second of having read the feed."""

    async def region() -> None:
        objects = MemoryObjects()
        early = await node(objects, 1)
        for name, kept_until_s in ((b"x", 100), (b"y", 5000)):
            header = PackHeader(SPEC, b"", name * 16, digest(RECORD))
            assert await early.persist(header, [memoryview(RECORD)], 0, kept_until_s)
        await asyncio.sleep(1000)
        late = await node(objects, 2)
        living = asyncio.create_task(late.run())
        await late.caught_up.wait()
        await asyncio.sleep(1)
        held = [late.held(SPEC.digest, 16, name * 16, 0) for name in (b"x", b"y")]
        assert held == [0, 1]
        living.cancel()

    run(region())
