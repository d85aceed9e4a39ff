"""The tail: a catalogue follows its region, whatever store and disk do, and costs few requests."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from replication.catalogue.catalogue import Catalogue, Counts
from replication.errors import CatalogueDamaged, CatalogueUnwritable
from replication.feed.feed import FeedWriter
from replication.feed.snapshots import MANIFESTS, RETENTION_S, Snapshots
from replication.feed.tail import BACKOFF_S_MAX, POLL_INTERVAL_S, Tail
from replication.formats.region import MARKER
from replication.formats.segment import FEED, Head, Segment, encode, encode_head, head_name, segment_name
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tests.replication.durable import pack_of
from tests.replication.kept import kept
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.errors import ObjectRefused

W = "000000000000000a"


class Place:
    """A region with one writer, and a daemon that follows it."""

    def __init__(
        self, rows: MemoryRows | None = None, objects: MemoryObjects | None = None, keeps: bool = True
    ) -> None:
        self.inner = objects or MemoryObjects(clock=asyncio.get_running_loop().time)
        self.objects = FaultyObjects(self.inner, random.Random(0))
        self.writer = FeedWriter(self.inner, W, lambda: 0.0, random.Random(0))
        self.catalogue = Catalogue(rows or MemoryRows())
        self.tail = Tail(
            self.objects,
            self.catalogue,
            lambda: 0.0,
            random.Random(1),
            keeper=kept(self.objects) if keeps else None,
        )
        self.announced = 0
        self.task = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        await self.inner.put(MARKER, b"of a region")
        await self.tail.run()

    async def announce(self, count: int = 1) -> None:
        for _ in range(count):
            self.announced += 1
            await self.writer.announce([pack_of([self.announced])])

    async def follows(self, within_s: float = 2 * POLL_INTERVAL_S) -> bool:
        await asyncio.sleep(within_s)
        assert not self.task.done()
        return (
            self.catalogue.positions.get(W, 0) == self.announced
            and self.catalogue.counts.packs == self.announced
        )


def test_a_catalogue_follows() -> None:
    """What is announced is known within two intervals, at once after a wake, and the status says so."""

    async def main() -> None:
        place = Place()
        assert place.tail.status().age_s is None and not place.tail.caught_up.is_set()
        await asyncio.wait_for(place.tail.caught_up.wait(), 1.0)
        for _ in range(10):
            await place.announce(3)
            assert await place.follows()
        await place.announce()
        place.tail.wake()
        assert await place.follows(0.01)
        status = place.tail.status()
        assert (status.writers, status.positions, status.segments, status.entries) == (1, {W: 31}, 31, 31)
        assert (status.damaged, status.gaps, status.failures, status.failure) == (0, (), 0, "")
        assert status.age_s is not None and status.age_s < 0.02

    run(main())


def test_a_dead_store_is_left_alone() -> None:
    """While a store fails it is asked less and less often, the status says since when and why; when it is back, the tail
    is, too."""

    async def main() -> None:
        place = Place()
        await place.announce()
        assert await place.follows()
        place.objects.faults.refuse = ObjectRefused("memory: no permission")
        place.objects.requests.clear()
        await asyncio.sleep(6 * 3600)
        assert place.objects.requests.total() < 2 * 6 * 3600 / BACKOFF_S_MAX * 1.5
        status = place.tail.status()
        assert status.failures > 5 and "no permission" in status.failure
        assert status.age_s is not None and status.age_s > 6 * 3600 - 2 * POLL_INTERVAL_S
        place.objects.faults = Faults()
        await place.announce()
        assert await place.follows(1.3 * BACKOFF_S_MAX)
        assert place.tail.status().failures == 0

    run(main())


@pytest.mark.parametrize(("writers", "looks_per_hour_max"), [(1, 900), (50, 900), (1000, 900)])
def test_an_idle_region_costs_few_requests(writers: int, looks_per_hour_max: int) -> None:
    """A daemon looks with one LIST of all heads, the more writers there are the less often, and asks nobody who has
    nothing new, but for the full looks."""

    async def main() -> None:
        objects = MemoryObjects()
        for writer in (f"{number:016x}" for number in range(writers)):
            await objects.put(segment_name(writer, 1), encode(Segment(writer, 1, 0.0, [])))
            await objects.put(head_name(writer), encode_head(Head(1, 0.0)))
        place = Place(objects=objects, keeps=False)
        await asyncio.wait_for(place.tail.caught_up.wait(), 3600)
        await asyncio.sleep(3600)
        assert len(place.catalogue.positions) == writers
        place.objects.requests.clear()
        await asyncio.sleep(3600)
        looks = place.objects.requests["list"] / (1 + -(-writers // 1000))
        assert looks_per_hour_max / 2 < looks <= looks_per_hour_max
        assert place.objects.requests["get"] <= writers * (looks // 64 + 1)

    run(main())


def test_a_newcomer_begins_with_a_snapshot() -> None:
    """A daemon that knows nothing reads the newest snapshot and what came after it, not the whole feed."""

    async def main() -> None:
        place = Place()
        await place.announce(50)
        assert await place.follows()
        await Snapshots(place.inner, lambda: 0.0, random.Random(0)).write(place.catalogue)
        await place.announce(3)
        newcomer = Place(objects=place.inner)
        newcomer.announced = 53
        assert await newcomer.follows()
        assert newcomer.tail.status().segments == 3 and newcomer.tail.status().snapshot

    run(main())


def test_who_was_away_too_long_reads_a_snapshot() -> None:
    """A daemon whose next segment was retired finds the gap, takes a snapshot, and goes on; without one it stays where it
    is and says what is missing."""

    async def main() -> None:
        place = Place()
        await place.announce(5)
        assert await place.follows()
        rows = MemoryRows(dict(place.catalogue._rows.content))  # type: ignore[attr-defined]  # of a daemon that goes away here
        await place.announce(20)
        assert await place.follows()
        await place.inner.delete([segment_name(W, number) for number in range(1, 20)])
        back = Place(rows, place.inner)
        back.announced = 25
        assert not await back.follows()
        assert back.tail.status().gaps == ((W, 6, 20),) and back.catalogue.positions == {W: 5}
        assert not back.tail.caught_up.is_set()
        await Snapshots(place.inner, lambda: 0.0, random.Random(0)).write(place.catalogue)
        assert await back.follows()
        assert not back.tail.status().gaps and back.tail.caught_up.is_set()

    run(main())


def test_a_segment_that_stays_damaged_is_found_in_a_snapshot() -> None:
    """Where a segment rots in the store, a daemon that has not read it is helped by the snapshot of one that has."""

    async def main() -> None:
        place = Place()
        await place.announce(5)
        assert await place.follows()
        place.inner.stored[segment_name(W, 3)] = flip(place.inner.stored[segment_name(W, 3)], 500)
        late = Place(objects=place.inner)
        late.announced = 5
        assert not await late.follows()
        assert (
            late.catalogue.positions == {W: 2} and late.tail.status().damaged and late.tail.status().failure
        )
        await Snapshots(place.inner, lambda: 0.0, random.Random(0)).write(place.catalogue)
        assert await late.follows(20 * POLL_INTERVAL_S)

    run(main())


def test_snapshots_are_written_when_they_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what a newcomer must read never costs much more than reading the catalogue twice: the keeper writes snapshots and
    retires segments without being told; that they may not write harms nothing else."""
    monkeypatch.setattr("replication.feed.tail.SNAPSHOT_SEGMENTS_MIN", 20)

    async def main(may_write: bool) -> None:
        class Region(MemoryObjects):
            async def put(self, name: str, content: Any, only_new: bool = False) -> bool:
                if name.startswith("snapshots/") and not may_write:
                    raise ObjectRefused("no permission to write")
                return await super().put(name, content, only_new)

        place = Place(objects=Region(clock=asyncio.get_running_loop().time))
        for _ in range(20):
            await place.announce(10)
            assert await place.follows()
            await asyncio.sleep(RETENTION_S / 8)
        manifests = [name for name in place.inner.stored if name.startswith(MANIFESTS)]
        segments = sum(name.startswith(FEED) for name in place.inner.stored)
        if may_write:
            assert manifests and segments < 200
        else:
            assert not manifests and segments == 200 and place.tail.status().failures == 0

    run(main(True))
    run(main(False))


