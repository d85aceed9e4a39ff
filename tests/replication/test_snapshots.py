"""Snapshots: snapshot and tail are the whole, whatever is damaged, and what is retired was covered."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueDamaged
from replication.feed.feed import FeedReader, FeedWriter
from replication.feed.snapshots import (
    MANIFESTS,
    PART_FORMAT,
    PARTS,
    RETENTION_S,
    SNAPSHOTS_KEPT,
    Snapshots,
    _PartBody,
    part_name,
    segments_behind,
)
from replication.formats.segment import FEED, HEAD_FORMAT, head_name
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tests.replication.durable import forget, pack_of, random_pack, spec_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.errors import ObjectError

W = "000000000000000a"


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replication.feed.snapshots.SNAPSHOT_PART_BYTES", 500)


def snapshots(objects: Any, seed: int = 0) -> Snapshots:
    return Snapshots(objects, lambda: 1.0, random.Random(seed))


def empty() -> Catalogue:
    return Catalogue(MemoryRows())


def ids(catalogue: Catalogue) -> set[bytes]:
    return {entry.pack.id for chunk in catalogue.chunks() for entry in chunk}


def filled(packs: int, seed: int = 0, positions: int = 7) -> Catalogue:
    chance, catalogue = random.Random(seed), empty()
    for _ in range(packs):
        catalogue.add_packs([random_pack(chance)])
    catalogue.jump({W: positions})
    return catalogue


@pytest.mark.parametrize("packs", [0, 1, 500])
def test_a_snapshot_is_the_catalogue(packs: int) -> None:
    """Who reads a snapshot knows the same packs, blocks and positions, in several parts or none."""

    async def main() -> None:
        objects, catalogue = MemoryObjects(), filled(packs)
        manifest = await snapshots(objects).write(catalogue)
        read = empty()
        assert await snapshots(objects).read_newest(read) == manifest
        assert [*read.chunks()] == [*catalogue.chunks()] and read.positions == {W: 7}
        assert read.counts == catalogue.counts
        assert manifest.packs == catalogue.counts.packs and (len(manifest.parts) > 1) == (packs > 1)

    run(main())


def test_no_snapshot_is_no_error() -> None:
    """Where there is none, nothing is read and nothing removed."""

    async def main() -> None:
        assert await snapshots(MemoryObjects()).newest() is None
        assert await snapshots(MemoryObjects()).read_newest(empty()) is None
        assert await snapshots(MemoryObjects()).retire() == (0, 0, 0, 0)

    run(main())


def test_what_is_learned_while_it_is_written_is_not_claimed() -> None:
    """A snapshot's positions are those from before it was begun: what comes meanwhile may be in it or not."""

    async def main(seed: int) -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(seed), Faults(delay_s=1.0))
        catalogue, chance = filled(50, seed, positions=1), random.Random(seed)
        writing = asyncio.ensure_future(snapshots(objects).write(catalogue))
        learned = set()
        for number in range(2, 30):
            await asyncio.sleep(0.3)
            new = pack_of([f"{seed} {number}"])
            catalogue.add_packs([new])
            catalogue.jump({W: number})
            learned.add(new.pack.id)
            forget(catalogue, chance.choice(sorted(ids(catalogue) - learned)))
        manifest = await writing
        read = empty()
        await snapshots(inner).read_newest(read)
        assert read.positions == {W: 1} == manifest.positions
        assert ids(catalogue) - learned <= ids(read)

    for seed in range(10):
        run(main(seed))


def test_a_catalogue_made_anew_meanwhile_is_no_snapshot() -> None:
    """If the catalogue is begun again while a snapshot is written or read, no manifest and no position comes of it."""

    async def main() -> None:
        objects, catalogue = MemoryObjects(), filled(100)
        await snapshots(objects, 1).write(catalogue)
        for work in (snapshots(objects, 2).write, snapshots(objects).read_newest):
            task = asyncio.ensure_future(work(catalogue))
            for _ in range(8):
                await asyncio.sleep(0)
            catalogue.renew()
            with pytest.raises(CatalogueDamaged, match="meanwhile"):
                await task
            assert not catalogue.positions
        assert sum(name.startswith(MANIFESTS) for name in objects.stored) == 1

    run(main())


