"""Packs whose life is over are promised by nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from kvstore.steps import finish
from replication.catalogue.catalogue import Catalogue
from replication.constants import UPKEEP_INTERVAL_S
from replication.erasure.erasure import Erasure
from replication.feed.feed import FeedWriter
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.region import init_region
from replication.formats.segment import FEED, HEADS
from replication.keeper.keeper import Keeper
from replication.region.region_node import RegionNode, announce_interval_s
from tests.objects import MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes, ObjectInfo, Objects
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PACKS, PackHeader

SPEC = NamespaceSpec(digest=b"a namespace of 1", record_bytes=64, hash_bytes=16, block_tokens=256)
RECORD = bytes(64)
SKEW_S = 60.0


async def node(objects: Objects, number: int) -> RegionNode:
    clock, chance = asyncio.get_running_loop().time, random.Random(number)
    catalogue = Catalogue(MemoryRows())
    writer = FeedWriter(objects, f"{number:016x}", clock, chance)
    region = await init_region(objects, "acme", "na", clock)
    keeper = Keeper(objects, region, chance)
    tail = Tail(objects, catalogue, clock, chance, keeper=keeper)
    erasure = Erasure(objects, catalogue, clock)
    return RegionNode(objects, region, catalogue, writer, tail, erasure, keeper, SKEW_S, clock, chance)


def test_who_joins_late_promises_nothing_that_is_over() -> None:
    """A feed tells of a pack that is over and of one that is not: once somebody keeps the region, who joins knows of the second
    one only, from a removal that it reads; nobody forgets anything by himself."""

    async def region() -> None:
        objects = MemoryObjects()
        early = await node(objects, 1)
        for name, kept_until_s in ((b"x", 100), (b"y", 5000)):
            header = PackHeader(SPEC, b"", name * 16, digest(RECORD))
            assert await early.persist(header, [memoryview(RECORD)], 0, kept_until_s)
        await asyncio.sleep(1000)
        late, later = await node(objects, 2), await node(objects, 3)
        living = asyncio.create_task(late.run())
        await late.caught_up.wait()
        assert [finish(late.held_steps(SPEC, name * 16, 0)) for name in (b"x", b"y")] == [1, 1]
        await asyncio.sleep(2 * UPKEEP_INTERVAL_S)
        second = asyncio.create_task(later.run())
        await later.caught_up.wait()
        for one in (late, later):
            assert [finish(one.held_steps(SPEC, name * 16, 0)) for name in (b"x", b"y")] == [0, 1]
            assert one.status()["expired_packs"] == 1
        living.cancel()
        second.cancel()

    run(region())


def test_what_is_over_is_deleted_soon() -> None:
    """Within an interval and a few seconds after twice the skew: who deletes asks all writers then, and does not wait until
    they are asked anyway."""

    async def region() -> None:
        objects = MemoryObjects()
        one = await node(objects, 1)
        living = asyncio.create_task(one.run())
        await asyncio.sleep(400)  # all writers were asked twice by now
        header = PackHeader(SPEC, b"", b"x" * 16, digest(RECORD))
        until_s = int(asyncio.get_running_loop().time()) + 10
        assert await one.persist(header, [memoryview(RECORD)], 0, until_s)
        await asyncio.sleep(10 + 2 * SKEW_S)
        assert [name for name in objects.stored if name.startswith(PACKS)]
        await asyncio.sleep(UPKEEP_INTERVAL_S + 10)
        assert not [name for name in objects.stored if name.startswith(PACKS)]
        living.cancel()

    run(region())


def test_a_keeper_among_a_thousand_writers_removes_as_much_as_they_put(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many announce 100 s apart, and put 50 packs a second: what is over of that is gone within one such pause and a look."""
    pause_s, packs = announce_interval_s(1000), 5000
    monkeypatch.setattr("replication.region.region_node.announce_interval_s", lambda writers: pause_s)

    async def region() -> None:
        objects = MemoryObjects()
        one = await node(objects, 1)
        living = asyncio.create_task(one.run())
        await asyncio.sleep(400)
        until_s = int(asyncio.get_running_loop().time()) + 10
        other = FeedWriter(objects, f"{2:016x}", asyncio.get_running_loop().time, random.Random(2))
        headers = (PackHeader(SPEC, b"", number.to_bytes(16), digest(RECORD)) for number in range(packs))
        made = [Announced(await put_pack(objects, header, [RECORD]), 0, "", until_s) for header in headers]
        await other.announce(made)
        await asyncio.sleep(10 + 2 * SKEW_S)
        assert sum(name.startswith(PACKS) for name in objects.stored) == packs
        await asyncio.sleep(pause_s + UPKEEP_INTERVAL_S + 10)
        assert not [name for name in objects.stored if name.startswith(PACKS)]
        living.cancel()

    run(region())


