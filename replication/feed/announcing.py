"""Announcing from outside: what is said in a region's feed by whoever has credentials for its bucket, and is no daemon.

Each is a writer of its own, with one segment, which is retired a day later.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from replication.feed.feed import FeedWriter, fresh_writer
from replication.formats.announced_models import AnnouncedModel
from replication.formats.keeping import store_now_s
from replication.formats.region import MARKER
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing


async def announce_models(
    objects: Objects, models: Sequence[AnnouncedModel], clock: Callable[[], float], chance: random.Random
) -> None:
    """Say that these models are in the region, with all of their chunks. When this returns, it is durable. clock: unix seconds.
    Raises ObjectError: not known to be said; saying it again does no harm."""
    writer = FeedWriter(objects, fresh_writer(chance), clock, chance)
    await writer.announce((), models)


async def announce_in_region(objects: Objects, model: AnnouncedModel, chance: random.Random) -> None:
    """The same where the place is a region, by the clock of its store; elsewhere nobody reads feeds. Raises ObjectError."""
    if await is_region(objects):
        now_s = await store_now_s(objects)
        await announce_models(objects, [model], lambda: now_s, chance)


async def is_region(objects: Objects) -> bool:
    """Raises ObjectError."""
    try:
        await objects.head(MARKER)
    except ObjectMissing:
        return False
    return True
