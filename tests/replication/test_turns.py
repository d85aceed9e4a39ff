"""The loop that follows regions is never held for long: rows that are looked at or written are counted in each turn."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import msgspec
import pytest

from replication.catalogue.catalogue import PACK_COSTS_BLOCKS, TURN_BLOCKS, TURN_LOOKS, Catalogue
from replication.catalogue.selection import choose
from replication.erasure.erased import Erased
from replication.erasure.erasure import ERASE_PACK_LOOKS, ERASE_TURN_LOOKS, Erasure
from replication.errors import CatalogueDamaged
from replication.feed.snapshots import Snapshots
from replication.formats.announced import Announced
from replication.formats.removed import Reason, removed
from replication.formats.segment import Segment
from replication.formats.tombstones import Tombstone
from replication.region.doubts import Doubts
from tests.objects import MemoryObjects
from tests.replication.durable import keys_of, pack_of, spec_of
from tests.replication.memory_rows import MemoryRows

W = "00000000000000aa"
ROWS_MAX = 4 * TURN_LOOKS  # looked at in one turn
T = TypeVar("T")


class Counted(MemoryRows):
    """looks, writes: rows, since it was asked last."""

    looks = writes = 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.looks += len(keys)
        return super().get(keys)

    def with_prefix(self, prefix: bytes) -> list[bytes]:
        self.looks += 1
        return super().with_prefix(prefix)

    def keys(self, start: bytes, end: bytes, limit: int) -> list[bytes]:
        found = super().keys(start, end, limit)
        self.looks += max(1, len(found))
        return found

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        puts = list(puts)
        self.writes += len(puts)
        super().write(puts, deletes)


class Place:
    """A catalogue; looks, writes: of the longest turn."""

    def __init__(self) -> None:
        self.rows = Counted()
        self.catalogue = Catalogue(self.rows)
        asyncio.run(self.catalogue.load())
        self.looks = self.writes = 0

    def work(self, work: Coroutine[Any, Any, T]) -> T:
        """Drive what only lets others run, and waits for nothing."""
        self.looks = self.writes = 0
        while True:
            self.rows.looks = self.rows.writes = 0
            try:
                work.send(None)
            except StopIteration as end:
                answer: T = end.value
                return answer
            finally:
                self.looks = max(self.looks, self.rows.looks)
                self.writes = max(self.writes, self.rows.writes)


@contextmanager
def lines_counted() -> Iterator[list[None]]:
    """One for each line of Python that runs."""
    lines: list[None] = []

    def count(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.append(None)
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.fixture
def place() -> Place:
    return Place()


def single(count: int) -> list[Announced]:
    return [pack_of([f"single {number}"]) for number in range(count)]


def test_a_full_segment_is_learned_in_many_turns(place: Place) -> None:
    """And as it would be at once: a thousand packs, then all of them again with a longer life, then none."""
    packs = single(1024)
    place.work(place.catalogue.take_in(Segment(W, 1, 5.0, packs)))
    assert place.catalogue.counts.packs == 1024 and place.catalogue.positions == {W: 1}
    assert place.writes <= 8 * TURN_BLOCKS // PACK_COSTS_BLOCKS and place.looks <= ROWS_MAX
    again = [msgspec.structs.replace(pack, kept_until_s=1000) for pack in packs]
    place.work(place.catalogue.take_in(Segment(W, 2, 6.0, again)))
    assert place.looks <= 2 * ROWS_MAX
    gone = [
        removed(known, Reason.GONE) for known in place.catalogue.packs([p.pack.id for p in packs]) if known
    ]
    place.work(place.catalogue.take_in(Segment(W, 3, 7.0, (), removed=gone)))
    assert place.catalogue.counts.packs == 0 and place.catalogue.positions == {W: 3}
    assert place.looks <= ROWS_MAX
    assert not any(place.catalogue.may_have(key) for pack in packs for key in keys_of(pack))


def test_a_segment_is_not_counted_as_read_in_a_catalogue_that_was_made_anew_meanwhile(place: Place) -> None:
    """Some of it was learned before, and is gone."""
    work = place.catalogue.take_in(Segment(W, 1, 5.0, single(1024)))
    work.send(None)
    place.catalogue.renew()
    with pytest.raises(CatalogueDamaged):
        place.work(work)
    assert place.catalogue.positions == {}


def test_a_large_pack_is_looked_through_in_many_turns(place: Place) -> None:
    """Its blocks, what hangs on each of them, and its removal."""
    pack = pack_of([f"block {number}" for number in range(1000)])
    child = behind(pack, ["child"])
    place.catalogue.add(Segment(W, 1, 5.0, [pack, child]))
    [known] = place.catalogue.packs([pack.pack.id])
    assert known is not None
    spots = place.work(place.catalogue.find_all(keys_of(pack), {pack.pack.id}))
    assert spots == [None] * 1000 and place.looks <= ROWS_MAX
    gone = place.work(place.catalogue.removals([known], Reason.GONE))
    assert {one.id for one in gone} == {pack.pack.id, child.pack.id} and place.looks <= ROWS_MAX
    place.work(place.catalogue.remove_all(gone))
    assert place.catalogue.counts.packs == 0 and place.looks <= ROWS_MAX


def behind(pack: Announced, names: Sequence[object]) -> Announced:
    header = pack.pack.header
    return pack_of(names, parent=header.hash_at(header.count - 1))


def test_the_packs_of_a_long_prefix_are_chosen_in_many_turns(place: Place) -> None:
    """Each hangs on the one before; the last one is worth most."""
    line = [pack_of(["first"])]
    while len(line) < 1000:
        line.append(behind(line[-1], [len(line)]))
    told = [msgspec.structs.replace(pack, kept_until_s=1000 + at) for at, pack in enumerate(line)]
    place.work(place.catalogue.take_in(Segment(W, 1, 5.0, told)))
    chosen = place.work(choose(place.catalogue, lambda _: True))
    assert [one.pack_id for one in chosen] == [pack.pack.id for pack in line]
    assert place.looks <= ROWS_MAX
    found = place.work(place.catalogue.packs_all([pack.pack.id for pack in line]))
    assert None not in found and place.looks <= ROWS_MAX


def test_a_doubt_costs_what_its_own_pack_has() -> None:
    """However many others are in doubt: they are not looked at, and theirs stays as it is."""
    doubts = Doubts(lambda: 0.0)
    packs = [pack_of([f"{number} {block}" for block in range(20)] + ["shared"]) for number in range(300)]
    for pack in packs:
        doubts.add(pack.pack, pack.pack.header.each_hash())
    others, one = packs[:-1], packs[-1].pack
    with lines_counted() as lines:
        doubts.over(one.id)
        doubts.add(one, one.header.each_hash())
    assert len(lines) < 300
    spec = one.header.spec
    assert {doubts.end(spec, pack.pack.header.hashes, 3, 21) for pack in others} == {3}
    assert doubts.end(spec, one.header.hashes, 0, 21) == 0


def test_packs_are_held_against_many_tombstones_in_many_turns(place: Place) -> None:
    """A tenth of them is of an erased namespace; thousands of others are erased as well, which costs a pack nothing. Hundreds of prefixes of its own
    namespace do."""
    packs = [pack_of([number], spec_of(number % 10)) for number in range(64)]
    known = [
        Tombstone(namespaces=(spec_of(number).digest,), watched_until_s=1 << 33) for number in range(9, 3009)
    ]
    known += [
        Tombstone(
            namespaces=(spec_of(8).digest,), watched_until_s=1 << 33, block_hash=bytes([number % 256, 9]) * 8
        )
        for number in range(256)
    ]
    erasure = Erasure(MemoryObjects(), place.catalogue, lambda: 1.8e9, known=Erased(lambda: 1.8e9, known))
    work = erasure._covered(packs)
    turns: list[int] = []
    while True:
        with lines_counted() as lines:
            try:
                work.send(None)
            except StopIteration as end:
                found: list[Announced] = end.value
                break
        turns.append(len(lines))
    assert found == packs[9::10] and 64 * ERASE_PACK_LOOKS // ERASE_TURN_LOOKS <= len(turns) < 64
    assert max(turns) < 30_000


def test_a_snapshot_of_small_packs_is_written_and_read_in_many_turns(place: Place) -> None:
    """No part has more than a thousand of them, and those that are read are learned some at a time."""
    packs, objects = single(1500), MemoryObjects()
    place.work(place.catalogue.add_all(packs))
    assert place.writes <= 8 * TURN_BLOCKS // PACK_COSTS_BLOCKS
    snapshots = Snapshots(objects, lambda: 1.8e9, random.Random(1))
    written = asyncio.run(snapshots.write(place.catalogue))
    assert written.packs == 1500 and len(written.parts) == 2
    other = Place()
    with pytest.MonkeyPatch.context() as patch:
        sizes: list[int] = []
        add = Catalogue.add_packs
        patch.setattr(
            Catalogue, "add_packs", lambda of, some, *more: sizes.append(len(some)) or add(of, some, *more)
        )
        read = asyncio.run(snapshots.read_newest(other.catalogue))
    assert read == written and other.catalogue.counts == place.catalogue.counts
    assert max(sizes) <= TURN_BLOCKS // PACK_COSTS_BLOCKS
