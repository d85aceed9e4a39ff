"""Collecting, with everybody at once: publishers, collectors and removals, killed at any request, over a store that is late.

MemoryObjects, which looks after each change whether a manifest lacks a chunk
  ◀── FaultyObjects: late, lost, twice, failed ◀── Mortal: dies at one of its requests ◀── publisher, collector, removal
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
import pytest

from coldstart.errors import ModelError, ModelExists
from coldstart.published import collecting
from coldstart.published.collecting import COLLECTING, INTENT_S, LOCK_S, collect
from coldstart.published.models import remove
from coldstart.published.publish import Stored, store
from replication.formats.manifests import (
    CHUNKS,
    MANIFESTS,
    PUBLISHING,
    Chunk,
    Manifest,
    encode,
    manifest_name,
)
from replication.models import collecting as signs
from replication.models.collecting import Intent, publishing
from replication.models.published import Published, published
from tests.coldstart.model_files import chunk_names, lacking, manifests, names_in, silent
from tests.objects import Faults, FaultyObjects, MemoryObjects
from tests.replication.test_manifests import chunk_of, manifest_of
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes, ObjectInfo, Objects, Range
from tiers.errors import ObjectError, ObjectRefused, ObjectUnavailable

T = TypeVar("T")
SEEDS = int(os.environ.get("SEEDS", "40"))  # no fewer: what happens must have happened often enough
LATE_S = 25.0  # less than a lock stays behind the last delete
ACTORS, ACTS = 4, 12
POOL = [random.Random(number).randbytes(20 + number) for number in range(24)]
BYTES = {chunk_of(content): content for content in POOL}


class Watched(MemoryObjects):
    """No manifest ever lacks a chunk. A manifest that was deleted does not come back by the same put, done once more behind that: in
    a region a removal keeps it away, and a bucket without regions has no means against that."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(clock=lambda: 1e9 + loop.time())
        self._deleted: set[bytes] = set()

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if name.startswith(MANIFESTS) and content in self._deleted:
            return False
        done = await super().put(name, content, only_new)
        if name.startswith(MANIFESTS):
            assert not lacking(self), f"put {name}"
        return done

    async def delete(self, names: Sequence[str]) -> None:
        self._deleted.update(
            self.stored[name] for name in names if name.startswith(MANIFESTS) and name in self.stored
        )
        await super().delete(names)
        if any(name.startswith(CHUNKS) for name in names):
            assert not lacking(self), f"deleted {names}"


class Killed(BaseException):
    """As kill -9: nothing that is called afterwards is done."""


class Mortal(Objects):
    """One process's way to the store. requests_left: then it is dead; its last request may have been done."""

    def __init__(self, inner: Objects, chance: random.Random, requests_left: int) -> None:
        self.where = inner.where
        self.requests_left = requests_left
        self._inner = inner
        self._chance = chance

    async def _one(self, work: Callable[[], Awaitable[T]]) -> T:
        self.requests_left -= 1
        if self.requests_left < 0 or (self.requests_left == 0 and self._chance.random() < 0.5):
            self.requests_left = 0
            raise Killed
        done = await work()
        if self.requests_left <= 0:
            raise Killed
        return done

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        return await self._one(lambda: self._inner.put(name, content, only_new))

    async def get(self, name: str) -> memoryview:
        return await self._one(lambda: self._inner.get(name))

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        return await self._one(lambda: self._inner.get_ranges(name, ranges))

    async def head(self, name: str) -> ObjectInfo:
        return await self._one(lambda: self._inner.head(name))

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        async for page in self._inner.list(prefix, after):
            await self._one(lambda: asyncio.sleep(0))
            yield page

    async def folders(self, prefix: str) -> Sequence[str]:
        return await self._one(lambda: self._inner.folders(prefix))

    async def delete(self, names: Sequence[str]) -> None:
        await self._one(lambda: self._inner.delete(names))


