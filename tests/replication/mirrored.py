"""Regions na, eu and apac in memory, packs that daemons make there, and mirrors into eu."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replication import constants as limits
from replication.catalogue.catalogue import Catalogue
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from replication.formats.region import init_region, open_region
from replication.formats.rules import Rule
from replication.formats.segment import FEED, decode, segment_number
from replication.mirror.mirror import Joined, Mirror
from replication.mirror.pull import Pull
from replication.region.region_node import RegionNode
from tests.objects import FaultyObjects, MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader, describe

ALL = Rule()
SOON_S = 20.0  # to be heard, copied and announced
STARTED_S = 1e9  # unix time when a test begins
SKEW_S = limits.CLOCK_SKEW_S


def pack(name: object, model: str = "m", tenant: str = "", record_bytes: int = 64) -> tuple[Announced, bytes]:
    """A pack of two records, and its bytes."""
    fields = {"model": model, "tenant": tenant}
    spec = NamespaceSpec(digest(repr((fields, record_bytes)).encode()), record_bytes, 16, 16, fields)
    names = [f"{name} {index}".encode() for index in range(2)]
    records = [digest(one) * (record_bytes // 16) for one in names]
    header = PackHeader(spec, b"", b"".join(map(digest, names)), b"".join(map(digest, records)))
    described, first = describe(header)
    return Announced(described), first + b"".join(records)


class Bucket:
    """A region's bucket, and a daemon that writes there. way: as a mirror sees it."""

    def __init__(self, region: str, clock: Callable[[], float]) -> None:
        self.region = region
        self.objects = MemoryObjects(region, clock)
        self.way = FaultyObjects(self.objects, random.Random(0))
        self.writer = FeedWriter(self.objects, "a" * 16, clock, random.Random(0))

    async def make(self, *made: tuple[Announced, bytes], kept_until_s: int = 0, puts: bool = True) -> None:
        for announced, content in made if puts else ():
            await self.objects.put(announced.pack.name, content)
        await self.writer.announce(
            [msgspec.structs.replace(announced, kept_until_s=kept_until_s) for announced, _ in made]
        )

    def announced(self) -> list[Announced]:
        """Everything in the feed, writer by writer, in order."""
        found: list[Announced] = []
        for name in sorted(name for name in self.objects.stored if name.startswith(FEED)):
            segment = decode(
                self.objects.stored[name], name[len(FEED) :].partition("/")[0], segment_number(name)
            )
            found += segment.entries
        return found

    def copies(self) -> list[bytes]:
        """Ids of what mirrors announced here, in order."""
        return [entry.pack.id for entry in self.announced() if entry.origin]

    def has(self, *made: tuple[Announced, bytes]) -> bool:
        return all(self.objects.stored.get(announced.pack.name) == content for announced, content in made)


class World:
    """Regions na, eu and apac, and mirrors into eu."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.buckets = {name: Bucket(name, self.clock) for name in ("na", "eu", "apac")}
        self.na, self.eu, self.apac = self.buckets.values()
        self.rows: dict[str, MemoryRows] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def clock(self) -> float:
        return STARTED_S + self.loop.time()

    async def begin(self) -> None:
        for name, bucket in self.buckets.items():
            await init_region(bucket.objects, "acme", name, self.clock)

    async def node(self) -> RegionNode:
        """A process of eu."""
        node = await RegionNode.join(
            self.eu.way, "acme", "eu", Path("eu"), "mirror", random.Random(1), self.clock, is_mirror=True
        )
        self.tasks.append(asyncio.ensure_future(node.run()))
        return node

    async def mirror(self, *rules: Rule, sources: tuple[str, ...] = ("na",)) -> list[Mirror]:
        node, paces = await self.node(), dict[Rule, float]()
        mirrors = []
        for name in sources:
            join, chance = partial(self.joined, name), random.Random(len(mirrors))
            mirrors.append(Mirror(node, self.eu.way, name, join, rules or (ALL,), paces, self.clock, chance))
            self.tasks.append(asyncio.ensure_future(mirrors[-1].run()))
        return mirrors

    async def joined(self, name: str) -> Joined:
        way = self.buckets[name].way
        marker = await open_region(way, "acme", name)
        return Joined(marker.identity, way, Catalogue(self.rows.setdefault(name, MemoryRows())))

    async def stop(self) -> None:
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()


def simulate(main: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = World()
        await world.begin()
        await main(world)
        await world.stop()

    run(whole())


def pulled(mirror: Mirror) -> Pull:
    assert mirror.pull is not None
    return mirror.pull


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    disks: dict[Path, MemoryRows] = {}
    monkeypatch.setattr(
        Catalogue, "open", lambda path, identity: Catalogue(disks.setdefault(path, MemoryRows()))
    )
