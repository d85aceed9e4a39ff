"""Collecting garbage: chunks that no manifest names are deleted, and none that somebody is about to name.

How those who collect and those who put chunks see each other says replication/models/collecting.py. Intents are listed and read before
manifests are listed: one that is gone by then has left its manifest.

A collector deletes nothing in the second half of its lock's life, and leaves it for a while behind its last delete: a delete that
the network kept back is done before anybody looks for that chunk. What a kill leaves, intent or lock, runs out.

A manifest or a living intent that cannot be read stops a collection before it deletes anything: nobody knows what it names.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from coldstart.errors import ModelError
from coldstart.published.models import Progress
from replication.deleting import delete_each
from replication.errors import Damaged
from replication.formats.manifests import (
    CACHES,
    CHUNKS,
    MANIFEST_BYTES_MAX,
    MANIFESTS,
    PUBLISHING,
    chunk_name,
    decode,
)
from replication.models.collecting import COLLECTING, INTENT_S, LOCK_FORMAT, LOCK_S, Lock
from replication.waits import boot_s
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectMissing
from tiers.together import together

DELETING_S: Final = 300.0  # of a lock's life
SETTLING_S: Final = 30.0  # a lock stays behind the last delete
GRACE_S: Final = 3600.0  # a chunk stays at least so long, whatever is named
AT_ONCE: Final = 8  # manifests read, folders listed


log = logging.getLogger("coldstart.collecting")


class Collected(NamedTuple):
    """young: nobody names them, and they are younger than the grace. left: garbage that there was no time for, or that
    the store does not let go."""

    manifests: int
    named: int
    deleted: int
    deleted_bytes: int
    young: int
    left: int


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
        await self._objects.put(self._lock, LOCK_FORMAT.seal(Lock(lasts_s)))
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
        if not self._dry_run:  # before any chunk: who has missed its time sees that
            left = await delete_each(self._objects.delete, over)
            living += [info for info in intents if info.name in left]
        await self._take_all(living)
        for folder in (
            MANIFESTS,
            CACHES,
        ):  # listed when intents have been read: one that was gone by then is here
            await self._take_all(await _all(self._objects, folder))

    async def _take_all(self, found: Sequence[ObjectInfo]) -> None:
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
                left = await delete_each(self._objects.delete, [info.name for info in garbage])
                self._left += len(left)
                for name, why in left.items():
                    log.warning("%s: %s: cannot be deleted: %s", self._objects.where, name, why)
                garbage = [info for info in garbage if info.name not in left]
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
