"""Audits: a bucket ends up with what was announced or is worth announcing, whatever was lost, and nothing erased comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from replication.audit.audit import AUDIT_AGAIN_S, Audit
from replication.audit.auditing import AUDIT_LOOK_S, NodeHands
from replication.audit.orphans import RESTORED_KEPT_S, Orphans, Terms
from replication.catalogue.catalogue import Catalogue
from replication.errors import RegionError
from replication.formats.region import open_region
from replication.formats.segment import segment_name
from replication.formats.tombstones import Tombstone, bury
from replication.region.region_node import RegionNode
from tests.objects import Faults, flip
from tests.replication.audited import SPECS, STARTED_S, Made, Region, held, known, make, opened
from tests.replication.kept import kept
from tests.replication.virtual_loop import run
from tiers.bucket.objects import ObjectInfo
from tiers.errors import ObjectMissing

SEEDS = int(os.environ.get("SEEDS", "6"))
INTERVAL_S = 1500.0  # of audits
SOON_S = 3 * 1200.0  # within which a gap is passed
DAYS_S = 12 * INTERVAL_S


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days are an hour; catalogues are kept in memory."""
    for name, value in {
        "audit.auditing.AUDIT_INTERVAL_S": INTERVAL_S,
        "audit.auditing.ORPHAN_GRACE_S": 600.0,
        "audit.orphans.PARENTLESS_S": 2000.0,
        "audit.orphans.AUDIT_REQUESTS_MAX": 3,
        "audit.audit.AUDIT_SLICE_PACKS": 7,
        "catalogue.catalogue.CATALOGUE_CHUNK_PACKS": 8,
    }.items():
        monkeypatch.setattr(f"replication.{name}", value)
    _disks.clear()
    monkeypatch.setattr(Catalogue, "open", opened(_disks))


_disks: dict[Path, dict[bytes, bytes]] = {}
Story = Callable[[Region, RegionNode], Coroutine[Any, Any, None]]


def tell(story: Story) -> None:
    """Run this in a region with one node that has read the feed."""

    async def main() -> None:
        region = Region()
        await region.begin()
        node = await region.node("node")
        await node.caught_up.wait()
        await story(region, node)
        await region.end()

    run(main())


def audits(node: RegionNode) -> dict[str, Any]:
    assert node.auditing is not None
    return node.auditing.status()


def test_a_pack_that_was_never_announced_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer died between put and announce: its packs become known to everybody, parents first, for a week at most."""
    monkeypatch.setattr("replication.audit.auditing.AUDIT_INTERVAL_S", 100.0)

    async def story(region: Region, node: RegionNode) -> None:
        root = make("root")
        leaf = make("leaf", make("stem", root))
        assert leaf.parent is not None
        await region.announce(root, kept_until_s=int(STARTED_S + 10 * DAYS_S))
        await region.put(leaf, leaf.parent)
        await asyncio.sleep(600)
        assert audits(node)["audits"] > 2 and set(known(node)) == {root.id}, "too young"
        await asyncio.sleep(DAYS_S)
        other = await region.node("other")
        await asyncio.sleep(60)
        for one in (node, other):
            assert held(one, leaf) == 6
            kept_until_s = known(one)[leaf.id].kept_until_s
            assert region.clock() < kept_until_s <= region.clock() + RESTORED_KEPT_S
        assert audits(node)["restored_packs"] == 2

    tell(story)


async def locked(names: Sequence[str]) -> int:
    return 0


def test_what_was_removed_and_not_deleted_goes() -> None:
    """The keeper says that a pack is over, and cannot delete it then: an audit does, and announces it no more."""

    async def story(region: Region, node: RegionNode) -> None:
        old, until_s = make("old"), int(STARTED_S + 100)
        await region.announce(old, kept_until_s=until_s)
        keeper: Any = node.keeper
        keeper.delete = locked
        await until(lambda: held(node, old) == 2)
        await until(lambda: not known(node))
        await asyncio.sleep(120)
        assert region.stored() == {old.id} and not held(node, old)
        del keeper.delete
        await asyncio.sleep(DAYS_S)
        assert not region.stored() and not audits(node)["restored_packs"]

    tell(story)


def test_nothing_outlives_what_it_hangs_on() -> None:
    """An orphan is kept no longer than its parent."""

    async def story(region: Region, node: RegionNode) -> None:
        root, until_s = make("root"), int(STARTED_S + 2 * DAYS_S)
        leaf = make("leaf", root)
        await region.announce(root, kept_until_s=until_s)
        await region.put(leaf)
        await asyncio.sleep(DAYS_S)
        assert known(node)[leaf.id].kept_until_s == until_s

    tell(story)


def test_what_hangs_on_nothing_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphan whose parent is not durable is deleted when it is old; one whose parent comes in time is announced."""
    monkeypatch.setattr("replication.audit.auditing.AUDIT_INTERVAL_S", 100.0)

    async def story(region: Region, node: RegionNode) -> None:
        lost, late = make("lost"), make("late")
        orphan, child = make("orphan", lost), make("child", late)
        await region.put(orphan, child)
        await asyncio.sleep(1500)
        assert audits(node)["audits"] > 5 and region.stored() == {orphan.id, child.id}
        await region.announce(late)
        await asyncio.sleep(DAYS_S)
        assert region.stored() == {late.id, child.id} == set(known(node))

    tell(story)


