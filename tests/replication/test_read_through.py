"""Reading another region through: it is only read, and what either region has erased is not read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import NamedTuple

import msgspec
import pytest

from kvstore.steps import finish
from replication.catalogue.catalogue import Catalogue
from replication.constants import SOURCE_TOMBSTONES_S, TOMBSTONES_INTERVAL_S
from replication.erasure.erased import Erased
from replication.feed.feed import FeedWriter
from replication.feed.tail import SNAPSHOT_SEGMENTS_MIN
from replication.formats.announced import Announced
from replication.formats.region import MARKER, Region
from replication.formats.removed import Reason, removed
from replication.formats.tombstones import TOMBSTONES, Tombstone, bury
from replication.region.read_through import ReadThrough
from replication.store_clock import StoreClock
from replication.waits import passed_s
from tests.objects import FaultyObjects, MemoryObjects
from tests.replication.durable import hash_of
from tests.replication.kept import look_at_nothing
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.base import Get
from tiers.bucket.objects import ObjectInfo, Objects, Range
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PackHeader

SKEW_S = 60.0
LONG_S = 10**9
READS = {"get", "get_ranges", "head", "list", "folders"}
REGION = Region(format=1, deployment="acme", region="na", made_s=0.0)


def spec_of(tenant: str) -> NamespaceSpec:
    return NamespaceSpec(digest(tenant.encode()), 64, 32, 16, {"tenant": tenant})


def prompt(tenant: str, start: int, end: int) -> bytes:
    return b"".join(hash_of((tenant, number)) for number in range(start, end))


def record(block_hash: bytes) -> bytes:
    return block_hash * 2


class Wanted(NamedTuple):
    key: bytes
    into: memoryview


class Source:
    """The bucket of na, and one writer there."""

    def __init__(self) -> None:
        self.objects = MemoryObjects()
        clock = asyncio.get_running_loop().time
        self.writer = FeedWriter(self.objects, f"{1:016x}", clock, random.Random(1))

    async def add(self, tenant: str, start: int, end: int, kept_until_s: int = 0) -> Announced:
        """Blocks of the tenant's prompt, as a pack."""
        hashes = prompt(tenant, start, end)
        records = [record(hashes[at : at + 32]) for at in range(0, len(hashes), 32)]
        parent = prompt(tenant, start - 1, start) if start else b""
        header = PackHeader(spec_of(tenant), parent, hashes, b"".join(map(digest, records)))
        await self.objects.put(MARKER, msgspec.json.encode(REGION), only_new=True)
        pack = await put_pack(self.objects, header, list(map(memoryview, records)))
        announced = Announced(pack, 0, kept_until_s=kept_until_s)
        await self.writer.announce([announced])
        return announced


def follower(objects: Objects, home: Erased) -> ReadThrough:
    clock = asyncio.get_running_loop().time
    return ReadThrough(objects, REGION, Catalogue(MemoryRows()), home, SKEW_S, clock, random.Random(2))


def held(reader: ReadThrough, tenant: str, blocks: int) -> int:
    return finish(reader.held_steps(spec_of(tenant), prompt(tenant, 0, blocks), 0))


async def fetched(reader: ReadThrough, tenant: str, numbers: Sequence[int]) -> list[Get]:
    views = [memoryview(bytearray(64)) for _ in numbers]
    keys = [spec_of(tenant).digest + prompt(tenant, number, number + 1) for number in numbers]
    answers = await reader.fetch(list(map(Wanted, keys, views)))
    for key, view, (result, _) in zip(keys, views, answers, strict=True):
        assert result is not Get.HIT or bytes(view) == record(key[16:])
    return [result for result, _ in answers]


def erased(tenant: str, block: int | None = None) -> Tombstone:
    if block is None:
        return Tombstone(tenant=tenant, watched_until_s=LONG_S)
    block_hash = prompt(tenant, block, block + 1)
    return Tombstone(namespaces=(spec_of(tenant).digest,), block_hash=block_hash, watched_until_s=LONG_S)


