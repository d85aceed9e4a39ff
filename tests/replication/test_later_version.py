"""What a later version has written is left alone: not taken for damage, not replaced, not deleted, and in nobody's way."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from kvstore.steps import finish
from replication.audit.audit import Report
from replication.audit.orphans import Finding, Kind, Terms
from replication.catalogue.catalogue import Catalogue
from replication.erasure.removed_models import Removal, put_removal
from replication.errors import FormatUnknown
from replication.feed.feed import FeedReader, FeedWriter, Gap
from replication.feed.snapshots import MANIFESTS, PARTS, RETENTION_S, SNAPSHOTS_KEPT, Snapshots
from replication.formats import orders
from replication.formats.announced import Announced
from replication.formats.region import init_region
from replication.formats.segment import FEED, HEADS, head_name, segment_name
from replication.formats.tombstones import TOMBSTONES, Tombstone, bring, bury
from replication.problems import Problems
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects
from tests.replication.audited import Made, Region, known, make, opened
from tests.replication.durable import pack_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.test_doubts import TOLD_S, tell
from tests.replication.test_one_bad_object import SPEC, W
from tests.replication.test_read_through import Wanted
from tests.replication.virtual_loop import run
from tiers.base import Get
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.checksum import digest
from tiers.errors import ObjectKeyUnknown
from tiers.packs.packs import PackHeader, describe


def later(content: bytes) -> bytes:
    """The same, as if a later version had written it."""
    return content[:6] + content[6:8].replace(b"1", b"7") + content[8:]


def make_later(objects: MemoryObjects, folder: str) -> dict[str, bytes]:
    """All that is in a folder."""
    found = {name: later(content) for name, content in objects.stored.items() if name.startswith(folder)}
    objects.stored.update(found)
    return found


def test_a_segment_is_a_gap_that_says_so() -> None:
    """At the first look, and not counted as damage."""

    async def main() -> None:
        objects = MemoryObjects()
        writer = FeedWriter(objects, W, lambda: 1.0, random.Random(0))
        for name in "ab":
            await writer.announce([pack_of([name])])
        make_later(objects, segment_name(W, 1))
        reader = FeedReader(objects, {})
        assert not (await reader.poll()).segments
        assert reader.gaps == {W: Gap(W, 1, 2)} and reader.damaged == 0
        assert "of a later version" in reader.reasons[W]

    run(main())


@pytest.mark.parametrize("folder", [HEADS, FEED])
def test_what_a_writer_has_said_stays(folder: str) -> None:
    """Whether its head or its segments are of a later version, its feed is not made short, whatever covers it."""

    async def main() -> None:
        objects, catalogue = MemoryObjects(clock=asyncio.get_running_loop().time), Catalogue(MemoryRows())
        writer = FeedWriter(objects, W, lambda: 0.0, random.Random(0))
        for name in "abc":
            await writer.announce([pack_of([name])])
        make_later(objects, folder)
        catalogue.jump({W: 3})
        snapshots = Snapshots(objects, lambda: 1.0, random.Random(0))
        for _ in range(SNAPSHOTS_KEPT):
            await snapshots.write(catalogue)
        await asyncio.sleep(2 * RETENTION_S)
        await snapshots.write(catalogue)
        assert await snapshots.retire() == (1, 0, 0, 0)
        assert set(objects.stored) >= {head_name(W), *(segment_name(W, number) for number in (1, 2, 3))}

    run(main())


def test_a_snapshot_stays_with_its_parts() -> None:
    """Older ones of ours go, it does not; who reads takes the newest of ours."""

    async def main() -> None:
        objects, catalogue = MemoryObjects(), Catalogue(MemoryRows())
        catalogue.add_packs([pack_of(["a"])])
        snapshots = Snapshots(objects, lambda: 1.0, random.Random(0))
        await snapshots.write(catalogue)
        theirs = (await snapshots.write(catalogue)).name
        kept = make_later(objects, MANIFESTS + theirs)
        for _ in range(SNAPSHOTS_KEPT):
            newest = await snapshots.write(catalogue)
        make_later(objects, MANIFESTS + (await snapshots.write(catalogue)).name)
        retired = await snapshots.retire()
        assert (retired.snapshots, retired.parts) == (1, 1)
        assert kept.items() <= objects.stored.items() and f"{PARTS}{theirs}/00000000" in objects.stored
        read = await snapshots.read_newest(Catalogue(MemoryRows()))
        assert read is not None and read.name == newest.name

    run(main())


def test_what_is_erased_or_ordered_is_not_written_over() -> None:
    """A tombstone, a removal, an order: FormatUnknown says it, and what was told of the order stays."""

    async def main() -> None:
        objects = MemoryObjects()
        order, stone = (
            orders.Order(models=("m",), made_s=1.0, until_s=9.0),
            Tombstone(tenant="a", watched_until_s=9),
        )
        removal = Removal("m", "r", "me", 1.0, 9)
        await orders.put_order(objects, order)
        await orders.put_progress(objects, order, orders.Progress(who="a", made_s=1.0))
        await bury(objects, stone)
        await put_removal(objects, removal)
        left = {}
        for folder in (orders.ORDERS, TOMBSTONES, removal.name):
            left |= make_later(objects, folder)
        for work in (
            orders.put_order(objects, msgspec.structs.replace(order, until_s=99.0)),
            bury(objects, stone),
            bring(objects, msgspec.structs.replace(stone, serial=1 << 50)),
            put_removal(objects, msgspec.structs.replace(removal, watched_until_s=99)),
        ):
            with pytest.raises(FormatUnknown, match="of a later version"):
                await work
        problems = Problems()
        assert (
            not (await orders.read_orders(objects, {}, problems)).found
            and "later version" in problems.told()[0]
        )
        await orders.clear_over(objects, 1e9)
        assert (
            left.items() <= objects.stored.items()
            and len(await orders.read_all_progress(objects, order)) == 1
        )

    run(main())


def test_packs_are_neither_damaged_nor_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody here has announced, one that lies where an announced one was, and one with a codec that is not known here: an audit
    and a keeper that is told to look at them leave them."""

    async def story(region: Region, keeper: RegionNode, reader: RegionNode) -> None:
        strange, renewed, packed, leaf = (
            make("strange"),
            make("renewed"),
            _packed(make("packed")),
            make("leaf", make("x")),
        )
        await region.announce(renewed, packed)
        await region.put(strange, leaf)
        region.inner.stored[strange.pack.name] = later(strange.content)
        region.inner.stored[renewed.pack.name] = later(renewed.content) + b"more"
        await asyncio.sleep(60)
        report = Report()
        assert keeper.auditing is not None
        audit, told = keeper.auditing._audit, list[Finding]()
        await audit.verify([renewed.id, packed.id], report, told.append)
        assert (report, told) == (Report(), [])
        await reader._doubt(renewed.pack, "gone")
        await asyncio.sleep(TOLD_S)
        await audit.run(Terms(region.clock() + 1.0, restores_all=True), told.append)
        assert {(one.kind, one.pack) for one in told} == {(Kind.STRANGE, strange.pack.name)}
        assert "of a later version" in told[0].reason
        assert known(keeper).keys() == {renewed.id, packed.id}
        assert region.stored() == {one.id for one in (strange, renewed, packed, leaf)}

    tell(monkeypatch, story)