def test_what_is_gone_is_forgotten_and_may_be_made_again() -> None:
    """A pack that somebody deleted is forgotten with what hangs on it, so that prompts end where the hole is; when it is put
    again, what hangs on it is known again, though nobody put that again."""

    async def story(region: Region, node: RegionNode) -> None:
        root = make("root")
        stem = make("stem", root)
        leaf, sibling = make("leaf", stem), make("sibling", root)
        await region.announce(root, stem, leaf, sibling)
        await asyncio.sleep(60)
        assert held(node, leaf) == 6
        await region.lose(stem)
        await until(lambda: set(known(node)) == {root.id, sibling.id})
        assert held(node, leaf) == 2 and held(node, sibling) == 4
        await region.announce(stem)
        await until(lambda: held(node, leaf) == 6)
        assert leaf.id in region.stored() and audits(node)["missing_packs"] == 1

    tell(story)


def test_what_is_announced_and_follows_nothing_goes() -> None:
    """A node that did not know that the parent is gone has announced what hangs on it: that counts as held by nobody, and is
    deleted in the end."""

    async def story(region: Region, node: RegionNode) -> None:
        root, kept = make("root"), make("kept")
        await region.announce(kept, make("leaf", root))
        await until(lambda: set(known(node)) == {kept.id} == region.stored())

    tell(story)


@pytest.mark.parametrize("meanwhile", ["nothing", "put again", "place away"])
def test_what_is_not_there_is_asked_for_again(meanwhile: str) -> None:
    """A pack that was not there, and is a minute later, stays known; where the whole place is away by then, nothing is forgotten.
    Else it goes at once with all that hangs on it, however far."""

    async def story(region: Region, node: RegionNode) -> None:
        made = [make(number) for number in range(5)]
        for number in range(5, 9):
            made.append(make(number, made[3] if number == 5 else made[-1]))
        await region.announce(*reversed(made))
        await asyncio.sleep(30)
        await region.lose(made[3])
        place = await open_region(region.inner, "acme", "na")
        hands = NodeHands(node.announce, kept(region.inner))
        audit = Audit(region.inner, place, node.catalogue, node.erasure, hands, region.clock)
        auditing = asyncio.ensure_future(audit.run(Terms(0.0)))
        await asyncio.sleep(AUDIT_AGAIN_S / 2)
        if meanwhile == "nothing":
            assert (await auditing).missing == 1
            assert set(known(node)) == {one.id for one in made[:3]} | {made[4].id}
            return
        if meanwhile == "put again":
            await region.put(made[3])
            assert (await auditing).missing == 0
        else:
            await region.inner.delete(list(region.inner.stored))
            with pytest.raises(RegionError):
                await auditing
        assert len(known(node)) == 9

    tell(story)


async def until(true: Callable[[], bool], within_s: float = DAYS_S) -> None:
    end_s = asyncio.get_running_loop().time() + within_s
    while not true():
        assert asyncio.get_running_loop().time() < end_s, "it did not happen"
        await asyncio.sleep(50)


