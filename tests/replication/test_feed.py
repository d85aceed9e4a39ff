"""The feed: what is announced is durable, numbers have no gaps and one content each, and everything is read in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from replication.constants import SEGMENT_BLOCKS_MAX
from replication.feed.feed import (
    FEED_PAGE_SEGMENTS,
    FULL_LOOK_EVERY,
    HEAD_TRUST_S,
    WRITER_SILENT_S,
    FeedReader,
    FeedWriter,
    Gap,
    fresh_writer,
)
from replication.formats.announced import Announced
from replication.formats.region import MARKER
from replication.formats.segment import (
    HEAD_FORMAT,
    Head,
    Segment,
    decode,
    encode,
    encode_head,
    head_name,
    segment_name,
)
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tests.replication.durable import pack_of, spec_of
from tests.replication.virtual_loop import run
from tiers.errors import ObjectRefused, ObjectUnavailable

A, B = "000000000000000a", "000000000000000b"


def writer(objects: Any, writer_id: str = A, seed: int = 0) -> FeedWriter:
    return FeedWriter(objects, writer_id, lambda: 1000.0, random.Random(seed))


async def read_all(reader: FeedReader) -> list[Segment]:
    found = []
    more = True
    while more:
        page = await reader.poll()
        assert len(page.segments) <= FEED_PAGE_SEGMENTS
        found += page.segments
        more = page.more
    return found


def ids(segments: list[Segment]) -> list[bytes]:
    return [entry.pack.id for segment in segments for entry in segment.entries]


def counted(objects: MemoryObjects) -> FaultyObjects:
    return FaultyObjects(objects, random.Random(0))


def announced_by(*steps: Callable[[FeedWriter], Awaitable[None]]) -> MemoryObjects:
    """What a writer leaves in the store."""
    objects = MemoryObjects()

    async def main() -> None:
        one = writer(objects)
        for step in steps:
            await step(one)

    run(main())
    return objects


def test_what_is_announced_is_read_once_and_in_order() -> None:
    """Several writers, several rounds: a reader gets every entry once, in order of each writer."""

    async def main() -> None:
        objects = MemoryObjects()
        one, two = writer(objects, A), writer(objects, B)
        reader = FeedReader(objects, {})
        for step in range(100):
            entries = [pack_of([step]), pack_of([step, "x"], spec_of(1))]
            await one.announce(entries[:1])
            await two.announce(entries)
            if step % 7 == 0:
                found = await read_all(reader)
                assert reader.positions == {A: step + 1, B: step + 1}
                for name, count in ((A, 1), (B, 2)):
                    mine = [segment for segment in found if segment.writer == name]
                    assert [segment.number for segment in mine] == sorted(segment.number for segment in mine)
                    assert {len(segment.entries) for segment in mine} == {count}
        assert reader.writers == 2 and reader.all_read
        assert not await read_all(reader) or step % 7

    run(main())


def test_each_life_is_a_writer_of_its_own() -> None:
    """After a restart, and after a silence in which it may have been retired, numbers begin anew under an id that nobody had."""

    async def main() -> None:
        objects = MemoryObjects(page_names=3)
        chance = random.Random(1)
        for start in range(10):
            one = FeedWriter(objects, fresh_writer(chance), lambda: 1000.0, chance)
            await one.announce([pack_of([start])])
            await one.announce([pack_of([start, "b"])])
            assert (one.number, one.conflicts) == (2, 0)
            before = one.id
            await asyncio.sleep(WRITER_SILENT_S + 1)
            await one.announce([pack_of([start, "c"])])
            assert (one.number, one.conflicts) == (1, 0) and one.id != before
        reader = FeedReader(objects, {})
        assert len(await read_all(reader)) == 30 and len(reader.positions) == 20

    run(main())


@pytest.mark.parametrize(
    "fault", ["failed", "lost", "late", "twice", "hung", "rotten", "flipped", "truncated"]
)
def test_no_number_is_burnt_or_used_twice(fault: str) -> None:
    """Whatever the store does to puts and reads, what a writer says is durable is there once, under gapless numbers."""

    async def main(seed: int) -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(seed), Faults(**{fault: 0.5}, delay_s=1.0, hang_s=5.0))
        one = writer(objects)
        said: list[Announced] = []
        for step in range(10):
            said.append(pack_of([step]))
            for _ in range(1000):
                try:
                    await one.announce([said[-1]])
                    break
                except ObjectUnavailable:
                    pass
            there = [
                decode(inner.stored[segment_name(A, number)], A, number)
                for number in range(1, one.number + 1)
            ]
            assert ids(there) == [entry.pack.id for entry in said]
        await objects.settle()
        reader = FeedReader(inner, {})
        assert ids(await read_all(reader)) == [entry.pack.id for entry in said]
        assert one.conflicts == 0 and reader.positions == {A: 10}

    for seed in range(10):
        run(main(seed))


def test_a_failed_announcement_is_finished_by_the_next_one() -> None:
    """What may be in the store is settled first, with the same bytes; announced again with more, nothing is said twice."""

    async def main() -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(0), Faults(lost=1.0, failed=0.0))
        one = writer(objects)
        objects.faults.truncated = 1.0  # nothing can be read back
        with pytest.raises(ObjectUnavailable):
            await one.announce([pack_of([1])])
        before = dict(inner.stored)
        objects.faults = Faults()
        await one.announce([pack_of([1]), pack_of([2])])
        assert inner.stored[segment_name(A, 1)] == before[segment_name(A, 1)]
        assert ids(await read_all(FeedReader(inner, {}))) == [pack_of([1]).pack.id, pack_of([2]).pack.id]

    run(main())


def test_an_announcement_that_is_cancelled_leaves_no_gap() -> None:
    """Cancelled in the middle of a put, a writer tries the same number with the same bytes."""

    async def main() -> None:
        inner = MemoryObjects()
        objects = FaultyObjects(inner, random.Random(0), Faults(late=1.0, late_s=10.0))
        one = writer(objects)
        task = asyncio.ensure_future(one.announce([pack_of([1])]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        objects.faults = Faults()
        await one.announce([pack_of([2])])
        await objects.settle()
        assert one.conflicts == 0
        assert ids(await read_all(FeedReader(inner, {}))) == [pack_of([1]).pack.id, pack_of([2]).pack.id]

    run(main())


def test_large_announcements_make_several_segments() -> None:
    """More than fits one segment is announced in several, in order."""

    async def main() -> None:
        objects = MemoryObjects()
        entries = [pack_of(range(step, step + 100)) for step in range(30)]
        one = writer(objects)
        await one.announce(entries)
        found = await read_all(FeedReader(objects, {}))
        assert len(found) == one.number == -(-30 // (SEGMENT_BLOCKS_MAX // 100))
        assert ids(found) == [entry.pack.id for entry in entries]

    run(main())


def test_a_copied_machine_is_noticed() -> None:
    """Two writers with one id: the second takes a fresh id, nobody's segment is overwritten, nothing is lost."""

    async def main() -> None:
        objects = MemoryObjects()
        one, clone = writer(objects, seed=1), writer(objects, seed=2)
        await one.announce([pack_of([1])])
        await clone.announce([pack_of([2])])
        await one.announce([pack_of([3])])
        await clone.announce([pack_of([4])])
        assert (one.id, one.conflicts) == (A, 0)
        assert clone.id != A and clone.conflicts == 1 and clone.number == 2
        reader = FeedReader(objects, {})
        assert sorted(ids(await read_all(reader))) == sorted(pack_of([n]).pack.id for n in range(1, 5))
        assert reader.positions == {A: 2, clone.id: 2}

    run(main())


