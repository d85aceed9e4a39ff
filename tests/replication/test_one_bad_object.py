"""One bad object of a bucket takes nothing else with it: what is wrong with it is told, the others are read, and the place is not
taken for sick."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.steps import finish
from replication.erasure.erased import Erased
from replication.feed.feed import FeedReader, FeedWriter, Gap
from replication.formats import nodes, orders
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState, read_mirrors
from replication.formats.region import MARKER, init_region
from replication.formats.segment import segment_name
from replication.formats.tombstones import TOMBSTONES, Tombstone, bury
from replication.problems import Problems
from replication.region.doubts import DOUBT_S_MAX, DOUBT_S_MIN, Doubts
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects, flip
from tests.replication.durable import pack_of
from tests.replication.mirrored import in_memory
from tests.replication.test_read_through import Wanted
from tests.replication.virtual_loop import run
from tiers.base import Get
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import Objects
from tiers.checksum import digest
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused, ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader

catalogues_in_memory = in_memory  # a fixture of every test here, too
W = "000000000000000a"
SPEC = NamespaceSpec(digest(b"space"), 256, 16, 16, {"tenant": "acme"})


class Way(MemoryObjects):
    """Fails for some objects. bad: by the beginning of a name."""

    def __init__(self) -> None:
        super().__init__("na", lambda: 0.0)
        self.bad: dict[str, ObjectError] = {}

    def _found(self, name: str) -> bytes:
        for beginning, error in self.bad.items():
            if name.startswith(beginning):
                raise error
        return super()._found(name)


async def _persisted(node: RegionNode, names: str) -> list[bytes]:
    """A pack for each name; their keys."""
    keys = []
    for name in names:
        block = digest(name.encode())
        header = PackHeader(SPEC, b"", block, digest(16 * block))
        assert await node.persist(header, [memoryview(16 * block)], 0, 0)
        keys.append(SPEC.digest + block)
    return keys


@pytest.mark.parametrize(
    ("harm", "answer"),
    [
        ("cut", Get.CORRUPT),
        ("empty", Get.CORRUPT),
        ("flipped", Get.CORRUPT),
        ("huge", Get.CORRUPT),
        ("gone", Get.MISS),
        ("refused", Get.MISS),
        ("a bad sector", Get.CORRUPT),
        ("the place refuses", Get.FAILED),
        ("the place is away", Get.FAILED),
        ("the place is empty", Get.FAILED),
        ("the place has lost its marker", Get.FAILED),
        ("the place is another region", Get.FAILED),
    ],
)
def test_a_pack_that_is_bad(harm: str, answer: Get) -> None:
    """A pack that is cut off, refused, gone or wrong is a failure of that pack: it is not held for a while, and the others are read.
    Where the place does not prove to be the place, it is the place that fails. No catalogue forgets anything in either case, and
    what is well again is read again."""

    async def main() -> None:
        way = Way()
        await init_region(way, "acme", "na", lambda: 1.0)
        node = await RegionNode.join(way, "acme", "na", Path("na"), "me", random.Random(0), lambda: 1.0)
        keys = await _persisted(node, "abc")
        await asyncio.sleep(5.0)
        [bad] = [spot.announced.pack.name for spot in node.catalogue.find(keys[:1]) if spot is not None]
        content, everything = way.stored[bad], dict(way.stored)
        if harm in ("cut", "empty", "flipped"):
            way.stored[bad] = {"cut": content[:-1], "empty": b"", "flipped": content[:-1] + b"!"}[harm]
        elif harm == "huge":
            way.stored[bad] = bytes(1 << 20)
        elif harm == "the place is empty":
            way.stored.clear()
        elif harm in ("the place has lost its marker", "the place is another region"):
            await way.delete([bad, MARKER])
            if harm == "the place is another region":
                await init_region(way, "acme", "na", lambda: 2.0)
        elif harm == "gone":
            await way.delete([bad])
        elif harm in ("refused", "the place refuses"):
            way.bad[bad if harm == "refused" else ""] = ObjectRefused("403")
        elif harm == "a bad sector":
            way.bad[bad] = ObjectDamaged("I/O error")
        else:
            way.bad[""] = ObjectUnavailable("no answer")
        views = [bytearray(SPEC.record_bytes) for _ in keys]
        for expected in (
            answer,
            Get.FAILED if answer is Get.FAILED else Get.MISS,
        ):  # what is doubted is not asked for
            answers = await node.fetch(
                [Wanted(key, memoryview(view)) for key, view in zip(keys, views, strict=True)]
            )
            assert answers[0][0] is expected
            if harm not in ("the place has lost its marker", "the place is another region"):
                others = answer if answer is Get.FAILED else Get.HIT
                assert {result for result, _ in answers[1:]} == {others}
            held = [finish(node.held_steps(SPEC, key[16:], 0)) for key in keys]
            assert held == [int(answer is Get.FAILED), 1, 1]
        assert None not in node.catalogue.find(keys)
        way.stored, way.bad = everything, {}
        await asyncio.sleep(DOUBT_S_MIN)
        answers = await node.fetch(
            [Wanted(key, memoryview(view)) for key, view in zip(keys, views, strict=True)]
        )
        assert {result for result, _ in answers} == {Get.HIT} and not node.doubts.ids
        await node.stop()

    run(main())


@pytest.mark.parametrize(
    "error", [ObjectRefused("403"), ObjectDamaged("cut"), ObjectUnavailable("500")], ids=repr
)
def test_a_tombstone_that_cannot_be_read_hides_no_other(error: ObjectError) -> None:
    """The others are known and in force; that one is a problem as long as it is there, and is read when it can be. What may be
    readable later keeps others from believing that all is known."""

    async def main() -> None:
        way, erased = Way(), Erased(lambda: 1.0)
        names = []
        for tenant in "abc":
            await bury(way, stone := Tombstone(tenant=tenant, watched_until_s=9))
            names.append(TOMBSTONES + stone.id)
        way.bad[names[1]] = error
        await way.put(TOMBSTONES + "a note.txt", b"x")
        assert {stone.tenant for stone in await erased.look(way)} == {"a", "c"}
        assert erased.is_read == (not isinstance(error, ObjectUnavailable))
        told = "\n".join(erased.problems.told())
        assert names[1] in told and "a note.txt" in told and len(erased.problems) == 2
        way.bad.clear()
        await way.delete([TOMBSTONES + "a note.txt"])
        assert [stone.tenant for stone in await erased.look(way)] == ["b"]
        assert erased.is_read and not erased.problems

    run(main())


STRAYS = (
    "a note.txt",
    "é",
    "..",
    "0" * 32,
    "sub/" + "0" * 32,
    "f" * 31 + "G",
    "0000000000000000",
    "mirror-x",
    "x" * 300,
)
ORDER = orders.Order(models=("m",), made_s=1.0, until_s=9.0)


async def _read_orders(objects: Objects) -> bool:
    await orders.put_order(objects, ORDER)
    return ORDER in (await orders.read_orders(objects, {}, Problems())).by_key.values()


async def _read_progress(objects: Objects) -> bool:
    await orders.put_progress(objects, ORDER, orders.Progress(who="a", made_s=1.0))
    return "a" in {one.who for one in await orders.read_all_progress(objects, ORDER)}


async def _read_nodes(objects: Objects) -> bool:
    await nodes.NODE_FORMAT.put(objects, nodes.Node(writer=W, at_s=1.0, dram_bytes=1, nvme_bytes=1))
    return W in {node.writer for node in (await nodes.read_nodes(objects)).read}


async def _read_mirrors(objects: Objects) -> bool:
    await objects.put(MIRRORS + "eu", MIRROR_STATE_FORMAT.seal(MirrorState(source="eu", at_s=7.0)))
    return 7.0 in {state.at_s for state in await read_mirrors(objects)}


async def _read_feed(objects: Objects) -> bool:
    writer = FeedWriter(objects, W, lambda: 1.0, random.Random(0))
    await writer.announce([pack_of(["a"])])
    reader, found = FeedReader(objects, {}), 0
    for _ in range(3):
        found += len((await reader.poll()).segments)
    return found == writer.number


FOLDERS: dict[str, Callable[[Objects], Awaitable[bool]]] = {
    "orders/": _read_orders,
    f"warming/{ORDER.id}/": _read_progress,
    "nodes/": _read_nodes,
    "mirrors/": _read_mirrors,
    "heads/": _read_feed,
    f"feed/{W}/": _read_feed,
}


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("stray", STRAYS)
def test_a_stray_object_hides_no_member(folder: str, stray: str) -> None:
    """Whatever else lies in a folder, under whatever name, its members are read."""

    async def main() -> None:
        objects = Way()
        await objects.put(folder + stray, b"x")
        assert await FOLDERS[folder](objects)

    run(main())


def test_nodes_are_read_as_they_were_told() -> None:
    """What is damaged, of another name or not handed out is told with the writer, since when and why; what is no node is passed over."""

    async def main() -> None:
        objects = Way()
        node = nodes.Node(
            writer=16 * "a", at_s=1.0, dram_bytes=1, nvme_bytes=2, asked=(nodes.Asked("m", "", 3.0, 1.0),)
        )
        await nodes.NODE_FORMAT.put(objects, node)
        content = objects.stored[nodes.NODES + node.writer]
        says = {"b": "says it is nodes/aaaa", "c": "checksum", "d": "answers 403", "e": "no answer"}
        for name, written in zip("bcde", (content, flip(content, 300), content, content), strict=True):
            await objects.put(nodes.NODES + 16 * name, written)
        await objects.put(nodes.NODES + "a note.txt", b"x")
        objects.bad = {
            nodes.NODES + 16 * "d": ObjectRefused("the store answers 403"),
            nodes.NODES + 16 * "e": ObjectUnavailable("no answer"),
        }
        told = await nodes.read_nodes(objects)
        [found] = told.read
        assert (found.writer, list(found.asked)) == (node.writer, list(node.asked))
        assert [one.writer[0] for one in told.unread] == list(says)
        assert all(says[one.writer[0]] in one.reason and one.at_s == 0.0 for one in told.unread), told
        await objects.delete([nodes.NODES + node.writer])
        with pytest.raises(ObjectUnavailable):
            await nodes.read_nodes(objects)

    run(main())


def test_strays_in_a_real_directory(tmp_path: Path) -> None:
    """The same of a directory, whose listing ends at a name that no object can have."""

    async def main() -> None:
        objects = open_objects(f"file://{tmp_path}")
        for folder, read in FOLDERS.items():
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            for name in ("a note.txt", "x\ny", ".hidden", "id#1"):
                (tmp_path / folder / name).write_text("x")
            assert await read(objects), folder

    asyncio.run(main())


def test_a_segment_that_is_refused_is_a_gap() -> None:
    """A segment that the store keeps to itself hides its writer for some looks and then counts as gone, in words; it is no gap any
    more when it can be read again. Other writers are read meanwhile."""

    async def main() -> None:
        way, other = Way(), "000000000000000b"
        for name in (W, other):
            writer = FeedWriter(way, name, lambda: 1.0, random.Random(0))
            for number in range(3):
                await writer.announce([pack_of([f"{name} {number}"])])
        way.bad[segment_name(W, 2)] = ObjectRefused("the store answers 403")
        reader = FeedReader(way, {})
        for _ in range(20):
            await reader.poll()
        assert reader.positions == {W: 1, other: 3}
        assert reader.gaps == {W: Gap(W, 2, 3)} and "403" in reader.reasons[W]
        way.bad.clear()
        reader.ask_all()
        for _ in range(4):
            await reader.poll()
        assert reader.positions == {W: 3, other: 3} and not reader.gaps

    run(main())


def test_doubts_end_a_prefix_where_they_begin() -> None:
    """Behind a hole nothing is held, whatever the catalogue says, until it is asked for again, later each time, or put again; a block
    that another pack has is no hole."""
    packs = [pack_of([number]) for number in range(3)]
    spec, hashes = packs[0].pack.header.spec, b"".join(pack.pack.header.hashes for pack in packs)
    now_s, middle = 0.0, packs[1].pack
    doubts = Doubts(lambda: now_s)
    assert doubts.add(middle, middle.header.each_hash()) and not doubts.add(middle, ())
    assert [doubts.end(spec, hashes, start, 3) for start in (0, 1, 2)] == [1, 1, 3] and doubts.ids == {
        middle.id
    }
    for pause_s in (DOUBT_S_MIN, 2 * DOUBT_S_MIN, 4 * DOUBT_S_MIN, *[DOUBT_S_MAX] * 5):
        is_last = pause_s == DOUBT_S_MAX
        if not is_last:
            now_s += pause_s - 1
            assert doubts.end(spec, hashes, 0, 3) == 1
        now_s += DOUBT_S_MAX if is_last else 1
        assert doubts.end(spec, hashes, 0, 3) == 3 and not doubts.ids
        assert not doubts.add(middle, middle.header.each_hash()) and doubts.end(spec, hashes, 0, 3) == 1
    assert doubts.over(middle.id) and doubts.end(spec, hashes, 0, 3) == 3 and not doubts.over(middle.id)
    assert doubts.add(middle, ()) and doubts.end(spec, hashes, 0, 3) == 3
