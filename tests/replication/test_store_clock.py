"""Clocks of machines that are wrong, by minutes to years, either way, and set while processes run: the store's is what counts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.steps import finish
from replication.catalogue.catalogue import Catalogue
from replication.formats.region import init_region, open_region
from replication.formats.rules import Rule
from replication.mirror.mirror import Joined, Mirror
from replication.region.region_node import RegionNode
from replication.store_clock import SETTLE_S, StoreClock
from tests.objects import Faults, FaultyObjects, MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.errors import ObjectRefused
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACKS, PackHeader

STARTED_S = 1.7e9
DAY_S = 86400.0
SKEW_S = 300.0
PACKS_MADE = 6
SPEC = NamespaceSpec(digest(b"a namespace"), 64, 16, 16, {"tenant": "acme"})
WRONG_S = [600.0, -3 * 3600.0, 8 * DAY_S, -30 * DAY_S, 1000 * DAY_S, -STARTED_S]
everywhere = pytest.mark.parametrize("wrong_s", WRONG_S, ids=lambda wrong_s: f"{wrong_s / 3600:.0f}h")


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    disks: dict[Path, MemoryRows] = {}
    monkeypatch.setattr(
        Catalogue, "open", lambda path, identity: Catalogue(disks.setdefault(path, MemoryRows()))
    )


class World:
    """Regions na and eu, whose stores have the right time, and processes by name. wrong_s: by how much a machine's clock is ahead."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.na, self.eu = MemoryObjects("na", self.now_s), MemoryObjects("eu", self.now_s)
        self.wrong_s: dict[str, float] = {}
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}

    def now_s(self) -> float:
        return STARTED_S + self.loop.time()

    def clock(self, name: str) -> Callable[[], float]:
        return lambda: self.now_s() + self.wrong_s.get(name, 0.0)

    async def node(self, name: str, region: str = "na", is_mirror: bool = False) -> RegionNode:
        bucket, chance = getattr(self, region), random.Random(name)
        node = await RegionNode.join(
            bucket, "acme", region, Path(name), name, chance, self.clock(name), SKEW_S, is_mirror=is_mirror
        )
        self.begin(name, node.run())
        return node

    async def mirror(self, name: str) -> Mirror:
        async def join() -> Joined:
            marker = await open_region(self.na, "acme", "na")
            return Joined(marker.identity, self.na, Catalogue.open(Path("na"), marker.identity))

        node = await self.node(name, "eu", is_mirror=True)
        chance = random.Random(1)
        mirror = Mirror(node, self.eu, "na", join, [Rule()], {}, self.clock(name), chance)
        self.begin(name, mirror.run())
        return mirror

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.setdefault(name, []).append(asyncio.ensure_future(work))

    async def kill(self, name: str) -> None:
        for task in self.tasks.pop(name):
            task.cancel()
        await asyncio.sleep(1.0)

    async def make(self, node: RegionNode, lasts_s: float) -> None:
        for number in range(PACKS_MADE):
            name = f"{lasts_s} {number}".encode()
            header = PackHeader(SPEC, b"", digest(name), digest(digest(name) * 4))
            assert await node.persist(header, [memoryview(digest(name) * 4)], 0, int(self.now_s() + lasts_s))
        await asyncio.sleep(20.0)


def packs(objects: MemoryObjects) -> int:
    return sum(name.startswith(PACKS) for name in objects.stored)


