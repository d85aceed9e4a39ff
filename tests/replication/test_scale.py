"""The scale plan: the real code makes as many requests as the plan says, and the document says what the plan says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from pathlib import Path

import pytest

from benchmarks.scale import (
    Load,
    Requests,
    announcing,
    audit_lists,
    following,
    following_closely,
    idle,
    idle_keeper,
    listing,
    persisting,
    reading_through,
    table,
    tombstones,
    warming,
)
from replication.audit.audit import Audit
from replication.audit.auditing import Auditing, NodeHands
from replication.audit.orphans import Terms
from replication.catalogue.catalogue import Catalogue
from replication.constants import UPKEEP_INTERVAL_S
from replication.erasure.erased import Erased
from replication.erasure.erasure import Erasure
from replication.feed.feed import FeedWriter
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.region import Region, init_region
from replication.keeper.keeper import Keeper
from replication.region.read_through import ReadThrough
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects
from tests.replication.kept import kept, look_at_nothing
from tests.replication.memory_rows import MemoryRows
from tests.replication.mirrored import World, in_memory, pack, simulate
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes, ObjectInfo
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PackHeader

catalogues_in_memory = in_memory  # a fixture of every test here, too
BEGUN_S, RUN_S = 700.0, 4000.0
RECORD = b"a record"
SPEC = NamespaceSpec(b"scale " * 2 + b"plan", len(RECORD), 16, 16)
DOCUMENT = Path(__file__).parents[2] / "docs" / "scale.md"


class CountedObjects(MemoryObjects):
    """requests: by method; of a list, each page."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        super().__init__(clock=clock or asyncio.get_running_loop().time)
        self.requests: Counter[str] = Counter()

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        self.requests["put"] += 1
        return await super().put(name, content, only_new)

    async def get(self, name: str) -> memoryview:
        self.requests["get"] += 1
        return await super().get(name)

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        found = await super().get_if_changed(name, e_tag, size_bytes_max)
        self.requests["get"] += found is None  # else it was counted as one
        return found

    async def head(self, name: str) -> ObjectInfo:
        self.requests["head"] += 1
        return await super().head(name)

    async def folders(self, prefix: str) -> Sequence[str]:
        self.requests["list"] += 1
        return await super().folders(prefix)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        pages = 0
        async for page in super().list(prefix, after):
            pages += 1
            yield page
        self.requests["list"] += max(1, pages)


async def node_of(objects: CountedObjects, number: int, chance: random.Random) -> RegionNode:
    clock = asyncio.get_running_loop().time
    catalogue = Catalogue(MemoryRows())
    region = await init_region(objects, "acme", "na", clock)
    keeper = Keeper(objects, region, chance)
    writer = FeedWriter(objects, f"{number + 1:016x}", clock, chance, lambda: keeper.needs_bell)
    tail = Tail(objects, catalogue, clock, chance, keeper=keeper)
    erasure = Erasure(objects, catalogue, clock, news=keeper)
    node = RegionNode(
        objects, region, catalogue, writer, tail, erasure, keeper, UPKEEP_INTERVAL_S, clock, chance
    )
    audit = Audit(objects, region, catalogue, erasure, node.hands, clock)
    node.auditing = Auditing(objects, audit, tail, keeper, UPKEEP_INTERVAL_S, clock, chance)
    return node


async def live(node: RegionNode, packs_per_s: float, chance: random.Random) -> None:
    """One node persists packs at random times."""
    following = asyncio.create_task(node.run())
    while True:
        await asyncio.sleep(chance.expovariate(packs_per_s))
        hashes = chance.randbytes(SPEC.hash_bytes)
        header = PackHeader(SPEC, b"", hashes, digest(RECORD))
        until_s = int(asyncio.get_running_loop().time() + 500)
        await node.persist(header, [memoryview(RECORD)], 0, until_s)
        assert not following.done()