def test_a_store_without_conditional_writes_is_noticed_too() -> None:
    """Where only_new is not known, reading back tells that somebody else's segment is there."""

    class Unconditional(MemoryObjects):
        async def put(self, name: str, content: Any, only_new: bool = False) -> bool:
            await super().put(name, content)
            if name == segment_name(A, 1) and self.overwrite is not None:
                await super().put(name, self.overwrite)
            return True

        overwrite: bytes | None = None

    async def main() -> None:
        objects = Unconditional()
        objects.overwrite = encode(Segment(A, 1, 7.0, [pack_of(["theirs"])]))
        one = writer(objects)
        await one.announce([pack_of([1])])
        assert one.conflicts == 1
        assert set(ids(await read_all(FeedReader(objects, {})))) == {
            pack_of([name]).pack.id for name in ("theirs", 1)
        }

    run(main())


def test_no_permission_is_said_at_once() -> None:
    """A store that refuses is asked once, and the error is its own."""

    async def main() -> None:
        objects = counted(MemoryObjects())
        objects.faults.refuse = ObjectRefused("memory: not allowed")
        with pytest.raises(ObjectRefused, match="not allowed"):
            await writer(objects).announce([pack_of([1])])
        assert objects.requests["put"] == 1

    run(main())


def test_a_head_that_cannot_be_written_is_no_failure() -> None:
    """Without its head a segment is announced all the same, and read at the next full look at the latest."""

    class NoHeads(MemoryObjects):
        async def put(self, name: str, content: Any, only_new: bool = False) -> bool:
            if name.startswith("heads/"):
                raise ObjectUnavailable("no head today")
            return await super().put(name, content, only_new)

    async def main() -> None:
        objects = NoHeads()
        await objects.put(MARKER, b"this place")
        reader = FeedReader(objects, {})
        assert not await read_all(reader)
        await writer(objects).announce([pack_of([1])])
        looks = 0
        while not await read_all(reader):
            looks += 1
        assert looks == FULL_LOOK_EVERY - 1

    run(main())


