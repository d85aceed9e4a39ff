"""Collecting: chunks that no manifest names are deleted, but none of those that are being put.

    publisher, mirror   intent ─▶ is a lock there? wait for its end ─▶ chunks ─▶ manifest ─▶ intent deleted
    gc                  lock ─▶ intents, manifests ─▶ chunks that nobody names deleted, until shortly before its end ─▶ lock deleted

    models/publishing/<id, 16 hex>   Manifest, sealed: its chunks are being put, or believed to be there
    models/collecting                Lock, sealed: a gc is under way

An intent is put before the lock is looked for, and the lock before intents are read: one of both sees the other one. All
times are the store's: when an object was put, and what has passed here since.

An intent stays where its block fails: who goes on within INTENT_S finds the chunks that were put.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from replication.constants import KIB
from replication.errors import Damaged
from replication.manifests import PUBLISHING, Manifest, encode
from replication.ranges import Text
from replication.sealed import fetch, seal
from tiers.errors import ObjectError, ObjectMissing
from tiers.objects import Objects
from tiers.together import meanwhile

INTENT_S: Final = 24 * 3600.0  # an intent that was put so long ago is of somebody who died
INTENT_RENEW_S: Final = 3600.0
INTENT_RETRY_S: Final = 30.0  # after a renewal that failed
LOCK_S_MAX: Final = 3600.0  # a gc holds its lock no longer
LOCK_LOOK_S: Final = 2.0  # between two looks whether it is over
LOCK_BYTES_MAX: Final = 16 * KIB
assert LOCK_S_MAX + INTENT_RENEW_S + INTENT_RETRY_S < INTENT_S

LOCK = "models/collecting"
_LOCK_MAGIC = b"KVCOLL1\n"

log = logging.getLogger("replication.collecting")


class Lock(msgspec.Struct, frozen=True, array_like=True):
    """lasts_s: since it was put. who: for people."""

    lasts_s: Annotated[float, Meta(ge=0, le=LOCK_S_MAX)]
    who: Text


def encode_lock(lock: Lock) -> bytes:
    return seal(_LOCK_MAGIC, lock)


async def lock_end_s(objects: Objects) -> float:
    """When the lock that is there is over, unix seconds by the store's clock; 0 without one. One that cannot be understood
    lasts as long as any may. Raises ObjectError."""
    try:
        put_s = (await objects.head(LOCK)).modified_s
        lasts_s = (await fetch(objects, _LOCK_MAGIC, Lock, LOCK, LOCK_BYTES_MAX)).lasts_s
    except ObjectMissing:
        return 0.0
    except Damaged as error:
        log.warning("%s: %s", objects.where, error)
        lasts_s = LOCK_S_MAX
    return put_s + lasts_s


def intent_name(who: str, manifest: Manifest) -> str:
    """who: publishes or copies it; the same in each of its attempts, and nobody else's."""
    return PUBLISHING + xxhash.xxh3_64_hexdigest(f"{who} {manifest.name}".encode())


@asynccontextmanager
async def intended(objects: Objects, who: str, manifest: Manifest) -> AsyncIterator[None]:
    """No gc deletes a chunk of this manifest in the block, nor after it, if the manifest is there then. who: see
    `intent_name`. Waits for a gc that is under way. Raises ObjectError."""
    name, content = intent_name(who, manifest), encode(manifest)
    await objects.put(name, content)
    await _until_free(objects, name)
    async with meanwhile(_renew(objects, name, content)):
        yield
    try:
        await objects.delete([name])
    except ObjectError as error:
        log.info("%s: %s: stays until it is over: %s", objects.where, name, error)


async def _until_free(objects: Objects, name: str) -> None:
    loop = asyncio.get_running_loop()
    put_s, since_s = (await objects.head(name)).modified_s, loop.time()
    while (end_s := await lock_end_s(objects)) > put_s + loop.time() - since_s:
        log.info("%s: waiting for a gc, %.0f s at most", objects.where, end_s - put_s - loop.time() + since_s)
        await asyncio.sleep(LOCK_LOOK_S)


async def _renew(objects: Objects, name: str, content: bytes) -> None:
    pause_s = INTENT_RENEW_S
    while True:
        await asyncio.sleep(pause_s)
        try:
            await objects.put(name, content)
            pause_s = INTENT_RENEW_S
        except ObjectError as error:
            log.warning("%s: %s: not renewed: %s", objects.where, name, error)
            pause_s = INTENT_RETRY_S