@pytest.mark.parametrize("what", [MANIFESTS, PARTS])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "other"])
def test_a_damaged_snapshot_is_left_for_the_one_before(what: str, how: str) -> None:
    """Whatever is wrong with a manifest or a part, the newest whole snapshot is read, and its positions are taken."""

    async def main(seed: int) -> None:
        chance, objects = random.Random(seed), MemoryObjects()
        old = filled(60, 1, positions=1)
        await snapshots(objects, 1).write(old)
        await snapshots(objects, 2).write(filled(60, 2, positions=2))
        newest = max(name for name in objects.stored if name.startswith(MANIFESTS))[len(MANIFESTS) :]
        victim = chance.choice(sorted(n for n in objects.stored if n.startswith(what) and newest in n))
        content = objects.stored[victim]
        if how == "gone":
            await objects.delete([victim])
        elif how == "other":
            objects.stored[victim] = next(
                content
                for name, content in objects.stored.items()
                if name.startswith(what) and newest not in name
            )
        else:
            objects.stored[victim] = (
                flip(content, chance.randrange(8 * len(content))) if how == "flipped" else content[:-1]
            )
        read = empty()
        manifest = await snapshots(objects).read_newest(read)
        assert manifest is not None and manifest.positions == {W: 1} == read.positions
        assert ids(old) <= ids(read)

    for seed in range(20):
        run(main(seed))


def test_a_part_of_another_content_is_not_believed() -> None:
    """A part that is sound in itself, and bears the right name, but is not the one its manifest was written for, is none."""

    async def main() -> None:
        objects = MemoryObjects()
        manifest = await snapshots(objects).write(filled(60))
        last = len(manifest.parts) - 1
        body = _PartBody(manifest.name, last, [], [])
        objects.stored[part_name(manifest.name, last)] = PART_FORMAT.seal(body)
        read = empty()
        assert await snapshots(objects).read_newest(read) is None and not read.positions

    run(main())


def test_what_is_stored_damaged_is_stored_again() -> None:
    """A store that damages what is put does not get a manifest for it."""

    async def main(seed: int) -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(seed), Faults(rotten=0.15))
        try:
            await snapshots(objects).write(filled(40))
        except ObjectError:
            assert await snapshots(inner).newest() is None
            return
        read = empty()
        await snapshots(inner).read_newest(read)
        assert read.positions == {W: 7} and ids(read) == ids(filled(40))

    for seed in range(20):
        run(main(seed))


class Region:
    """A region with a writer, whose clock is the loop's."""

    def __init__(self) -> None:
        self.objects = MemoryObjects(clock=asyncio.get_running_loop().time)
        self.writer = FeedWriter(self.objects, W, lambda: 0.0, random.Random(0))
        self.catalogue = empty()
        self.reader = FeedReader(self.objects, {})
        self.announced = 0

    async def announce(self, count: int) -> None:
        for _ in range(count):
            await self.writer.announce([pack_of([f"pack {self.announced}"], spec_of(1))])
            self.announced += 1

    async def follow(self, catalogue: Catalogue, reader: FeedReader) -> None:
        more = True
        while more:
            page = await reader.poll()
            for segment in page.segments:
                catalogue.add(segment)
            more = page.more

    def segments(self) -> list[int]:
        return [int(name[-16:], 16) for name in sorted(self.objects.stored) if name.startswith(FEED)]


def test_what_is_retired_is_covered_and_old() -> None:
    """Segments are removed when as many whole snapshots as are kept cover them and they are old by the store's clock; the
    last covered one stays, and snapshot and tail are the whole at every moment."""

    async def main() -> None:
        region = Region()
        for round_ in range(8):
            await region.announce(10)
            await region.follow(region.catalogue, region.reader)
            await asyncio.sleep(RETENTION_S / 2)
            await snapshots(region.objects, round_).write(region.catalogue)
            retired = await snapshots(region.objects).retire()
            kept = sorted(name for name in region.objects.stored if name.startswith(MANIFESTS))
            assert len(kept) == min(round_ + 1, SNAPSHOTS_KEPT)
            folders = await region.objects.folders(PARTS)
            assert [name[len(MANIFESTS) :] for name in kept] == list(folders)
            # The third newest snapshot covers 10 × (round - 1) segments; its own last one stays.
            assert region.segments()[0] == max(1, 10 * (round_ - 1)) and region.segments()[-1] == 10 * (
                round_ + 1
            )
            assert (retired.segments > 0) == (round_ > 1)
            newcomer = empty()
            assert await snapshots(region.objects).read_newest(newcomer) is not None
            await region.follow(newcomer, FeedReader(region.objects, newcomer.positions))
            assert ids(newcomer) == ids(region.catalogue) and newcomer.positions == region.catalogue.positions

    run(main())


