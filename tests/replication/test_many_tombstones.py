"""Tombstones are never deleted: thousands of them, in force or over, hold up nobody who starts."""

from __future__ import annotations

import asyncio

from replication.erasure.erased import Erased
from replication.formats.tombstones import Tombstone, bury, read_tombstones, take_back
from tests.objects import Faults
from tests.replication.mirrored import World, in_memory, pack, simulate

__all__ = ["in_memory"]  # a fixture
DAY_S = 24 * 3600


async def buried(world: World, number: int, days: int) -> Tombstone:
    until_s = int(world.clock()) + days * DAY_S
    return await bury(world.na.objects, Tombstone(tenant=f"gone {number}", watched_until_s=until_s, serial=1))


def test_a_mirror_that_starts_begins_to_copy_soon() -> None:
    """Those of the source that are in force, or were taken back, are at home before anything is copied, within seconds; those that are over are
    not brought, whatever this machine's clock says."""

    async def main(world: World) -> None:
        forced = [await buried(world, number, 20) for number in range(500)]
        for number in range(1000, 1500):
            await buried(world, number, -3)
        back = await buried(world, 7777, 9)
        await take_back(world.na.objects, back.id)
        await world.na.make(pack("x"), pack("y", tenant="gone 3"))
        world.na.way.faults = world.eu.way.faults = Faults(delay_s=0.1)  # half of that on average
        await world.mirror()
        await asyncio.sleep(30.0)
        assert world.eu.copies() == [pack("x")[0].pack.id]
        there = {one.id for one in (await read_tombstones(world.eu.objects)).by_key.values()}
        assert there == {*(one.id for one in forced), back.id}

    simulate(main)


def test_a_node_that_starts_knows_them_soon() -> None:
    """They are read side by side."""

    async def main(world: World) -> None:
        for number in range(1000):
            await buried(world, number, 20)
        world.na.way.faults = Faults(delay_s=0.1)
        erased, begun_s = Erased(world.clock), world.loop.time()
        await erased.look(world.na.way)
        assert len(erased.tombstones) == 1000 and world.loop.time() - begun_s < 10.0

    simulate(main)
