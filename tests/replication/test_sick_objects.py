"""One object of a region is sick for good: the store fails for it, does not delete it, or says that it is of the year 2100. All others
are found, removed, erased, audited and retired as ever."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.feed.feed import FeedWriter
from replication.formats.keeping import ring
from replication.formats.region import init_region
from replication.formats.segment import FEED, head_name, segment_name
from replication.problems import Problems
from replication.region.region_node import RegionNode
from replication.watched import ALONE_S, Watched
from tests.objects import MemoryObjects
from tests.replication.audited import SPECS, Made, Region, known, make, opened
from tests.replication.virtual_loop import run
from tests.running import TIMEOUT_S
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import ObjectInfo, Range
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused, ObjectUnavailable

OTHER, LATE = "b" * 16, "c" * 16
FUTURE_S = 4102444800.0  # in the year 2100
_disks: dict[Path, dict[bytes, bytes]] = {}


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day is half an hour; catalogues are kept in memory."""
    for name, value in {
        "audit.auditing.AUDIT_INTERVAL_S": 600.0,
        "audit.auditing.ORPHAN_GRACE_S": 600.0,
        "feed.snapshots.RETENTION_S": 1800.0,
        "feed.tail.SNAPSHOT_SEGMENTS_MIN": 4,
    }.items():
        monkeypatch.setattr(f"replication.{name}", value)
    _disks.clear()
    monkeypatch.setattr(Catalogue, "open", opened(_disks))


