"""What mirrors brought while their source is away, or nobody reads it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from replication.formats.announced import Announced
from replication.formats.mirror_state import MIRRORS
from replication.region.region_node import RegionNode
from replication.region.upkeep import AWAY_S_MAX
from tests.objects import Faults
from tests.replication.mirrored import World, in_memory, pack, simulate
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable
from tiers.packs.packs import PACKS, PackHeader, describe

__all__ = ["in_memory"]  # a fixture
LIFE_S = 100


def packs(world: World) -> int:
    return sum(name.startswith(PACKS) for name in world.eu.objects.stored)


@pytest.mark.parametrize("away", ["source", "mirror", "forgotten"])
def test_what_was_copied_lives_on_while_its_source_is_not_read_and_no_longer(away: str) -> None:
    """The source is away, or the mirror is dead, which a daemon of its region notices: copies whose lives are over stay and are held, those
    of the region itself go. When the source is read again they go, too, but for those that live longer there; and where nothing is known
    of a look at it."""

    async def main(world: World) -> None:
        await world.mirror()
        daemon = await RegionNode.join(
            world.eu.way, "acme", "eu", Path("daemon"), "daemon", random.Random(2), world.clock
        )
        living = asyncio.ensure_future(daemon.run())
        until_s = int(world.clock()) + LIFE_S
        await world.na.make(*(pack(name) for name in "abcd"), kept_until_s=until_s)
        await world.eu.make(pack("home"), kept_until_s=until_s)
        await asyncio.sleep(60.0)
        assert packs(world) == 5
        world.na.way.faults = Faults(refuse=ObjectUnavailable("away"))
        if away != "source":
            await world.stop()
        await world.na.make(pack("a"), kept_until_s=until_s + int(AWAY_S_MAX), puts=False)
        await asyncio.sleep(1500.0)
        assert packs(world) == 4
        spec, blocks = pack("b")[0].pack.header.spec, pack("b")[0].pack.header.hashes
        assert daemon.held(spec, blocks, 0) == 2
        if away == "forgotten":
            await world.eu.objects.delete([MIRRORS + "na"])
        else:
            world.na.way.faults = Faults()
            if away == "mirror":
                await world.mirror()
        await asyncio.sleep(3000.0)
        assert packs(world) == (0 if away == "forgotten" else 1)
        living.cancel()

    simulate(main)


def test_a_source_that_never_comes_back_keeps_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long behind the last look at it nothing of what was copied is left."""
    monkeypatch.setattr("replication.region.upkeep.AWAY_S_MAX", 2500.0)

    async def main(world: World) -> None:
        await world.mirror()
        await world.na.make(pack("a"), kept_until_s=int(world.clock()) + LIFE_S)
        await asyncio.sleep(60.0)
        world.na.way.faults = Faults(refuse=ObjectUnavailable("away"))
        await asyncio.sleep(2400.0)
        assert packs(world) == 1
        await asyncio.sleep(1000.0)
        assert packs(world) == 0

    simulate(main)


def behind(before: Announced, name: str) -> tuple[Announced, bytes]:
    """A pack of one record that follows on this one."""
    header, record = before.pack.header, digest(name.encode()) * 4
    described, first = describe(
        PackHeader(header.spec, header.hashes[-16:], digest(name.encode()), digest(record))
    )
    return Announced(described), first + record


def test_what_a_copy_hangs_on_lives_as_long_though_it_was_made_here() -> None:
    """Both regions made the beginning of a prompt, the source what follows: while it is away both stay; with the copy its beginning goes."""

    async def main(world: World) -> None:
        await world.mirror()
        until_s = int(world.clock()) + LIFE_S
        begin = pack("begin")
        rest = behind(begin[0], "rest")
        await world.eu.make(begin, pack("home"), kept_until_s=until_s)
        await asyncio.sleep(10.0)
        await world.na.make(begin, rest, kept_until_s=until_s)
        await asyncio.sleep(50.0)
        assert packs(world) == 3
        world.na.way.faults = Faults(refuse=ObjectUnavailable("away"))
        await asyncio.sleep(4000.0)
        assert packs(world) == 2
        assert world.eu.has(begin, rest)
        world.na.way.faults = Faults()
        await asyncio.sleep(6000.0)
        assert packs(world) == 0

    simulate(main)
