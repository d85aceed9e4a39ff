"""Doubts: what a reader misses the keeper looks at itself, and what is gone or wrong is removed for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from replication.audit.auditing import AUDIT_LOOK_S
from replication.catalogue.catalogue import Catalogue
from replication.formats.doubts import DOUBTS
from replication.formats.region import MARKER
from replication.formats.removed import Reason, removed
from replication.region.region_node import DOUBTS_INTERVAL_S, RegionNode
from tests.replication.audited import Made, Region, held, known, make, opened
from tests.replication.virtual_loop import run
from tiers.base import Get
from tiers.checksum import digest

TOLD_S = DOUBTS_INTERVAL_S + AUDIT_LOOK_S + 30.0  # and looked at, and read by everybody


def tell(
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[Region, RegionNode, RegionNode], Coroutine[Any, Any, None]],
) -> None:
    """With a node that keeps the region, and another one."""

    async def main() -> None:
        monkeypatch.setattr(Catalogue, "open", opened({}))
        region = Region()
        await region.begin()
        keeper = await region.node("keeper")
        await asyncio.sleep(60)
        reader = await region.node("reader")
        await reader.caught_up.wait()
        assert keeper.keeper.holds and not reader.keeper.holds
        await story(region, keeper, reader)
        await region.end()

    run(main())


async def doubt(node: RegionNode, *made: Made) -> None:
    for one in made:
        await node._doubt(one.pack, "gone")


def test_what_is_doubted_is_removed_where_it_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gone, cut off, or with one bit that is wrong: removed for everybody within a minute or two, what hangs on it too, and held again
    when it is put again, by whomever, whatever his clock says. What is well stays, and is asked for again by its reader only."""

    async def story(region: Region, keeper: RegionNode, reader: RegionNode) -> None:
        root = make("root")
        stem = make("stem", root)
        leaf, cut, rotten, well = make("leaf", stem), make("cut"), make("rotten"), make("well")
        await region.announce(root, stem, leaf, cut, rotten, well)
        await asyncio.sleep(60)
        await region.lose(stem)
        region.cut_off(cut)
        region.flip_header(rotten)
        await doubt(reader, stem, cut, rotten, well)
        assert held(reader, leaf) == 2 and held(keeper, leaf) == 6
        await asyncio.sleep(TOLD_S)
        for node in (keeper, reader):
            assert set(known(node)) == {root.id, well.id} and held(node, leaf) == 2
        assert region.stored() == {root.id, leaf.id, well.id}
        assert not [name for name in region.inner.stored if name.startswith(DOUBTS)]
        await asyncio.sleep(DOUBTS_INTERVAL_S)
        assert held(reader, well) == 2 and not reader.doubts.ids
        await region.put(stem)
        reader._writer._clock = lambda: 1.0  # a node whose clock is decades late
        await reader.announce(stem.announced())
        await asyncio.sleep(60)
        assert held(keeper, stem) == held(reader, stem) == 4

    tell(monkeypatch, story)


def test_a_place_that_is_not_the_place_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the marker of the region is not there nothing is believed that is missing; when it is back, what is gone is removed."""

    async def story(region: Region, keeper: RegionNode, reader: RegionNode) -> None:
        stays, gone = make("stays"), make("gone")
        await region.announce(stays, gone)
        await asyncio.sleep(60)
        await doubt(reader, stays, gone)
        away = {one.pack.name: region.inner.stored.pop(one.pack.name) for one in (stays, gone)}
        marker = region.inner.stored.pop(MARKER)
        await asyncio.sleep(TOLD_S)
        assert set(known(keeper)) == set(known(reader)) == {stays.id, gone.id}
        region.inner.stored |= {MARKER: marker, stays.pack.name: away[stays.pack.name]}
        await asyncio.sleep(TOLD_S)
        assert set(known(keeper)) == set(known(reader)) == {stays.id}

    tell(monkeypatch, story)


class Wanted(NamedTuple):
    key: bytes
    into: memoryview


def test_who_is_promised_what_nobody_has_ends_prompts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack in the middle of a prefix was removed alone, as a mirror says of one that it brings again: who asks for it and gets nothing
    holds what is before it, so that it is persisted from there on, and all of it from when it is known again. Nobody else's prompts end
    there, and nothing is told to the keeper."""

    async def story(region: Region, keeper: RegionNode, reader: RegionNode) -> None:
        line, other = [make("root")], make("other")
        for number in range(3):
            line.append(make(number, line[-1]))
        await region.announce(*line, other)
        await asyncio.sleep(60)
        [entry] = reader.catalogue.packs([line[1].id])
        assert entry is not None
        await region.writer.announce([], removed=[removed(entry, Reason.GONE)])
        await asyncio.sleep(60)
        assert held(reader, line[3]) == 8, "by halves"
        spec = line[1].pack.header.spec
        wanted = [
            Wanted(spec.digest + block, memoryview(bytearray(spec.record_bytes)))
            for one in line
            for block in one.pack.header.each_hash()
        ]
        answers = [answer for answer, _ in await reader.fetch(wanted)]
        assert answers == [Get.HIT] * 2 + [Get.MISS] * 2 + [Get.HIT] * 4
        assert (held(reader, line[3]), held(reader, line[0]), held(reader, other)) == (2, 2, 2)
        assert held(keeper, line[3]) == 8 and not reader.doubts.told and not reader.problems.all()
        records = [memoryview(digest(f"0 {at}".encode()) * (spec.record_bytes // 16)) for at in range(2)]
        assert await reader.persist(line[1].pack.header, records, 0, 0)
        assert held(reader, line[3]) == 8, "it is expected"
        await asyncio.sleep(60)
        assert held(keeper, line[3]) == held(reader, line[3]) == 8 and line[1].id in known(keeper)

    tell(monkeypatch, story)