def test_nothing_of_the_other_region_is_changed() -> None:
    """Over thousands of segments, tombstones, lives that end, packs that are gone or damaged, and reads of all that: no request
    but such that read, and the bucket has the same objects afterwards."""

    async def region() -> None:
        source, home = Source(), Erased(asyncio.get_running_loop().time)
        await look_at_nothing(home)
        for number in range(SNAPSHOT_SEGMENTS_MIN + 100):
            await source.add("many", number, number + 1, 50 * (number % 2))
        gone = await source.add("gone", 0, 4)
        damaged = await source.add("damaged", 0, 4)
        await bury(source.objects, erased("acme"))
        await source.add("acme", 0, 2)
        await source.objects.delete([gone.pack.name])
        await source.objects.put(damaged.pack.name, bytes(damaged.pack.size_bytes))
        before = {info.name: info async for page in source.objects.list("") for info in page}
        objects = FaultyObjects(source.objects, random.Random(3))
        reader = follower(objects, home)
        living = asyncio.create_task(reader.run())
        await reader.caught_up.wait()
        for _ in range(5):
            await asyncio.sleep(1000)
            for tenant in ("many", "gone", "damaged", "acme"):
                await fetched(reader, tenant, range(4))
            await reader.probe()
        assert not living.done()
        living.cancel()
        assert set(objects.requests) <= READS and objects.requests["get_ranges"]
        assert {info.name: info async for page in source.objects.list("") for info in page} == before
        assert (
            held(reader, "gone", 4) == 0 == held(reader, "damaged", 4) and reader.missing and reader.corrupt
        )
        assert reader.catalogue.counts.packs == SNAPSHOT_SEGMENTS_MIN + 103

    run(region())


class Blind(FaultyObjects):
    """A bucket of which tombstones cannot be listed for a while."""

    is_blind = True

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        if prefix == TOMBSTONES and self.is_blind:
            raise ObjectUnavailable("tombstones are not told (injected)")
        async for page in super().list(prefix, after):
            yield page


def test_nothing_is_held_before_it_is_known_what_is_erased() -> None:
    """Whichever of the two regions cannot be asked for its tombstones, nothing is held until it can; from then on what is erased in one
    of them is not, and all else is."""

    async def region(first: str) -> None:
        source, home_bucket = Source(), MemoryObjects()
        for tenant in ("home", "there", "kept"):
            await source.add(tenant, 0, 4)
        await bury(home_bucket, erased("home"))
        await bury(source.objects, erased("there"))
        home = Erased(asyncio.get_running_loop().time)
        there = Blind(source.objects, random.Random(3))
        reader = follower(there, home)
        living = asyncio.create_task(reader.run())
        await reader.caught_up.wait()
        for region in (first, "there" if first == "home" else "home"):
            await asyncio.sleep(TOMBSTONES_INTERVAL_S + 1)
            assert held(reader, "kept", 4) == 0
            if region == "home":
                await home.look(home_bucket)
            else:
                there.is_blind = False
        await asyncio.sleep(TOMBSTONES_INTERVAL_S + 1)
        assert [held(reader, tenant, 4) for tenant in ("home", "there", "kept")] == [0, 0, 4]
        living.cancel()

    run(region("home"))
    run(region("there"))


