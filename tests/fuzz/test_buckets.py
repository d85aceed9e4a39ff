"""Whatever lies in a bucket: a reader raises the one kind of error of its format, or says what can be true; it takes no more memory than
its bound, and what lies beside is read.

    example ─▶ changed bytes, or nonsense under a checksum that matches ─▶ reader ─▶ applied as a daemon would
"""

from __future__ import annotations

import asyncio
import random
import re
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldstart.errors import ModelError
from coldstart.published import collecting
from replication.catalogue.catalogue import Catalogue
from replication.erasure import removed_models
from replication.errors import CatalogueDamaged, Damaged, MarkerDamaged, RegionError
from replication.feed import snapshots
from replication.feed.snapshots import Snapshots
from replication.formats import (
    carried_out,
    doubts,
    keeping,
    manifests,
    mirror_state,
    nodes,
    orders,
    segment,
    tombstones,
)
from replication.formats.announced import Announced, entry_of
from replication.formats.region import MARKER, init_region, open_region
from replication.formats.removed import Reason, removed
from replication.formats.sealed import PRELUDE_BYTES, seal
from replication.keeper.news_reader import Folders, NewsReader
from replication.models import collecting as signs
from replication.problems import Problems
from replication.store_clock import StoreClock
from tests.fuzz.mutator import INPUTS, changed, nonsense
from tests.objects import MemoryObjects
from tests.replication.durable import pack_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.test_manifests import manifest_of
from tests.running import ROOT
from tiers.base import Get
from tiers.checksum import digest
from tiers.errors import PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.codecs import SPLIT_ZSTD
from tiers.packs.pack_io import fetch_records, put_pack, read_pack, verified_pack
from tiers.packs.packs import Pack, PackHeader, parse

W = "00000000000000aa"
ALLOCATED_MAX = 48 << 20  # of any object here, whatever it says it is


class Format(NamedTuple):
    """name: of the object. good: its content. read: what is done with the place where it lies; raises what it may, and fails
    where something beside it is not read."""

    name: str
    good: bytes
    read: Callable[[MemoryObjects], Awaitable[object]]
    errors: tuple[type[Exception], ...] = ()


def _resealed(chance: random.Random, good: bytes) -> bytes:
    """Something else under a checksum that matches."""
    value = msgspec.msgpack.decode(good[PRELUDE_BYTES : PRELUDE_BYTES + int.from_bytes(good[8:12], "little")])
    return seal(good[:8], nonsense(chance, value))


def _beside(folder: str, write: Callable[[MemoryObjects], Awaitable[object]]) -> tuple[str, bytes]:
    """Name and content of what this writes into a folder."""
    objects = MemoryObjects()
    asyncio.run(_awaited(write(objects)))
    [name] = [name for name in objects.stored if name.startswith(folder)]
    return name, objects.stored[name]


async def _awaited(work: Awaitable[object]) -> None:
    await work


def _applied(packs: list[Announced]) -> None:
    """A daemon's catalogue learns them, finds them, and forgets them."""
    catalogue = Catalogue(MemoryRows())
    for piece in segment.cut(packs):
        catalogue.add_packs(piece)
    for announced in packs:
        header = announced.pack.header
        catalogue.held(header.spec.digest, header.spec.hash_bytes, header.hashes, 0)
        [spot] = catalogue.find([header.spec.digest + header.hash_at(0)])
        assert spot is not None and announced.pack.ranges()
        assert 0 <= announced.stored_s < 1 << 32, "the arena has no room for more"
    list(catalogue.outlived(2.0**39))
    for announced in packs:
        catalogue.remove([removed(announced, Reason.OVER)])


async def _segment(objects: MemoryObjects) -> None:
    _applied(list(segment.decode(objects.stored[segment.segment_name(W, 7)], W, 7).entries))


async def _head(objects: MemoryObjects) -> None:
    head = await segment.HEAD_FORMAT.fetch(objects, segment.head_name(W))
    assert head.number >= 0


async def _snapshot(objects: MemoryObjects) -> None:
    read = await Snapshots(objects, lambda: 0.0, random.Random(0)).read_newest(
        catalogue := Catalogue(MemoryRows())
    )
    assert read is None or all(0 <= number < 1 << 63 for number in catalogue.positions.values())


async def _tombstones(objects: MemoryObjects) -> None:
    await tombstones.bury(objects, tombstones.Tombstone(tenant="other", watched_until_s=9))
    assert "other" in {one.tenant for one in (await tombstones.read_tombstones(objects)).by_key.values()}


