"""What is known of another region goes by the clock of its store."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import pytest

from replication.erasure.erased import Erased
from replication.formats.keeping import BELL, CLOCK
from replication.formats.rules import Rule
from replication.mirror.mirror import Mirror
from replication.region.read_through import ReadThrough
from replication.region.region_node import RegionNode
from tests.replication.mirrored import World, in_memory, pack, simulate
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectUnavailable

__all__ = ["in_memory"]  # a fixture


@pytest.mark.parametrize("who", ["who reads through", "a mirror"])
def test_what_another_region_removed_is_remembered_by_its_clock(who: str) -> None:
    """A machine whose clock is set a year ahead for a moment forgets nothing of it: for how long removals are remembered is in that clock."""

    async def main(world: World) -> None:
        off_s = 0.0

        def own() -> float:
            return world.clock() + off_s

        source = await RegionNode.join(
            world.na.way, "acme", "na", Path("na"), "daemon", random.Random(4), world.clock
        )
        living = asyncio.ensure_future(source.run())
        if who == "a mirror":
            node = await world.node()
            mirror = Mirror(
                node, world.eu.way, "na", partial(world.joined, "na"), [Rule()], {}, own, random.Random(5)
            )
            task = asyncio.ensure_future(mirror.run())
            await asyncio.sleep(60.0)
            assert mirror.pull is not None
            catalogue = mirror.pull._catalogue
        else:
            erased = Erased(world.clock)
            reader = await ReadThrough.follow(
                world.na.way, "acme", "na", Path("far"), erased, random.Random(5), own
            )
            task = asyncio.ensure_future(reader.run())
            await asyncio.sleep(60.0)
            catalogue = reader.catalogue
        off_s = 365 * 24 * 3600.0
        assert abs(catalogue.clock() - world.clock()) < 60.0
        for each in (task, living):
            each.cancel()
        await asyncio.gather(task, living, return_exceptions=True)

    simulate(main)


@pytest.mark.parametrize("is_known_later", [True, False])
def test_a_mirror_that_does_not_know_the_time_passes_nothing_by(is_known_later: bool) -> None:
    """Its machine's clock is a year ahead, and the store cannot be asked yet: what takes that for the time counts as copied, for good,
    what lives for a day."""

    async def main(world: World) -> None:
        can_ask = False
        put = world.eu.way.put

        async def way(name: str, content: Bytes, only_new: bool = False) -> bool:
            if name in (BELL, CLOCK) and not can_ask:
                raise ObjectUnavailable("not now")
            return await put(name, content, only_new)

        world.eu.way.put = way  # type: ignore[method-assign]
        one = pack("a")
        await world.na.make(one, kept_until_s=int(world.clock()) + 24 * 3600)

        def own() -> float:
            return world.clock() + 365 * 24 * 3600.0

        node = await RegionNode.join(
            world.eu.way, "acme", "eu", Path("eu"), "mirror", random.Random(1), own, is_mirror=True
        )
        mirror = Mirror(
            node, world.eu.way, "na", partial(world.joined, "na"), [Rule()], {}, own, random.Random(5)
        )
        living = [asyncio.ensure_future(node.run()), asyncio.ensure_future(mirror.run())]
        await asyncio.sleep(60.0)
        assert world.eu.has(one) and not world.eu.copies()  # what is announced has times
        can_ask = is_known_later
        await asyncio.sleep(60.0)
        assert world.eu.copies() == ([one[0].pack.id] if is_known_later else [])
        for each in living:
            each.cancel()
        await asyncio.gather(*living, return_exceptions=True)

    simulate(main)
