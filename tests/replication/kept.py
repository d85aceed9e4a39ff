"""Keepers for tests that need one and look at something else."""

from __future__ import annotations

import random

from replication.erasure.erased import Erased
from replication.formats.region import MARKER, Region, init_region
from replication.keeper.keeper import Keeper
from tests.objects import MemoryObjects
from tiers.bucket.objects import Objects


class Kept(Keeper):
    """Of a region that nobody else would keep; it does not run."""

    @property
    def holds(self) -> bool:
        return True

    def heads(self) -> None:
        """They are listed: nobody runs it who would hear a bell."""


def kept(objects: Objects) -> Kept:
    region = Region(format=1, deployment="acme", region="na", made_s=0.0)
    return Kept(objects, region, random.Random(0))


async def look_at_nothing(erased: Erased) -> None:
    """Of a region in which nothing was ever erased."""
    objects = MemoryObjects()
    await objects.put(MARKER, b"this place")
    await erased.look(objects)


async def candidate(objects: Objects, chance: random.Random) -> Keeper:
    """The real one, for `run`; the place is made a region."""
    return Keeper(objects, await init_region(objects, "acme", "na", lambda: 0.0), chance)
