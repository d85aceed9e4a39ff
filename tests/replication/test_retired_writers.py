"""Writers whose lives are over: they go, nothing of what they said is lost to anybody, and thousands of them slow nobody down."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.constants import RETENTION_S
from replication.feed.feed import SILENT_ASKED, FeedWriter, fresh_writer
from replication.feed.snapshots import PARTS, SNAPSHOTS_KEPT, Retired, Snapshots
from replication.feed.tail import SILENT_WRITERS_MAX, Tail
from replication.formats.region import MARKER
from replication.formats.segment import (
    FEED,
    HEADS,
    Head,
    Segment,
    encode,
    encode_head,
    head_name,
    segment_name,
)
from tests.objects import FaultyObjects
from tests.replication.durable import pack_of
from tests.replication.kept import kept
from tests.replication.memory_rows import MemoryRows
from tests.replication.simulated import SickObjects
from tests.replication.virtual_loop import run
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused, ObjectUnavailable


class Region:
    """A bucket, and those who follow it by hand."""

    def __init__(self) -> None:
        self.objects = SickObjects(clock=asyncio.get_running_loop().time)
        self.chance = random.Random(3)
        self.said = 0

    async def life(self, segments: int = 2) -> str:
        """Of a writer that says so much, and is no more."""
        writer = FeedWriter(self.objects, fresh_writer(self.chance), lambda: 0.0, self.chance)
        for _ in range(segments):
            self.said += 1
            await writer.announce([pack_of([self.said])])
        return writer.id

    def tail(self, rows: MemoryRows | None = None) -> Tail:
        catalogue = Catalogue(rows or MemoryRows())
        return Tail(self.objects, catalogue, lambda: 0.0, random.Random(1))

    async def retire(self, by: Tail) -> Retired:
        """As many snapshots as have to cover a writer, and a day later."""
        snapshots = Snapshots(self.objects, lambda: 0.0, self.chance)
        for _ in range(SNAPSHOTS_KEPT):
            await snapshots.write(by._catalogue)
            await looked(by)
        await asyncio.sleep(RETENTION_S + 1)
        await snapshots.write(by._catalogue)
        return await snapshots.retire()


async def looked(tail: Tail) -> int:
    """Packs that it knows after a full look."""
    tail.make_sure()
    await tail.look()
    return tail._catalogue.counts.packs


def simulate(main: Callable[[Region], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        region = Region()
        await region.objects.put(MARKER, b"of a region")
        await main(region)

    run(whole())


def test_a_silent_writer_goes_and_what_it_said_stays() -> None:
    """Nothing of it is left in the bucket; who was as far reads no snapshot; who was behind, who began anew and who never knew it
    have all that it said; after a further snapshot nobody keeps its position."""

    async def main(region: Region) -> None:
        early, late = region.tail(), region.tail()
        first = await region.life(2)
        assert await looked(late) == 2
        await region.life(3)
        second = await region.life(1)
        assert await looked(early) == 6
        retired = await region.retire(early)
        assert retired.writers == 3 and not [
            name for name in region.objects.stored if name.startswith((FEED, HEADS))
        ]
        assert await looked(early) == 6 and early.status().snapshot == ""
        assert early._catalogue.positions == {} and early._catalogue.retired.keys() >= {first, second}
        assert await looked(late) == 6 and await looked(region.tail()) == 6
        await Snapshots(region.objects, lambda: 0.0, region.chance).write(early._catalogue)
        assert await looked(early) == 6 and early.status().snapshot == ""
        assert not early._catalogue.retired
        assert await looked(late) == 6 and await looked(region.tail()) == 6

    simulate(main)


@pytest.mark.parametrize(
    "error", [ObjectRefused("a lock"), ObjectUnavailable("no answer"), ObjectDamaged("torn")]
)
@pytest.mark.parametrize("folder", [FEED, HEADS])
def test_one_that_cannot_be_deleted_keeps_no_other_one(error: ObjectError, folder: str) -> None:
    """Neither its last segment nor its head."""

    async def main(region: Region) -> None:
        tail = region.tail()
        writers = sorted([await region.life(2) for _ in range(5)])
        assert await looked(tail) == 10
        sick = min(name for name in region.objects.stored if name.startswith(folder))
        region.objects.sick[sick] = error, frozenset({"delete"})
        retired = await region.retire(tail)
        left = {name.split("/")[1] for name in region.objects.stored if name.startswith(FEED)}
        assert left == {writers[0]} and retired.writers == 4
        assert await looked(tail) == 10 and await looked(region.tail()) == 10

    simulate(main)


@pytest.mark.parametrize("kept", ["head", "segment"])
def test_who_speaks_now_and_then_stays(kept: str) -> None:
    """A young head, or a young segment that no head tells of: nothing of its writer goes that is not covered twice."""

    async def main(region: Region) -> None:
        tail = region.tail()
        writer = await region.life(3)
        assert await looked(tail) == 3
        await asyncio.sleep(RETENTION_S)
        if kept == "head":
            await region.objects.put(head_name(writer), encode_head(Head(3, 0.0)))
        else:
            await region.objects.put(
                segment_name(writer, 4), encode(Segment(writer, 4, 0.0, [pack_of(["x"])]))
            )
        assert await looked(tail) == 3 + (kept == "segment")
        retired = await region.retire(tail)
        assert (retired.writers, retired.segments) == (1, 3 + (kept == "segment"))

    simulate(main)


def test_a_place_that_looks_empty_retires_nobody() -> None:
    """Where the marker is not there, no position is given up because nothing of its writer is found."""

    async def main(region: Region) -> None:
        tail = region.tail()
        writer = await region.life()
        assert await looked(tail) == 2
        await Snapshots(region.objects, lambda: 0.0, region.chance).write(tail._catalogue)
        there = dict(region.objects.stored)
        await region.objects.delete([name for name in there if name.startswith((FEED, HEADS, MARKER))])
        with pytest.raises(Exception, match="no such object"):
            await looked(tail)
        assert tail._catalogue.positions == {writer: 2} and not tail._catalogue.retired
        for name, content in there.items():
            await region.objects.put(name, content)
        await region.life()
        assert await looked(tail) == 4

    simulate(main)


def test_a_retired_writer_that_comes_back_is_read_on() -> None:
    """One that was only cut off for days, and goes on with its numbers: who knew it reads what is new."""

    async def main(region: Region) -> None:
        tail = region.tail()
        writer = await region.life(2)
        assert await looked(tail) == 2
        await region.retire(tail)
        assert await looked(tail) == 2 and tail._catalogue.retired == {writer: 2}
        await region.objects.put(segment_name(writer, 3), encode(Segment(writer, 3, 0.0, [pack_of(["x"])])))
        await region.objects.put(head_name(writer), encode_head(Head(3, 0.0)))
        assert await looked(tail) == 3 and tail._catalogue.positions == {writer: 3}
        assert not tail._catalogue.retired

    simulate(main)


def test_one_that_cannot_be_deleted_holds_up_no_other() -> None:
    """A head that the store does not hand out, or not delete, costs its own writer's retirement."""

    class Way(FaultyObjects):
        bad = ""

        async def head(self, name: str) -> Any:
            if name == self.bad:
                raise ObjectRefused(f"{name}: 403")
            return await super().head(name)

    async def main(region: Region) -> None:
        tail = region.tail()
        writers = [await region.life() for _ in range(3)]
        assert await looked(tail) == 6
        region.objects = way = Way(region.objects, random.Random(0))  # type: ignore[assignment]  # the same, seen so
        way.bad = head_name(writers[1])
        assert (await region.retire(tail)).writers == 2

    simulate(main)


