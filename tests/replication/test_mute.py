"""A node that cannot announce, a pack that is removed before it was announced, a mirror whose source is away: the region goes on, and says so."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from replication.audit.auditing import Elsewhere
from replication.catalogue.catalogue import Catalogue
from replication.formats.removed import Reason, removed
from replication.formats.segment import FEED, HEADS
from replication.region.region_node import MUTE_S, RegionNode
from tests.objects import FaultyObjects
from tests.replication.audited import Region, known, make, opened
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectRefused

HOUR_S = 3600.0
_disks: dict[Path, dict[bytes, bytes]] = {}


@pytest.fixture(autouse=True)
def _in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day is half an hour; catalogues are kept in memory."""
    for name in ("AUDIT_INTERVAL_S", "ORPHAN_GRACE_S"):
        monkeypatch.setattr(f"replication.audit.auditing.{name}", 600.0)
    _disks.clear()
    monkeypatch.setattr(Catalogue, "open", opened(_disks))


class Mute(FaultyObjects):
    """May read and put everything but news of its own."""

    is_mute = False

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if self.is_mute and name.startswith((FEED, HEADS)):
            raise ObjectRefused(f"na: {name}: the store answers 403 AccessDenied")
        return await super().put(name, content, only_new)


async def pair(region: Region) -> tuple[Mute, RegionNode, RegionNode]:
    """A node that keeps the region, and its way there; one beside it."""
    way, mute = region.way, Mute(region.inner, random.Random(1))
    await region.begin()
    region.way = mute
    first = await region.node("x")
    await asyncio.sleep(100)
    region.way = way
    second = await region.node("y")
    await asyncio.sleep(MUTE_S)
    assert first.keeper.holds
    return mute, first, second


def test_who_cannot_announce_says_so_and_keeps_nothing() -> None:
    """Its removals would be heard of by nobody: another one keeps the region, and what is over goes. It is told, and over when it is."""

    async def main() -> None:
        region = Region()
        mute, first, second = await pair(region)
        mute.is_mute = True
        packs = [make(number) for number in range(10)]
        await region.announce(*packs, kept_until_s=int(region.clock() + 600))
        await asyncio.sleep(2 * HOUR_S)
        assert second.keeper.holds and not first.keeper.holds and not region.stored()
        [problem] = [one for one in first.wrong() if one.subject == "na: announcing"]
        assert "403 AccessDenied" in problem.text and "below feed/" in problem.fix
        mute.is_mute = False
        await asyncio.sleep(MUTE_S)
        assert not [one for one in first.wrong() if one.subject == "na: announcing"]
        await region.stop(second)
        await asyncio.sleep(5 * MUTE_S)
        assert first.keeper.holds
        await region.end()

    run(main())


def test_what_is_removed_before_it_was_announced_is_promised_to_nobody() -> None:
    """A node could not announce for days; meanwhile an audit did it, and the pack's life ended. What is still there is announced."""

    async def main() -> None:
        region = Region()
        mute, first, second = await pair(region)
        mute.is_mute = True
        before, gone, there = make("before"), make("gone"), make("there")
        await region.put(before)
        waiting = [asyncio.ensure_future(first.announce(before.announced()))]
        await asyncio.sleep(10)  # it is what is tried again and again
        await region.announce(gone, there)
        waiting += [asyncio.ensure_future(first.announce(one.announced())) for one in (gone, there)]
        await asyncio.sleep(5 * MUTE_S)
        entries = known(second)
        await second.hands.announce([removed(entries[one.id], Reason.OVER) for one in (gone, there)])
        await region.lose(gone)
        await asyncio.sleep(MUTE_S)
        assert not known(first) and not known(second)
        mute.is_mute = False
        await asyncio.gather(*waiting)
        await asyncio.sleep(MUTE_S)
        assert known(first).keys() == known(second).keys() == {before.id, there.id}
        await region.end()

    run(main())


def test_a_source_that_is_away_stops_no_healing_at_home() -> None:
    """A segment is gone, and a mirror that knows nothing yet keeps the region: all goes on behind the gap, what is over is removed. What
    the segment said is left alone until the source has said what is its own."""

    async def main() -> None:
        region, sources = Region(), {"are read": False}
        await region.begin()
        packs = [make(number) for number in range(8)]
        for number, one in enumerate(packs):
            await region.announce(one, kept_until_s=int(region.clock() + 600) if number >= 4 else 0)
        await region.lose_segment(3)
        lost = packs[2]
        mirror = await region.node("mirror", is_mirror=True)
        assert mirror.auditing is not None
        mirror.auditing.elsewhere = Elsewhere(
            lambda: sources["are read"],
            lambda pack_id: "" if sources["are read"] else None,
            lambda announced: True,
            lambda: None,
        )
        await asyncio.sleep(100)
        daemon = await region.node("daemon")
        await asyncio.sleep(3 * HOUR_S)
        stay = {one.id for one in packs[:4]}
        assert mirror.keeper.holds and daemon.caught_up.is_set()
        assert known(daemon).keys() == known(mirror).keys() == stay - {lost.id}
        assert region.stored() == stay
        sources["are read"] = True
        await asyncio.sleep(HOUR_S)
        assert known(daemon).keys() == known(mirror).keys() == stay
        await region.end()

    run(main())
