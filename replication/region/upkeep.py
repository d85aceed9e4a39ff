"""Upkeep: packs whose life is over leave the catalogue, and the bucket.

    stored ──────── kept_until_s ───── + skew ───────── + 2 × skew
           worth keeping        │ may still be renewed │ no more  │ forgotten by everybody, deleted by the keeper

Clocks may differ by `skew_s`. Who renews a pack looks at its own clock, and the keeper, who deletes it, has asked all writers since, so
nobody deletes a pack that another one may still renew. Everybody forgets what is over. A pack that was put again meanwhile is younger
than the life that is over: it stays.

Packs are deleted from the end of their prefix, because what hangs on a prefix is never kept longer than the prefix.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from replication.catalogue.catalogue import Catalogue
from replication.constants import UPKEEP_INTERVAL_S
from replication.errors import CatalogueDamaged
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.keeper.keeper import Keeper
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused
from tiers.together import together

UPKEEP_SURE_S: Final = 1.0  # between two looks whether all writers were asked
UPKEEP_PACKS: Final = 256  # in one step

log = logging.getLogger("replication.upkeep")


async def forget_outlived(catalogue: Catalogue, until_s: float) -> list[Announced]:
    """Forget some packs whose life was over then, and return them; none are left where it is none. Raises CatalogueDamaged."""
    over = catalogue.outlived(until_s, UPKEEP_PACKS)
    for announced in over:
        catalogue.forget(announced.pack.id)
        await asyncio.sleep(0)
    return over


async def delete_each(delete: Callable[[Sequence[str]], Awaitable[None]], names: Sequence[str]) -> int:
    """Delete what can be deleted, together if possible; returns how many. Raises ObjectUnavailable."""
    try:
        await delete(names)
    except (ObjectDamaged, ObjectRefused) as error:
        if len(names) == 1:
            log.warning("%s: cannot be deleted: %s", names[0], error)
            return 0
        middle = len(names) // 2
        return await delete_each(delete, names[:middle]) + await delete_each(delete, names[middle:])
    return len(names)


class Upkeep:
    """Of one catalogue and its bucket."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        tail: Tail,
        keeper: Keeper,
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
        self._keeper = keeper
        self._skew_s = skew_s
        self._clock = clock
        self._chance = chance
        self._deletes_since_s: float | None = None  # by the loop's clock, while this node keeps the region

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
                log.debug("%s: upkeep goes on later: %s", self._objects.where, error)
            interval_s = min(UPKEEP_INTERVAL_S, self._skew_s) * self._chance.uniform(0.5, 1.0)
            await asyncio.sleep(interval_s if self._deletes_since_s is None else UPKEEP_SURE_S)

    async def step(self) -> bool:
        """Some of what was over when all of the feed was read last: what is not read may say that it lives longer. Who
        deletes asks all writers before. Returns whether there is more."""
        tail, loop = self._tail, asyncio.get_running_loop()
        if not self._keeper.clock.is_sure:
            return False
        before_s = self._clock() - 2 * self._skew_s
        if self._deletes_since_s is None:
            if not self._catalogue.outlived(before_s, 1):
                return False
            if self._keeper.holds:
                self._deletes_since_s = loop.time()
                tail.make_sure()
        deletes = self._deletes_since_s is not None
        age_s = tail.sure_age_s if deletes else tail.age_s
        if age_s is None or (deletes and loop.time() - age_s < (self._deletes_since_s or 0.0)):
            return False
        over = await forget_outlived(self._catalogue, before_s - age_s)
        self.forgotten += len(over)
        if deletes:
            await self._delete(over)
        is_more = len(over) == UPKEEP_PACKS
        if not is_more:
            self._deletes_since_s = None
        return is_more

    async def _delete(self, over: Sequence[Announced]) -> None:
        """Those that cannot be are left to an audit, which says so: they take no other one with them."""
        ages = await together(self._is_over(announced) for announced in over)
        names = [announced.pack.name for announced, is_over in zip(over, ages, strict=True) if is_over]
        self.deleted += await delete_each(self._keeper.delete, names)

    async def _is_over(self, announced: Announced) -> bool:
        try:
            info = await self._objects.head(announced.pack.name)
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            return False
        return info.modified_s < announced.kept_until_s + self._skew_s