class Again(MemoryObjects):
    """A pack is put again by somebody, when the next segment is put. again: its name."""

    again = ""

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if self.again and name.startswith(FEED):
            again, self.again = self.again, ""
            await super().put(again, self.stored[again])
        return await super().put(name, content, only_new)


def test_a_pack_that_is_put_again_while_its_removal_is_said_stays() -> None:
    """Whoever put it is about to announce it: it is held again then."""

    async def region() -> None:
        objects = Again()
        one = await node(objects, 1)
        living = asyncio.create_task(one.run())
        await asyncio.sleep(400)
        header = PackHeader(SPEC, b"", b"x" * 16, digest(RECORD))
        until_s = int(asyncio.get_running_loop().time()) + 10
        assert await one.persist(header, [memoryview(RECORD)], 0, until_s)
        await asyncio.sleep(10)
        [objects.again] = [name for name in objects.stored if name.startswith(PACKS)]
        await asyncio.sleep(2 * SKEW_S + UPKEEP_INTERVAL_S + 10)
        assert one.status()["expired_packs"] == 1
        assert not objects.again and [name for name in objects.stored if name.startswith(PACKS)]
        living.cancel()

    run(region())


class Blind(MemoryObjects):
    """While it is blind it does not list; and heads may be kept from it."""

    is_blind = has_no_heads = False

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if self.has_no_heads and name.startswith(HEADS):
            raise ObjectUnavailable("no head today")
        return await super().put(name, content, only_new)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        if self.is_blind:
            raise ObjectUnavailable("no list today")
        async for page in super().list(prefix, after):
            yield page


@pytest.mark.parametrize("hidden", ["feed", "head"])
def test_who_has_not_read_that_a_pack_lives_longer_does_not_delete_it(hidden: str) -> None:
    """A life grows while another node cannot list the feed, or when the head that tells of it is not written: that node does
    not delete the pack, and knows of the longer life as soon as it has read it."""

    async def region() -> None:
        objects = Blind()
        one, other = await node(objects, 1), await node(objects, 2)
        header = PackHeader(SPEC, b"", b"x" * 16, digest(RECORD))
        assert await one.persist(header, [memoryview(RECORD)], 0, 1000)
        living = asyncio.create_task(other.run())
        await asyncio.sleep(990)
        assert finish(other.held_steps(SPEC, b"x" * 16, 0)) == 1
        objects.is_blind, objects.has_no_heads = hidden == "feed", hidden == "head"
        await one.renew({SPEC.digest + b"x" * 16: 10**6})
        await asyncio.sleep(4 * SKEW_S if hidden == "head" else 2000)
        objects.is_blind = False
        await asyncio.sleep(1000)
        assert any(name.startswith(PACKS) for name in objects.stored)
        assert finish(other.held_steps(SPEC, b"x" * 16, 0)) == 1
        assert [known.kept_until_s for known in other.known(_ids(objects)) if known] == [10**6]
        living.cancel()

    run(region())


def _ids(objects: MemoryObjects) -> list[bytes]:
    return [bytes.fromhex(name.rpartition("/")[2]) for name in objects.stored if name.startswith(PACKS)]
