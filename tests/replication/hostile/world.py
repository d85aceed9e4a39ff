"""A small region with every kind of object in it, and what somebody does who can write into its bucket and knows our formats.

made ─▶ worked on ─▶ attacked ─▶ a daemon that knew it, one that is new, and a mirror of it go on ─▶ what came back
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

import replication
import tiers.packs
from coldstart.disk.sources import Bucket, fetched
from coldstart.errors import ChunkDamaged, ModelError
from coldstart.published.collecting import collect
from replication.catalogue.catalogue import Catalogue
from replication.erasure.removed_models import Removal, put_removal
from replication.errors import Damaged
from replication.feed.feed import FeedWriter
from replication.feed.snapshots import Snapshots
from replication.formats import nodes, orders
from replication.formats.announced import Announced
from replication.formats.carried_out import CARRIED_OUT, CARRIED_OUT_FORMAT
from replication.formats.doubts import put_doubts
from replication.formats.keeping import Holder, put_stuck
from replication.formats.manifests import encode, read_manifest
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState, read_mirrors
from replication.formats.region import MARKER, init_region, open_region
from replication.formats.rules import Rule
from replication.formats.tombstones import Tombstone, bury, put_behind, read_behind, read_tombstones
from replication.mirror.mirror import Joined, Mirror
from replication.models.collecting import COLLECTING, LOCK_FORMAT, Lock, intent_name, lasts_s
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.models import MadeModel, make_model, publish, put_model
from tiers.base import Get
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.checksum import digest
from tiers.errors import ObjectError
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.codecs import SPLIT_ZSTD
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PACKS, PackHeader

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
STARTED_S = 1e9
RECORD_BYTES = 256
ORDER = orders.Order(models=("m*",), made_s=STARTED_S, until_s=STARTED_S + 9e4)


class Wanted(NamedTuple):
    key: bytes
    into: memoryview


class Counted(MemoryObjects):
    """reads: how often each name was asked for."""

    def __init__(self, where: str, clock: Callable[[], float]) -> None:
        super().__init__(where, clock)
        self.reads: Counter[str] = Counter()

    def _found(self, name: str) -> bytes:
        self.reads[name] += 1
        return super()._found(name)


def spec_of(tenant: str) -> NamespaceSpec:
    fields = {"model": "secret-model", "tenant": tenant}
    return NamespaceSpec(digest(tenant.encode()), RECORD_BYTES, 16, 16, fields)


def record_of(tenant: str, name: str) -> bytes:
    return digest(f"{tenant} {name}".encode()) * (RECORD_BYTES // 16)


class World:
    """Region na, and a mirror of it into eu. key: of the deployment, None: it has none. true: what each key's record is."""

    def __init__(self, key: bytes | None = KEY) -> None:
        self.loop = asyncio.get_running_loop()
        self.seals = Seals([key]) if key else None
        self.na, self.eu = (Counted(name, self.clock) for name in ("na", "eu"))
        self.true: dict[bytes, bytes] = {}
        self.model: MadeModel = make_model("m")
        self.tasks: list[asyncio.Task[None]] = []
        self.nodes: list[RegionNode] = []

    def clock(self) -> float:
        return STARTED_S + self.loop.time()

    def way(self, raw: Objects, region: str) -> Objects:
        return SealedObjects(raw, self.seals, f"acme/{region}") if self.seals else raw

    async def make(self) -> None:
        """Both regions, with everything in na that a region may have."""
        for raw in (self.na, self.eu):
            await init_region(self.way(raw, raw.where), "acme", raw.where, self.clock)
        node = await self.join("na", "one")
        for tenant, codec in (("tenant-a", ""), ("tenant-b", ""), ("tenant-a", SPLIT_ZSTD)):
            node.codec = codec
            for name in ("ab", "cd"):
                await self.persist(node, tenant, name + codec)
        way = self.way(self.na, "na")
        await publish(way, self.model, clock=self.clock)
        await bury(way, stone := Tombstone(tenant="gone", watched_until_s=int(STARTED_S) + 10**6))
        await put_behind(way, stone.id, [b"b" * 16])
        await orders.put_order(way, ORDER)
        await orders.put_progress(way, ORDER, orders.Progress(who="me", made_s=STARTED_S))
        await nodes.NODE_FORMAT.put(
            way, nodes.Node(writer="0" * 16, at_s=STARTED_S, dram_bytes=1, nvme_bytes=1)
        )
        await put_removal(way, Removal("old", "r", STARTED_S, "me", int(STARTED_S) + 10**6))
        await way.put(MIRRORS + "apac", MIRROR_STATE_FORMAT.seal(MirrorState(source="apac", at_s=STARTED_S)))
        await asyncio.sleep(10.0)
        await Snapshots(way, self.clock, random.Random(0)).write(node.catalogue)

    async def put_passing(self) -> None:
        """What is not there for long."""
        way, manifest = self.way(self.na, "na"), self.model.manifest
        cache = msgspec.structs.replace(manifest, about={"torch": "2"})
        await way.put(cache.name, encode(cache))
        await way.put(intent_name(manifest, "me"), encode(manifest))
        await way.put(COLLECTING + "b" * 16, LOCK_FORMAT.seal(Lock(60.0)))
        await put_stuck(way, Holder("c" * 16, "somewhere", is_mirror=False))
        await put_doubts(way, "one", [b"d" * 16])

    async def look(self) -> None:
        """What those read who ask: each leaves out what it cannot read, or says so in its one kind of error."""
        way = self.way(self.na, "na")
        await nodes.read_nodes(way)
        await orders.read_orders(way, {})
        await orders.read_all_progress(way, ORDER)
        await read_mirrors(way)
        for tombstone in (await read_tombstones(way)).by_key.values():
            await CARRIED_OUT_FORMAT.hint(way, CARRIED_OUT + tombstone.id)
        await read_behind(way, set())
        await lasts_s(way, COLLECTING + "b" * 16)
        with suppress(ModelError, ObjectError):
            await collect(way, 0, lambda *_: None, dry_run=True)

    async def persist(self, node: RegionNode, tenant: str, names: str) -> None:
        records = [record_of(tenant, names + name) for name in names[:2]]
        hashes = [digest(record) for record in records]
        header = PackHeader(spec_of(tenant), b"", b"".join(hashes), b"".join(map(digest, records)))
        assert await node.persist(header, list(map(memoryview, records)), 0, 0)
        self.true |= {header.spec.digest + block: data for block, data in zip(hashes, records, strict=True)}

    async def join(self, region: str, who: str) -> RegionNode:
        """A daemon, which goes on."""
        raw = {"na": self.na, "eu": self.eu}[region]
        node = await RegionNode.join(
            self.way(raw, region), "acme", region, Path(who), who, random.Random(who), self.clock
        )
        self.nodes.append(node)
        self.tasks.append(asyncio.ensure_future(node.run()))
        return node

    async def mirror(self) -> RegionNode:
        """From na into eu."""
        node = await self.join("eu", "mirror")
        rows = MemoryRows()

        async def joined() -> Joined:
            way = self.way(self.na, "na")
            return Joined((await open_region(way, "acme", "na")).identity, way, Catalogue(rows))

        rules = [Rule(of_weights=True), Rule()]
        home = self.way(self.eu, "eu")
        mirror = Mirror(node, home, "na", joined, rules, {}, self.clock, random.Random(0))
        self.tasks.append(asyncio.ensure_future(mirror.run()))
        return node

    async def fetch(self, node: RegionNode) -> dict[bytes, bytes | None]:
        """What a daemon hands to an engine, by key."""
        views = {key: bytearray(RECORD_BYTES) for key in self.true}
        answers = await node.fetch([Wanted(key, memoryview(view)) for key, view in views.items()])
        return {
            key: bytes(view) if result is Get.HIT else None
            for (key, view), (result, _) in zip(views.items(), answers, strict=True)
        }

    async def weights(self) -> bytes | None:
        """The model's bytes, as a preload gets them; None where it gets none."""
        way = self.way(self.na, "na")
        try:
            manifest = await read_manifest(way, "m", "r")
            content = b""
            for chunk in manifest.chunks:
                view = memoryview(bytearray(chunk.size_bytes))
                await fetched([Bucket(way)], chunk, view)
                content += view
        except (Damaged, ChunkDamaged, ObjectError):
            return None
        return content

    @property
    def true_weights(self) -> bytes:
        return b"".join(self.model.chunks[chunk.name] for chunk in self.model.manifest.chunks)

    async def stop(self) -> None:
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


