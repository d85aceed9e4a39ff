"""One keeper: whoever holds the lease, it is one, or none for less than a minute; whatever stores, objects and clocks do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from replication.feed.feed import FeedReader
from replication.formats.keeping import NEWS, TERM_FORMAT, TERMS, Holder, Term, term_name
from replication.formats.region import init_region
from replication.formats.segment import Head, Segment, encode, encode_head, head_name, segment_name
from replication.formats.tombstones import TOMBSTONES, Tombstone, bury
from replication.keeper.keeper import HELD_S, NEWS_INTERVAL_S, Keeper
from replication.keeper.news_reader import LEASE_S, Folders, NewsReader
from replication.keeper.watch import LISTEN_ON_S, LISTEN_S
from replication.problems import Problems
from replication.region.region_node import MIRROR_SILENT_S
from tests.objects import Faults, FaultyObjects, MemoryObjects
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectRefused, ObjectUnavailable

MINUTE_S = 60.0


class NoConditions(MemoryObjects):
    """A store that replaces what it should only create."""

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        return await super().put(name, content)


class Sick(MemoryObjects):
    """Some objects are refused: to be put, to be deleted, to be read."""

    unwritable: Sequence[str] = ()
    undeletable: Sequence[str] = ()

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if name in self.unwritable:
            raise ObjectRefused(f"{name}: no")
        return await super().put(name, content, only_new)

    async def delete(self, names: Sequence[str]) -> None:
        if not set(names).isdisjoint(self.undeletable):
            raise ObjectRefused(f"{names}: no")
        await super().delete(names)


class Group:
    """Processes of a region that would keep it."""

    def __init__(self, objects: MemoryObjects | None = None, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.objects = objects or MemoryObjects(clock=asyncio.get_running_loop().time)
        self.ways: dict[Keeper, FaultyObjects] = {}
        self.tasks: dict[Keeper, asyncio.Task[None]] = {}

    async def add(self, is_mirror: bool = False) -> Keeper:
        region = await init_region(self.objects, "acme", "na", lambda: 0.0)
        way = FaultyObjects(self.objects, random.Random(self.chance.random()))
        keeper = Keeper(way, region, self.chance, is_mirror)
        self.ways[keeper] = way
        self.tasks[keeper] = asyncio.ensure_future(keeper.run())
        return keeper

    def kill(self, keeper: Keeper) -> None:
        self.tasks.pop(keeper).cancel()
        del self.ways[keeper]

    @property
    def holders(self) -> list[Keeper]:
        return [keeper for keeper in self.tasks if keeper.holds]

    async def one(self, within_s: float = MINUTE_S) -> Keeper:
        """The one that keeps, which there is within so long; never are there two."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while not self.holders:
            assert loop.time() < end_s, "nobody keeps"
            await asyncio.sleep(0.5)
        [keeper] = self.holders
        return keeper

    async def watched(self, for_s: float) -> list[Keeper]:
        """Who keeps meanwhile, each once, in order; at no moment two."""
        loop = asyncio.get_running_loop()
        end_s, seen = loop.time() + for_s, list[Keeper]()
        while loop.time() < end_s:
            holders = self.holders
            assert len(holders) <= 1, "two keep"
            seen += [keeper for keeper in holders if seen[-1:] != [keeper]]
            await asyncio.sleep(0.25)
        return seen


@pytest.mark.parametrize("store", [MemoryObjects, NoConditions])
def test_one_keeps_and_when_it_is_killed_another_one_does(store: type[MemoryObjects]) -> None:
    """Of five that begin at once one keeps, and goes on; within a minute after it is killed another one does, without two at any
    moment, with conditional writes or without; old terms are not left behind."""

    async def main() -> None:
        group = Group(store())
        for _ in range(5):
            await group.add()
        first = await group.one(10.0)
        assert await group.watched(1000.0) == [first]
        for _ in range(3):
            group.kill(await group.one(0.0))
            seen = await group.watched(MINUTE_S)
            assert len(seen) == 1
        await group.watched(MINUTE_S)
        assert len([name for name in group.objects.stored if name.startswith(TERMS)]) == 1

    run(main())


def test_a_mirror_takes_the_lease_from_a_daemon_and_no_daemon_takes_it_back() -> None:
    """A mirror that begins keeps within half a minute, and is the only one at every moment; another mirror leaves it alone."""

    async def main() -> None:
        group = Group()
        daemon = await group.add()
        assert await group.one(10.0) is daemon
        mirror = await group.add(is_mirror=True)
        assert await group.watched(HELD_S + 15.0) == [daemon, mirror]
        await group.add(is_mirror=True)
        assert await group.watched(1000.0) == [mirror]
        group.kill(mirror)
        assert len(await group.watched(300.0)) in (1, 2)  # a daemon may be faster than the other mirror
        assert (await group.one(0.0)).holder.is_mirror

    run(main())


