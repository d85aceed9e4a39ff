"""Removals: whatever order announcements and removals are read in, catalogues say the same."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from replication.catalogue.catalogue import VOIDS_KEPT_S, Catalogue, Counts
from replication.formats.announced import Announced
from replication.formats.removed import LOST, Reason, Removed, removed
from replication.formats.segment import Segment, decode, encode
from tests.replication.durable import hash_of, keys_of, pack_of, random_pack, spec_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.test_announced_models import MODEL

WRITERS = [f"{number:016x}" for number in range(3)]


def expected(segments: list[Segment]) -> dict[bytes, Announced]:
    """A pack is there if it was announced later than it was removed."""
    found: dict[bytes, Announced] = {}
    for segment in segments:
        for entry in segment.entries:
            said_s = max(found[entry.pack.id].said_s if entry.pack.id in found else 0.0, segment.written_s)
            found[entry.pack.id] = msgspec.structs.replace(entry, said_s=said_s)
    voids: dict[bytes, float] = {}
    for segment in segments:
        for one_removed in segment.removed:
            voids[one_removed.id] = max(voids.get(one_removed.id, 0.0), one_removed.said_s)
    return {name: one for name, one in found.items() if one.said_s > voids.get(name, 0.0)}


def story(chance: random.Random) -> list[Segment]:
    """What several writers say, in the order of their own numbers."""
    packs = [msgspec.structs.replace(random_pack(chance), stored_s=7) for _ in range(8)]
    numbers, segments = dict.fromkeys(WRITERS, 0), list[Segment]()
    for _ in range(40):
        writer, written_s = chance.choice(WRITERS), float(chance.randrange(1, 100))
        numbers[writer] += 1
        some = [chance.choice(packs) for _ in range(chance.randrange(3))]
        gone = [
            Removed(chance.choice(packs).pack.id, float(chance.randrange(100)), chance.choice(list(Reason)))
            for _ in range(chance.randrange(3))
        ]
        segments.append(Segment(writer, numbers[writer], written_s, some, removed=tuple(gone)))
    return segments


@pytest.mark.parametrize("seed", range(8))
def test_any_order_says_the_same(seed: int) -> None:
    """Announcements and removals of three writers, read in any order and over restarts, leave exactly the packs that were announced
    later than they were removed: found by block, counted, and in the filter, as if the others had never been."""
    chance = random.Random(seed)
    segments = story(chance)
    for segment in segments:
        assert decode(encode(segment), segment.writer, segment.number).removed == segment.removed
    wanted = expected(segments)
    assert wanted and any(segment.removed for segment in segments)
    for _ in range(6):
        rows: dict[bytes, bytes] = {}
        catalogue, left = (
            Catalogue(MemoryRows(rows)),
            {w: [s for s in segments if s.writer == w] for w in WRITERS},
        )
        while left := {writer: some for writer, some in left.items() if some}:
            catalogue.add(left[chance.choice(list(left))].pop(0))
            if chance.random() < 0.1:
                catalogue = Catalogue(MemoryRows(rows))
                while not catalogue.loaded:
                    catalogue._load_slice(50)
        found = {entry.pack.id: entry for chunk in catalogue.chunks() for entry in chunk}
        assert found == wanted
        packs = wanted.values()
        assert catalogue.counts == Counts(
            len(packs), sum(one.blocks for one in packs), sum(one.pack.size_bytes for one in packs)
        )
        there = {key for one in packs for key in keys_of(one)}
        keys = {key for segment in segments for entry in segment.entries for key in keys_of(entry)}
        assert {key for key in keys if catalogue.find([key]) != [None]} == there
        assert {key for key in keys if catalogue.may_have(key)} == there


def test_a_removal_takes_what_it_knew_and_nothing_later() -> None:
    """What is removed stays away when it is read once more, comes back when it is announced later, and
    whoever announces it again knows how much later that has to be."""
    now_s = 1e9
    catalogue: Any = Catalogue(MemoryRows(), lambda: now_s)
    pack = pack_of(["a", "b"])
    catalogue.add(Segment(WRITERS[0], 1, 5.0, [msgspec.structs.replace(pack, kept_until_s=900)]))
    [known] = catalogue.packs([pack.pack.id])
    catalogue.add(Segment(WRITERS[1], 1, 6.0, [], removed=[removed(known, Reason.GONE)]))
    assert catalogue.packs([pack.pack.id]) == [None] and Reason.GONE in LOST
    assert [one.pack.id for chunk in catalogue.lost(0.0) for one in chunk] == [pack.pack.id]
    catalogue.add(Segment(WRITERS[2], 1, 4.0, [pack]))
    assert catalogue.packs([pack.pack.id]) == [None] and not catalogue.has(spec_of().digest, hash_of("a"))
    assert catalogue.void_until_s([pack.pack.id]) == 5.0
    catalogue.add(Segment(WRITERS[0], 2, 5.5, [msgspec.structs.replace(pack, kept_until_s=100)]))
    [again] = catalogue.packs([pack.pack.id])
    assert again.kept_until_s == 100 and again.said_s == 5.5 and not list(catalogue.removed())


def test_removals_are_remembered_for_some_days() -> None:
    """And not for ever: after that their rows are gone."""
    now_s, rows = 1e9, dict[bytes, bytes]()
    catalogue = Catalogue(MemoryRows(rows), lambda: now_s)
    gone = Removed(bytes(16), 5.0, Reason.OVER)
    assert catalogue.remove([gone]) == 0 and [*catalogue.removed()] == [[gone]]
    now_s += VOIDS_KEPT_S + 1
    assert [*catalogue.removed()] == [[]] and not any(key.startswith(b"x") for key in rows)


def test_models_are_removed_by_name() -> None:
    """A manifest that is gone is gone with every content that was announced under its name until then."""
    catalogue = Catalogue(MemoryRows())
    catalogue.add(Segment(WRITERS[0], 1, 5.0, [], models=(MODEL,)))
    catalogue.add(
        Segment(WRITERS[1], 1, 5.0, [], removed=[removed(catalogue.models[MODEL.name], Reason.GONE)])
    )
    catalogue.add(Segment(WRITERS[2], 1, 4.0, [], models=(MODEL,)))
    assert not catalogue.models
    catalogue.add(Segment(WRITERS[2], 2, 6.0, [], models=(MODEL,)))
    assert list(catalogue.models) == [MODEL.name]