class FailingRows(MemoryRows):
    """Rows on a disk that fails, or is full, when told to."""

    is_failing = is_full = False

    def _require(self) -> None:
        if self.is_failing:
            raise CatalogueDamaged("the disk fails")
        if self.is_full:
            raise CatalogueUnwritable("No space left on device")

    def write(self, *arguments: Any) -> None:
        self._require()
        super().write(*arguments)

    def renew(self) -> None:
        self._require()
        super().renew()

    def reopen(self) -> None:
        self._require()


def test_a_full_disk_throws_no_catalogue_away() -> None:
    """A catalogue whose disk is full keeps what it knows, says that it is so, is tried again, and knows everything when there is room,
    whoever met it."""

    async def main() -> None:
        rows = FailingRows()
        place = Place(rows)
        await place.announce(5)
        assert await place.follows()
        rows.is_full = True
        await place.announce(5)
        assert not await place.follows(600)
        place.tail.mend(CatalogueUnwritable("No space left on device"))
        assert place.catalogue.counts.packs == 5 and place.tail.status().renewals == 0
        [problem] = place.tail.problems.all()
        assert (problem.kind, problem.text) == ("catalogue", "No space left on device")
        rows.is_full = False
        assert await place.follows() and place.tail.status().renewals == 0
        await asyncio.sleep(60)
        assert not place.tail.problems.all()

    run(main())


def test_a_damaged_catalogue_is_made_anew() -> None:
    """A catalogue found damaged, by the tail or by somebody else, in the middle of anything, is filled again from the
    region; while the disk fails the tail tries again, and never says more than it has."""

    async def main() -> None:
        rows = FailingRows()
        place = Place(rows)
        await place.announce(5)
        assert await place.follows()
        place.tail.mend(CatalogueDamaged("rows"))
        place.tail.mend(CatalogueDamaged("rows"))
        assert place.catalogue.counts == Counts() and await place.follows(1.0)
        assert place.tail.status().renewals == 1
        place.objects.faults.delay_s = 0.1
        await place.announce(40)
        for _ in range(100):
            await asyncio.sleep(0.05)
            place.catalogue.renew()
        assert await place.follows()
        rows.is_failing = True
        await place.announce(5)
        assert not await place.follows(3600)
        assert "the disk fails" in place.tail.status().failure
        rows.is_failing = False
        assert await place.follows(1.3 * BACKOFF_S_MAX)

    run(main())


def test_a_restart_goes_on_where_it_was() -> None:
    """After a restart only what is new is read, and blocks are held when the filter is filled."""

    async def main() -> None:
        place = Place()
        await place.announce(30)
        assert await place.follows()
        place.task.cancel()
        again = Place(MemoryRows(place.catalogue._rows.content), place.inner)  # type: ignore[attr-defined]  # of the first life
        again.announced = 30
        header = pack_of([7]).pack.header
        assert again.catalogue.held(header.spec.digest, 32, header.hashes, 0) == 0
        await again.tail.caught_up.wait()
        assert await again.follows() and again.tail.status().segments == 0
        assert again.catalogue.held(header.spec.digest, 32, header.hashes, 0) == 1

    run(main())
