"""A region for tests of audits: trees of packs with real bytes, nodes that follow, and everything that can go wrong with a bucket.

Grove ─▶ packs whose parents are other packs, or none        Region ─▶ bucket, writers, nodes: the real code
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

from kvstore.steps import finish
from replication.catalogue.catalogue import Catalogue
from replication.errors import ReplicationError
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from replication.formats.region import init_region
from replication.formats.segment import FEED, segment_name
from replication.formats.tombstones import Tombstone, bury
from replication.region.region_node import RegionNode
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tests.replication.memory_rows import MemoryRows
from tiers.checksum import digest
from tiers.errors import ObjectError
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACKS, Pack, PackHeader, describe

STARTED_S = 1e9  # unix time when a test begins
SPECS = [
    NamespaceSpec(digest(f"audited {tenant}".encode()), 32, 16, 16, {"model": "m", "tenant": tenant})
    for tenant in ("acme", "", "")
]


@dataclass(frozen=True, eq=False)
class Made:
    """A pack, its bytes, and the one it hangs on."""

    pack: Pack
    content: bytes
    parent: Made | None

    @property
    def line(self) -> list[Made]:
        """It and all before it."""
        return [self, *(self.parent.line if self.parent is not None else ())]

    @property
    def id(self) -> bytes:
        return self.pack.id

    def announced(self, kept_until_s: int = 0) -> Announced:
        return Announced(self.pack, kept_until_s=kept_until_s)


def make(name: object, parent: Made | None = None, spec: NamespaceSpec = SPECS[1], blocks: int = 2) -> Made:
    names = [f"{name} {index}".encode() for index in range(blocks)]
    records = [digest(one) * (spec.record_bytes // 16) for one in names]
    above = parent.pack.header.hash_at(parent.pack.header.count - 1) if parent is not None else b""
    header = PackHeader(spec, above, b"".join(map(digest, names)), b"".join(map(digest, records)))
    pack, first = describe(header)
    return Made(pack, first + b"".join(records), parent)


class Region:
    """A bucket, as it is (`inner`) and as nodes see it (`way`)."""

    def __init__(self, chance: random.Random | None = None, name: str = "na") -> None:
        self.name = name
        self.chance = chance or random.Random(0)
        self.loop = asyncio.get_running_loop()
        self.inner = MemoryObjects(name, self.clock, page_names=50)
        self.way = FaultyObjects(self.inner, random.Random(1), Faults())
        self.writer = FeedWriter(self.inner, "a" * 16, self.clock, random.Random(2))
        self.tasks: dict[RegionNode, asyncio.Task[None]] = {}

    def clock(self) -> float:
        return STARTED_S + self.loop.time()

    async def begin(self) -> None:
        await init_region(self.inner, "acme", self.name, self.clock)

    async def node(self, name: str, skew_s: float = 10.0, is_mirror: bool = False) -> RegionNode:
        """A daemon, or a mirror's process, that follows, with the disk it had when it was here before."""
        chance = random.Random(self.chance.random())
        while True:
            try:
                node = await RegionNode.join(
                    self.way,
                    "acme",
                    self.name,
                    Path(name),
                    name,
                    chance,
                    self.clock,
                    skew_s,
                    is_mirror=is_mirror,
                )
                break
            except (ObjectError, ReplicationError):  # the way flips bits of the marker, too
                await asyncio.sleep(5)
        self.tasks[node] = asyncio.ensure_future(node.run())
        return node

    async def stop(self, node: RegionNode) -> None:
        task = self.tasks.pop(node)
        for one in (task, *node._tasks.all):
            one.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self) -> None:
        for node, task in list(self.tasks.items()):
            assert not task.done(), task
            await self.stop(node)

    # -- what happens --

    async def put(self, *made: Made) -> None:
        for one in made:
            await self.inner.put(one.pack.name, one.content)

    async def announce(self, *made: Made, kept_until_s: int = 0) -> None:
        await self.put(*made)
        await self.writer.announce([one.announced(kept_until_s) for one in made])

    async def lose(self, *made: Made) -> None:
        await self.inner.delete([one.pack.name for one in made])

    def cut_off(self, one: Made) -> None:
        self.inner.stored[one.pack.name] = one.content[: self.chance.randrange(len(one.content))]

    def flip_header(self, one: Made) -> None:
        self.inner.stored[one.pack.name] = flip(one.content, self.chance.randrange(8 * one.pack.start))

    async def lose_segment(self, number: int) -> None:
        await self.inner.delete([segment_name(self.writer.id, number)])

    def rot_segment(self, number: int) -> None:
        name = segment_name(self.writer.id, number)
        self.inner.stored[name] = flip(self.inner.stored[name], 300)

    async def erase(self, **what: object) -> None:
        stone = Tombstone(watched_until_s=int(self.clock() + 1e6), **what)  # type: ignore[arg-type]  # fields of one
        await bury(self.inner, stone)

    # -- what is there --

    def is_announced(self, one: Made) -> bool:
        """By anybody, at any time."""
        return any(one.id in content for name, content in self.inner.stored.items() if name.startswith(FEED))

    def stored(self) -> set[bytes]:
        return {bytes.fromhex(name[-32:]) for name in self.inner.stored if name.startswith(PACKS)}


def known(node: RegionNode) -> dict[bytes, Announced]:
    return {entry.pack.id: entry for chunk in node.catalogue.chunks() for entry in chunk}


def held(node: RegionNode, one: Made) -> int:
    """How many blocks of a line are held."""
    hashes = b"".join(each.pack.header.hashes for each in reversed(one.line))
    return finish(node.held_steps(one.pack.header.spec, hashes, 0))


def opened(disks: dict[Path, dict[bytes, bytes]]) -> object:
    """Stands for Catalogue.open: rows in memory, by path."""

    def open_catalogue(path: Path, identity: str) -> Catalogue:
        return Catalogue(MemoryRows(disks.setdefault(path, {})))

    return open_catalogue