def test_who_ends_gives_the_lease_back() -> None:
    """A keeper that ends holds nothing from then on, and another one keeps within ten seconds; one that cannot say so is
    followed within a minute all the same."""

    async def main() -> None:
        group = Group()
        for _ in range(4):
            await group.add()
        for number in range(3):
            ending = await group.one(MINUTE_S)
            way = group.ways[ending]
            group.kill(ending)
            way.faults = Faults(failed=1.0) if number == 2 else Faults()
            await ending.resign()
            assert not ending.holds
            if number < 2:
                assert await group.one(10.0) is not ending
        await group.add()
        assert len(await group.watched(MINUTE_S)) == 1

    run(main())


def test_a_mirror_that_is_dead_is_missed_by_daemons() -> None:
    """A daemon that reads the news knows within a minute that no mirror keeps any more, also while daemons keep; not while it
    cannot read them, nor for a while after; and not any more when a mirror is back."""

    async def main() -> None:
        group = Group()
        daemon, other = await group.add(), await group.add()
        mirror = await group.add(is_mirror=True)
        await group.watched(300.0)
        assert daemon.news.mirror_silent_s < MIRROR_SILENT_S
        group.kill(mirror)
        await group.watched(MINUTE_S)
        assert daemon.news.mirror_silent_s > MIRROR_SILENT_S and other.news.mirror_silent_s > MIRROR_SILENT_S
        await group.watched(300.0)
        assert daemon.news.mirror_silent_s > MIRROR_SILENT_S and other.news.mirror_silent_s > MIRROR_SILENT_S
        reader = other if daemon.holds else daemon
        group.ways[reader].faults = Faults(refuse=ObjectUnavailable("away"))
        await asyncio.sleep(MINUTE_S)
        assert reader.news.mirror_silent_s == 0.0
        group.ways[reader].faults = Faults()
        await asyncio.sleep(2 * NEWS_INTERVAL_S)
        assert 0.0 < reader.news.mirror_silent_s < MIRROR_SILENT_S
        await group.add(is_mirror=True)
        await group.watched(MINUTE_S)
        assert daemon.news.mirror_silent_s < MIRROR_SILENT_S and other.news.mirror_silent_s < MIRROR_SILENT_S

    run(main())


def test_a_mirror_that_never_ran_is_missed_by_the_first_daemon() -> None:
    """So is one that was never started, by a daemon that has kept the region since there is one, and so has read no news."""

    async def main() -> None:
        group = Group()
        daemon = await group.add()
        await group.watched(MINUTE_S)
        assert daemon.holds and daemon.news.mirror_silent_s > MIRROR_SILENT_S

    run(main())


