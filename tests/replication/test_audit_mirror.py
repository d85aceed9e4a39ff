"""Audits where a mirror copies: what is gone is copied again, what was not announced keeps its origin, and nobody copies in circles."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from replication.audit.audit import Report
from replication.audit.orphans import Finding
from replication.catalogue.catalogue import Catalogue
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState
from replication.formats.region import open_region
from replication.formats.rules import Rule
from replication.mirror.mirror import Joined, Mirror, elsewhere
from replication.mirror.verify import Deep, Outside
from replication.region.region_node import RegionNode
from tests.objects import Faults, flip
from tests.replication.audited import SPECS, Region, held, known, make, opened
from tests.replication.virtual_loop import run
from tiers.errors import ObjectUnavailable

INTERVAL_S = 1500.0
DAYS_S = 12 * INTERVAL_S


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days are minutes; catalogues are kept in memory."""
    monkeypatch.setattr("replication.audit.auditing.AUDIT_INTERVAL_S", INTERVAL_S)
    monkeypatch.setattr("replication.audit.auditing.ORPHAN_GRACE_S", 600.0)
    monkeypatch.setattr("replication.audit.orphans.PARENTLESS_S", 2000.0)
    monkeypatch.setattr(Catalogue, "open", opened({}))


class Pair:
    """na, where packs are made, and eu, whose mirror copies all but those of acme."""

    def __init__(self) -> None:
        self.na, self.eu = Region(), Region(name="eu")
        self.mirror: Mirror

    async def begin(self, bytes_per_s: int = 0) -> RegionNode:
        for region in (self.na, self.eu):
            await region.begin()
        node = await self.eu.node("mirror", is_mirror=True)
        rules = [Rule(tenants=("acme",), copies=False), Rule(bytes_per_s=bytes_per_s)]
        self.mirror = Mirror(node, self.eu.way, "na", self.joined, rules, {}, self.eu.clock, random.Random(3))
        assert node.auditing is not None
        node.auditing.elsewhere = elsewhere([self.mirror])
        self.task = asyncio.ensure_future(self.mirror.run())
        return node

    async def joined(self) -> Joined:
        marker = await open_region(self.na.way, "acme", "na")
        return Joined(marker.identity, self.na.way, Catalogue.open(Path("na"), marker.identity))

    async def end(self) -> None:
        assert not self.task.done()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.eu.end()


def tell(story: Callable[[Pair, RegionNode], Coroutine[Any, Any, None]], bytes_per_s: int = 0) -> None:
    async def main() -> None:
        pair = Pair()
        node = await pair.begin(bytes_per_s)
        await story(pair, node)
        await pair.end()

    run(main())


def test_what_is_gone_is_copied_again() -> None:
    """A copy that somebody deleted is there again after an audit, without copying what hangs on it; meanwhile the mirror says that
    not everything is here."""

    async def story(pair: Pair, node: RegionNode) -> None:
        root = make("root")
        leaf = make("leaf", root)
        await pair.na.announce(root, leaf)
        await asyncio.sleep(120)
        assert pair.eu.stored() == {root.id, leaf.id}
        await pair.eu.lose(root)
        copied = pair.mirror.state().copied_packs
        end_s = pair.eu.loop.time() + DAYS_S
        assert node.auditing is not None
        while not node.auditing.status()["missing_packs"]:
            assert pair.eu.loop.time() < end_s, "not found"
            await asyncio.sleep(5)
        await asyncio.sleep(60)  # and not at the next sweep
        assert held(node, leaf) == 4 and known(node)[root.id].origin == "na"
        assert pair.mirror.state().copied_packs == copied + 1

    tell(story)


@pytest.mark.parametrize("maker", ["home", "source", "a source that is gone"])
def test_what_no_mirror_brings_leaves_no_hole(maker: str) -> None:
    """A pack in the middle of a prefix is gone: what hangs on it goes, too, where it was made at home, so that it is persisted again, and
    stays where the mirror copies it again."""

    async def story(pair: Pair, node: RegionNode) -> None:
        line = [make("root")]
        for number in range(3):
            line.append(make(number, line[-1]))
        if maker == "source":
            await pair.na.announce(*line)
        else:
            await pair.eu.put(*line)
            origin = "apac" if maker == "a source that is gone" else ""
            await pair.eu.writer.announce([replace(one.announced(), origin=origin) for one in line])
        await asyncio.sleep(120)
        assert held(node, line[-1]) == 8
        await pair.eu.lose(line[1])
        end_s = pair.eu.loop.time() + DAYS_S
        assert node.auditing is not None
        while not node.auditing.status()["missing_packs"]:
            assert pair.eu.loop.time() < end_s, "not found"
            await asyncio.sleep(5)
        await asyncio.sleep(60)
        assert held(node, line[-1]) == (8 if maker == "source" else 2)
        assert len(known(node)) == (4 if maker == "source" else 1)
        if maker == "home":  # somebody who has the blocks is asked for them
            await pair.eu.announce(line[1])
            await asyncio.sleep(2 * INTERVAL_S + 1000)
            assert held(node, line[-1]) == 8

    tell(story)


