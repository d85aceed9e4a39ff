"""Problems: one list, since when and how often, and few lines of the log, whatever fails for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest

from kvstore.logs import Guard
from replication import problems as module
from replication.formats.region import MARKER, init_region, open_region
from replication.problems import CALM_S, REMIND_FIRST_S, REMIND_S, Problem, Problems
from replication.watched import ALONE_S, PLACE_S, SETTLED_S, Watched
from tests.objects import FaultyObjects, MemoryObjects
from tests.replication.mirrored import World, in_memory, pack, simulate
from tests.replication.virtual_loop import run
from tiers.errors import ObjectError, ObjectRefused, ObjectUnavailable

catalogues_in_memory = in_memory  # a fixture of every test here, too
HOUR_S = 3600
LINES_MAX = 70  # of the log, for one fault in an hour


class Lines(logging.Handler):
    """What a daemon's or a mirror's log would have, by a clock of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addFilter(Guard(clock))

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def clock() -> list[float]:
    """The one element is the time."""
    return [1000.0]


@pytest.fixture
def lines(clock: list[float]) -> Iterator[Lines]:
    root, handler = logging.getLogger(), Lines(lambda: clock[0])
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


def test_what_lasts_has_few_lines_and_counts_all(clock: list[float], lines: Lines) -> None:
    """A line when it begins, one after a minute, one each five minutes, one when it ends; each time that it was met counts."""
    problems = Problems(clock=lambda: clock[0])
    for _ in range(HOUR_S):
        problems.note("na", "403", "credentials", "new ones")
        clock[0] += 1
    assert problems.all() == [Problem("credentials", "na", "403", "new ones", "problem", HOUR_S, HOUR_S)]
    problems.over("na", "credentials")
    assert not problems.all()
    assert len(lines.texts) == 1 + 1 + (HOUR_S - 1 - REMIND_FIRST_S) // REMIND_S + 1
    assert lines.texts[0] == "credentials na: 403" and lines.texts[-1] == "credentials na: is right again"


def test_what_comes_and_goes_has_no_more_lines(clock: list[float], lines: Lines) -> None:
    """Begun and over each other second for an hour: a begin and an end at once, then one of each each five minutes at most; after
    a calm time a new one is told at once."""
    problems = Problems(clock=lambda: clock[0])
    for second in range(HOUR_S):
        problems.note("na", "503", "bucket") if second % 2 else problems.over("na", "bucket")
        clock[0] += 1
    assert 2 <= len(lines.texts) <= 2 * (2 + HOUR_S / REMIND_S) and problems.noted == HOUR_S / 2
    problems.over("na", "bucket")
    lines.texts.clear()
    clock[0] += CALM_S + 1
    problems.note("na", "503", "bucket")
    assert lines.texts == ["bucket na: 503"]


def test_what_nobody_sees_to_end_is_over_by_itself(clock: list[float]) -> None:
    """A problem that is not met again for as long as it lasts, and one that is not among those that were seen."""
    problems = Problems("bucket", clock=lambda: clock[0])
    problems.note("a", "gone", lasts_s=10.0)
    problems.only([Problem("object", "a", "gone"), Problem("gap", "feed", "hole")])
    assert [(one.kind, one.subject) for one in problems.all()] == [
        ("object", "bucket: a"),
        ("gap", "bucket: feed"),
    ]
    problems.only([Problem("gap", "feed", "hole")])
    assert [one.kind for one in problems.all()] == ["gap"]
    problems.note("a", "gone", lasts_s=10.0)
    clock[0] += 10.0
    assert [one.kind for one in problems.all()] == ["gap"]


def test_a_warning_that_is_repeated_is_cut_short(clock: list[float], lines: Lines) -> None:
    """Any wording: ten lines at once, then one each five minutes, which says how many were left out; other lines go on."""
    log = logging.getLogger("test")
    for number in range(HOUR_S):
        log.warning("block %d is damaged", number)
        log.info("an engine is here")
        clock[0] += 1
    damaged = [text for text in lines.texts if "damaged" in text]
    assert 10 < len(damaged) <= LINES_MAX and lines.texts.count("an engine is here") == HOUR_S


EXPIRED = ObjectRefused("na: the store answers 403 ExpiredToken")
SLOW = ObjectUnavailable("na: the store answers 503 SlowDown")
SKEWED = ObjectUnavailable("na: the store answers 403 RequestTimeTooSkewed")


