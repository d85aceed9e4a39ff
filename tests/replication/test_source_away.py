"""What mirrors brought while their source is away, or nobody reads it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvstore.steps import finish
from replication.formats.announced import Announced
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState, read_state
from replication.region.region_node import RegionNode
from replication.region.upkeep import AWAY_S_MAX
from tests.objects import Faults, FaultyObjects, flip
from tests.replication.mirrored import World, in_memory, pack, simulate
from tiers.checksum import digest
from tiers.errors import ObjectError, ObjectRefused, ObjectUnavailable
from tiers.packs.packs import PACKS, PackHeader, describe

__all__ = ["in_memory"]  # a fixture
LIFE_S = 100
STATE = MIRRORS + "na"


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
        assert finish(daemon.held_steps(spec, blocks, 0)) == 2
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


class OneObject(FaultyObjects):
    """A place in which one object cannot be had."""

    error: ObjectError | None = None

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        if self.error is not None and name == STATE:
            raise self.error
        return await super().get_within(name, size_bytes_max)


@pytest.mark.parametrize(
    "why",
    ["damaged", "of another version", "of another source", "refused", "not to be had", "of a dead mirror"],
)
def test_while_nobody_can_say_when_a_source_was_read_nothing_that_was_copied_from_it_goes(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of its mirror is damaged, of another version, or not handed out, and no mirror lives that writes it anew: copies stay for
    ever, what was made here goes, and it is told. When it can be read again it counts. A mirror that finds it so and cannot reach the
    source says that it was read when that was written."""
    monkeypatch.setattr("replication.region.upkeep.UNKNOWN_LIFE_S", 3600.0)
    monkeypatch.setattr("replication.region.upkeep.AWAY_S_MAX", 7200.0)

    async def main(world: World) -> None:
        world.eu.way = way = OneObject(world.eu.objects, random.Random(0), Faults())
        await world.mirror()
        until_s = int(world.clock()) + LIFE_S
        await world.na.make(*(pack(name) for name in "abcd"), kept_until_s=until_s)
        await asyncio.sleep(60.0)
        world.na.way.faults = Faults(refuse=ObjectUnavailable("away"))
        await world.stop()
        good = world.eu.objects.stored[STATE]
        errors = {"refused": ObjectRefused("answers 403"), "not to be had": ObjectUnavailable("hangs")}
        way.error = errors.get(why)
        bad = {
            "damaged": flip(good, 200),
            "of another version": b"KVMIRR9\n" + good[8:],
            "of a dead mirror": b"",
        }
        other = MIRROR_STATE_FORMAT.seal(MirrorState(source="apac", at_s=1.0))
        await world.eu.objects.put(STATE, good if way.error else bad.get(why, other))
        home = RegionNode.join(way, "acme", "eu", Path("daemon"), "daemon", random.Random(2), world.clock)
        daemon = await home
        living = asyncio.ensure_future(daemon.run())
        await world.eu.make(*(pack(f"home {number}") for number in range(300)), kept_until_s=until_s)
        await asyncio.sleep(3000.0)
        assert packs(world) == 4
        [told] = [problem for problem in daemon.wrong() if STATE in problem.subject]
        assert "na is removed" in told.text
        if why == "of a dead mirror":
            await world.mirror()
            await asyncio.sleep(300.0)
            state = await read_state(world.eu.objects, "na")
            assert packs(world) == 4 and 3000 < world.clock() - state.looked_s < 4000 and state.at_s
        else:
            await asyncio.sleep(4 * 3600.0)
            assert packs(world) == 4 and [1 for problem in daemon.wrong() if STATE in problem.subject]
            way.error = None
            await world.eu.objects.put(STATE, good)
            await asyncio.sleep(2 * 3600.0)
            assert packs(world) == 0 and not [1 for problem in daemon.wrong() if STATE in problem.subject]
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


@pytest.mark.parametrize("is_sweeping", [False, True])
def test_a_pack_that_cannot_be_copied_prolongs_no_life_of_what_can(is_sweeping: bool) -> None:
    """One that is damaged at the source, met by a first sweep or heard of later: what was copied from there goes when its life is over, but for what
    lives longer there, which a restarted mirror finds, too."""

    async def main(world: World) -> None:
        bad = pack("bad")
        damaged = bad[0], flip(bad[1], len(bad[1]) - 3)
        if is_sweeping:
            await world.na.make(damaged)
        await world.mirror()
        await asyncio.sleep(60.0)
        if not is_sweeping:
            await world.na.make(damaged)
        until_s = int(world.clock()) + LIFE_S
        await world.na.make(*(pack(name) for name in "abcd"), kept_until_s=until_s)
        await asyncio.sleep(60.0)
        assert packs(world) == 4
        await world.stop()
        await world.na.make(pack("a"), kept_until_s=until_s + 7200, puts=False)
        await asyncio.sleep(600.0)
        await world.mirror()
        await asyncio.sleep(3000.0)
        state = await read_state(world.eu.objects, "na")
        assert state.failed == 1 and world.clock() - state.looked_s < 300.0
        assert world.eu.has(pack("a")) and packs(world) == 1
        await asyncio.sleep(7200.0)
        assert packs(world) == 0

    simulate(main)
