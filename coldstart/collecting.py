"""Collecting garbage: chunks that no manifest names are deleted, and none that somebody is about to name.

    who publishes, or mirrors                                    who collects
      put the intent  models/publishing/<id>                       put the lock  models/collecting/<id>
      is there a lock? wait until it is over                       list intents, then manifests: what is named
      put the chunks that are not there                            list chunks: delete those nobody names
      put the manifest                                             let the lock run out
      delete the intent

Each puts its own sign before it looks for the other's: so one of both always sees the other. A collector that sees an
intent keeps its chunks; a publisher that sees a lock has not looked yet which chunks are there. Intents are listed before
manifests: one that is gone by then has left its manifest.

Times are the store's: the lock ends so long after it was put, an intent dies INTENT_S after it was put last. Whoever lives puts
its own anew each hour. A collector deletes nothing in the second half of its lock's life, and leaves it for a while behind its
last delete: a delete that the network kept back is done before anybody looks for that chunk. What a kill leaves, intent or lock,
runs out.

A manifest or a living intent that cannot be read stops a collection before it deletes anything: nobody knows what it names.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from coldstart.errors import ModelError
from coldstart.models import Progress
from replication.errors import Damaged
from replication.manifests import (
    CACHES,
    CHUNKS,
    MANIFEST_BYTES_MAX,
    MANIFESTS,
    PUBLISHING,
    Manifest,
    chunk_name,
    decode,
    encode,
)
from replication.sealed import fetch, seal
from tiers.errors import ObjectError, ObjectMissing
from tiers.objects import ObjectInfo, Objects
from tiers.together import meanwhile, together

COLLECTING: Final = "models/collecting/"
INTENT_S: Final = 24 * 3600.0
INTENT_RENEW_S: Final = 3600.0
INTENT_RETRY_S: Final = 60.0  # after a renewal that failed
LOCK_S: Final = 600.0
DELETING_S: Final = 300.0  # of a lock's life
SETTLING_S: Final = 30.0  # a lock stays behind the last delete
GRACE_S: Final = 3600.0  # a chunk stays at least so long, whatever is named
POLL_S: Final = 2.0
AT_ONCE: Final = 8  # manifests read, folders listed
_MAGIC: Final = b"KVMCOLL1"
_LOCK_BYTES_MAX: Final = 4096

log = logging.getLogger("coldstart.collecting")


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """What somebody who collects has put. lasts_s: since it was put, by the store's clock."""

    lasts_s: Annotated[float, Meta(ge=0, le=LOCK_S)]


class Collected(NamedTuple):
    """young: nobody names them, and they are younger than the grace. left: garbage that there was no time for."""

    manifests: int
    named: int
    deleted: int
    deleted_bytes: int
    young: int
    left: int