def test_news_cost_one_request() -> None:
    """A reader that follows asks for what is new and nothing else: one LIST, one GET per segment, none in vain."""

    async def main() -> None:
        inner = MemoryObjects()
        objects = counted(inner)
        one, two = writer(inner, A), writer(inner, B)
        for each in (one, two):
            await each.announce([pack_of([each.id])])
        reader = FeedReader(objects, {})
        await read_all(reader)
        for step in range(20):
            for count in range(step % 4):
                await one.announce([pack_of([step, count])])
            objects.requests.clear()
            await asyncio.sleep(5)
            assert len(await read_all(reader)) == step % 4
            assert objects.requests == {"list": 2, "get": step % 4} or not step % 4

    run(main())


@pytest.mark.parametrize("news", [4095, 4096, 4099])
def test_far_behind_is_caught_up_in_pages(news: int) -> None:
    """However much was missed, also more than the length of a head can tell, all of it is read, page by page."""

    async def main() -> None:
        objects = MemoryObjects()
        count = 5 + news
        for number in range(1, 6):
            await objects.put(segment_name(A, number), encode(Segment(A, number, 0.0, [])))
        await objects.put(head_name(A), encode_head(Head(5, 0.0)))
        reader = FeedReader(objects, {})
        assert len(await read_all(reader)) == 5
        for number in range(6, count + 1):
            await objects.put(segment_name(A, number), encode(Segment(A, number, 0.0, [])))
        await objects.put(head_name(A), encode_head(Head(count, 0.0)))
        await asyncio.sleep(HEAD_TRUST_S)
        assert len(await read_all(reader)) == news
        assert reader.positions == {A: count}

    run(main())


def test_a_gap_is_reported_and_not_passed() -> None:
    """A segment that is gone while a later one is there is a gap; a jump, or the segment itself, closes it."""

    async def main() -> None:
        objects = MemoryObjects()
        one = writer(objects)
        for step in range(6):
            await one.announce([pack_of([step])])
        lost = objects.stored[segment_name(A, 3)]
        await objects.delete([segment_name(A, 3)])
        for closed_by in ("jump", "segment"):
            reader = FeedReader(objects, {})
            for _ in range(3):
                await read_all(reader)
                assert reader.positions == {A: 2} and not reader.all_read
                assert reader.gaps == {A: Gap(A, 3, 4)}
            if closed_by == "jump":
                reader.jump({A: 3})
            else:
                await objects.put(segment_name(A, 3), lost)
            assert len(await read_all(reader)) == (3 if closed_by == "jump" else 4)
            assert not reader.gaps and reader.all_read and reader.positions == {A: 6}
        reader.jump({A: 2})
        assert reader.positions == {A: 6}

    run(main())


