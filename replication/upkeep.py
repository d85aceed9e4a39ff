"""Upkeep: packs whose life is over leave the catalogue, and the bucket.

    stored ──────── kept_until_s ───── + skew ───────── + 2 × skew
           worth keeping        │ may still be renewed │ no more  │ forgotten by everybody, deleted by a few

Clocks may differ by `skew_s`. Who renews a pack looks at its own clock, and who deletes one has read all of the feed since, so nobody
deletes a pack that another one may still renew. Everybody forgets what is over; of w writers each deletes it with a chance of 3 in w, so that few are left over and
few requests are made twice. A pack that was put again meanwhile is younger than the life that is over: it stays.

Packs are deleted from the end of their prefix, because what hangs on a prefix is never kept longer than the prefix.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from replication.announced import Announced
from replication.catalogue import Catalogue
from replication.constants import UPKEEP_DELETERS, UPKEEP_INTERVAL_S, UPKEEP_PACKS
from replication.errors import CatalogueDamaged
from replication.tail import Tail
from tiers.errors import ObjectError, ObjectMissing
from tiers.objects import Objects

log = logging.getLogger("replication.upkeep")


async def forget_outlived(catalogue: Catalogue, until_s: float) -> list[Announced]:
    """Forget some packs whose life was over then, and return them; none are left where it is none. Raises CatalogueDamaged."""
    over = catalogue.outlived(until_s, UPKEEP_PACKS)
    for announced in over:
        catalogue.forget(announced.pack.id)
        await asyncio.sleep(0)
    return over


class Upkeep:
    """Of one catalogue and its bucket."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        tail: Tail,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """tail: of the catalogue. clock: unix seconds."""
        self.forgotten = 0
        self.deleted = 0
        self._objects = objects
        self._catalogue = catalogue
        self._tail = tail
        self._skew_s = skew_s
        self._clock = clock
        self._chance = chance

    def may_renew(self, announced: Announced) -> bool:
        """Whether nobody deletes this pack before a renewal that is announced now is read."""
        return not announced.kept_until_s or self._clock() < announced.kept_until_s + self._skew_s

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        while True:
            try:
                while await self.step():
                    pass
            except (ObjectError, CatalogueDamaged) as error:
                log.info("%s: upkeep goes on later: %s", self._objects.where, error)
            await asyncio.sleep(min(UPKEEP_INTERVAL_S, self._skew_s) * self._chance.uniform(0.5, 1.0))

    async def step(self) -> bool:
        """Some of what was over when all of the feed was read last: what is not read may say that it lives longer.
        Returns whether there is more."""
        if (age_s := self._tail.sure_age_s) is None:
            return False
        over = await forget_outlived(self._catalogue, self._clock() - age_s - 2 * self._skew_s)
        self.forgotten += len(over)
        if over and self._chance.random() * self._tail.status().writers < UPKEEP_DELETERS:
            await self._delete(over)
        return len(over) == UPKEEP_PACKS

    async def _delete(self, over: Sequence[Announced]) -> None:
        ages = await asyncio.gather(*(self._is_over(announced) for announced in over))
        names = [announced.pack.name for announced, is_over in zip(over, ages, strict=True) if is_over]
        await self._objects.delete(names)
        self.deleted += len(names)

    async def _is_over(self, announced: Announced) -> bool:
        try:
            info = await self._objects.head(announced.pack.name)
        except ObjectMissing:
            return False
        return info.modified_s < announced.kept_until_s + self._skew_s