def boot_s() -> float:
    """Seconds that go on while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Intent:
    """What somebody is about to publish; made by `publishing`."""

    def __init__(self, objects: Objects, manifest: Manifest) -> None:
        self.name = f"{PUBLISHING}{uuid.uuid4().hex[:16]}"
        self._objects = objects
        self._content = encode(manifest)
        self._put_s = 0.0

    async def put(self) -> None:
        begun_s = boot_s()
        await self._objects.put(self.name, self._content)
        self._put_s = begun_s

    async def renew(self) -> None:
        """Until it is cancelled."""
        pause_s = INTENT_RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.put()
                pause_s = INTENT_RENEW_S
            except ObjectError as error:  # it lives for a day: there is time to try again
                log.warning("%s is not renewed: %s", self.name, error)
                pause_s = INTENT_RETRY_S

    async def require(self) -> None:
        """Nobody has collected what it names: to be asked right before the manifest is put. Raises ModelError, ObjectError."""
        try:
            await self._objects.head(self.name)
        except ObjectMissing:
            self._put_s = -INTENT_S
        if boot_s() - self._put_s > INTENT_S / 2:
            raise ModelError(
                f"{self._objects.where}: this took a break of many hours, and its chunks may be gone: run it again"
            )


@asynccontextmanager
async def publishing(objects: Objects, manifest: Manifest, progress: Progress) -> AsyncIterator[Intent]:
    """Inside, no chunk that the manifest names is collected; entered when no collection is under way that could do so.

    What ends in a failure leaves its intent, so that a rerun within a day finds the chunks.
    """
    intent = Intent(objects, manifest)
    await intent.put()
    async with meanwhile(intent.renew()):
        await _wait_for_collections(objects, intent, progress)
        yield intent
    await objects.delete([intent.name])


async def _wait_for_collections(objects: Objects, intent: Intent, progress: Progress) -> None:
    """Until those that are under way now are over; one that begins later sees our intent."""
    begun_s = boot_s()
    now_s = (await objects.head(intent.name)).modified_s
    first: set[str] | None = None
    while True:
        ends = {
            info.name: info.modified_s + await lasts_s(objects, info.name)
            for info in await _all(objects, COLLECTING)
        }
        passed_s = boot_s() - begun_s
        living = {
            name
            for name, end_s in ends.items()
            if end_s > now_s + passed_s and (first is None or name in first)
        }
        if not living:
            return
        first = living
        progress("waiting for a collection", int(passed_s), int(LOCK_S))
        await asyncio.sleep(POLL_S)


async def lasts_s(objects: Objects, name: str) -> float:
    """Of a lock, since it was put. Raises ObjectError."""
    try:
        return (await fetch(objects, _MAGIC, Lock, name, _LOCK_BYTES_MAX)).lasts_s
    except ObjectMissing:
        return 0.0
    except Damaged:
        return LOCK_S


async def collect(
    objects: Objects,
    grace_s: float,
    progress: Progress,
    dry_run: bool = False,
    settling_s: float = SETTLING_S,
) -> Collected:
    """Delete the chunks that nobody names. dry_run: only say what would be deleted. Raises ModelError, ObjectError."""
    collection = _Collection(objects, grace_s, progress, dry_run)
    await collection.lock(LOCK_S)
    try:
        await collection.find_named()
        for start in range(0, len(folders := await objects.folders(CHUNKS)), AT_ONCE):
            progress("looking at chunks", start, len(folders))
            await together(map(collection.collect_folder, folders[start : start + AT_ONCE]))
    except BaseException:
        if not collection.may_have_deleted:
            await collection.unlock()
        raise
    if collection.may_have_deleted:
        await collection.lock(settling_s)
    else:
        await collection.unlock()
    return collection.result()


class _Collection:
    """One of them. may_have_deleted: a chunk, also where the store did not say so."""

    def __init__(self, objects: Objects, grace_s: float, progress: Progress, dry_run: bool) -> None:
        self.may_have_deleted = False
        self._objects = objects
        self._grace_s = grace_s
        self._progress = progress
        self._dry_run = dry_run
        self._lock = f"{COLLECTING}{uuid.uuid4().hex[:16]}"
        self._until_s = boot_s() + DELETING_S
        self._now_s = 0.0  # by the store's clock
        self._named: set[bytes] = set()
        self._manifests = self._deleted = self._deleted_bytes = self._young = self._left = 0

    async def lock(self, lasts_s: float) -> None:
        await self._objects.put(self._lock, seal(_MAGIC, Lock(lasts_s)))
        self._now_s = (await self._objects.head(self._lock)).modified_s

    async def unlock(self) -> None:
        await self._objects.delete([self._lock])

    def result(self) -> Collected:
        return Collected(
            self._manifests, len(self._named), self._deleted, self._deleted_bytes, self._young, self._left
        )

    async def find_named(self) -> None:
        """All chunks of intents and of manifests, in this order. Raises ModelError, ObjectError."""
        intents, locks = [await _all(self._objects, folder) for folder in (PUBLISHING, COLLECTING)]
        living = [info for info in intents if info.modified_s + INTENT_S >= self._now_s]
        over = [info.name for info in intents if info not in living]
        over += [info.name for info in locks if info.modified_s + LOCK_S < self._now_s]
        if not self._dry_run:
            await self._objects.delete(over)  # before any chunk: who has missed its time sees that
        for found in (living, await _all(self._objects, MANIFESTS), await _all(self._objects, CACHES)):
            for start in range(0, len(found), AT_ONCE):
                self._progress("reading manifests", start, len(found))
                await together(map(self._take, found[start : start + AT_ONCE]))

    async def _take(self, info: ObjectInfo) -> None:
        try:
            manifest = decode(await self._objects.get_within(info.name, MANIFEST_BYTES_MAX), info.name)
        except ObjectMissing:
            return  # an intent that ended has left its manifest, which is listed later; a manifest was removed
        except Damaged as error:
            raise ModelError(
                f"{self._objects.where}: nothing was collected, for nobody knows what this names: {error}"
            ) from error
        self._manifests += not info.name.startswith(PUBLISHING)
        self._named.update(chunk.sha256 for chunk in manifest.chunks)

    async def collect_folder(self, folder: str) -> None:
        async for page in self._objects.list(f"{CHUNKS}{folder}/"):
            garbage = [info for info in page if self._is_garbage(info)]
            if not garbage:
                continue
            if boot_s() > self._until_s:
                self._left += len(garbage)
                continue
            if not self._dry_run:
                self.may_have_deleted = True
                await self._objects.delete([info.name for info in garbage])
            self._deleted += len(garbage)
            self._deleted_bytes += sum(info.size_bytes for info in garbage)

    def _is_garbage(self, info: ObjectInfo) -> bool:
        try:
            sha256 = bytes.fromhex(info.name.rpartition("/")[2])
        except ValueError:
            return False
        if sha256 in self._named or chunk_name(sha256) != info.name:  # what is no chunk is not ours
            return False
        is_young = info.modified_s + self._grace_s > self._now_s
        self._young += is_young
        return not is_young


async def _all(objects: Objects, folder: str) -> list[ObjectInfo]:
    return [info async for page in objects.list(folder) for info in page]