class Way(MemoryObjects):
    """Fails for some objects. bad: by verb ("read", "delete") and the beginning of a name. times: said of some."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("na", clock, page_names=50)
        self.bad: dict[tuple[str, str], ObjectError] = {}
        self.times: dict[str, float] = {}

    def _ask(self, verb: str, name: str) -> None:
        for (bad, beginning), error in self.bad.items():
            if bad == verb and name.startswith(beginning):
                raise error

    async def get(self, name: str) -> memoryview:
        self._ask("read", name)
        return await super().get(name)

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        self._ask("read", name)
        return await super().get_ranges(name, ranges)

    async def head(self, name: str) -> ObjectInfo:
        self._ask("read", name)
        return await super().head(name)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._ask("delete", name)
        await super().delete(names)

    def _info(self, name: str) -> ObjectInfo:
        info = super()._info(name)
        return info._replace(modified_s=self.times.get(name, info.modified_s))


class _Announced(MemoryObjects):
    """The same objects, by a way on which nothing fails."""

    def __init__(self, way: Way) -> None:
        self.__dict__ = {name: value for name, value in way.__dict__.items() if name not in ("bad", "times")}


FIRST, MORE = make("first"), [make(f"more {number}") for number in range(3)]
OVER, ORPHANS = [make(f"over {number}") for number in range(3)], [make("an orphan"), make("another")]
ERASED, STRAYS = (
    make("erased", spec=SPECS[0]),
    [make(f"stray {number}", spec=SPECS[0]) for number in range(2)],
)


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *(("read", one.pack.name) for one in (FIRST, OVER[0], ORPHANS[0], ERASED, STRAYS[0], STRAYS[1])),
        *(
            ("read", name)
            for name in (segment_name(OTHER, 2), head_name(OTHER), "snapshots/manifests/0000000000000001")
        ),
        *(("delete", one.pack.name) for one in (OVER[0], ORPHANS[0], ERASED, STRAYS[0])),
        *(
            ("delete", name)
            for name in (segment_name("a" * 16, 1), head_name("a" * 16), segment_name(OTHER, 2))
        ),
        *(("delete", f"snapshots/{folder}/0000000000000001") for folder in ("manifests", "parts")),
        ("delete", "keeper/"),
        ("delete", "doubts/"),
    ],
)
@pytest.mark.parametrize(
    "error", [ObjectUnavailable("500"), ObjectRefused("403"), ObjectDamaged("EIO")], ids=repr
)
def test_one_that_is_sick_for_good_takes_nothing_with_it(verb: str, name: str, error: ObjectError) -> None:
    """Whatever is to be done with all others is done: news, removals, erasure, an audit, snapshots, retirement."""

    async def main() -> None:
        region = Region()
        region.inner = way = Way(region.clock)
        region.way = Watched(way, "na", Problems())  # type: ignore[assignment]  # as daemons see it
        region.writer = FeedWriter(way, "a" * 16, region.clock, random.Random(2))
        await region.begin()
        nodes = [await region.node(name) for name in "xy"]
        await region.announce(FIRST)
        await asyncio.sleep(60)
        way.bad[verb, name] = error
        region.inner = _Announced(way)
        other = FeedWriter(region.inner, OTHER, region.clock, random.Random(5))
        await region.put(*MORE, *OVER, *ORPHANS, ERASED, *STRAYS)
        for one in (*MORE, ERASED):
            await other.announce([one.announced()])
        await other.announce([one.announced(int(region.clock() + 60)) for one in OVER])
        await region.erase(tenant="acme")
        await ring(way)
        await asyncio.sleep(3 * ALONE_S)

        def are_known(*packs: Made) -> bool:
            sick = {one.id for one in packs if one.pack.name == name and verb == "read"}
            return all(sick | known(node).keys() >= {one.id for one in packs} for node in nodes)

        def are_gone(*packs: Made) -> bool:
            return {one.id for one in packs if one.pack.name != name}.isdisjoint(region.stored())

        deadline_s = asyncio.get_running_loop().time() + 6 * 3600
        is_hidden = (verb, name) == ("read", segment_name(OTHER, 2))  # with what it says of lives
        late = FeedWriter(region.inner, LATE, region.clock, random.Random(6))

        def is_done() -> bool:
            silent = [
                writer for writer in ("a" * 16, OTHER) if writer not in name
            ]  # of the sick one some may stay
            left = [one for one in way.stored if one.startswith(tuple(FEED + writer for writer in silent))]
            manifests = [one for one in way.stored if one.startswith("snapshots/manifests/")]
            return (
                are_known(*MORE, *ORPHANS)
                and are_gone(ERASED, *STRAYS, *(() if is_hidden else OVER))
                and not left
                and len(manifests) <= 4
                and all(node.keeper.silent_s < 60 for node in nodes)
            )

        number = 0
        while not is_done() and asyncio.get_running_loop().time() < deadline_s:
            await late.announce([make(f"late {(number := number + 1)}").announced()])
            await asyncio.sleep(60)
        assert is_done()
        await region.end()

    run(main())


@pytest.mark.parametrize("which", ["head", "snapshot"])
def test_one_of_the_future_hides_and_retires_nobody(which: str) -> None:
    """A store whose clock was wrong for a moment leaves one behind. Writers of today are in the news all the same, and what they
    said an hour ago is not older than a day."""

    async def main() -> None:
        region = Region()
        region.inner = region.way = way = Way(region.clock)  # type: ignore[assignment]  # as daemons see it
        region.writer = FeedWriter(way, "a" * 16, region.clock, random.Random(2))
        await region.begin()
        nodes = [await region.node(name) for name in "xy"]
        writers = [FeedWriter(way, name, region.clock, random.Random(5)) for name in (OTHER, LATE)]
        for number in range(8):
            await region.announce(make(f"of the future {number}"))
            await writers[1].announce([make(f"early {number}").announced()])
            await asyncio.sleep(20)
        snapshots = [name for name in way.stored if name.startswith("snapshots/manifests/")]
        assert snapshots
        for name in [head_name("a" * 16)] if which == "head" else snapshots:
            way.times[name] = FUTURE_S
        await asyncio.sleep(400)
        for number in range(8):
            news = make(f"today {number}")
            await region.put(news)
            await writers[0].announce([news.announced()])
            await asyncio.sleep(60)
            assert all(news.id in known(node) for node in nodes)
        assert head_name(LATE) in way.stored
        await region.end()

    run(main())


@pytest.mark.parametrize("name", ["bell", "news", "heads/" + "f" * 16, "nodes/x"])
def test_a_folder_where_a_file_should_be_stops_nothing(name: str, tmp_path: Path) -> None:
    """In a region that is a directory: daemons that start then know the store's clock, announce, and one keeps the region."""

    async def main() -> None:
        objects = open_objects(f"file://{tmp_path}")
        await init_region(objects, "acme", "na", time.time)
        (tmp_path / name / "a folder").mkdir(parents=True)
        node = await RegionNode.join(objects, "acme", "na", tmp_path / "x", "x", random.Random(0), time.time)
        following = asyncio.ensure_future(node.run())
        made = make("in a directory")
        start, size = made.pack.start, made.pack.header.spec.record_bytes
        records = [memoryview(made.content)[at : at + size] for at in range(start, len(made.content), size)]
        assert await node.persist(made.pack.header, records, 1, 0)
        async with asyncio.timeout(TIMEOUT_S):
            while not (made.id in known(node) and node.keeper.holds):
                await asyncio.sleep(0.1)
        following.cancel()
        await node.stop()

    asyncio.run(main())