def test_thousands_of_dead_writers_slow_nobody_down() -> None:
    """News of a living one comes with the next look, full looks ask some of the dead ones only, and a snapshot is written for
    their sake."""

    async def main(region: Region) -> None:
        count = 5000
        for number in range(count):
            writer = f"{number:016x}"
            await region.objects.put(segment_name(writer, 1), encode(Segment(writer, 1, 0.0, [])))
            await region.objects.put(head_name(writer), encode_head(Head(1, 0.0)))
        way = FaultyObjects(region.objects, random.Random(0))
        tail = Tail(way, Catalogue(MemoryRows()), lambda: 0.0, random.Random(1), keeper=kept(way))
        following = asyncio.ensure_future(tail.run())
        await tail.caught_up.wait()
        await asyncio.sleep(60)
        assert count > SILENT_WRITERS_MAX and tail.status().snapshot
        for _ in range(3):
            before = tail._catalogue.counts.packs
            await region.life(1)
            await asyncio.sleep(10)
            assert tail._catalogue.counts.packs == before + 1
        way.requests.clear()
        reader = tail._reader
        reader.ask_all()
        while reader._asks_all:
            await asyncio.sleep(1)
        assert way.requests["get"] <= 2 * SILENT_ASKED
        following.cancel()

    simulate(main)


def test_a_newest_snapshot_that_is_damaged_holds_nobody_up() -> None:
    """A newcomer takes an older one, knows all that retired writers said, and goes on to hold itself against later ones."""

    async def main(region: Region) -> None:
        early = region.tail()
        await region.life(3)
        assert await looked(early) == 3
        assert (await region.retire(early)).writers == 1
        newest = await early._snapshots.newest()
        assert newest is not None
        await region.objects.delete(
            [name for name in region.objects.stored if name.startswith(PARTS + newest.name)]
        )
        late = region.tail()
        assert await looked(late) == 3 and late._catalogue.compared == newest.number

    simulate(main)