def _packed(made: Made) -> Made:
    """As a codec of a later version makes it."""
    header = msgspec.structs.replace(made.pack.header, codec="later", sizes=(8,) * made.pack.header.count)
    pack, first = describe(header)
    return Made(pack, first + bytes(8 * header.count), None)


def test_a_codec_of_a_later_version_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is not held here for a while, which is told; the keeper of the region is not told, for others can read it."""

    async def main() -> None:
        monkeypatch.setattr(Catalogue, "open", opened({}))
        objects = MemoryObjects("na", lambda: 0.0)
        await init_region(objects, "acme", "na", lambda: 1.0)
        node = await RegionNode.join(objects, "acme", "na", Path("na"), "me", random.Random(0), lambda: 1.0)
        block = digest(b"a")
        header = PackHeader(SPEC, b"", block, digest(16 * block), "later", (8,))
        node.catalogue.add_packs([Announced(describe(header)[0])])
        key, view = SPEC.digest + block, memoryview(bytearray(SPEC.record_bytes))
        assert finish(node.held_steps(SPEC, block, 0)) == 1
        assert await node.fetch([Wanted(key, view)]) == [(Get.MISS, None)]
        assert finish(node.held_steps(SPEC, block, 0)) == 0 and node.doubts.ids and not node.doubts.told
        [problem] = node.problems.all()
        assert problem.kind == "unknown" and "of a later version" in problem.text
        await node.stop()

    run(main())


def test_a_seal_of_a_later_version_is_no_damage() -> None:
    """In a deployment with a key: what is sealed in another manner is refused as what is sealed with another key is, and not judged."""

    async def main() -> None:
        inner = MemoryObjects()
        objects = SealedObjects(inner, Seals([b"k" * 32]), "acme/na")
        await objects.put("orders/x", b"said")
        assert bytes(await objects.get("orders/x")) == b"said"
        make_later(inner, "orders/")
        with pytest.raises(ObjectKeyUnknown, match="later version"):
            await objects.get("orders/x")

    run(main())