def test_a_pack_of_another_size_goes() -> None:
    """An announced pack that was cut off is deleted and forgotten; put again it stays."""

    async def story(region: Region, node: RegionNode) -> None:
        one, other = make("one"), make("other")
        await region.announce(one, other)
        region.cut_off(one)
        await until(lambda: set(known(node)) == {other.id} == region.stored())
        await region.announce(one)
        await asyncio.sleep(DAYS_S)
        assert set(known(node)) == {one.id, other.id} == region.stored()

    tell(story)


def test_damaged_orphans_go_and_a_bad_way_harms_none() -> None:
    """What is damaged in the store is deleted; what only comes back damaged is announced sooner or later."""

    async def story(region: Region, node: RegionNode) -> None:
        sound, cut, flipped = (make(name) for name in ("sound", "cut", "flipped"))
        more = [make(number) for number in range(30)]
        await region.put(sound, cut, flipped, *more)
        region.cut_off(cut)
        region.flip_header(flipped)
        region.way.faults = Faults(flipped=0.4, truncated=0.1)
        await asyncio.sleep(DAYS_S)
        wanted = {sound.id, *(one.id for one in more)}
        assert region.way.injected["flipped"] and region.stored() >= wanted
        region.way.faults = Faults()
        await until(lambda: region.stored() == wanted == set(known(node)))

    tell(story)


def test_a_damaged_orphan_that_is_put_again_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its deletion somebody puts it anew, and is about to announce it."""

    async def story(region: Region, node: RegionNode) -> None:
        bad, looked = make("bad"), Orphans._is_damaged
        await region.put(bad)
        region.inner.stored[bad.pack.name] = flip(bad.content, 8 * 20)

        async def looked_at(orphans: Orphans, info: ObjectInfo) -> bool:
            is_damaged = await looked(orphans, info)
            await region.put(bad)
            return is_damaged

        monkeypatch.setattr(Orphans, "_is_damaged", looked_at)
        await asyncio.sleep(10)
        assert node.auditing is not None
        report = await node.auditing._audit.run(Terms(region.clock()))
        assert (report.deleted, report.left) == (0, 1) and region.stored() == {bad.id}

    tell(story)


def test_nothing_erased_comes_back() -> None:
    """Orphans of an erased tenant, and of an erased prefix with what hangs on it, are deleted, also where the tombstone is
    younger than the last look, and in whatever order they are found."""

    async def story(region: Region, node: RegionNode) -> None:
        root = make("root")
        stem = make("stem", root)
        leaf = make("leaf", make("twig", stem))
        assert leaf.parent is not None
        kept = make("kept", root)
        tenants = [make(number, spec=SPECS[0]) for number in range(5)]
        await region.announce(root)
        await region.put(leaf, leaf.parent, stem, kept, *tenants)
        await region.erase(tenant="acme")
        block_hash = stem.pack.header.hash_at(0)
        await region.erase(namespaces=(stem.pack.header.spec.digest,), block_hash=block_hash)
        for _ in range(int(DAYS_S / 100)):
            await asyncio.sleep(100)
            assert set(known(node)) <= {root.id, kept.id}
        assert region.stored() == {root.id, kept.id} == set(known(node))
        assert not any(map(region.is_announced, (stem, leaf, leaf.parent, *tenants)))

    tell(story)


@pytest.mark.parametrize("loss", ["gone", "rotten"])
def test_a_gap_is_closed_by_the_packs_themselves(loss: str) -> None:
    """A segment is lost that nobody has read, and no snapshot has it: within minutes its packs are known all the same, and the
    writer's feed goes on; others are helped by the snapshot, and who comes later never sees a gap."""

    async def story(region: Region, node: RegionNode) -> None:
        await region.stop(node)
        made = [make(number) for number in range(6)]
        for one in made:
            await region.announce(one)
        names = [f"node {number}" for number in range(8)]
        for name in names:  # each is a writer
            made.append(make(name))
            await region.put(made[-1])
            writer = await region.node(name)
            await writer.announce(made[-1].announced())
            await region.stop(writer)
        _disks.clear()
        if loss == "gone":
            await region.lose_segment(3)
            await region.lose_segment(4)
        else:
            region.rot_segment(3)
        nodes = [await region.node(name) for name in names]
        await asyncio.sleep(AUDIT_LOOK_S / 2)
        if loss == "gone":
            assert nodes[0].status()["feed_gaps"] == 1 and len(known(nodes[0])) == 2 + 8
        everything = {one.id for one in made}
        await until(lambda: all(set(known(one)) == everything for one in nodes), SOON_S)
        newcomer = await region.node("newcomer")
        await newcomer.caught_up.wait()
        assert set(known(newcomer)) == everything and not newcomer.status()["feed_gaps"]
        await region.announce(make("more"))
        await until(lambda: all(len(known(one)) == len(made) + 1 for one in (*nodes, newcomer)), 60)
        assert all(one.status()["feed_gaps"] == 0 for one in nodes)
        assert 1 <= sum(audits(one)["audits"] for one in nodes) <= 3, "the keeper helps the others"

    tell(story)


