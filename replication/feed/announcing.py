"""Announcing from outside: what is said in a region's feed by whoever has credentials for its bucket, and is no daemon.

All of them write as one writer, a segment each time: feeds grow by what is published, not by who publishes. Two at once find that
they are (`FeedWriter`): one of them goes on under an id of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import xxhash

from replication.feed.feed import FeedWriter
from replication.formats.announced_models import AnnouncedModel
from replication.formats.region import MARKER
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing

_WRITER = xxhash.xxh3_64_hexdigest(b"kvstore model")


async def announce_models(
    objects: Objects, models: Sequence[AnnouncedModel], clock: Callable[[], float], chance: random.Random
) -> None:
    """Say that these models are in the region, with all of their chunks. When this returns, it is durable. clock: unix seconds.
    Raises ObjectError: not known to be said; saying it again does no harm."""
    writer = FeedWriter(objects, _WRITER, clock, chance)
    await writer.open()
    await writer.announce((), models)


async def announce_in_region(
    objects: Objects, model: AnnouncedModel, clock: Callable[[], float], chance: random.Random
) -> None:
    """The same where the place is a region; elsewhere nobody reads feeds. Raises ObjectError."""
    if await is_region(objects):
        await announce_models(objects, [model], clock, chance)


async def is_region(objects: Objects) -> bool:
    """Raises ObjectError."""
    try:
        await objects.head(MARKER)
    except ObjectMissing:
        return False
    return True