@pytest.mark.parametrize("region", ["na", "eu"])
@pytest.mark.parametrize(("error", "kind"), [(EXPIRED, "credentials"), (SLOW, "bucket"), (SKEWED, "clock")])
def test_a_store_that_fails_for_an_hour_is_one_problem(
    region: str,
    error: ObjectError,
    kind: str,
    lines: Lines,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a mirror and the node beside it, under traffic: its own bucket or the source refuses or fails. Within a minute it is one
    problem of that region, counted, with what to do; the log has few lines in an hour; it is over within a minute."""
    monkeypatch.setattr(
        module.Problems.__init__, "__defaults__", ("", lambda: asyncio.get_running_loop().time())
    )

    async def main(world: World) -> None:
        problems = Problems()
        for name, bucket in world.buckets.items():
            bucket.way = Watched(bucket.way, name, problems)  # type: ignore[assignment]
        [mirror] = await world.mirror()
        node = mirror._home

        async def traffic(seconds: int) -> None:
            for second in range(seconds):
                clock[0] = world.loop.time()
                if second % 5 == 0:
                    made, content = pack(f"{world.loop.time()}")
                    await world.na.make((made, content))
                    header, size = made.pack.header, made.pack.header.spec.record_bytes
                    records = [memoryview(content)[-2 * size : -size], memoryview(content)[-size:]]
                    await node.persist(header, records, 1, 0)
                await asyncio.sleep(1.0)
                node.wrong()

        await traffic(60)
        assert not problems and not node.wrong()
        lines.texts.clear()
        faults = _faulty(world, region).faults
        faults.refuse = error
        await traffic(60)
        [problem] = problems.all()
        assert (problem.kind, problem.subject) == (kind, region) and problem.fix and problem.count > 3
        await traffic(HOUR_S - 60)
        assert 3 < len(lines.texts) <= LINES_MAX, lines.texts
        assert (
            mirror.state().problem if region == "na" else [one for one in node.wrong() if one.kind == "feed"]
        )
        faults.refuse = None
        await traffic(60)
        assert not problems and not node.wrong() and not mirror.state().problem
        assert [text for text in lines.texts if "is right again" in text]

    simulate(main)


def _faulty(world: World, region: str) -> FaultyObjects:
    way = world.buckets[region].way
    assert isinstance(way, Watched) and isinstance(way._objects, FaultyObjects)
    return way._objects


def test_one_bad_object_says_nothing_of_its_place() -> None:
    """A pack that is refused again and again between others that are handed out, one that is missing, one that is damaged: no
    problem of the bucket; writes that are refused while reads work are one, and say so."""

    async def main(world: World) -> None:
        problems = Problems()
        inner = world.na.way
        way = Watched(inner, "na", problems)
        await way.put("packs/a", b"a")
        for _ in range(9):
            inner.faults.refuse = ObjectRefused("na: packs/b: the store answers 403 AccessDenied")
            with pytest.raises(ObjectRefused):
                await way.get("packs/b")
            inner.faults.refuse = None
            await way.get("packs/a")
            with pytest.raises(ObjectError):
                await way.get("packs/c")
        assert not problems
        for name in "ab":
            inner.faults.refuse = ObjectRefused("na: put: the store answers 403 AccessDenied")
            with pytest.raises(ObjectRefused):
                await way.put(f"packs/{name}", b"")
            inner.faults.refuse = None
            await way.get("packs/a")
        [problem] = problems.all()
        assert (problem.kind, problem.subject) == ("credentials", "na") and problem.text.startswith(
            "writes only: "
        )
        await asyncio.sleep(11.0)
        await way.put("packs/d", b"")
        assert not problems

    simulate(main)


@pytest.mark.parametrize("marker", [b"", b'{"region": "eu"}'])
def test_another_place_is_not_written_to(marker: bytes) -> None:
    """Once a process has joined, the mount or the endpoint is swapped: within a minute nothing is written or deleted there, which is a
    problem, and no fault of an object; when the region is back, all goes on. A marker that is damaged, or cannot be read, says nothing."""

    async def main() -> None:
        problems, place = Problems(), MemoryObjects("na")
        way, mirrors = Watched(place, "na", problems), Watched(place, "na", Problems(), proves_reads=True)
        await init_region(place, "acme", "na", lambda: 1.0)
        for each in (way, mirrors):
            await open_region(each, "acme", "na")
        await way.put("packs/a", b"a")
        mine = place.stored[MARKER]
        await place.delete([MARKER])
        if marker:
            await place.put(MARKER, marker)
        await asyncio.sleep(PLACE_S)
        for _ in range(9):
            for name in "bc":
                with pytest.raises(ObjectUnavailable, match="of another region: it is left alone"):
                    await way.put(f"packs/{name}", b"b")
            with pytest.raises(ObjectUnavailable, match="of another region"):
                await way.delete(["packs/a"])
            assert await way.get("packs/a") == b"a"
            with pytest.raises(ObjectUnavailable, match="of another region"):
                await anext(mirrors.list("packs/"))
            await asyncio.sleep(ALONE_S / 4)
        assert place.stored.keys() - {MARKER} == {"packs/a"}
        [problem] = problems.all()
        assert problem.kind == "bucket" and "region.json is gone, or of another region" in problem.text
        await place.put(MARKER, mine)
        await way.put("packs/b", b"b")
        await asyncio.sleep(SETTLED_S)
        await way.put("packs/c", b"c")
        assert not problems and len(await anext(mirrors.list("packs/"))) == 3
        await place.put(MARKER, mine[:-1])
        await asyncio.sleep(PLACE_S)
        await way.put("packs/d", b"d")
        place.get_within = sick  # type: ignore[method-assign]
        await asyncio.sleep(PLACE_S)
        await way.put("packs/d", b"d")

    async def sick(name: str, size_bytes_max: int) -> memoryview:
        raise ObjectRefused(f"na: {name}: the store answers 403 AccessDenied")

    run(main())