def simulate(main: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        world = World()
        for bucket in (world.na, world.eu):
            await init_region(bucket, "acme", bucket.where, world.now_s)
        await main(world)

    run(whole())


def kinds(node: RegionNode) -> list[str]:
    return [problem.kind for problem in node.wrong()]


@everywhere
@pytest.mark.parametrize("others", [1, 0])
def test_a_daemon_whose_clock_is_wrong_deletes_nothing_that_lives_and_keeps_nothing_for_ever(
    wrong_s: float, others: int
) -> None:
    """It comes with the clock wrong, alone in its region or not, and the clock is put right later: what lives stays and is held, the
    problem is told as long as it is so, and what is over goes when somebody with a right clock keeps the region."""

    async def main(world: World) -> None:
        maker = await world.node("maker")
        await world.make(maker, 7 * DAY_S)
        await world.make(maker, 100.0)
        if not others:
            await world.kill("maker")
        world.wrong_s["late"] = wrong_s
        late = await world.node("late")
        await asyncio.sleep(1800.0)
        assert packs(world.na) == PACKS_MADE if others else packs(world.na) == 2 * PACKS_MADE
        assert kinds(late)[:1] == ["clock"] and not late.keeper.holds
        assert abs(late.status()["clock_off_s"] - wrong_s) < 30  # type: ignore[operator]
        assert finish(late.held_steps(SPEC, digest(f"{7 * DAY_S} 0".encode()), 0)) == 1
        world.wrong_s["late"] = 0.0
        await asyncio.sleep(1800.0)
        assert packs(world.na) == late.catalogue.counts.packs == PACKS_MADE
        assert not kinds(late)

    simulate(main)


@everywhere
def test_a_keeper_whose_clock_is_set_wrong_leaves_the_region_to_another_one(wrong_s: float) -> None:
    """It has kept the region for minutes, then its clock is set wrong: it keeps nothing from then on, another daemon does within a minute,
    and what it persists meanwhile lives as long as it should."""

    async def main(world: World) -> None:
        keeper = await world.node("keeper")
        await asyncio.sleep(100.0)
        other = await world.node("other")
        assert keeper.keeper.holds
        world.wrong_s["keeper"] = wrong_s
        assert not keeper.keeper.holds
        await asyncio.sleep(60.0)
        assert other.keeper.holds and not keeper.keeper.holds
        await world.make(keeper, 7 * DAY_S)
        await world.make(keeper, 100.0)
        await asyncio.sleep(1800.0)
        assert packs(world.na) == other.catalogue.counts.packs == PACKS_MADE

    simulate(main)


@everywhere
def test_a_mirror_whose_clock_is_wrong_brings_all_that_lives(wrong_s: float) -> None:
    """It begins with the clock wrong, or has it set while it runs: what lives is at home, what is over is not."""

    async def main(world: World) -> None:
        maker = await world.node("maker")
        await world.make(maker, 7 * DAY_S)
        world.wrong_s["mirror"] = wrong_s
        mirror = await world.mirror("mirror")
        await asyncio.sleep(180.0)
        assert packs(world.eu) == PACKS_MADE
        world.wrong_s["mirror"] = -wrong_s / 2
        await world.make(maker, 6 * DAY_S)
        await world.make(maker, 100.0)
        await asyncio.sleep(1800.0)
        assert packs(world.eu) >= 2 * PACKS_MADE
        world.wrong_s["mirror"] = 0.0
        await asyncio.sleep(3600.0)
        assert packs(world.eu) == 2 * PACKS_MADE
        state = mirror.state()
        assert state.watermark == state.read and not state.pending and (state.oldest_age_s or 0.0) < 60

    simulate(main)


@everywhere
def test_a_clock_is_held_within_what_the_store_says(wrong_s: float) -> None:
    """What is asked is right to a second, whatever our own clock says and is set to; where that is right, it is what is asked."""

    async def main() -> None:
        loop, ahead_s = asyncio.get_running_loop(), 0.0
        clock = StoreClock(lambda: loop.time() + STARTED_S + ahead_s, SKEW_S)
        assert clock() == STARTED_S and not clock.is_known and not clock.is_sure
        clock.learn(int(STARTED_S + 5), loop.time(), loop.time() + 0.5)
        for hours in range(20):
            ahead_s = hours % 2 * wrong_s
            assert abs(clock() - STARTED_S - loop.time()) < 7 + hours * 2
            assert clock.is_off == bool(ahead_s) and clock.is_sure != clock.is_off
            await asyncio.sleep(3600.0)

    run(main())


@everywhere
def test_a_clock_of_a_store_that_is_set_is_followed_and_not_judged_by(wrong_s: float) -> None:
    """What contradicts all that was learned is believed, and for an hour nothing may be deleted by it."""

    async def main() -> None:
        loop, store_s = asyncio.get_running_loop(), STARTED_S
        clock = StoreClock(lambda: store_s + loop.time(), SKEW_S)
        clock.learn(store_s, loop.time())
        assert clock.is_sure
        store_s += wrong_s
        await asyncio.sleep(10.0)
        clock.learn(store_s + loop.time(), loop.time() - 1)
        assert abs(clock() - store_s - loop.time()) < 2 and not clock.is_sure
        await asyncio.sleep(SETTLE_S)
        assert clock.is_sure

    run(main())


def test_where_nobody_may_ring_the_clock_is_known_by_the_news_of_others() -> None:
    """A process that may write nothing but reads the news knows the store's clock to some seconds, within a minute."""

    async def main(world: World) -> None:
        await world.node("keeper")
        await asyncio.sleep(100.0)
        world.wrong_s["guest"] = 30 * DAY_S
        refused = ObjectRefused("no writes today")
        objects = FaultyObjects(world.na, random.Random(0), Faults())
        objects.put = partial(_refuse, refused)  # type: ignore[method-assign]
        guest = await RegionNode.join(
            objects, "acme", "na", Path("guest"), "guest", random.Random(0), world.clock("guest"), SKEW_S
        )
        assert not guest.clock.is_known
        world.begin("guest", guest.run())
        await asyncio.sleep(60.0)
        assert guest.clock.is_known and guest.clock.is_off and abs(guest.clock() - world.now_s()) < 20

    simulate(main)


async def _refuse(error: Exception, *arguments: object) -> bool:
    raise error