def test_what_cannot_be_read_is_tried_again() -> None:
    """A damaged segment stops its writer, counted, and nobody else; when it can be read again, it goes on."""

    async def main() -> None:
        objects = MemoryObjects()
        one, two = writer(objects, A), writer(objects, B)
        for step in range(4):
            await one.announce([pack_of([step])])
            await two.announce([pack_of([step])])
        sound = objects.stored[segment_name(A, 2)]
        objects.stored[segment_name(A, 2)] = flip(sound, 99)
        reader = FeedReader(objects, {})
        for look in range(1, 4):
            await read_all(reader)
            assert reader.positions == {A: 1, B: 4}
            assert reader.damaged >= look and not reader.all_read and not reader.gaps
        assert "checksum" in reader.last_failure
        objects.stored[segment_name(A, 2)] = sound
        assert [segment.number for segment in await read_all(reader)] == [2, 3, 4]
        assert reader.all_read

    run(main())


def test_a_poll_that_is_cancelled_has_read_nothing() -> None:
    """Wherever a poll is cancelled, its positions do not move, and the next poll finds everything."""

    async def main(turns: int) -> bool:
        objects = MemoryObjects()
        one = writer(objects)
        for step in range(5):
            await one.announce([pack_of([step])])
        reader = FeedReader(objects, {})
        found = []
        task = asyncio.ensure_future(reader.poll())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            found += task.result().segments
        else:
            task.cancel()
            assert not reader.positions
        await asyncio.sleep(HEAD_TRUST_S)
        for _ in range(FULL_LOOK_EVERY + 1):
            found += await read_all(reader)
        assert [segment.number for segment in found] == [1, 2, 3, 4, 5]
        return task.done() and not task.cancelled()

    finished = [run(main(turns)) for turns in range(30)]
    assert finished[-1] and not finished[0]


def test_a_head_that_is_cut_off_hides_no_gap() -> None:
    """A head is stored cut off, to the length of an older one, and what follows on that one is gone: a reader that begins
    there sees the gap."""

    async def main() -> None:
        objects = MemoryObjects()
        one = writer(objects)
        for step in range(6):
            await one.announce([pack_of([step])])
        await objects.delete([segment_name(A, 4)])
        whole = objects.stored[head_name(A)]
        objects.stored[head_name(A)] = whole[: len(whole) - 3]
        reader = FeedReader(objects, {A: 3})
        await read_all(reader)
        assert reader.gaps == {A: Gap(A, 4, 5)} and not reader.all_read

    run(main())


def test_a_head_lies_and_nothing_is_lost() -> None:
    """Heads that are old, damaged or from nowhere delay what is new until the next full look at most, and harm nothing."""

    async def main(seed: int) -> None:
        chance = random.Random(seed)
        objects = MemoryObjects()
        one = writer(objects)
        reader = FeedReader(objects, {})
        found = []
        for step in range(60):
            await one.announce([pack_of([step])])
            lie = chance.choice(
                (
                    encode_head(Head(chance.randint(1, 100), chance.random())),
                    flip(objects.stored[head_name(A)], chance.randrange(200)),
                    b"",
                    None,
                )
            )
            if lie is not None:
                await objects.put(head_name(A), lie)
            found += await read_all(reader)
            assert not reader.gaps
        for _ in range(FULL_LOOK_EVERY + 1):
            found += await read_all(reader)
        assert [segment.number for segment in found] == list(range(1, 61))

    for seed in range(20):
        run(main(seed))


def test_names_that_are_none_are_passed_over() -> None:
    """Whatever else lies below feed/ and heads/ is no writer and no segment."""
    objects = announced_by(lambda one: one.announce([pack_of([1])]))

    async def main() -> None:
        for name in (
            "heads/README",
            "heads/x/y",
            f"feed/{A}/notes",
            "feed/README",
            "feed/other/0000000000000001",
        ):
            await objects.put(name, b"?")
        reader = FeedReader(objects, {})
        assert len(await read_all(reader)) == 1 and reader.listed == {A}
        assert HEAD_FORMAT.unseal(await objects.get(head_name(A)), "").number == 1

    run(main())