# -- what is done to an object: its new content --

_KIND = re.compile("[a-z/]+/|news|bell")

Attack = Callable[[random.Random, str, World, dict[str, bytes]], bytes]


def kinds() -> list[str]:
    """Of all objects that a region may have, as our own code names them: their folders, and those that lie in none."""
    found = {MARKER}
    for package in (replication, tiers.packs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            named = vars(importlib.import_module(module.name)).items()
            found |= {v for k, v in named if k.isupper() and isinstance(v, str) and _KIND.fullmatch(v)}
    return sorted(found)


def kind_of(name: str) -> str:
    """The longest that it begins with."""
    return max((kind for kind in KINDS if name.startswith(kind)), key=len)


def replaced(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 60, 5000)))


def truncated(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    content = world.na.stored[name]
    return content[: chance.randrange(len(content))]


def flipped(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    content = bytearray(world.na.stored[name])
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(content)


def swapped(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    """With another one of its kind, or of the whole region, of any tenant."""
    near = [other for other in older if kind_of(other) == kind_of(name) and other != name]
    return older[chance.choice(near or list(older))]


def replayed(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    return older.get(name, world.na.stored[name])


def of_other_region(chance: random.Random, name: str, world: World, older: dict[str, bytes]) -> bytes:
    """Of its name, or of its kind, in eu, where the key is the same."""
    near = [other for other in world.eu.stored if kind_of(other) == kind_of(name)]
    return world.eu.stored.get(name) or world.eu.stored[chance.choice(near or list(world.eu.stored))]


KINDS = kinds()
ATTACKS: tuple[Attack, ...] = (replaced, truncated, flipped, swapped, replayed, of_other_region)


# -- what is put where nothing was: forged by the book, with checksums and seals of the attacker that match --


def hostile_ways(world: World) -> list[Objects]:
    """As somebody without the key may write into na: without seals, with those of a key of its own, and with these where they say
    that they are of the deployment's."""
    posing = Seals([OTHER_KEY])
    if world.seals is not None:
        posing._keys[0].id = world.seals.key_id
    return [world.na, *(SealedObjects(world.na, seals, "acme/na") for seals in (Seals([OTHER_KEY]), posing))]


async def forge_records(bucket: Objects, world: World) -> None:
    """Wrong records of real blocks, announced by a writer that nobody knows, in the place of the true ones."""
    spec = spec_of("tenant-a")
    for name in [name for name in world.na.stored if name.startswith(f"{PACKS}{spec.digest.hex()}")]:
        await world.na.delete([name])
    hashes = [digest(record_of("tenant-a", "ab" + name)) for name in "ab"]
    records = [b"wrong!!!" * (RECORD_BYTES // 8) for _ in hashes]
    header = PackHeader(spec, b"", b"".join(hashes), b"".join(map(digest, records)))
    announced = Announced(await put_pack(bucket, header, records))
    writer = FeedWriter(bucket, "f" * 16, world.clock, random.Random(0))
    await writer.announce([announced])


async def forge_tombstone(bucket: Objects, world: World) -> None:
    await bury(bucket, Tombstone(tenant="tenant-a", watched_until_s=int(STARTED_S) + 10**6))


async def forge_model(bucket: Objects, world: World) -> None:
    """Another model under the name of the published one, whole in itself."""
    await put_model(bucket, make_model("m", seed="forged"))


async def forge_removal(bucket: Objects, world: World) -> None:
    await put_removal(bucket, Removal("m", "r", STARTED_S, "me", int(STARTED_S) + 10**6))


Forgery = Callable[[Objects, World], Awaitable[None]]
FORGERIES: tuple[Forgery, ...] = (forge_records, forge_tombstone, forge_model, forge_removal)
