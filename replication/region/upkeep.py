"""Upkeep: packs whose life is over leave the region.

    stored ──────── kept_until_s ───── + skew ───────── + 2 × skew
           worth keeping        │ may still be renewed │ no more  │ the keeper says that they are removed, and deletes them

Clocks may differ by `skew_s`. Who renews a pack looks at its own clock, and the keeper has asked all writers since, so nobody deletes a
pack that another one may still renew. Nobody else forgets anything. A pack that was put again meanwhile is younger than the life that
is over: it stays in the bucket. What is removed and not deleted, because the keeper died in between, is deleted by an audit.

What a mirror brought lives on while its source is not read, which may have given it a longer life: the keeper announces it again. Where
nobody can say when the source was read, because the state of its mirror cannot be read, nothing of it goes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence, Set
from typing import Final

import msgspec

from replication.audit.orphans import Hands
from replication.catalogue.catalogue import TURN_LOOKS, Catalogue
from replication.constants import CATALOGUE_CHUNK_PACKS, PROBLEM_LASTS_S, UPKEEP_INTERVAL_S
from replication.errors import CatalogueDamaged, Damaged
from replication.feed.tail import Tail
from replication.formats.announced import Announced, lasts_longer
from replication.formats.mirror_state import MIRRORS, read_state
from replication.formats.region import require_place
from replication.formats.removed import Reason
from replication.keeper.keeper import Keeper
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused
from tiers.together import together

UPKEEP_SURE_S: Final = 1.0  # between two looks whether all writers were asked
UPKEEP_PACKS: Final = (
    8192  # announced to be removed together: a region of 1,000 writers hears each of them every 100 s
)
LOOK_LATE_S: Final = 600.0  # since a source was read, heads and all: then it is away
AWAY_S_MAX: Final = 7 * 24 * 3600.0  # what was copied from a source that is not read lives on for so long
UNKNOWN_LIFE_S: Final = 24 * 3600.0  # where nobody can say when it was read: again and again

log = logging.getLogger("replication.upkeep")


def lives_until(announced: Announced, looked_s: float | None, now_s: float, skew_s: float) -> int:
    """Of a copy whose life is over, the same where it is; longer where its source was not read since: twice as long each time, and
    AWAY_S_MAX behind the last look at most. looked_s: None: nobody can say."""
    if looked_s is None:
        return int(now_s + UNKNOWN_LIFE_S)
    if looked_s >= announced.kept_until_s + skew_s:
        return announced.kept_until_s
    until_s = min(now_s + max(4 * skew_s, now_s - looked_s), looked_s + AWAY_S_MAX)
    return int(until_s) if until_s > now_s else announced.kept_until_s


class Upkeep:
    """Of one catalogue and its bucket."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        tail: Tail,
        keeper: Keeper,
        hands: Hands,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """tail: of the catalogue. clock: unix seconds."""
        self._objects = objects
        self._catalogue = catalogue
        self._tail = tail
        self._keeper = keeper
        self._hands = hands
        self._skew_s = skew_s
        self._clock = clock
        self._chance = chance
        self._unknown_s: dict[str, float] = {}  # by source whose mirror's state cannot be read, since when
        self._asked_s: float | None = None  # loop's time when writers were asked, while something is over

    def may_renew(self, announced: Announced) -> bool:
        """Whether nobody deletes this pack before a renewal that is announced now is read."""
        return not announced.kept_until_s or self._clock() < announced.kept_until_s + self._skew_s

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        while True:
            try:
                if self._keeper.holds:
                    await self._looked_s(set(self._unknown_s))  # as long as one cannot be read, it is told
                while await self.step():
                    pass
            except (ObjectError, CatalogueDamaged) as error:
                log.debug("%s: upkeep goes on later: %s", self._objects.where, error)
            interval_s = min(UPKEEP_INTERVAL_S, self._skew_s) * self._chance.uniform(0.5, 1.0)
            await asyncio.sleep(interval_s if self._asked_s is None else UPKEEP_SURE_S)

    async def step(self) -> bool:
        """Some of what was over when all writers were asked last: what is not read may say that it lives longer. Returns whether
        there is more."""
        tail, loop = self._tail, asyncio.get_running_loop()
        if not self._keeper.clock.is_sure:
            return False
        before_s = self._clock() - 2 * self._skew_s
        if not self._keeper.holds or not next(self._catalogue.outlived(before_s), ()):
            self._asked_s = None
            return False
        if self._asked_s is None:
            self._asked_s = loop.time()
            tail.make_sure()
        age_s = tail.sure_age_s
        if age_s is None or loop.time() - age_s < self._asked_s:
            return False
        outlived: list[Announced] = []
        for some in self._catalogue.outlived(before_s - age_s):
            outlived += some
            if len(outlived) >= UPKEEP_PACKS:
                break
            await asyncio.sleep(0)
        over, longer = await self._without_source(outlived)
        await self._hands.announce(longer)
        await self._remove(over)
        is_more = len(outlived) >= UPKEEP_PACKS and bool(over or longer)
        if not is_more:
            self._asked_s = None
        return is_more

    async def _without_source(self, outlived: Sequence[Announced]) -> tuple[list[Announced], list[Announced]]:
        """Those that are over; and what lives longer, because its source is not read, with what it hangs on. While the last look is
        young, they wait for the next one."""
        going = await self._catalogue.removals(outlived, Reason.OVER)
        known = await self._catalogue.packs_all([one.id for one in going])
        copies = [one for one in known if one and one.origin]
        if not copies:
            return list(outlived), []
        stay, longer, now_s = set[bytes](), dict[bytes, Announced](), self._clock()
        looked_s = await self._looked_s({copy.origin for copy in copies})
        for copy in copies:
            known_s, until_s = looked_s.get(copy.origin), copy.kept_until_s
            since_s = self._unknown_s[copy.origin] if known_s is None else known_s
            if is_past := until_s <= now_s:
                until_s = lives_until(copy, known_s, now_s, self._skew_s)
            if until_s <= now_s:
                continue
            path = [*await self._before(copy), copy]
            stay.update(one.pack.id for one in path)
            if not is_past or now_s - since_s >= LOOK_LATE_S:
                for one in path:
                    lasting = msgspec.structs.replace(one, kept_until_s=until_s)
                    if lasts_longer(lasting, longer.get(one.pack.id, one)):
                        longer[one.pack.id] = lasting
        return [one for one in outlived if one.pack.id not in stay], list(longer.values())

    async def _looked_s(self, sources: Set[str]) -> dict[str, float]:
        """When each of these was read last, 0: never. One whose mirror's state cannot be read is not among them, and a problem."""
        found = dict[str, float]()
        for source in sorted(sources):
            name = MIRRORS + source
            try:
                found[source] = (await read_state(self._objects, source)).looked_s
                if not found[source]:
                    await require_place(self._objects)
            except (Damaged, ObjectError) as error:
                found.pop(source, None)
                self._unknown_s.setdefault(source, self._clock())
                text = f"cannot be read: {error}: nothing that was copied from {source} is removed meanwhile"
                fix = f"kvstore mirror writes it anew; where there is none from {source} any more, delete it"
                self._keeper.problems.note(name, text, fix=fix, lasts_s=PROBLEM_LASTS_S)
            else:
                self._unknown_s.pop(source, None)
                self._keeper.problems.over(name)
        return found

    async def _before(self, announced: Announced) -> list[Announced]:
        """What this pack hangs on, the first one first."""
        path, header = list[Announced](), announced.pack.header
        while header.parent:
            [spot] = self._catalogue.find([header.spec.digest + header.parent])
            if spot is None:
                break
            path.append(spot.announced)
            header = spot.announced.pack.header
            if len(path) % TURN_LOOKS == 0:
                await asyncio.sleep(0)
        return path[::-1]

    async def _remove(self, over: Sequence[Announced]) -> None:
        """Those that cannot be deleted are left to an audit, which says so."""
        await self._hands.announce(await self._catalogue.removals(over, Reason.OVER))
        for at in range(0, len(over), CATALOGUE_CHUNK_PACKS):
            some = over[at : at + CATALOGUE_CHUNK_PACKS]
            ages = await together(map(self._is_over, some))  # right before: see deleting.py
            await self._hands.delete(
                [one.pack.name for one, is_over in zip(some, ages, strict=True) if is_over]
            )

    async def _is_over(self, announced: Announced) -> bool:
        try:
            info = await self._objects.head(announced.pack.name)
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            return False
        return info.modified_s < announced.kept_until_s + self._skew_s
