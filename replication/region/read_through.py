"""Read-through: another region, read by a daemon that does not belong to it.

    feed of the other region ─▶ Tail ─▶ catalogue of our own ─▶ held ─▶ fetch ─▶ DRAM of this node
    its tombstones ─┐                                             │
    those at home ──┴─▶ what neither region may give any more ────╯ cut off

What a mirror has not brought yet, or no rule copies, is found where it was made. Nothing is ever written there: no
segment, no snapshot, no delete. What is read becomes a block of this node like any other.

Invariants: nothing is held before the tombstones of both regions were read once. What one of them erases is neither held nor
a HIT.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

from replication.catalogue.catalogue import Catalogue
from replication.constants import CLOCK_SKEW_S, SOURCE_TOMBSTONES_S, TOMBSTONES_INTERVAL_S
from replication.erasure.erased import Erased
from replication.feed.tail import Tail
from replication.formats.region import Region, open_region
from replication.formats.tombstones import TOMBSTONES
from replication.keeper.news_reader import Folders, NewsReader
from replication.problems import Problems
from replication.region.region_reader import RegionReader
from replication.store_clock import StoreClock, over_by
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError
from tiers.namespace_spec import NamespaceSpec

log = logging.getLogger("replication.read_through")


class ReadThrough(RegionReader):
    """Made by `follow`."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        catalogue: Catalogue,
        home: Erased,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        now = StoreClock(clock, skew_s)
        catalogue.clock = now
        news = NewsReader(objects, Problems(objects.where), now)
        tail = Tail(objects, catalogue, now, chance, news=news)
        self._stones = Folders(news, TOMBSTONES)
        self._there = Erased(over_by(now))
        self._home = home
        super().__init__(objects, region, catalogue, tail, (home, self._there), now)

    @classmethod
    async def follow(
        cls,
        objects: Objects,
        deployment: str,
        region: str,
        catalogue_path: Path,
        home: Erased,
        chance: random.Random,
        clock: Callable[[], float],
        skew_s: float = CLOCK_SKEW_S,
    ) -> ReadThrough:
        """home: the tombstones of the daemon's own region. clock: this machine's, unix seconds. skew_s: by which it may differ from the store's.

        Raises RegionError (not this region), CatalogueBusy, CatalogueDamaged, ObjectError.
        """
        marker = await open_region(objects, deployment, region)
        catalogue = Catalogue.open(catalogue_path, marker.identity)
        return cls(objects, marker, catalogue, home, skew_s, clock, chance)

    def work(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Follow the feed and the tombstones."""
        return {"following the feed": self._tail.run, "looking for tombstones": self._read_tombstones}

    def held_steps(self, spec: NamespaceSpec, hashes: bytes, start: int) -> Generator[None, None, int]:
        """As `RegionReader.held_steps`; `start` until it is known what is erased."""
        if not (self._home.is_read and self._there.is_read):
            return start
        return (yield from super().held_steps(spec, hashes, start))

    async def _read_tombstones(self) -> None:
        """Seldom: whoever erases does so in all regions, and home is looked at more often."""
        while True:
            try:
                if self._stones.are_due():
                    await self._there.look(self._objects)
                    if not self._there.unavailable:
                        self._stones.listed()
            except ObjectError as error:
                log.debug("%s: tombstones are read later: %s", self.where, error)
            await asyncio.sleep(SOURCE_TOMBSTONES_S if self._there.is_read else TOMBSTONES_INTERVAL_S)

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        return {**super().status(), "tombstones": len(self._there.tombstones)}