def test_a_place_that_is_away_loses_nothing() -> None:
    """A directory that is not mounted has nothing, not even its marker: nothing is forgotten, nothing deleted."""

    async def story(region: Region, node: RegionNode) -> None:
        made = [make(number) for number in range(20)]
        await region.announce(*made)
        await asyncio.sleep(60)
        stored, names = dict(region.inner.stored), list(region.inner._names)
        for _ in range(6):
            region.inner.stored.clear()
            region.inner._names.clear()
            await asyncio.sleep(INTERVAL_S)
            region.inner.stored.update(stored)
            region.inner._names[:] = names
            await asyncio.sleep(AUDIT_AGAIN_S / 2)
        region.way.faults = Faults(refuse=ObjectMissing("away"))
        await asyncio.sleep(5 * INTERVAL_S)
        assert len(known(node)) == 20 and audits(node)["missing_packs"] == 0

    tell(story)


def test_a_catalogue_that_was_made_anew_is_filled_before_anything_is_judged() -> None:
    """While a catalogue is read again nothing is taken for an orphan: what was announced is announced once."""

    async def story(region: Region, node: RegionNode) -> None:
        made = [make(number) for number in range(20)]
        for one in made:
            await region.announce(one)
        assert node.auditing is not None
        for _ in range(30):
            await asyncio.sleep(INTERVAL_S / 3)
            region.way.faults = Faults(failed=0.9)
            node.catalogue.renew()
            await asyncio.sleep(INTERVAL_S / 3)
            region.way.faults = Faults()
        await asyncio.sleep(INTERVAL_S)
        assert len(known(node)) == 20 and audits(node)["restored_packs"] == 0 and audits(node)["audits"]

    tell(story)


def test_a_busy_region_is_left_alone() -> None:
    """While packs are put, announced, renewed and deleted all the time, audits find nothing to do."""

    async def story(region: Region, node: RegionNode) -> None:
        chance = random.Random(5)
        for number in range(600):
            one = make(number)
            await region.put(one)
            await asyncio.sleep(chance.uniform(0, 300))
            until_s = int(region.clock() + chance.choice((200, 5000, 50000)))
            await region.announce(one, kept_until_s=until_s)
        counts = audits(node)
        assert counts["audits"] > 5
        found = ("missing_packs", "damaged_packs", "restored_packs", "deleted_orphans")
        assert [counts[name] for name in found] == [0, 0, 0, 0]

    tell(story)


# -- anything at all --