async def _behind(objects: MemoryObjects) -> None:
    await tombstones.put_behind(objects, "f" * 32, [b"other"])
    assert tombstones.Behind("f" * 32, [b"other"]) in await tombstones.read_behind(objects, set())


async def _doubted(objects: MemoryObjects) -> None:
    await doubts.put_doubts(objects, "other", [bytes(16)])
    members = await doubts.read_doubts(objects, Problems())
    assert [bytes(16)] in [said.packs for _, said in members.found]


async def _stuck(objects: MemoryObjects) -> None:
    other = keeping.Holder("00000000000000bb", "there", is_mirror=False)
    await keeping.put_stuck(objects, other)
    assert keeping.STUCK + other.life in await keeping.stuck(objects, Problems())


def _removal(model: str) -> removed_models.Removal:
    return removed_models.Removal(model, "r", 1.0, "me", 9)


async def _removals(objects: MemoryObjects) -> None:
    await removed_models.put_removal(objects, _removal("other"))
    assert _removal("other") in (await removed_models.read_removals(objects)).by_key.values()


HOLDER = keeping.Holder(W, "here", is_mirror=True)
TERM = keeping.Term(7, HOLDER, 1)
NEWS = keeping.News(7, HOLDER, 1, 9, {W: 3}, {"orders/": bytes(16)}, listens=True)


async def _news(objects: MemoryObjects) -> None:
    """Who reads them believes them, or looks himself."""
    reader = NewsReader(objects, Problems(), StoreClock())
    await reader.refresh()
    Folders(reader, "orders/").are_due()


CARRIED_OUT = carried_out.CarriedOut("0" * 32, 1, 2.0, 1, ("a lock",))
ORDER = orders.Order(models=("a*",), tenants=("t",), made_s=1.0, until_s=9.0)
OTHER = orders.Order(models=("other",), made_s=1.0, until_s=9.0)


async def _orders(objects: MemoryObjects) -> None:
    await orders.put_order(objects, OTHER)
    assert OTHER in (await orders.read_orders(objects, {})).by_key.values()


async def _progress(objects: MemoryObjects) -> None:
    await orders.put_progress(objects, ORDER, orders.Progress(who="other", made_s=1.0))
    assert "other" in {one.who for one in await orders.read_all_progress(objects, ORDER)}


def _node(writer: str) -> nodes.Node:
    return nodes.Node(
        writer=writer, at_s=1.0, dram_bytes=1, nvme_bytes=2, asked=(nodes.Asked("m", "", 3.0, 1.0),)
    )


async def _nodes(objects: MemoryObjects) -> None:
    await nodes.NODE_FORMAT.put(objects, _node("0" * 16))
    found = (await nodes.read_nodes(objects)).read
    assert "0" * 16 in {one.writer for one in found}
    nodes.durable_share(found, lambda model, tenant: True, lambda model, tenant: True, 1e9)


async def _mirrors(objects: MemoryObjects) -> None:
    await objects.put(
        mirror_state.MIRRORS + "apac",
        mirror_state.MIRROR_STATE_FORMAT.seal(mirror_state.MirrorState(source="apac", at_s=7.0)),
    )
    for state in await mirror_state.read_mirrors(objects):
        mirror_state.judged(state, 1e9)
        await mirror_state.segments_behind(objects, state)


async def _marker(objects: MemoryObjects) -> None:
    region = await open_region(objects, "acme", "eu")
    assert (region.deployment, region.region) == ("acme", "eu") and region.identity


RECORDS = [random.Random(number).randbytes(64) * 4 for number in range(6)]
SPEC = NamespaceSpec(bytes(16), 256, 16, 16, {"model": "m", "tenant": "t"})
HEADER = PackHeader(
    SPEC,
    b"",
    b"".join(digest(f"{n}".encode()) for n in range(6)),
    b"".join(digest(record) for record in RECORDS),
)


def _pack_of(codec: str) -> tuple[Pack, bytes]:
    objects = MemoryObjects()
    pack = asyncio.run(put_pack(objects, HEADER, RECORDS, codec))
    return pack, objects.stored[pack.name]


PLAIN, PACKED = _pack_of(""), _pack_of(SPLIT_ZSTD)