class World:
    """What happened. ends: how often each actor's acts ended how."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bucket = Watched()
        faults = Faults(failed=0.004, lost=0.004, late=0.01, twice=0.1, delay_s=4.0, late_s=LATE_S)
        self.store = FaultyObjects(self.bucket, random.Random(seed + 1), faults)
        self.pause_s = self.chance.choice([30, 300])  # at most, between two acts of one
        self.ends: Counter[str] = Counter()

    def mortal(self) -> Mortal:
        """A process, every third of which is killed."""
        lives = self.chance.randrange(1, 40) if self.chance.random() < 0.3 else 1 << 30
        return Mortal(self.store, self.chance, lives)

    def revision(self) -> Manifest:
        """Some of the chunks, under a name that others may use, too; or under one of its own."""
        pieces = self.chance.sample(POOL, self.chance.randrange(1, 8))
        made = manifest_of({f"file{n}": [piece] for n, piece in enumerate(pieces)})
        revision = self.chance.choice([f"r{made.content.hex()[:12]}", "v1", "v2"])
        return msgspec.structs.replace(made, revision=revision)

    async def publish(self) -> None:
        manifest = self.revision()

        async def read(chunk: Chunk) -> bytes:
            await asyncio.sleep(self.chance.random() * 3)
            return BYTES[chunk]

        stored = await store(self.mortal(), manifest, read, self.chance.random() < 0.1, silent)
        assert stored.manifest.content == manifest.content

    async def collect(self) -> None:
        done = await collect(self.mortal(), self.chance.choice([0, 0, 30, 3600]), silent)
        self.ends["chunks collected"] += done.deleted

    async def remove(self) -> None:
        if there := await published(self.bucket):
            await remove(self.mortal(), self.chance.choice(there))

    async def act(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        for _ in range(ACTS):
            await asyncio.sleep(self.chance.random() * self.pause_s)
            try:
                await work()
                self.ends[name] += 1
            except (ObjectError, ModelExists, Killed) as error:
                self.ends[f"{name}: {type(error).__name__}"] += 1


async def _lived(seed: int) -> Counter[str]:
    world = World(seed)
    work = {"publish": world.publish, "collect": world.collect, "remove": world.remove}
    await asyncio.gather(*(world.act(name, each) for name, each in work.items() for _ in range(ACTORS)))
    await world.store.settle()
    await asyncio.sleep(INTENT_S + LOCK_S)
    await collect(world.bucket, 0, silent)
    await asyncio.sleep(LOCK_S)
    await collect(world.bucket, 0, silent)
    named = {chunk.name for manifest in manifests(world.bucket) for chunk in manifest.chunks}
    assert chunk_names(world.bucket) == named and not lacking(world.bucket)
    left = [name for name in world.bucket.stored if name.startswith((PUBLISHING, COLLECTING))]
    assert len(left) <= 1, "the lock of the last collection at most"
    return world.ends


def _clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collecting, signs):
        monkeypatch.setattr(module, "boot_s", lambda: asyncio.get_running_loop().time())


def test_no_manifest_ever_lacks_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they do at once, wherever they are killed, however late the store is; and in the end nothing is left that nobody names."""
    _clock_of_the_loop(monkeypatch)
    ends: Counter[str] = Counter()
    for seed in range(max(40, SEEDS)):
        ends += run(_lived(seed))
    for often in (
        "publish",
        "collect",
        "remove",
        "publish: Killed",
        "collect: Killed",
        "publish: ModelExists",
    ):
        assert ends[often] >= 10, ends
    assert ends["chunks collected"] >= 100, ends


async def _revision(objects: MemoryObjects, *pieces: bytes, revision: str = "v1") -> Stored:
    manifest = manifest_of({f"f{n}": [piece] for n, piece in enumerate(pieces)}, revision=revision)
    contents = {chunk_of(piece): piece for piece in pieces}

    async def read(chunk: Chunk) -> bytes:
        return contents[chunk]

    return await store(objects, manifest, read, False, silent)


def test_what_two_revisions_share_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a revision that is removed only that goes which no other one has; young chunks stay; a dry run deletes nothing."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        objects = Watched()
        await _revision(objects, b"shared", b"old", revision="v1")
        await _revision(objects, b"shared", b"new", revision="v2")
        await objects.put(CHUNKS + "strange", b"whose?")
        await remove(objects, Published("m", "v1", "", manifest_name("m", "v1"), 0.0))
        dry = await collect(objects, 0, silent, dry_run=True)
        assert (dry.manifests, dry.named, dry.deleted, dry.deleted_bytes) == (1, 2, 1, 3)
        assert len(chunk_names(objects)) == 4 and not await names_in(objects, COLLECTING)
        young = await collect(objects, 10, silent)
        assert (young.deleted, young.young) == (0, 1)
        await asyncio.sleep(11)
        done = await collect(objects, 10, silent)
        assert (done.deleted, done.deleted_bytes, done.left) == (1, 3, 0)
        assert chunk_names(objects) == {chunk_of(b"shared").name, chunk_of(b"new").name, CHUNKS + "strange"}

    run(main())


def test_what_cannot_be_deleted_stops_no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage that stays is counted; what an intent names that is over, and stays, is kept: who put it may go on."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        objects = Watched()
        for piece in (b"a", b"b", b"c", b"named"):
            await objects.put(chunk_of(piece).name, piece)
        intent = Intent(objects, manifest_of({"f": [b"named"]}), "me")
        await intent.put()
        await asyncio.sleep(INTENT_S + 1)
        kept = {intent.name, chunk_of(b"b").name}

        class Locked(FaultyObjects):
            async def delete(self, names: Sequence[str]) -> None:
                if not kept.isdisjoint(names):
                    raise ObjectRefused("a lock")
                await super().delete(names)

        done = await collect(Locked(objects, random.Random(0), Faults()), 0, silent)
        assert (done.deleted, done.left, done.named) == (2, 1, 1)
        assert chunk_names(objects) == {chunk_of(b"b").name, chunk_of(b"named").name}

    run(main())