class Chaos:
    """A region in which everything goes wrong, and what must be left of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.region = Region(self.chance)
        self.made: list[Made] = []
        self.gone: set[bytes] = set()  # lost, cut off, or damaged by us
        self.stones: list[Tombstone] = []
        self.seen: Counter[str] = Counter()

    async def live(self) -> None:
        region, chance = self.region, self.chance
        await region.begin()
        names = ("a", "b")
        nodes = [await region.node(name) for name in names]
        for _ in range(60):
            await asyncio.sleep(chance.expovariate(1 / 120))
            await self.happen()
            if chance.random() < 0.05:
                at = chance.randrange(2)
                await region.stop(nodes[at])
                nodes[at] = await region.node(names[at])
                self.seen["restart"] += 1
            if chance.random() < 0.1:
                region.way.faults = chance.choice(
                    (Faults(), Faults(failed=0.2), Faults(flipped=0.1, truncated=0.1))
                )
        region.way.faults = Faults()
        await asyncio.sleep(DAYS_S)
        nodes.append(await region.node("newcomer"))
        await asyncio.sleep(DAYS_S)
        for node in nodes:
            self.check(node)
            self.seen.update({name: count for name, count in audits(node).items() if count})
        await region.end()

    async def happen(self) -> None:
        region, chance = self.region, self.chance
        kind = chance.choice(
            ("announce",) * 6 + ("orphan",) * 4 + ("lose", "cut off", "flip", "segment", "rot", "erase")
        )
        self.seen[kind] += 1
        if kind in ("announce", "orphan"):
            spec = chance.choice(SPECS)
            parents = [one for one in self.made if one.pack.header.spec is spec]
            parent = chance.choice(parents) if parents and chance.random() < 0.7 else None
            one = make(len(self.made), parent, spec, chance.randint(1, 3))
            self.made.append(one)
            await (region.announce(one) if kind == "announce" else region.put(one))
        elif kind in ("segment", "rot") and region.writer.number > 2:
            number = chance.randint(1, region.writer.number - 1)
            if kind == "segment":
                await region.lose_segment(number)
            elif segment_name(region.writer.id, number) in region.inner.stored:
                region.rot_segment(number)
        elif kind == "erase" and len(self.stones) < 2 and self.made:
            one = chance.choice(self.made)
            digest = one.pack.header.spec.digest
            self.stones.append(
                Tombstone(
                    namespaces=(digest,),
                    block_hash=chance.choice(list(one.pack.header.each_hash())),
                    watched_until_s=2 * 10**9,
                )
            )
            await bury(region.inner, self.stones[-1])
        elif kind in ("lose", "cut off", "flip") and self.made:
            one = chance.choice(self.made)
            is_there = region.inner.stored.get(one.pack.name) == one.content
            # A header that rots behind an announcement is found by whoever reads it, not by an audit.
            if is_there and (kind != "flip" or not region.is_announced(one)):
                self.gone.add(one.id)
                if kind == "lose":
                    await region.lose(one)
                else:
                    (region.cut_off if kind == "cut off" else region.flip_header)(one)

    def is_erased(self, one: Made) -> bool:
        """What hangs on an erased block is found by its parents: not where somebody took those away."""
        return not any(each.id in self.gone for each in one.line) and any(
            stone.block_hash in list(each.pack.header.each_hash())
            and each.pack.header.spec.digest in stone.namespaces
            for stone in self.stones
            for each in one.line
        )

    def check(self, node: RegionNode) -> None:
        """What is left is what was neither lost nor erased, with all before it."""
        wanted = {
            one.id
            for one in self.made
            if not any(each.id in self.gone or self.is_erased(each) for each in one.line)
        }
        stored, entries = self.region.stored(), known(node)
        assert wanted <= stored, "something alive was deleted"
        assert wanted <= set(entries), "something that is there is not known"
        by_id = {one.id: one for one in self.made}
        for pack_id in entries:
            assert not self.is_erased(by_id[pack_id]), "something erased came back"
        erased = {one.id for one in self.made if self.is_erased(one)}
        assert not erased & stored, "something erased is there"
        assert not node.status()["feed_gaps"], "a feed does not go on"
        if node.keeper.holds:
            assert self.region.inner.stored.keys() >= {entry.pack.name for entry in entries.values()}


def test_whatever_happens_what_is_sound_is_known_and_what_is_erased_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After faults have ended and audits were made, everything that is there, sound, whole to its root and not erased is
    known to every node, nothing of it was deleted, and nothing erased is known or there."""
    caplog.set_level(logging.CRITICAL, "replication")
    monkeypatch.setattr("replication.feed.tail.POLL_INTERVAL_S", 60.0)
    monkeypatch.setattr("replication.erasure.erasure.ERASE_INTERVAL_S", 20.0)
    monkeypatch.setattr("replication.audit.auditing.AUDIT_LOOK_S", 50.0)
    seen: Counter[str] = Counter()

    async def main(seed: int) -> None:
        _disks.clear()
        chaos = Chaos(seed)
        try:
            await chaos.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(chaos.seen)

    for seed in range(SEEDS):
        run(main(seed))
    kinds = ("lose", "cut off", "flip", "segment", "rot", "erase", "restart")
    counted = ("restored_packs", "missing_packs", "damaged_packs", "deleted_orphans")
    assert not [kind for kind in (*kinds, *counted) if not seen[kind]], f"never happened: {seen}"
