"""Doubts: what a reader misses the keeper looks at itself, and what is gone or wrong is removed for everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from replication.audit.auditing import AUDIT_LOOK_S
from replication.catalogue.catalogue import Catalogue
from replication.formats.doubts import DOUBTS
from replication.formats.region import MARKER
from replication.region.region_node import DOUBTS_INTERVAL_S, RegionNode
from tests.replication.audited import Made, Region, held, known, make, opened
from tests.replication.virtual_loop import run

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


def doubt(node: RegionNode, *made: Made) -> None:
    for one in made:
        node._doubt(one.pack, "gone")


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
        doubt(reader, stem, cut, rotten, well)
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
        doubt(reader, stays, gone)
        away = {one.pack.name: region.inner.stored.pop(one.pack.name) for one in (stays, gone)}
        marker = region.inner.stored.pop(MARKER)
        await asyncio.sleep(TOLD_S)
        assert set(known(keeper)) == set(known(reader)) == {stays.id, gone.id}
        region.inner.stored |= {MARKER: marker, stays.pack.name: away[stays.pack.name]}
        await asyncio.sleep(TOLD_S)
        assert set(known(keeper)) == set(known(reader)) == {stays.id}

    tell(monkeypatch, story)
