"""Erasure: what tombstones name leaves the catalogue and the bucket, and does not come back.

    tombstones/ ─▶ look, every 15 s ───▶ a new one: the whole catalogue is swept
    feed ─▶ catalogue ─▶ step, every second ─▶ what became known since is removed, if a tombstone names it

A prefix is erased with all that hangs on it: packs that have its block, and packs behind those, whoever made them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from replication.announced import Announced
from replication.catalogue import Catalogue
from replication.constants import TOMBSTONES_INTERVAL_S
from replication.errors import CatalogueDamaged
from replication.tombstones import Tombstone, read_tombstones
from tiers.errors import ObjectError
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Objects

log = logging.getLogger("replication.erasure")


class Erasure:
    """Of one catalogue and its bucket. told: called with each tombstone that is new here, and never twice."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        clock: Callable[[], float],
        told: Callable[[Tombstone], None] = lambda tombstone: None,
    ) -> None:
        """clock: unix seconds."""
        self.told = told
        self.erased = 0  # packs
        self._objects = objects
        self._catalogue = catalogue
        self._clock = clock
        self._tombstones: dict[str, Tombstone] = {}  # by id
        self._read: set[str] = set()  # names and ETags
        self._behind: dict[
            str, set[bytes]
        ] = {}  # by tombstone of a prefix: the last blocks of packs it has erased
        self._next = 0  # number of the first pack in the catalogue that was not looked at
        self._renewals = catalogue.renewals

    @property
    def tombstones(self) -> list[Tombstone]:
        """Those that are watched for now."""
        now_s = self._clock()
        return [tombstone for tombstone in self._tombstones.values() if now_s < tombstone.watched_until_s]

    def forbids(self, spec: NamespaceSpec, hashes: bytes = b"") -> bool:
        """Whether these blocks of a namespace, or one before them in `hashes`, are erased."""
        size = spec.hash_bytes
        for tombstone in self.tombstones:
            if tombstone.names(spec):
                wanted = tombstone.block_hash
                if not wanted or any(hashes[at : at + size] == wanted for at in range(0, len(hashes), size)):
                    return True
        return False

    def covers(self, announced: Announced) -> bool:
        """Whether a pack is erased."""
        return any(self._is_of(announced, tombstone) for tombstone in self.tombstones)

    def _is_of(self, announced: Announced, tombstone: Tombstone) -> bool:
        header = announced.pack.header
        if not tombstone.names(header.spec):
            return False
        if not tombstone.block_hash:
            return True
        behind = self._behind.setdefault(tombstone.id, {tombstone.block_hash})
        hashes = list(header.each_hash())
        if header.parent in behind:
            behind.update(hashes)
        elif tombstone.block_hash in hashes:
            behind.update(hashes[hashes.index(tombstone.block_hash) :])
        else:
            return False
        return True

    def _is_of_prefix(self, announced: Announced) -> bool:
        named = (t for t in self.tombstones if t.block_hash)
        return any(self._is_of(announced, tombstone) for tombstone in named)

    # -- work --

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        looked_s = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() - looked_s >= TOMBSTONES_INTERVAL_S:
                    await self.look()
                    looked_s = loop.time()
                await self.step()
            except (ObjectError, CatalogueDamaged) as error:
                log.info("%s: erasing goes on later: %s", self._objects.where, error)
            await asyncio.sleep(1.0)

    async def look(self) -> None:
        """Learn of new tombstones. Raises ObjectError."""
        news = await read_tombstones(self._objects, self._read)
        self._read |= news.keys()
        for tombstone in news.values():
            if tombstone.id not in self._tombstones:
                self._next = 0
                self.told(tombstone)
            self._tombstones[tombstone.id] = tombstone

    async def step(self) -> None:
        """Remove what is named of what became known; after a new tombstone, of everything. Raises ObjectError."""
        catalogue = self._catalogue
        if self._renewals != catalogue.renewals:
            self._renewals, self._next = catalogue.renewals, 0
        while self.tombstones and self._next < catalogue.next_number:
            end, is_found = catalogue.next_number, False
            for chunk in catalogue.chunks(self._next):
                found = list(filter(self.covers, chunk))
                is_found |= any(self._is_of_prefix(announced) for announced in found)
                await self._remove(found)
                await asyncio.sleep(0)
            self._next = 0 if is_found else end  # what hangs on a prefix may have become known before it

    async def _remove(self, packs: Iterable[Announced]) -> None:
        """From the bucket first: what is in the catalogue still is found again if that fails."""
        for announced in packs:
            await self._objects.delete([announced.pack.name])
            self._catalogue.forget(announced.pack.id)
            self.erased += 1