def _pack(pack: Pack) -> Callable[[MemoryObjects], Awaitable[object]]:
    async def read(objects: MemoryObjects) -> None:
        wanted = [(number, memoryview(bytearray(256))) for number in range(6)]
        answers = await fetch_records(objects, pack, wanted)
        for (number, view), answer in zip(wanted, answers, strict=True):
            assert answer in (Get.HIT, Get.CORRUPT), "the place does not fail"
            assert answer is not Get.HIT or view == RECORDS[number]
        for look in (read_pack(objects, SPEC.digest, pack.id), verified_pack(objects, pack)):
            try:
                await look
            except PackDamaged:
                pass

    return read


MODEL = manifest_of(
    {"config.json": [b"{}"], "a/model.safetensors": [b"head", b"tensor", b"head"], "empty": []}
)


async def _model(objects: MemoryObjects) -> None:
    """What is read is unpacked inside its directory, and is as large as it says."""
    manifest = await manifests.read_manifest(objects, "m", "r")
    for file in manifest.files:
        assert not manifests.wrong_of_path(file.path)
        assert sum(chunk.size_bytes for _, chunk in manifest.chunks_of(file)) == file.size_bytes


async def _intent(objects: MemoryObjects) -> None:
    """Who collects keeps what it names, or deletes nothing."""
    kept = manifests.chunk_name(MODEL.chunks[0].sha256)
    await objects.put(kept, b"{}")
    await collecting.collect(objects, 0, lambda *what: None)


async def _lock(objects: MemoryObjects) -> None:
    """Who publishes waits for it, not for ever."""
    assert 0 <= await signs.lasts_s(objects, LOCK) <= signs.LOCK_S


LOCK = signs.COLLECTING + W

FORMATS = {
    "model": Format(MODEL.name, manifests.encode(MODEL), _model, (Damaged,)),
    "intent": Format(manifests.PUBLISHING + W, manifests.encode(MODEL), _intent, (ModelError,)),
    "lock": Format(LOCK, seal(b"KVMCOLL1", signs.Lock(60.0)), _lock),
    "segment": Format(
        segment.segment_name(W, 7),
        segment.encode(segment.Segment(W, 7, 1.0, [pack_of(["a", "b"]), pack_of(["c"], origin="eu")])),
        _segment,
        (Damaged,),
    ),
    "head": Format(segment.head_name(W), segment.encode_head(segment.Head(7, 1.0)), _head, (Damaged,)),
    "tombstone": Format(
        *_beside(
            "tombstones/",
            lambda objects: tombstones.bury(
                objects,
                tombstones.Tombstone(tenant="t", namespaces=(bytes(16),), block_hash=b"b", watched_until_s=9),
            ),
        ),
        _tombstones,
    ),
    "behind": Format(
        *_beside("behind/", lambda objects: tombstones.put_behind(objects, "0" * 32, [], [(b"a", b"b")])),
        _behind,
    ),
    "carried out": Format(
        *_beside("erased/", lambda objects: carried_out.CARRIED_OUT_FORMAT.put(objects, CARRIED_OUT)),
        lambda objects: carried_out.CARRIED_OUT_FORMAT.hint(
            objects, carried_out.CARRIED_OUT + CARRIED_OUT.tombstone
        ),
    ),
    "doubts": Format(
        *_beside("doubts/", lambda objects: doubts.put_doubts(objects, W, [b"a" * 16, b"b" * 16])), _doubted
    ),
    "stuck": Format(*_beside(keeping.STUCK, lambda objects: keeping.put_stuck(objects, HOLDER)), _stuck),
    "removal": Format(
        *_beside(removed_models.REMOVED, lambda objects: removed_models.put_removal(objects, _removal("m"))),
        _removals,
    ),
    "term": Format(
        TERM.name,
        keeping.TERM_FORMAT.seal(TERM),
        lambda objects: keeping.TERM_FORMAT.fetch(objects, TERM.name),
        (Damaged,),
    ),
    "news": Format(keeping.NEWS, keeping.NEWS_FORMAT.seal(NEWS), _news),
    "order": Format(*_beside("orders/", lambda objects: orders.put_order(objects, ORDER)), _orders),
    "progress": Format(
        *_beside(
            "warming/",
            lambda objects: orders.put_progress(objects, ORDER, orders.Progress(who="a", made_s=1.0)),
        ),
        _progress,
    ),
    "node": Format(
        *_beside("nodes/", lambda objects: nodes.NODE_FORMAT.put(objects, _node("1" * 16))), _nodes
    ),
    "mirror": Format(
        mirror_state.MIRRORS + "na",
        mirror_state.MIRROR_STATE_FORMAT.seal(
            mirror_state.MirrorState(
                source="na",
                watermark={W: 3},
                read={W: 4},
                failures=[mirror_state.Failure("00", "no", 1, 2.0)],
                lost_packs=["00"],
                lag_p50_s=1.0,
                oldest_age_s=2.0,
            )
        ),
        _mirrors,
    ),
    "marker": Format(
        *_beside(MARKER, lambda objects: init_region(objects, "acme", "eu", lambda: 7.5)),
        _marker,
        (MarkerDamaged, RegionError),
    ),
    "pack": Format(PLAIN[0].name, PLAIN[1], _pack(PLAIN[0])),
    "pack with a codec": Format(PACKED[0].name, PACKED[1], _pack(PACKED[0])),
}