def test_who_was_stopped_holds_nothing_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is stopped while it keeps, as by SIGSTOP or a machine's sleep: another one keeps by the time it goes on, and it
    knows, before it has asked anybody, that it does not any more. Its delete is refused, and it writes no news."""

    async def main() -> None:
        group = Group()
        stopped, other = await group.add(), await group.add()
        keeper = await group.one(10.0)
        if keeper is not stopped:
            stopped, other = other, stopped
        group.tasks.pop(stopped).cancel()
        assert stopped.holds
        assert await group.watched(MINUTE_S) == [other]
        assert not stopped.holds
        with pytest.raises(ObjectUnavailable, match="does not keep"):
            await stopped.delete(["packs/x"])
        news = group.objects.stored[NEWS]
        group.tasks[stopped] = asyncio.ensure_future(stopped.run())
        await asyncio.sleep(1.0)
        assert group.objects.stored[NEWS] == news or other.news.latest is not None
        assert await group.watched(300.0) == [other]

    run(main())


@pytest.mark.parametrize("sick", [NEWS, TERMS])
def test_objects_that_are_refused_cost_no_keeper(sick: str) -> None:
    """News that nobody may write, or an old term that nobody may delete, is a problem that is told; somebody keeps all the same, and
    is the only one, and when it is killed another one does."""

    async def main() -> None:
        objects = Sick()
        group = Group(objects)
        objects.unwritable = [NEWS] if sick == NEWS else []
        objects.undeletable = [term_name(1)] if sick == TERMS else []
        for _ in range(3):
            await group.add()
        first = await group.one(10.0)
        assert await group.watched(300.0) == [first]
        group.kill(first)
        seen = await group.watched(MINUTE_S + 20.0)
        assert len(seen) == 1 and await group.watched(300.0) == seen
        [problem] = seen[0].problems.all()
        assert problem.subject.endswith(NEWS if sick == NEWS else term_name(1))

    run(main())


def test_a_place_that_refuses_all_writes_is_no_fault_of_the_news() -> None:
    """Who keeps a region whose bucket takes nothing any more says nothing of one object: the place is the problem."""

    async def main() -> None:
        objects = Sick()
        group = Group(objects)
        keeper = await group.add()
        await group.one(10.0)
        objects.unwritable = [NEWS, *map(term_name, range(100))]
        await group.watched(MINUTE_S)
        assert not keeper.holds and not keeper.problems.all()

    run(main())


@pytest.mark.parametrize("content", [b"", b"rubbish", TERM_FORMAT.seal(Term(7, Holder("0" * 16, "", False)))])
def test_what_is_no_term_or_no_news_harms_nobody(content: bytes) -> None:
    """Objects in `keeper/` that are damaged, lie under another number, or have no name of ours, and news that are damaged, are told,
    and left; the region is kept, and the next one finds a number."""

    async def main() -> None:
        group = Group()
        for name in (term_name(1), term_name(2), term_name(9), f"{TERMS}a-note.txt"):
            await group.objects.put(name, content)
        await group.objects.put(NEWS, content)
        for _ in range(2):
            await group.add()
        first = await group.one(20.0)
        await group.objects.put(NEWS, content)
        assert await group.watched(300.0) == [first]
        await group.objects.put(term_name(4), content)
        group.kill(first)
        assert len(await group.watched(MINUTE_S + 10.0)) == 1
        problems = (await group.one(0.0)).problems.all()
        assert any(one.subject.endswith("a-note.txt") for one in problems)

    run(main())


def test_a_place_that_is_away_is_kept_by_nobody() -> None:
    """While a directory is not mounted, which lists as empty and takes what is put, whoever kept holds nothing, nobody begins to, and
    no term is put there; when it is back, somebody keeps."""

    async def main() -> None:
        group = Group()
        for _ in range(2):
            await group.add()
        await group.one(10.0)
        kept, names = dict(group.objects.stored), list(group.objects._names)
        group.objects.stored.clear()
        group.objects._names.clear()
        await asyncio.sleep(HELD_S)
        assert await group.watched(300.0) == []
        assert not any(name.startswith(TERMS) for name in group.objects.stored)
        group.objects.stored.clear()
        group.objects.stored.update(kept)
        group.objects._names[:] = names
        assert len(await group.watched(2 * MINUTE_S)) == 1

    run(main())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_store_does_there_is_one_in_the_end(seed: int) -> None:
    """While calls fail, hang, are done late or lose their answers, and processes are killed, the one that would delete has the highest
    term there was a moment ago; when the store is well again, one keeps within two minutes, and no other one."""
    seen: Counter[str] = Counter()

    async def main() -> None:
        group = Group(NoConditions() if seed % 2 else None, seed)
        for number in range(4):
            await group.add(is_mirror=number == 3 and seed % 4 > 1)
        for _ in range(40):
            for way in group.ways.values():
                way.faults = group.chance.choice(
                    (
                        Faults(),
                        Faults(failed=0.3),
                        Faults(lost=0.3),
                        Faults(late=0.2, late_s=30.0),
                        Faults(hung=0.1, hang_s=40.0),
                    )
                )
            await asyncio.sleep(group.chance.uniform(5, 60))
            seen["held"] += bool(group.holders)
            seen["two"] += len(group.holders) > 1
            if group.chance.random() < 0.2:
                group.kill(group.chance.choice(list(group.tasks)))
                await group.add()
        for way in group.ways.values():
            way.faults = Faults()
            await way.settle()
        await asyncio.sleep(2 * MINUTE_S)
        assert len(await group.watched(600.0)) == 1
        assert not any(task.done() for task in group.tasks.values())

    run(main())
    assert seen["held"] > 15 and not seen["two"]


# -- news --


class Followed:
    """A region with a keeper that lists heads, and somebody who reads news."""

    def __init__(self) -> None:
        self.objects = MemoryObjects(clock=asyncio.get_running_loop().time)
        self.group = Group(self.objects)
        self.way = FaultyObjects(self.objects, random.Random(0))
        self.news = NewsReader(self.way, Problems())
        self.reader = FeedReader(self.way, {}, self.news)

    async def begin(self) -> Keeper:
        keeper = await self.group.add()
        await self.group.one(10.0)
        self.listing = asyncio.ensure_future(self._list(keeper))
        return keeper

    async def _list(self, keeper: Keeper) -> None:
        reader = FeedReader(self.objects, {}, keeper)
        while True:
            await reader.poll()
            if reader.has_listed:
                keeper.tell(reader.numbers)
            await asyncio.sleep(NEWS_INTERVAL_S)

    async def write(self, writer: str, number: int) -> None:
        await self.objects.put(segment_name(writer, number), encode(Segment(writer, number, 0.0, [])))
        await self.objects.put(head_name(writer), encode_head(Head(number, 0.0)))

    async def read(self) -> dict[str, int]:
        await self.news.refresh()
        while (await self.reader.poll()).more:
            pass
        return self.reader.positions


def test_who_reads_news_reads_what_is_written_and_lists_nothing() -> None:
    """What writers announce is read within twelve seconds by whoever reads news, without one LIST; where news stand still, are damaged
    or are gone, heads are listed, and nothing is missed."""

    async def main() -> None:
        followed, writer = Followed(), "a" * 16
        keeper = await followed.begin()
        await followed.read()
        await asyncio.sleep(2 * NEWS_INTERVAL_S)
        followed.way.requests.clear()
        for number in range(1, 30):
            await followed.write(writer, number)
            await asyncio.sleep(12.0)
            assert await followed.read() == {writer: number}
        assert not followed.way.requests["list"] and not followed.way.requests["folders"]
        for number, harm in enumerate((b"rubbish", None, b""), 30):
            if harm is None:
                await followed.objects.delete([NEWS])
            else:
                await followed.objects.put(NEWS, harm)
            await followed.write(writer, number)
            assert await followed.read() == {writer: number} and followed.reader.has_listed
            await asyncio.sleep(20.0)
        followed.group.kill(keeper)
        for _ in range(10):
            await followed.news.refresh()
            await asyncio.sleep(NEWS_INTERVAL_S)
        await followed.write(writer, 33)
        assert await followed.read() == {writer: 33} and followed.reader.has_listed

    run(main())


def test_an_idle_region_waits_for_the_bell() -> None:
    """Ten minutes after the last announcement heads are listed no more, and writers are told so before; one that rings is heard
    within seconds, and one that cannot within five minutes."""

    async def main() -> None:
        followed, writer = Followed(), "a" * 16
        keeper = await followed.begin()
        await followed.write(writer, 1)
        await asyncio.sleep(20.0)
        await followed.read()
        assert not keeper.needs_bell and followed.news.fresh and followed.news.fresh.listens
        await asyncio.sleep(LISTEN_S + LISTEN_ON_S)
        await followed.news.refresh()
        assert keeper.needs_bell and followed.news.fresh and not followed.news.fresh.listens
        assert keeper.heads() is not None
        await followed.write(writer, 2)
        await followed.objects.put("bell", b"ding")
        await asyncio.sleep(3 * NEWS_INTERVAL_S)
        assert await followed.read() == {writer: 2}
        await asyncio.sleep(LISTEN_S + LISTEN_ON_S + 10.0)
        await followed.write(writer, 3)
        await asyncio.sleep(300.0 + 3 * NEWS_INTERVAL_S)
        assert await followed.read() == {writer: 3}

    run(main())


def test_folders_are_listed_when_something_was_put_there() -> None:
    """A tombstone is heard of within ten seconds; as long as none comes the folder is not due, but for every five minutes, nor
    when nobody is known to keep."""

    async def main() -> None:
        followed = Followed()
        keeper = await followed.begin()
        folders = Folders(followed.news, TOMBSTONES)
        await asyncio.sleep(10.0)
        await followed.news.refresh()
        assert folders.are_due()
        folders.listed()
        assert not folders.are_due()
        await bury(followed.objects, Tombstone(tenant="acme", watched_until_s=10**9))
        await asyncio.sleep(10.0)
        await followed.news.refresh()
        assert folders.are_due() and folders.are_due()
        folders.listed()
        await asyncio.sleep(290.0)
        await followed.news.refresh()
        assert not folders.are_due()
        await asyncio.sleep(11.0)
        await followed.news.refresh()
        assert folders.are_due()
        folders.listed()
        followed.group.kill(keeper)
        await asyncio.sleep(LEASE_S)
        await followed.news.refresh()
        assert folders.are_due()

    run(main())