@pytest.mark.parametrize("nodes", [3, 8])
def test_the_plan_counts_what_the_code_asks_for(nodes: int) -> None:
    """Over an hour of a small region, requests differ from the plan by no more than a tenth."""
    load = Load(packs_per_s=0.05)
    counted: Counter[str] = Counter()

    async def region() -> None:
        chance, store = random.Random(nodes), CountedObjects()
        members = [await node_of(store, number, chance) for number in range(nodes)]
        tasks = [asyncio.create_task(live(member, load.packs_per_s, chance)) for member in members]
        await asyncio.sleep(BEGUN_S)
        store.requests.clear()
        await asyncio.sleep(RUN_S)
        counted.update(store.requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(region())
    each = (following(nodes, load) + announcing(nodes, load)).times(nodes) + tombstones().times(nodes)
    planned = each + persisting(nodes, load) + listing(nodes, load)
    assert (counted["put"] + counted["list"]) / RUN_S == pytest.approx(planned.puts, rel=0.1)
    assert (counted["get"] + counted["head"]) / RUN_S == pytest.approx(planned.gets, rel=0.1)


@pytest.mark.parametrize("nodes", [3, 8])
def test_a_node_that_reads_another_region_through_asks_no_more_than_planned(nodes: int) -> None:
    """Of a region that it only follows, over an hour."""
    load = Load(packs_per_s=0.05)
    counted: Counter[str] = Counter()

    async def region() -> None:
        chance, store, home = random.Random(nodes), CountedObjects(), Erased(asyncio.get_running_loop().time)
        members = [await node_of(store, number, chance) for number in range(nodes)]
        tasks = [asyncio.create_task(live(member, load.packs_per_s, chance)) for member in members]
        await look_at_nothing(home)
        far = copy(store)  # the same bucket, counted apart
        far.requests = Counter()
        place = Region(format=1, deployment="acme", region="na", made_s=0.0)
        clock = asyncio.get_running_loop().time
        reader = ReadThrough(far, place, Catalogue(MemoryRows()), home, 10.0, clock, chance)
        tasks.append(asyncio.create_task(reader.run()))
        await asyncio.sleep(BEGUN_S)
        far.requests.clear()
        await asyncio.sleep(RUN_S)
        counted.update(far.requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(region())
    planned = reading_through(nodes, load)
    assert counted["list"] / RUN_S == pytest.approx(planned.puts, rel=0.1)
    assert (counted["get"] + counted["head"]) / RUN_S == pytest.approx(planned.gets, rel=0.1)
    assert not counted["put"]


@pytest.mark.parametrize("nodes", [1, 8])
def test_an_idle_node_costs_half_a_dollar_a_month(nodes: int) -> None:
    """While nobody writes, a node makes no more requests than planned, of which a month costs less than half a dollar; the keeper
    less than two dollars."""

    async def region() -> list[tuple[bool, Counter[str]]]:
        chance, store = random.Random(nodes), CountedObjects()
        ways = [copy(store) for _ in range(nodes)]  # the same bucket, counted apart
        members, tasks = list[RegionNode](), list[asyncio.Task[None]]()
        for number, way in enumerate(ways):
            way.requests = Counter()
            members.append(await node_of(way, number, chance))
            tasks.append(asyncio.create_task(members[-1].run()))
        await asyncio.sleep(BEGUN_S)
        for way in ways:
            way.requests.clear()
        await asyncio.sleep(RUN_S)
        return [(member.keeper.holds, way.requests) for member, way in zip(members, ways, strict=True)]

    counted = run(region())
    assert sum(holds for holds, _ in counted) == 1
    for holds, requests in counted:
        found = (
            Requests(
                (requests["put"] + requests["list"]) / RUN_S, (requests["get"] + requests["head"]) / RUN_S
            )
            + warming()
        )
        planned = (idle_keeper if holds else idle)(nodes)
        assert found.month_price == pytest.approx(planned.month_price, rel=0.1)
        assert found.month_price < (2.0 if holds else 0.5)


@pytest.mark.parametrize("writes", [False, True])
def test_a_mirror_asks_its_source_for_no_more_than_planned(writes: bool) -> None:
    """Over an hour in which nobody writes there, or somebody makes a pack every twenty seconds, of which it copies each."""
    load = Load(packs_per_s=0.05 if writes else 0.0)
    found: Counter[str] = Counter()

    async def main(world: World) -> None:
        store, chance = CountedObjects(world.clock), random.Random(0)
        await init_region(store, "acme", "na", world.clock)
        way = copy(store)  # the same bucket, counted apart
        way.requests = found
        world.na.objects, world.na.way = store, way  # type: ignore[assignment]  # any objects will do
        world.na.writer = FeedWriter(store, "a" * 16, world.clock, chance)
        node = await RegionNode.join(store, "acme", "na", Path("na"), "node", chance, world.clock)
        world.tasks.append(asyncio.ensure_future(node.run()))
        await world.mirror()
        end_s = BEGUN_S + RUN_S
        world.loop.call_later(BEGUN_S, found.clear)
        while writes and world.loop.time() < end_s:
            await asyncio.sleep(chance.expovariate(load.packs_per_s))
            await world.na.make(pack(world.loop.time()))
        await asyncio.sleep(end_s - world.loop.time())

    simulate(main)
    copied = Requests(0.0, load.packs_per_s)
    planned = following_closely(1, load, writes) + copied
    asked = Requests(found["list"] / RUN_S, (found["get"] + found["head"]) / RUN_S)
    assert asked.month_price == pytest.approx(planned.month_price, rel=0.1)
    assert writes or asked.month_price < 0.5
    assert not found["put"]


def test_an_audit_lists_no_more_than_planned() -> None:
    """Of 2,500 packs that are there as announced, and one that is not announced yet, all pages once, and the tombstones."""

    async def audit() -> Counter[str]:
        chance, store = random.Random(0), CountedObjects()
        region = await init_region(store, "acme", "na", asyncio.get_running_loop().time)
        node = await node_of(store, 0, chance)
        records = [memoryview(RECORD)]
        for number in range(2501):
            header = PackHeader(SPEC, b"", digest(b"%d" % number), digest(RECORD))
            pack = await put_pack(store, header, records)
            node.catalogue.add_packs([Announced(pack)] if number else [])
        hands = NodeHands(node.announce, kept(store))
        audit = Audit(store, region, node.catalogue, node.erasure, hands, asyncio.get_running_loop().time)
        store.requests.clear()
        report = await audit.run(Terms(settled_s=0.0))
        assert (report.listed, report.announced, report.left) == (2501, 2500, 1)
        return store.requests

    requests = run(audit())
    tombstones = 1
    assert requests["list"] == audit_lists(2501) + tombstones
    assert not requests["put"] and requests["head"] == tombstones  # none: that the place is there


def test_the_document_has_the_table_of_the_plan() -> None:
    """docs/scale.md is what `python -m benchmarks.scale` prints."""
    assert table(Load()) in DOCUMENT.read_text()


def test_prices_are_of_requests() -> None:
    """A million PUTs cost 5, a million GETs 0.4."""
    month_s = 365.25 / 12 * 86_400
    assert Requests(1e6 / month_s, 0).month_price == pytest.approx(5.0)
    assert Requests(0, 1e6 / month_s).month_price == pytest.approx(0.4)