def _snapshot_formats() -> dict[str, tuple[dict[str, bytes], str]]:
    """What a whole snapshot consists of, and which object of it is changed."""
    objects, catalogue = MemoryObjects(), Catalogue(MemoryRows())
    catalogue.add(segment.Segment(W, 1, 1.0, [pack_of(["a", "b"]), pack_of(["c"])]))
    asyncio.run(_awaited(Snapshots(objects, lambda: 1.0, random.Random(0)).write(catalogue)))
    return {
        kind: (dict(objects.stored), next(name for name in objects.stored if name.startswith(folder)))
        for kind, folder in (("manifest", snapshots.MANIFESTS), ("part", snapshots.PARTS))
    }


fuzzed = settings(
    max_examples=INPUTS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
seeds = st.integers(0, 1 << 62)


@pytest.fixture(scope="module")
def loop() -> Any:
    made = asyncio.new_event_loop()
    tracemalloc.start()
    yield made
    tracemalloc.stop()
    made.close()


def _allowed(
    loop: asyncio.AbstractEventLoop,
    work: Awaitable[object],
    errors: tuple[type[Exception], ...],
    allocated_max: int = ALLOCATED_MAX,
) -> None:
    """It raises nothing else, and takes no more memory than that at a time."""
    tracemalloc.reset_peak()
    before_bytes, _ = tracemalloc.get_traced_memory()
    try:
        loop.run_until_complete(work)
    except errors:
        pass
    _, peak_bytes = tracemalloc.get_traced_memory()
    assert peak_bytes - before_bytes < allocated_max


def test_every_format_is_among_them() -> None:
    """Each first bytes that our rooms give an object of a bucket are those of an example here; what is sealed is what these are."""
    source = "".join(
        path.read_text() for room in ("replication", "tiers/packs") for path in (ROOT / room).rglob("*.py")
    )
    magics = {
        magic.encode().decode("unicode_escape").encode()
        for magic in re.findall(r'= b"(KV[A-Z0-9]{5,6}(?:\\n)?)"', source)
    }
    parts = [stored[name] for stored, name in _snapshot_formats().values()]
    examples = {content[:8] for content in (*(one.good for one in FORMATS.values()), *parts)}
    assert magics - examples == {b"KVPACK2\n"}


@pytest.mark.parametrize("kind", FORMATS)
def test_an_object_of_a_bucket(kind: str, loop: asyncio.AbstractEventLoop) -> None:
    """Whatever became of one object, its reader raises one kind of error at most, within its memory, and reads the others."""
    name, good, read, errors = FORMATS[kind]

    @fuzzed
    @given(seeds)
    def look(seed: int) -> None:
        chance = random.Random(seed)
        content = changed(chance, good)
        if chance.random() < 0.6 and kind != "marker" and not kind.startswith("pack"):
            content = _resealed(chance, good)
        elif kind == "marker" and chance.random() < 0.6:
            content = msgspec.json.encode(nonsense(chance, msgspec.json.decode(good)))
        objects = MemoryObjects()
        objects.stored[name] = content
        objects._names.append(name)
        objects._modified_s[name] = 0.0
        _allowed(loop, read(objects), errors)

    look()


@pytest.mark.parametrize("kind", ["manifest", "part"])
def test_a_snapshot(kind: str, loop: asyncio.AbstractEventLoop) -> None:
    """A snapshot whose manifest or part is not what was written is not taken over, or says what can be true."""
    stored, name = _snapshot_formats()[kind]
    good = stored[name]

    @fuzzed
    @given(seeds)
    def look(seed: int) -> None:
        chance = random.Random(seed)
        objects = MemoryObjects()
        content = _resealed(chance, good) if chance.random() < 0.6 else changed(chance, good)
        whole = {**stored, name: content}
        if kind == "part":  # the manifest knows its checksum, which may be of nonsense as well
            manifest = next(one for one in stored if one.startswith(snapshots.MANIFESTS))
            said = msgspec.msgpack.decode(stored[manifest][PRELUDE_BYTES:])
            said[4] = [[len(content), xxhash.xxh3_128_digest(content)]]
            whole[manifest] = seal(b"KVSNAP1\n", said)
        for one, bytes_ in whole.items():
            loop.run_until_complete(objects.put(one, bytes_))
        _allowed(loop, _snapshot(objects), ())

    look()


def test_the_header_of_a_pack(loop: asyncio.AbstractEventLoop) -> None:
    """A header that says anything at all under an id that matches is a pack that can be, or damaged; its records are verified
    within the memory that they take in the bucket."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(PACKED[0].header))

    @fuzzed
    @given(seeds)
    def look(seed: int) -> None:
        chance = random.Random(seed)
        body = msgspec.msgpack.encode(nonsense(chance, value))
        first = (
            PACKED[1][:8] + len(body).to_bytes(4, "little") + bytes(4) + xxhash.xxh3_128_digest(body) + body
        )
        content = first + PACKED[1][PACKED[0].start :]

        async def verify() -> None:
            pack = parse(content, "here")
            _applied([Announced(pack)])
            objects = MemoryObjects()
            await objects.put(pack.name, content)
            await verified_pack(objects, pack)

        _allowed(loop, verify(), (PackDamaged,))

    look()


def test_rows_of_a_catalogue(loop: asyncio.AbstractEventLoop) -> None:
    """A row that became something else is a catalogue that is damaged, and made anew; or it says what can be true."""
    rows = MemoryRows()
    packs = [pack_of(["a", "b"]), pack_of(["c"])]
    Catalogue(rows).add(segment.Segment(W, 1, 1.0, packs))
    good = dict(rows.content)  # type: ignore[attr-defined]
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(entry_of(packs[0], 0)))

    @fuzzed
    @given(seeds)
    def look(seed: int) -> None:
        chance = random.Random(seed)
        content = dict(good)
        key = chance.choice(sorted(content))
        content[key] = changed(chance, content[key])
        if key.startswith(b"p") and chance.random() < 0.7:
            content[key] = msgspec.msgpack.encode(nonsense(chance, entry))

        async def ask() -> None:
            catalogue = Catalogue(MemoryRows(content))
            await catalogue.load()
            catalogue.find([pack.pack.header.spec.digest + pack.pack.header.hash_at(0) for pack in packs])
            for chunk in catalogue.chunks():
                assert all(one.pack.ranges() for one in chunk)

        _allowed(loop, ask(), (CatalogueDamaged,))

    look()


def _many(count: int) -> list[tuple[str, bytes, object]]:
    """The bodies that have very many parts, each of which says nothing."""
    spec: list[object] = [bytes(16), 64, 16, 0, {str(number): "" for number in range(count // 4)}, b""]
    return [
        (segment.segment_name(W, 7), b"KVFEED1\n", [W, 7, 1.0, [], [None] * count]),
        (segment.segment_name(W, 7), b"KVFEED1\n", [W, 7, 1.0, [None] * count, []]),
        (
            segment.segment_name(W, 7),
            b"KVFEED1\n",
            [W, 7, 1.0, [{"digest": bytes(16), "fields": spec[4]}], []],
        ),
        (mirror_state.MIRRORS + "na", b"KVMIRR1\n", {"source": "na", "lost_packs": [""] * count}),
        (mirror_state.MIRRORS + "na", b"KVMIRR1\n", {"source": "na", "failures": [[]] * count}),
        (
            "nodes/" + W,
            b"KVNODE1\n",
            {"writer": W, "at_s": 1.0, "dram_bytes": 1, "nvme_bytes": 1, "asked": [[]] * count},
        ),
    ]


@pytest.mark.parametrize("number", range(6))
def test_many_parts_that_say_nothing(number: int, loop: asyncio.AbstractEventLoop) -> None:
    """An object of a few hundred kilobytes that consists of nothing but parts is refused before they are made."""
    name, magic, body = _many(300_000)[number]
    content = seal(magic, body)
    objects = MemoryObjects()
    loop.run_until_complete(objects.put(name, content))
    read = {"f": _segment, "n": lambda place: nodes.NODE_FORMAT.hint(place, nodes.NODES + W)}.get(
        name[0], _state_of_na
    )
    errors = () if name[0] == "n" else (Damaged,)
    _allowed(loop, read(objects), errors, 4 << 20)


async def _state_of_na(objects: MemoryObjects) -> object:
    return await mirror_state.read_state(objects, "na")