def test_what_was_not_announced_keeps_its_origin() -> None:
    """Packs that lie at home unannounced: one that the source made and the rules copy is the mirror's; one that they do not copy
    keeps its origin; what nobody knows was made here."""

    async def story(pair: Pair, node: RegionNode) -> None:
        copied, skipped, own = make("copied"), make("skipped", spec=SPECS[0]), make("own")
        pair.na.way.faults = Faults(refuse=ObjectUnavailable("away"))
        await pair.eu.put(copied, skipped, own)
        await pair.na.announce(copied, skipped)
        await asyncio.sleep(DAYS_S)
        assert not known(node), "nothing is known of the source yet: an origin would be a guess"
        pair.na.way.faults = Faults()
        await asyncio.sleep(DAYS_S)
        origins = {pack_id: entry.origin for pack_id, entry in known(node).items()}
        assert origins == {copied.id: "na", skipped.id: "na", own.id: ""}

    tell(story)


def test_what_a_mirror_is_about_to_copy_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow rule lets packs through one by one, audits do not announce those that lie at home already."""
    monkeypatch.setattr("replication.audit.auditing.AUDIT_INTERVAL_S", 200.0)

    async def story(pair: Pair, node: RegionNode) -> None:
        made = [make(number) for number in range(30)]
        await pair.na.announce(*made)
        await pair.eu.put(*made)
        await asyncio.sleep(2 * INTERVAL_S)
        assert node.auditing is not None and node.auditing.audits and len(known(node)) < 30
        await asyncio.sleep(DAYS_S)
        assert [entry.origin for entry in known(node).values()] == ["na"] * 30
        assert node.auditing.status()["restored_packs"] == 0

    tell(story, bytes_per_s=1)


def test_a_gap_at_home_is_closed_by_the_mirror() -> None:
    """A segment of the region's own feed is lost: the mirror audits at once, daemons leave it to it, and all go on."""

    async def story(pair: Pair, node: RegionNode) -> None:
        made = [make(number) for number in range(5)]
        await pair.eu.stop(node)
        for one in made:
            await pair.eu.announce(one)
        await pair.eu.lose_segment(2)
        again = await pair.eu.node("mirror", is_mirror=True)
        assert again.auditing is not None
        again.auditing.elsewhere = elsewhere([pair.mirror])
        pair.mirror._home = again
        daemon = await pair.eu.node("daemon")
        await asyncio.sleep(1200)
        assert daemon.auditing is not None and daemon.auditing.audits == 0 and again.auditing.audits
        for one in (again, daemon):
            assert set(known(one)) == {each.id for each in made} and not one.status()["feed_gaps"]

    tell(story)


@pytest.mark.parametrize("fault", ["gone", "rotten"])
@pytest.mark.parametrize("has_mirror", [False, True])
def test_a_repair_from_outside_leaves_no_hole_of_what_was_made_here(fault: str, has_mirror: bool) -> None:
    """Where a mirror copies into the region, too: it brings what is a copy, and nothing else."""

    async def main() -> None:
        home = Region(name="eu")
        await home.begin()
        line = [make("root")]
        for number in range(3):
            line.append(make(number, line[-1]))
        copies = [make("copied root")]
        copies += [make("copied", copies[0])]
        await home.announce(*line)
        await home.put(*copies)
        await home.writer.announce([replace(one.announced(), origin="na") for one in copies])
        if has_mirror:
            await home.inner.put(MIRRORS + "na", MIRROR_STATE_FORMAT.seal(MirrorState(source="na")))
        for one in (line[1], copies[0]):
            if fault == "gone":
                await home.lose(one)
            else:
                home.inner.stored[one.pack.name] = flip(one.content, 8 * len(one.content) - 9)
        await asyncio.sleep(2 * INTERVAL_S)
        outside = await Outside.open(home.inner, "acme", "eu", Path("outside"), 10.0, random.Random(1))
        found: list[Finding] = []
        await outside.follow(found.append, repairs=True)
        await outside.audit(True, found.append, lambda *_: None, Report())
        await outside.read(Deep(), True, found.append, lambda *_: None)
        assert len(found) >= 2 and all(one.repaired for one in found)
        node = await home.node("daemon")
        await node.caught_up.wait()
        assert held(node, line[-1]) == 2 and len(known(node)) == (2 if has_mirror else 1)
        await home.end()

    run(main())
