"""A bucket in hostile hands: with a key of the deployment nobody gets a wrong byte, nothing is erased that nobody of the deployment
erased, no task of a daemon or a mirror ends, and each object that is not believed is told once."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from replication.erasure.erased import Erased
from replication.errors import MarkerDamaged
from replication.feed.snapshots import Snapshots
from replication.formats.announced import Announced
from replication.formats.keeping import BELL
from replication.formats.manifests import CHUNKS
from replication.formats.region import open_region
from replication.formats.segment import Segment, encode
from replication.formats.tombstones import Tombstone, bury
from replication.mirror.resealing import reseal
from replication.region.region_node import RegionNode
from tests.objects import MemoryObjects
from tests.replication.hostile.world import (
    ATTACKS,
    FORGERIES,
    KEY,
    KINDS,
    OTHER_KEY,
    RECORD_BYTES,
    STARTED_S,
    Attack,
    Forgery,
    World,
    forge_model,
    forge_records,
    forge_removal,
    forge_tombstone,
    hostile_ways,
    kind_of,
    spec_of,
)
from tests.replication.mirrored import in_memory
from tests.replication.virtual_loop import run
from tiers.base import Get
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.checksum import digest
from tiers.errors import ObjectKeyUnknown, PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs import pack_io
from tiers.packs.codecs import SPLIT_ZSTD
from tiers.packs.packs import PACKS, PackHeader, describe

catalogues_in_memory = in_memory  # a fixture of every test here, too
SEEDS = int(os.environ.get("ROUNDS", "1"))  # of each attack; `make soak` asks for more
PROCESSES = 5  # two daemons, a mirror's two sides, and whoever asks
# The bell says nothing; chunks are known by SHA-256; packs have tags, and misses are counted.
WITHOUT_SEAL = {BELL, CHUNKS, PACKS}
READS_MAX = 400  # of one bad object, in ten minutes, by three processes that look every few seconds


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_objects_that_somebody_else_has_written(
    attack: Attack, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All objects of a region, or, with other seeds, some, are replaced by something else: what a daemon that knew the region, a new
    one, and the region of a mirror hand out is true or nothing, and all of them go on."""
    chance = random.Random(f"{attack.__name__} {seed}")
    share = 0.2 if seed % 2 else 1.0
    told = _told(attack, chance, lambda name: chance.random() < share, caplog)
    assert told or attack.__name__ == "replayed" or share < 1, "nothing was told"


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_object(kind: str, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The same of each kind that our code has a name for, alone; an attack for each, and the others with other seeds. What has a seal
    is told of where somebody reads it."""
    attack = ATTACKS[(KINDS.index(kind) + seed) % len(ATTACKS)]
    chance = random.Random(f"{attack.__name__} {kind} {seed}")
    told = _told(attack, chance, lambda name: kind_of(name) == kind, caplog)
    assert told or kind in WITHOUT_SEAL or attack.__name__ == "replayed", "nothing was told"


def _told(
    attack: Attack, chance: random.Random, is_bad: Callable[[str], bool], caplog: pytest.LogCaptureFixture
) -> set[str]:
    """Which of the objects that somebody has replaced a line of the log names; all processes go on."""
    caplog.set_level(logging.WARNING)
    bad = set[str]()

    async def main() -> None:
        world = World()
        await world.make()
        far = await world.mirror()
        await asyncio.sleep(60.0)
        older = dict(world.na.stored)
        await world.persist(world.nodes[0], "tenant-b", "ef")
        await asyncio.sleep(60.0)
        assert await world.fetch(world.nodes[0]) == await world.fetch(far) == world.true
        await world.put_passing()
        assert {kind_of(name) for name in world.na.stored} == set(KINDS), "an object of each kind is there"
        bad.update(filter(is_bad, sorted(world.na.stored)))
        for name in sorted(bad):
            world.na.stored[name] = attack(chance, name, world, older)
        world.na.reads.clear()
        try:
            await world.join("na", "two")
        except MarkerDamaged:
            pass  # a daemon serves without a region then, and looks again
        for _ in range(2):
            await world.look()
            await asyncio.sleep(300.0)
            for node in world.nodes:
                for key, record in (await world.fetch(node)).items():
                    assert record in (None, world.true[key]), "a wrong byte"
        assert await world.weights() in (None, world.true_weights)
        assert await world.fetch(far) == world.true, "eu is not na"
        assert max(world.na.reads.values(), default=0) < READS_MAX
        await world.stop()

    run(main())
    told = Counter((record.args or ("", ""))[1] for record in caplog.records if record.name == "tiers.seals")
    assert all(count <= PROCESSES for count in told.values()), "each process tells of an object once"
    assert set(told) <= bad
    return {name for name in bad if name in told or f" {name}: " in caplog.text}


async def _after(forge: Forgery, key: bytes | None, way: int = 0) -> tuple[World, RegionNode]:
    """A world in which something was forged, and a daemon that came afterwards, some minutes later."""
    world = World(key)
    await world.make()
    await world.mirror()
    await asyncio.sleep(60.0)
    await forge(hostile_ways(world)[way], world)
    await asyncio.sleep(60.0)
    node = await world.join("na", "two")
    for _ in range(2):
        await asyncio.sleep(60.0)
        await world.fetch(node)
    return world, node


@pytest.mark.parametrize("way", range(3))
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_what_is_forged_is_not_believed(forge: Forgery, way: int, caplog: pytest.LogCaptureFixture) -> None:
    """Whole and by the book, with checksums that match, without a seal or sealed with another key: with a key all that was true is
    there, but for what was deleted; nothing is erased, nobody gets other weights, and it is told and counted."""

    async def main() -> None:
        world, node = await _after(forge, KEY, way)
        deleted = spec_of("tenant-a").digest if forge is forge_records else b"-"
        for key, record in (await world.fetch(node)).items():
            assert record == (None if key.startswith(deleted) else world.true[key])
        if forge is forge_removal:
            assert "models/manifests/m/r" in world.eu.stored, "it was copied, and not removed"
        weights = await world.weights()
        assert weights == (None if forge is forge_model else world.true_weights)
        assert node.status()["untrusted_objects"] or forge in (forge_model, forge_removal)
        await world.stop()

    run(main())
    assert any("not believed" in record.message for record in caplog.records)


def test_without_a_key_it_is_believed() -> None:
    """What the key is for: of the same forgeries, each one works where there is none."""

    async def main() -> None:
        world, node = await _after(forge_records, None)
        assert b"wrong!!!" * (RECORD_BYTES // 8) in (await world.fetch(node)).values()
        await world.stop()
        world, node = await _after(forge_tombstone, None)
        assert list((await world.fetch(node)).values()).count(None) == 8, "tenant-a is erased"
        await world.stop()
        world, node = await _after(forge_model, None)
        assert await world.weights() not in (None, world.true_weights)
        await world.stop()
        world, node = await _after(forge_removal, None)
        assert not [name for name in world.eu.stored if name.startswith("models/manifests/")], (
            "it was removed"
        )
        await world.stop()

    run(main())


def test_a_record_whose_checksum_was_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds other bytes with the same xxh3 has a hit without a key, and none with one; a decoder never sees them."""

    async def fetched(key: bytes | None) -> Get:
        world = World(key)
        await world.make()
        way, block = world.way(world.na, "na"), digest(b"block")
        record = bytes(range(256))
        header = PackHeader(spec_of("tenant-a"), b"", block, digest(record))
        pack = await pack_io.put_pack(way, header, [record])
        world.na.stored[pack.name] = world.na.stored[pack.name][: -len(record)] + b"w" * len(record)
        with monkeypatch.context() as patched:
            patched.setattr(pack_io, "copy_and_digest", lambda jobs, columns: [digest(record) for _ in jobs])
            [answer] = await pack_io.fetch_records(way, pack, [(0, memoryview(bytearray(len(record))))])
        await world.stop()
        return answer

    async def main() -> None:
        assert (await fetched(None), await fetched(KEY)) == (Get.HIT, Get.CORRUPT)

    run(main())


class InPlace(MemoryObjects):
    """Receives in the caller's memory, as S3 does."""

    async def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        for view in views:
            view[:] = self.stored[name][start : start + len(view)]
            start += len(view)
        return True


def test_records_that_are_received_where_they_belong() -> None:
    """Of a large run that is not copied, each record that was changed is found, and no other; so it is where whole packs are
    verified, and where they are compressed."""

    async def main() -> None:
        raw, size, count = InPlace(), 64 << 10, 32
        way = SealedObjects(raw, Seals([KEY]), "acme/na")
        records = [digest(bytes([number])) * (size // 16) for number in range(count)]
        spec = NamespaceSpec(b"n" * 16, size, 16, 16, {})
        hashes, checksums = (b"".join(map(digest, made)) for made in (map(digest, records), records))
        for codec in ("", SPLIT_ZSTD):
            pack = await pack_io.put_pack(way, PackHeader(spec, b"", hashes, checksums), records, codec)
            wanted = [(number, memoryview(bytearray(size))) for number in range(count)]
            assert await pack_io.fetch_records(way, pack, wanted) == [Get.HIT] * count
            await pack_io.verified_pack(way, pack)
            content = bytearray(raw.stored[pack.name])
            content[pack.ranges()[7][0] + 5] ^= 1
            raw.stored[pack.name] = bytes(content)
            found = await pack_io.fetch_records(way, pack, wanted)
            assert [number for number, one in enumerate(found) if one is not Get.HIT] == [7]
            with pytest.raises(PackDamaged, match="record 7"):
                await pack_io.verified_pack(way, pack)
            unsealed = msgspec.structs.replace(pack, header=msgspec.structs.replace(pack.header, tags=b""))
            assert set(await pack_io.fetch_records(way, unsealed, wanted)) == {Get.UNKNOWN}

    asyncio.run(main())


def test_names_are_not_in_the_bucket() -> None:
    """With a key no object has the name of a tenant or of a model that computes in it; without, some have."""

    async def main() -> None:
        for key in (KEY, None):
            world = World(key)
            await world.make()
            contents = b"".join(world.na.stored.values()) + repr(sorted(world.na.stored)).encode()
            assert (b"tenant-a" in contents, b"secret-model" in contents) == (key is None, key is None)
            await world.stop()

    run(main())


def test_without_a_key_nothing_is_written_anew() -> None:
    """Packs and segments have the very bytes that versions wrote which know no key."""
    spec = NamespaceSpec(b"n" * 16, 64, 16, 16, {"model": "m", "tenant": "t"})
    plain = PackHeader(spec, b"", b"h" * 32, b"c" * 32)
    shorter = PackHeader(spec, b"p" * 16, b"h" * 32, b"c" * 32, SPLIT_ZSTD, (40, 50))
    made = [describe(plain), describe(shorter)]
    said = [Announced(pack, 5, "eu", 9) for pack, _ in made]
    content = b"".join(first for _, first in made) + encode(Segment("a" * 16, 7, 1.0, said))
    assert hashlib.sha256(content).hexdigest().startswith("14ee5c965bd6d6f45f293fc86fdc2a14")


def test_a_key_is_replaced() -> None:
    """A new first key: what the older one sealed is read as long as it is in the file; after `reseal` all but packs is read
    without it, what needs it is left alone, and the marker names the region as before."""

    async def main() -> None:
        world = World()
        await world.make()
        before = await open_region(world.way(world.na, "na"), "acme", "na")
        world.seals = Seals([OTHER_KEY, KEY])
        node = await world.join("na", "two")
        await asyncio.sleep(20.0)
        assert await world.fetch(node) == world.true
        both = world.way(world.na, "na")
        assert isinstance(both, SealedObjects)
        done = await reseal(both)
        assert (done.left, done.resealed > 10) == (0, True)
        assert (await reseal(both)).resealed == 0
        await world.persist(node, "tenant-a", "gh")
        await asyncio.sleep(20.0)
        packs = {name for name in world.na.stored if name.startswith(PACKS)}
        world.seals = Seals([OTHER_KEY])
        assert (await open_region(world.way(world.na, "na"), "acme", "na")).identity == before.identity
        late = await world.join("na", "three")
        await asyncio.sleep(600.0)
        assert await world.weights() == world.true_weights
        found = {key for key, record in (await world.fetch(late)).items() if record is not None}
        assert len(found) == 2, "what the new key has sealed"
        assert packs <= world.na.stored.keys()
        await world.stop()

    run(main())


def test_a_key_that_is_not_in_the_file() -> None:
    """Nobody takes it for damaged, and deletes it: but for the marker, without which a daemon goes on."""

    async def main() -> None:
        world = World()
        await world.make()
        other = SealedObjects(world.na, Seals([OTHER_KEY]), "acme/na")
        for name in ("heads/", "tombstones/"):
            [page] = [page async for page in other.list(name)]
            with pytest.raises(ObjectKeyUnknown, match="not in key_file"):
                await other.get(page[0].name)
        with pytest.raises(MarkerDamaged, match="not in key_file"):
            await open_region(other, "acme", "na")
        with pytest.raises(MarkerDamaged, match="no key_file"):
            await open_region(world.na, "acme", "na")
        plain = World(None)
        await plain.make()
        with pytest.raises(MarkerDamaged, match="it has no seal"):
            await open_region(world.way(plain.na, "na"), "acme", "na")
        await world.stop()
        await plain.stop()

    run(main())


def test_a_tombstone_of_an_older_day() -> None:
    """One whose time is over erases nothing, whoever puts it again; an older one of the same subject shortens nothing."""

    async def main() -> None:
        objects, now_s = MemoryObjects(), STARTED_S
        erased = Erased(lambda: now_s)
        await bury(objects, Tombstone(tenant="a", watched_until_s=int(now_s) + 10))
        older = dict(objects.stored)
        await bury(objects, Tombstone(tenant="a", watched_until_s=int(now_s) + 1000))
        assert len(await erased.look(objects)) == 1
        objects.stored |= older
        await erased.look(objects)
        now_s += 100
        assert [one.watched_until_s for one in erased.tombstones] == [STARTED_S + 1000]
        assert await Erased(lambda: now_s).look(objects) == []

    run(main())


@pytest.mark.parametrize("key", [KEY, None])
def test_names_that_are_far_ahead(key: bytes | None) -> None:
    """Names have no seal: a number behind which there is none, put into the feed of a daemon and among snapshots, keeps nobody from
    telling the next pack, or from writing a snapshot that others find. Without a key, too."""

    async def main() -> None:
        world = World(key)
        await world.make()
        writer = world.nodes.pop().writer
        world.tasks.pop().cancel()
        await world.na.put(f"feed/{writer}/7fffffffffffffff", b"junk")
        await world.na.put("snapshots/manifests/7fffffffffffffff-00000000", b"junk")
        other, again = await world.join("na", "two"), await world.join("na", "one")
        await world.persist(again, "tenant-a", "xy")
        await asyncio.sleep(60.0)
        assert await world.fetch(other) == world.true
        snapshots = Snapshots(world.way(world.na, "na"), world.clock, random.Random(1))
        written = await snapshots.write(again.catalogue)
        found = await snapshots.newest()
        assert found is not None and found.name == written.name
        await world.stop()

    run(main())