def test_young_segments_stay() -> None:
    """However many snapshots cover it, a segment younger than the retention time is there."""

    async def main() -> None:
        region = Region()
        for round_ in range(6):
            await region.announce(5)
            await region.follow(region.catalogue, region.reader)
            await snapshots(region.objects, round_).write(region.catalogue)
            assert (await snapshots(region.objects).retire()).segments == 0
        assert region.segments() == list(range(1, 31))

    run(main())


def test_what_follows_on_an_old_head_stays() -> None:
    """A writer's last heads were not written. Who has read as far as the head says finds what follows, however old it is."""

    async def main() -> None:
        region = Region()
        await region.announce(10)
        head = region.objects.stored[head_name(W)]
        told = HEAD_FORMAT.unseal(head, W).number
        await region.announce(10)
        await region.follow(region.catalogue, region.reader)
        for round_ in range(SNAPSHOTS_KEPT):
            await snapshots(region.objects, round_).write(region.catalogue)
        await asyncio.sleep(2 * RETENTION_S)
        await region.objects.put(head_name(W), head)
        await region.objects.put(f"{MANIFESTS}0000000000000009-00000000", b"the store's clock goes on")
        assert (await snapshots(region.objects).retire()).segments == told
        late = FeedReader(region.objects, {W: told})
        await region.follow(empty_at(told), late)
        assert late.positions == region.catalogue.positions

    run(main())


def empty_at(position: int) -> Catalogue:
    catalogue = empty()
    catalogue.jump({W: position})
    return catalogue


def test_half_snapshots_count_for_nothing() -> None:
    """A snapshot with a part missing is not one of those that must cover a segment, and parts of one that was never
    finished are removed with the snapshots of its time."""

    async def main() -> None:
        region = Region()
        await region.announce(20)
        await region.follow(region.catalogue, region.reader)
        await region.objects.put(f"{PARTS}0000000000000001-00000000/00000000", b"of one that was killed")
        for round_ in range(SNAPSHOTS_KEPT):
            await snapshots(region.objects, round_).write(region.catalogue)
        await region.announce(1)  # the store's clock goes on
        await asyncio.sleep(2 * RETENTION_S)
        lost = min(
            name
            for name in region.objects.stored
            if name.startswith(PARTS) and not name.startswith(f"{PARTS}0000000000000001-00000000")
        )
        content = region.objects.stored[lost]
        await region.objects.delete([lost])
        assert await snapshots(region.objects).retire() == (0, 0, 0, 0)
        await region.objects.put(lost, content)
        await snapshots(region.objects, 9).write(region.catalogue)
        retired = await snapshots(region.objects).retire()
        assert retired.snapshots == 1 and retired.segments == 19
        assert not [name for name in region.objects.stored if name.startswith(f"{PARTS}0000000000000001")]

    run(main())


def test_two_that_write_at_once_harm_nothing() -> None:
    """Snapshots written at the same time, with the same number, are both whole."""

    async def main() -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(1), Faults(delay_s=1.0))
        one, two = await asyncio.gather(
            snapshots(objects, 1).write(filled(80, 1)),
            snapshots(objects, 2).write(filled(80, 2, positions=9)),
        )
        assert one.name != two.name and one.name[:16] == two.name[:16]
        for manifest, seed in sorted(((one, 1), (two, 2)), key=lambda each: each[0].name, reverse=True):
            read = empty()
            assert await snapshots(inner).read_newest(read) == manifest and ids(read) == ids(filled(80, seed))
            await inner.delete([MANIFESTS + manifest.name])
        assert segments_behind(one, {W: 10, "b": 4}) == 3 + 4 and segments_behind(None, {W: 10}) == 10

    run(main())
