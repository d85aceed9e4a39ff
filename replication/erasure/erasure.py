"""Erasure: what tombstones name leaves the catalogue and the bucket, and does not come back.

    tombstones/ ─▶ look, every 15 s ───▶ a new one: the whole catalogue is swept; the keeper lists packs/, too, now and later
    feed ─▶ catalogue ─▶ step, every second ─▶ what became known since, and a tombstone names: the keeper says that it is removed, and
                                              deletes it (`erased/` says how far); all others learn what hangs on what, and read none of it

A prefix is erased with all that hangs on it: packs that have its block, and packs behind those, whoever made them. Which
blocks were found behind it is put down in the bucket before anything is removed: a pack may come later, from a node or a
region that was away, when nothing is left that says on what it hangs. The same for the first blocks of a pack that goes for a
later one: they are not erased, and what hangs on them stays, until a prefix before them is erased. A pack that was lost
(rotten, or gone from the bucket) says on what it hung for as long as the catalogue remembers it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.constants import PROBLEMS_TOLD, TOMBSTONES_INTERVAL_S
from replication.deleting import REFUSED_MAX, delete_each
from replication.erasure.erased import Erased
from replication.erasure.strays import Strays
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from replication.formats.carried_out import CARRIED_OUT_FORMAT, CarriedOut
from replication.formats.removed import Reason, Removed, removed
from replication.formats.tombstones import BEHIND, TOMBSTONES, Tombstone, put_behind, read_behind
from replication.keeper.news_reader import Folders, Source
from replication.store_clock import over_by
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec

ERASE_PACKS: Final = 8192  # announced to be removed together
ERASE_TURN_LOOKS: Final = (
    4096  # at a pack for a tombstone that names its namespace, in one turn of the loop, …
)
ERASE_PACK_LOOKS: Final = 512  # … and as many for each pack, which has up to a thousand blocks
ERASE_INTERVAL_S: Final = 1.0  # between two looks whether what became known is erased
# The bucket is listed so long after a tombstone became known: a node that did not know it may have put something meanwhile.
STRAYS_LOOKS_S: Final = (0.0, 600.0, 3600.0)
STRAYS_PAUSE_S: Final = 15.0  # between two looks, also where a store fails in the middle of one
STRAYS_AGAIN_S: Final = 600.0  # at most, while something cannot be deleted
STRAYS_UNREAD_S: Final = 6 * 3600.0  # at most, while something cannot be read: each look reads it again

log = logging.getLogger("replication.erasure")


class Erasure:
    """Of one catalogue and its bucket. told: called with tombstones that are new here, or that erase once more; and with those of a
    prefix again when all that hangs on it is known, as what was fetched before that may have been behind it."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        clock: Callable[[], float],
        told: Callable[[Sequence[Tombstone]], None] = lambda tombstones: None,
        known: Erased | None = None,
        holds: Callable[[], bool] = lambda: True,
        news: Source | None = None,
    ) -> None:
        """clock: unix seconds. known: where tombstones are kept; its own place if none is given. holds: whether this process keeps
        the region now; nobody else deletes anything, or puts anything down."""
        self.told = told
        self.remove: Callable[[Sequence[Removed]], Awaitable[None]] = _nobody  # announces removals
        self.known = known or Erased()
        self.known.over_s = over_by(clock)
        self._folders = Folders(news, TOMBSTONES, BEHIND)
        self._objects = objects
        self._catalogue = catalogue
        self._clock = clock
        self._behind: dict[
            str, set[bytes]
        ] = {}  # by tombstone of a prefix: its block, and those found behind it
        self._kept: dict[str, set[bytes]] = {}  # of these, those that the bucket has
        self._links: dict[bytes, set[bytes]] = {}  # by block, those that follow on it, in packs that are gone
        self._unkept: dict[
            str, list[tuple[bytes, bytes]]
        ] = {}  # of these, by tombstone, what the bucket has not
        self._read: set[str] = set()  # names of objects that say so
        self._next = 0  # number of the first pack in the catalogue that was not looked at
        self._renewals = catalogue.renewals
        self._holds = holds
        self._held = False  # whether it kept the region at the last step
        self._undeleted: dict[str, str] = {}  # names of what is erased and cannot be deleted, and why
        self._strays = Strays(objects)
        self._strays_due_s: list[float] = []  # loop's time, in order
        self._again_s = STRAYS_PAUSE_S  # from now, while something cannot be deleted
        self._away: set[str] = set()  # see `delete_each`
        self._strays_begun_s = float("-inf")
        self._looked_through: dict[
            str, int
        ] = {}  # tombstones by id, their serial: since they are known all of the bucket was looked at
        self._said: dict[str, CarriedOut] = {}
        self._unswept: list[
            Tombstone
        ] = []  # of prefixes: the catalogue was not looked through since they are known

    @property
    def swept(self) -> list[Tombstone]:
        """Those that are watched for, and of which all is known that hangs on what they name."""
        return [tombstone for tombstone in self.tombstones if tombstone not in self._unswept]

    @property
    def tombstones(self) -> list[Tombstone]:
        """Those that are watched for now."""
        return self.known.tombstones

    def forbids(self, spec: NamespaceSpec, hashes: bytes = b"") -> bool:
        """Whether these blocks of a namespace, or one before them in `hashes`, are erased."""
        size = spec.hash_bytes
        if self.known.forbids(spec, hashes):
            return True
        behind = [found for tombstone in self.known.naming(spec) if (found := self._behind.get(tombstone.id))]
        if not behind:
            return False
        blocks = [hashes[at : at + size] for at in range(0, len(hashes), size)]
        return not all(found.isdisjoint(blocks) for found in behind)

    def covers(self, announced: Announced) -> bool:
        """Whether a pack is erased."""
        named = self.known.naming(announced.pack.header.spec)
        found = [self._is_of(announced, tombstone) for tombstone in named]  # each learns of it
        return any(found)

    def _is_of(self, announced: Announced, tombstone: Tombstone) -> bool:
        """Of a namespace that this tombstone names."""
        if not tombstone.block_hash:
            return True
        header = announced.pack.header
        behind = self._behind_of(tombstone)
        blocks = list(header.each_hash())
        if header.parent not in behind:
            first = next((at for at, block in enumerate(blocks) if block in behind), None)
            if first is None:
                return False
            self._link(tombstone.id, [header.parent, *blocks[:first]])
            blocks = blocks[first:]
        self._add(behind, blocks)
        return True

    def _behind_of(self, tombstone: Tombstone) -> set[bytes]:
        behind = self._behind.setdefault(tombstone.id, set())
        self._add(behind, [tombstone.block_hash])
        return behind

    def _add(self, behind: set[bytes], blocks: Iterable[bytes]) -> None:
        """Blocks that are behind a prefix, and those that follow on them though no pack says so any more."""
        news = [block for block in blocks if block not in behind]
        if news:
            self._next = 0  # what hangs on it may have become known before it
        while news:
            block = news.pop()
            behind.add(block)
            news += self._links.get(block, set()) - behind

    def _link(self, tombstone_id: str, blocks: Sequence[bytes]) -> None:
        """These follow on each other in a pack that goes, and stay alive."""
        for before, block in pairwise(blocks):
            follow = self._links.setdefault(before, set())
            if before and block not in follow:
                follow.add(block)
                self._unkept.setdefault(tombstone_id, []).append((before, block))

    # -- work --

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        looked_s = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            try:
                if loop.time() - looked_s >= TOMBSTONES_INTERVAL_S:
                    if self._folders.are_due():
                        await self.look()
                        self._folders.listed()
                    looked_s = loop.time()
            except ObjectError as error:
                log.debug("%s: tombstones are looked for again: %s", self._objects.where, error)
            try:
                self._see_keeper()
                await self.step()
                await self._keep(loop.time())
            except (ObjectError, CatalogueDamaged) as error:
                log.debug("%s: erasing goes on later: %s", self._objects.where, error)
            await asyncio.sleep(ERASE_INTERVAL_S)

    async def look(self) -> None:
        """Learn of new tombstones. Raises ObjectError, after all that can be read was learned, if some could not."""
        if new := await self.known.look(self._objects):
            self._next = 0
            self.told(new)
        for tombstone in new:
            if tombstone.block_hash and not tombstone.is_taken_back:
                self._unswept.append(tombstone)
        is_of_prefixes = any(tombstone.block_hash for tombstone in self.tombstones)
        for found in (
            await read_behind(self._objects, self._read, self.known.problems) if is_of_prefixes else ()
        ):
            self._add(self._behind.setdefault(found.tombstone, set()), found.blocks)
            self._kept.setdefault(found.tombstone, set()).update(found.blocks)
            for before, block in found.links:
                self._links.setdefault(before, set()).add(block)
                for behind in self._behind.values():
                    if before in behind:
                        self._add(behind, [block])
        if self.known.unavailable:
            raise ObjectUnavailable(self.known.unavailable)

    async def step(self) -> None:
        """Remove what is named of what became known; after a new tombstone, of everything. Raises ObjectError."""
        catalogue = self._catalogue
        if self._renewals != catalogue.renewals:
            self._renewals, self._next = catalogue.renewals, 0
        while self.tombstones and self._next < catalogue.next_number:
            first, self._next = self._next, catalogue.next_number
            try:
                if not first:
                    await self._look_at_lost()
                found: list[Announced] = []
                for chunk in catalogue.chunks(first):
                    found += await self._covered(chunk)
                    if len(found) >= ERASE_PACKS:
                        await self._remove(found)
                        found = []
                await self._remove(found)
            except BaseException:
                self._next = min(self._next, first)
                raise
        await self._keep_behind()
        swept, self._unswept = self._unswept, []
        if swept:
            self.told(swept)

    async def _look_at_lost(self) -> None:
        """What hangs on packs that are gone goes as if they were here."""
        for chunk in self._catalogue.lost(self._clock()):
            await self._covered(chunk)

    async def _covered(self, packs: Sequence[Announced]) -> list[Announced]:
        """Those that are erased."""
        found, looks = list[Announced](), 0
        for announced in packs:
            if self.covers(announced):
                found.append(announced)
            looks += ERASE_PACK_LOOKS + len(self.known.naming(announced.pack.header.spec))
            if looks >= ERASE_TURN_LOOKS:
                looks = 0
                await asyncio.sleep(0)
        return found

    # -- what the keeper does --

    def _see_keeper(self) -> None:
        """Who keeps the region from now on looks at everything: another one may have died in the middle."""
        holds = self._holds()
        if holds and not self._held:
            self._next = 0
            self._looked_through.clear()
            self._said.clear()
        self._held = holds

    async def _keep(self, now_s: float) -> None:
        """Look at all that the bucket has, when it is time, and say how far it is. now_s: loop's time. Raises ObjectError."""
        if not self._holds():
            return
        there = {tombstone.id: tombstone.serial for tombstone in self.tombstones}
        if any(self._looked_through.get(one) != serial for one, serial in there.items()):
            self._strays_due_s = [now_s + pause_s for pause_s in STRAYS_LOOKS_S]
            self._again_s = STRAYS_PAUSE_S
        if self._strays_due_s and max(self._strays_due_s[0], self._strays_begun_s + STRAYS_PAUSE_S) <= now_s:
            self._strays_begun_s = now_s
            await self._remove_strays()
            self._looked_through = there
            self._strays_due_s = [due_s for due_s in self._strays_due_s if due_s > now_s]
            self._again_s = min(2 * self._again_s, STRAYS_AGAIN_S if self._undeleted else STRAYS_UNREAD_S)
        if (self._undeleted or self._strays.unread) and now_s + self._again_s < min(
            self._strays_due_s, default=math.inf
        ):
            self._strays_due_s.insert(0, now_s + self._again_s)
        for tombstone in self.tombstones:
            if self._looked_through.get(tombstone.id) == tombstone.serial:
                await self._say(tombstone)

    async def _remove_strays(self) -> None:
        """What is erased, and in the bucket whether it was announced or not."""

        def is_known(pack_id: bytes) -> bool:
            return self._catalogue.packs([pack_id]) != [None]

        self._undeleted.clear()  # each is tried again
        async for names in self._strays.pages(self.tombstones, is_known, self.covers):
            await self._keep_behind()
            await self._delete(names)

    async def _say(self, tombstone: Tombstone) -> None:
        """That it is carried out, but for what cannot be deleted, and of what nobody here can say whether it is erased."""
        left = {name: why for name, why in self._undeleted.items() if self._strays.concerns(name, tombstone)}
        why = [f"{name}: {reason}" for name, reason in left.items()]
        why += [f"may be of it, and cannot be read: {reason}" for reason in self._strays.doubtful(tombstone)]
        said = CarriedOut(tombstone.id, tombstone.serial, self._clock(), len(why), tuple(why[:PROBLEMS_TOLD]))
        before = self._said.get(tombstone.id)
        if before is None or msgspec.structs.replace(before, at_s=said.at_s) != said:
            await CARRIED_OUT_FORMAT.put(self._objects, said)
            self._said[tombstone.id] = said

    async def _delete(self, names: Sequence[str]) -> None:
        """Those that cannot be are problems, are read by nobody, and are tried again now and then; the others go. Raises
        ObjectUnavailable."""

        async def delete(some: Sequence[str]) -> None:
            if not self._holds():
                raise ObjectUnavailable(f"{self._objects.where}: this process does not keep the region now")
            await self._objects.delete(some)

        for at in range(0, len(names), REFUSED_MAX):
            some = names[at : at + REFUSED_MAX]
            left = await delete_each(delete, some, self._away)
            for name in some:
                if (why := left.get(name)) is not None:
                    self._undeleted[name] = f"cannot be deleted: {why}"
                    self.known.problems.note(name, f"erased, and cannot be deleted: {why}")
                else:
                    self._undeleted.pop(name, None)
                    self.known.problems.over(name)

    async def _keep_behind(self) -> None:
        """Before anything is removed that says what hangs on it: others, and later lives, need it still."""
        if not self._holds():
            return
        for tombstone in self.tombstones:
            behind, kept = (found.setdefault(tombstone.id, set()) for found in (self._behind, self._kept))
            unkept = self._unkept.setdefault(tombstone.id, [])
            kept.add(tombstone.block_hash)  # which the tombstone says
            if len(kept) < len(behind) or unkept:
                news, links = behind - kept, list(unkept)
                await put_behind(self._objects, tombstone.id, news, links)
                kept.update(news)
                del unkept[: len(links)]

    async def _remove(self, packs: Sequence[Announced]) -> None:
        """By the keeper. What cannot be deleted is found again in the list of the bucket."""
        await self._keep_behind()
        if not packs:
            return
        if not self._holds():
            self._held = False  # whenever it keeps the region from now on, it looks at everything
            return
        await self.remove([removed(announced, Reason.ERASED) for announced in packs])
        if any(await self._catalogue.packs_all([announced.pack.id for announced in packs])):
            self._next = 0  # they were announced once more meanwhile
        await self._delete([announced.pack.name for announced in packs])


async def _nobody(some: Sequence[Removed]) -> None:
    """Of a process that keeps no region."""
