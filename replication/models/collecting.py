"""Intents and locks: how those who put chunks and those who collect garbage see each other, on nodes and in mirrors.

    models/publishing/<id, 16 hex>     Manifest: its chunks are being put, or are believed to be there
    models/collecting/<id, 16 hex>     Lock: somebody collects

    who publishes, or mirrors                                    who collects (coldstart/published/collecting.py)
      put the intent                                               put the lock
      is there a lock? wait until it is over                       read intents, then manifests: what is named
      put the chunks that are not there                            list chunks: delete those nobody names
      put the manifest, if the intent is there still               let the lock run out
      delete the intent

Each puts its own sign before it looks for the other's: so one of both always sees the other. Times are the store's: a lock ends
so long after it was put, an intent dies INTENT_S after it was put last. Whoever lives puts his own anew each hour.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from replication.deleting import delete_each
from replication.errors import Damaged, IntentLost
from replication.formats.manifests import PUBLISHING, Manifest, encode
from replication.formats.sealed import Sealed
from replication.waits import boot_s
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectKeyUnknown, ObjectMissing
from tiers.together import meanwhile

COLLECTING: Final = "models/collecting/"
INTENT_S: Final = 24 * 3600.0
INTENT_RENEW_S: Final = 3600.0
INTENT_RETRY_S: Final = 60.0  # after a renewal that failed
LOCK_S: Final = 600.0  # at most
POLL_S: Final = 2.0

log = logging.getLogger("replication.collecting")


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """What somebody who collects has put. lasts_s: since it was put, by the store's clock."""

    lasts_s: Annotated[float, Meta(ge=0, le=LOCK_S)]


LOCK_FORMAT: Final = Sealed(b"KVMCOLL1", Lock, 4096)


async def lasts_s(objects: Objects, name: str) -> float:
    """Of a lock, since it was put; one that cannot be understood lasts as long as any may. Raises ObjectError."""
    try:
        return (await LOCK_FORMAT.fetch(objects, name)).lasts_s
    except ObjectMissing:
        return 0.0
    except (Damaged, ObjectKeyUnknown):
        return LOCK_S


async def _end_s(objects: Objects, name: str) -> float:
    """Of a lock, by the store's clock. Its time is asked behind what it says: who collects may put it anew between the two, and a
    lock is never taken to end before its last delete is long over. Raises ObjectError."""
    lasting_s = await lasts_s(objects, name)
    try:
        return (await objects.head(name)).modified_s + lasting_s
    except ObjectMissing:
        return 0.0


def intent_name(manifest: Manifest, who: str) -> str:
    return PUBLISHING + xxhash.xxh3_64_hexdigest(f"{who} {manifest.name}".encode())


class Intent:
    """What somebody is about to publish, or to copy; made by `publishing`."""

    def __init__(self, objects: Objects, manifest: Manifest, who: str) -> None:
        self.name = intent_name(manifest, who)
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

    async def end(self) -> None:
        """It is done. Where the store lets nobody delete, what is named is kept for a day. Raises ObjectUnavailable."""
        for why in (await delete_each(self._objects.delete, [self.name])).values():
            log.warning("%s is kept for a day: it cannot be deleted: %s", self.name, why)

    async def require(self) -> None:
        """Nobody has collected what it names: to be asked right before the manifest is put. Raises IntentLost, ObjectError."""
        try:
            await self._objects.head(self.name)
        except ObjectMissing:
            self._put_s = -INTENT_S
        if boot_s() - self._put_s > INTENT_S / 2:
            raise IntentLost(
                f"{self._objects.where}: this took a break of many hours, and its chunks may be gone: run it again"
            )

    async def now_s(self) -> float:
        """Unix seconds by the store's clock; where it is required, and put anew. Raises as `require`."""
        await self.require()
        await self.put()
        return (await self._objects.head(self.name)).modified_s


@asynccontextmanager
async def publishing(
    objects: Objects, manifest: Manifest, who: str, waits: Callable[[float], None] = lambda passed_s: None
) -> AsyncIterator[Intent]:
    """Inside, no chunk that the manifest names is collected; entered when no collection is under way that could do so.

    who: puts it: nobody else may at the same time, and who tries again is the same. waits: called while a collection is waited
    for, with the seconds. What ends in a failure leaves its intent, so that a rerun within a day finds the chunks.
    """
    intent = Intent(objects, manifest, who)
    await intent.put()
    async with meanwhile(intent.renew()):
        await _wait_for_collections(objects, intent, waits)
        yield intent
    await intent.end()


async def _wait_for_collections(objects: Objects, intent: Intent, waits: Callable[[float], None]) -> None:
    """Until those that are under way now are over; one that begins later sees our intent."""
    begun_s = boot_s()
    now_s = (await objects.head(intent.name)).modified_s
    first: set[str] | None = None
    while True:
        names = [info.name async for page in objects.list(COLLECTING) for info in page]
        ends = {name: await _end_s(objects, name) for name in names}
        passed_s = boot_s() - begun_s
        living = {
            name
            for name, end_s in ends.items()
            if end_s > now_s + passed_s and (first is None or name in first)
        }
        if not living:
            return
        first = living
        waits(passed_s)
        await asyncio.sleep(POLL_S)