@pytest.mark.parametrize("piece", [1, 3, 1024])
def test_what_hangs_on_an_erased_block_is_not_held(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is erased from its seventh block on, at home: blocks before it are held, those behind are not, also such as become
    known after a restart that knows of no pack between. So it is whatever is looked at in a piece."""
    monkeypatch.setattr("replication.region.region_reader.HELD_TURN_BLOCKS", piece)

    async def region() -> None:
        source, home_bucket = Source(), MemoryObjects()
        await source.add("acme", 0, 4)
        await source.add("acme", 4, 10)
        await source.add("acme", 10, 12)
        await bury(home_bucket, erased("acme", 6))
        for blocks in (12, 16):
            home = Erased(asyncio.get_running_loop().time)
            await home.look(home_bucket)
            reader = follower(source.objects, home)
            living = asyncio.create_task(reader.run())
            await asyncio.sleep(SOURCE_TOMBSTONES_S)
            whole = prompt("acme", 0, blocks)
            assert [
                finish(reader.held_steps(spec_of("acme"), whole, start)) for start in (0, 5, 6, 8, 11)
            ] == [6, 6, 6, 8, 11]
            assert held(reader, "acme", 3) == 3
            assert await fetched(reader, "acme", [3, 5, 6, 9]) == [Get.HIT, Get.HIT, Get.MISS, Get.MISS]
            living.cancel()
            await source.add("acme", 12, 16)

    run(region())


def test_a_tombstone_that_comes_while_records_do_makes_them_misses() -> None:
    """It becomes known after the bucket was asked and before it answers."""

    class Slow(FaultyObjects):
        meanwhile: Callable[[], Coroutine[None, None, object]]

        async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
            parts = await super().get_ranges(name, ranges)
            await self.meanwhile()
            return parts

    async def region() -> None:
        source, home_bucket = Source(), MemoryObjects()
        await source.add("acme", 0, 4)
        home = Erased(asyncio.get_running_loop().time)
        await home_bucket.put(MARKER, b"home")
        await home.look(home_bucket)
        objects = Slow(source.objects, random.Random(3))
        reader = follower(objects, home)
        living = asyncio.create_task(reader.run())
        await asyncio.sleep(SOURCE_TOMBSTONES_S)
        objects.meanwhile = lambda: asyncio.sleep(1)
        assert await fetched(reader, "acme", range(4)) == [Get.HIT] * 4
        await bury(home_bucket, erased("acme"))
        objects.meanwhile = lambda: home.look(home_bucket)
        assert await fetched(reader, "acme", range(4)) == [Get.MISS] * 4
        living.cancel()

    run(region())


def test_tombstones_of_the_other_region_become_known_within_a_minute() -> None:
    """And count until they are not watched for any more."""

    async def region() -> None:
        source, home = Source(), Erased(asyncio.get_running_loop().time)
        await look_at_nothing(home)
        await source.add("acme", 0, 4)
        reader = follower(source.objects, home)
        living = asyncio.create_task(reader.run())
        await asyncio.sleep(SOURCE_TOMBSTONES_S / 2)
        assert held(reader, "acme", 4) == 4
        await bury(source.objects, Tombstone(tenant="acme", watched_until_s=1000))
        await asyncio.sleep(SOURCE_TOMBSTONES_S)
        assert held(reader, "acme", 4) == 0 and reader.status()["tombstones"] == 1
        await asyncio.sleep(1000)
        assert held(reader, "acme", 4) == 0  # nothing told what time it is there
        loop = asyncio.get_running_loop()
        assert isinstance(reader.clock, StoreClock)
        reader.clock.learn(loop.time(), passed_s(loop))
        assert held(reader, "acme", 4) == 4 and reader.status()["tombstones"] == 0
        living.cancel()

    run(region())


def test_what_is_removed_there_is_not_promised() -> None:
    """What the keeper of the other region removes leaves the catalogue here, too; nothing else does, though its life is over."""

    async def region() -> None:
        source, home = Source(), Erased(asyncio.get_running_loop().time)
        await look_at_nothing(home)
        short = await source.add("short", 0, 4, 500)
        await source.add("grown", 0, 4, 500)
        reader = follower(source.objects, home)
        living = asyncio.create_task(reader.run())
        await asyncio.sleep(600)
        assert [held(reader, tenant, 4) for tenant in ("short", "grown")] == [4, 4]
        await source.writer.announce((), (), [removed(short, Reason.OVER)])  # before that
        await asyncio.sleep(61)
        assert [held(reader, tenant, 4) for tenant in ("short", "grown")] == [4, 4]
        [known] = reader.catalogue.packs([short.pack.id])
        assert known is not None
        await source.writer.announce((), (), [removed(known, Reason.OVER)])
        await asyncio.sleep(61)
        assert [held(reader, tenant, 4) for tenant in ("short", "grown")] == [0, 4]
        living.cancel()

    run(region())