def test_who_publishes_waits_for_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed while it deleted runs out by the store's clock; until then nobody believes that a chunk is there."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        objects, loop = Watched(), asyncio.get_running_loop()
        await _revision(objects, b"a", revision="v1")
        await remove(objects, Published("m", "v1", "", manifest_name("m", "v1"), 0.0))
        with pytest.raises(Killed):
            await collect(Mortal(objects, random.Random(0), 6), 0, silent)
        [lock] = await names_in(objects, COLLECTING)
        begun_s, said = loop.time(), []
        manifest = manifest_of({"f": [b"a"]}, revision="v2")
        async with publishing(objects, manifest, "me", said.append):
            waited_s = loop.time() - begun_s
        assert LOCK_S - 10 < waited_s < LOCK_S + 10 and len(said) > 10
        await asyncio.sleep(1)
        await collect(objects, 0, silent)
        assert lock not in objects.stored

    run(main())


def test_an_intent_lives_as_long_as_its_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that goes on for days is renewed; one whose publisher is dead is gone after a day, and its chunks with it."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        objects = Watched()
        manifest = manifest_of({"f": [b"a"]}, revision="v1")
        await objects.put(chunk_of(b"a").name, b"a")
        async with publishing(objects, manifest, "me") as intent:
            await asyncio.sleep(3 * INTENT_S)
            assert (await collect(objects, 0, silent)).deleted == 0
            await intent.require()
        await objects.put(intent.name, b"what is no manifest")
        with pytest.raises(ModelError, match="nothing was collected, for nobody knows what this names"):
            await collect(objects, 0, silent)
        await asyncio.sleep(INTENT_S + 1)
        assert (await collect(objects, 0, silent)).deleted == 1
        assert not await names_in(objects, PUBLISHING)

    run(main())


def test_a_manifest_that_cannot_be_read_stops_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what it names: nothing is deleted, until it is removed."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        objects = Watched()
        await _revision(objects, b"a")
        name = manifest_name("m", "v1")
        objects.stored[name] = b"KVMODEL9" + objects.stored[name][8:]
        with pytest.raises(ModelError, match=r"nothing was collected.*KVMODEL9"):
            await collect(objects, 0, silent)
        assert len(chunk_names(objects)) == 1 and not await names_in(objects, COLLECTING)
        await remove(objects, Published("m", "v1", "", name, 0.0))
        assert (await collect(objects, 0, silent)).deleted == 1

    run(main())


@pytest.mark.parametrize("behind", [PUBLISHING, MANIFESTS])
def test_who_ends_while_a_collection_looks_is_seen(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right behind one of its lists a publisher puts its manifest and takes its intent back: one of both has been read."""
    _clock_of_the_loop(monkeypatch)

    class Racing(Watched):
        ends: Callable[[], Awaitable[object]] | None = None

        async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
            async for page in super().list(prefix, after):
                yield page
            if prefix == behind and (ends := self.ends) is not None:
                self.ends = None
                await ends()

    async def main() -> None:
        objects, manifest = Racing(), manifest_of({"f": [b"a"]}, revision="v1")
        intent = Intent(objects, manifest, "me")
        await intent.put()
        await objects.put(chunk_of(b"a").name, b"a")

        async def end() -> None:
            await objects.put(manifest.name, encode(manifest))
            await objects.delete([intent.name])

        objects.ends = end
        assert (await collect(objects, 0, silent)).deleted == 0
        assert objects.ends is None and not await names_in(objects, PUBLISHING) and not lacking(objects)

    run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_delete_that_comes_late_finds_nothing_that_is_named(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is done once more a moment later, or only then, after it was said to have failed: the lock is there for so long, and who
    publishes waits for its end before it looks which chunks are there."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        late: list[asyncio.Task[None]] = []

        class Late(Watched):
            async def delete(self, names: Sequence[str]) -> None:
                if late or not any(name.startswith(CHUNKS) for name in names):
                    return await super().delete(names)
                late.append(asyncio.create_task(self.delete_later(names)))
                if fails:
                    raise ObjectUnavailable("no answer")
                return await super().delete(names)

            async def delete_later(self, names: Sequence[str]) -> None:
                await asyncio.sleep(LATE_S)
                await Watched.delete(self, names)

        objects = Late()
        await objects.put(chunk_of(b"a").name, b"a")
        try:
            await collect(objects, 0, silent)
        except ObjectUnavailable:
            assert fails
        await _revision(objects, b"a")
        await asyncio.gather(*late)
        assert len(late) == 1 and not lacking(objects)

    run(main())


def test_a_lock_that_is_put_anew_while_it_is_read_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed when it was old, read when it had been put for some seconds more behind the last delete: its end is that of the new one."""
    _clock_of_the_loop(monkeypatch)

    async def main() -> None:
        loop, again_s = asyncio.get_running_loop(), 0.0

        class Renewed(Watched):
            async def get(self, name: str) -> memoryview:
                nonlocal again_s
                if name.startswith(COLLECTING) and not again_s:
                    again_s = loop.time()
                    await self.put(name, signs.LOCK_FORMAT.seal(signs.Lock(30.0)))
                return await super().get(name)

        objects = Renewed()
        await objects.put(f"{COLLECTING}{'0' * 16}", signs.LOCK_FORMAT.seal(signs.Lock(LOCK_S)))
        await asyncio.sleep(60)
        async with publishing(objects, manifest_of({"f": [b"a"]}), "me"):
            assert again_s and loop.time() >= again_s + 30

    run(main())
