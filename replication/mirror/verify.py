"""Verifying a region from outside, with nothing but credentials for its bucket: is everything there that was announced?

    feed, snapshots ─▶ catalogue in a directory that is thrown away ─▶ Audit ─▶ what is found
                                                     │                  └▶ with repair: orphans announced, damage deleted, what is gone
                                                     │                     removed, and a snapshot over gaps
                                                     ├─▶ deep: packs read, every checksum compared
                                                     └─▶ against another region: what the rules say, and is not here

Without repair nothing is written but the bell, which tells the store's clock. With it, what is gone is removed for everybody, by entries of the feed.
Memory: a catalogue's, DEEP_PACKS packs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from replication.audit.audit import Audit, Report, Wrong, wrong_of
from replication.audit.orphans import Finding, Kind, Terms
from replication.catalogue.catalogue import Catalogue
from replication.constants import ORPHAN_GRACE_S, ROTTEN_LOOKS
from replication.deleting import delete_each
from replication.erasure.erasure import Erasure
from replication.feed.feed import FeedWriter, fresh_writer
from replication.feed.snapshots import Snapshots
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.announced_models import AnnouncedModel
from replication.formats.keeping import clock_of
from replication.formats.mirror_state import MIRRORS, source_of
from replication.formats.region import Region, open_region
from replication.formats.removed import Reason, Removed, Said, removed
from replication.formats.rules import Rule, rule_for
from replication.formats.segment import Segment
from replication.mirror.copying import is_lacking
from replication.mirror.verify_models import ReadChunks, copied, lacking_models, read_chunks
from tiers.bucket.objects import Objects
from tiers.errors import ObjectKeyUnknown, ObjectUnavailable, PackUnknown
from tiers.packs.packs import Pack
from tiers.together import together

DEEP_PACKS: Final = 4  # read whole at a time, by whoever verifies every byte
VERIFY_LOOK_S: Final = 0.2  # of a region that is verified from outside: between two looks at its feed
VERIFY_AGAIN_S: Final = 2.0  # before what is not there is asked for again
LACKING_AGAIN_S: Final = 10.0  # before what was not copied yet is asked for again

Told = Callable[[Finding], None]
Progress = Callable[[str, int, int], None]


class Deep(NamedTuple):
    """share: of the packs that are read, 0 to 1. bytes_per_s: at most, 0: no limit."""

    share: float = 1.0
    bytes_per_s: int = 0


class Read(msgspec.Struct):
    """Packs that were read to their last byte. unread: others, which this version, or who has not their key, cannot read."""

    packs: int = 0
    bytes: int = 0
    damaged: int = 0
    unread: int = 0


class Outside:
    """One region, followed from outside."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        directory: Path,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """directory: where there is nothing yet. skew_s: by which clocks differ. clock: unix seconds."""
        self.objects = objects
        self.region = region
        self.catalogue = Catalogue.open(directory, region.identity)
        self.erasure = Erasure(objects, self.catalogue, clock)
        self._tail = Tail(objects, self.catalogue, clock, chance)
        self._skew_s = skew_s
        self._clock = clock
        self._chance = chance
        self._gaps = 0
        self._has_mirror = False
        self._hands = _Hands(self, False)

    @classmethod
    async def open(
        cls,
        objects: Objects,
        deployment: str,
        region: str,
        directory: Path,
        skew_s: float,
        chance: random.Random,
    ) -> Outside:
        """Raises RegionError, ObjectError."""
        marker = await open_region(objects, deployment, region)
        return cls(objects, marker, directory, skew_s, await clock_of(objects), chance)

    def close(self) -> None:
        self.catalogue.close()

    async def follow(self, told: Told, repairs: bool = False) -> None:
        """Read all that was announced and is not erased; told of gaps, and goes on behind them. repairs: an audit, and
        `end_repair`, come next. Raises ObjectError, CatalogueDamaged."""
        looks_left = 2 * ROTTEN_LOOKS
        while not await self._tail.look():
            gaps = self._tail.gaps
            for gap in gaps:
                numbers = f"{gap.next_number} to {gap.first_there - 1}"
                told(
                    Finding(
                        Kind.GAP,
                        f"feed/{gap.writer}",
                        f"segments {numbers} are gone or damaged, and in no snapshot",
                        "its packs and a snapshot say what they said" if repairs else "",
                    )
                )
            self._gaps += len(gaps)
            self._tail.leave_behind(gaps)
            looks_left = 2 * ROTTEN_LOOKS if gaps else looks_left - 1
            if not looks_left:
                raise ObjectUnavailable(
                    self._tail.status().failure or f"{self.objects.where}: its feed cannot be read"
                )
            await asyncio.sleep(VERIFY_LOOK_S)
        await self.erasure.look()
        await self._forget_erased()

    async def _forget_erased(self) -> None:
        """As nodes do, but for the bucket."""
        is_found = True
        while is_found and self.erasure.tombstones:
            is_found = False
            for chunk in self.catalogue.chunks():
                for announced in filter(self.erasure.covers, chunk):
                    is_found |= bool(self.catalogue.remove([removed(announced, Reason.ERASED)]))
                await asyncio.sleep(0)

    # -- the bucket --

    async def audit(self, repairs: bool, told: Told, progress: Progress, report: Report) -> None:
        """After `follow`. report: is filled in, as far as it comes. Raises RegionError, ObjectError, CatalogueDamaged."""

        def tell(finding: Finding) -> None:
            told(finding if repairs else finding._replace(repaired=""))

        self._hands = hands = _Hands(self, repairs)
        audit = Audit(
            self.objects, self.region, self.catalogue, self.erasure, hands, self._clock, VERIFY_AGAIN_S
        )
        self._has_mirror = await self._has_mirrors()
        audit.forgets_behind = not self._has_mirror  # copies come in any order
        audit.is_brought = self._is_brought
        audit.progress = progress
        settled_s = self._clock() - ORPHAN_GRACE_S - 2 * self._skew_s
        await audit.run(Terms(settled_s, restores_all=bool(self._gaps)), tell, report)

    async def end_repair(self) -> str:
        """A snapshot that leads over gaps: its name; "" where there are none. Raises ObjectError, CatalogueDamaged."""
        if not self._gaps:
            return ""
        return (await Snapshots(self.objects, self._clock, self._chance).write(self.catalogue)).name

    async def _has_mirrors(self) -> bool:
        async for page in self.objects.list(MIRRORS):
            if any(source_of(info.name) for info in page):
                return True
        return False

    def _is_brought(self, announced: Announced) -> bool:
        """Whether a mirror copies it again, as far as it can be known from outside."""
        return self._has_mirror and bool(announced.origin)

    # -- every byte --

    async def read(self, deep: Deep, repairs: bool, told: Told, progress: Progress) -> Read:
        """Read packs, and compare what their headers and checksums say. Raises ObjectError, CatalogueDamaged."""
        loop = asyncio.get_running_loop()
        begun_s, done = loop.time(), Read()
        total_bytes = int(self.catalogue.counts.bytes * deep.share)
        for chunk in self.catalogue.chunks():
            drawn = [one for one in chunk if self._is_alive(one) and self._chance.random() < deep.share]
            for at in range(0, len(drawn), DEEP_PACKS):
                some = drawn[at : at + DEEP_PACKS]
                wrongs = await together(_wrong_of(self.objects, one.pack) for one in some)
                for announced, wrong in zip(some, wrongs, strict=True):
                    if isinstance(wrong, str):
                        done.unread += 1
                        told(Finding(Kind.STRANGE, announced.pack.name, wrong))
                        continue
                    done.packs += 1
                    done.bytes += announced.pack.size_bytes
                    if wrong is not None and wrong.reason != Reason.GONE:
                        done.damaged += 1
                        if repairs and self._is_brought(announced):
                            await self._hands.announce([removed(announced, wrong.reason)])
                        elif repairs:
                            await self._hands.announce(
                                await self.catalogue.removals([announced], wrong.reason)
                            )
                        is_deleted = repairs and await self._hands.delete([announced.pack.name])
                        repaired = "deleted" if is_deleted else "removed" if repairs else ""
                        told(Finding(Kind.DAMAGED, announced.pack.name, wrong.text, repaired))
                progress("bytes verified", done.bytes, max(total_bytes, done.bytes))
                if deep.bytes_per_s:
                    await asyncio.sleep(max(0.0, begun_s + done.bytes / deep.bytes_per_s - loop.time()))
        return done

    async def read_models(self, deep: Deep, repairs: bool, told: Told, progress: Progress) -> ReadChunks:
        """The same of chunks of models. Raises ObjectError, CatalogueDamaged."""
        loop = asyncio.get_running_loop()
        begun_s, done = loop.time(), ReadChunks()
        total_bytes = int(sum(model.size_bytes for model in self.catalogue.models.values()) * deep.share)
        read = read_chunks(self.objects, self.catalogue, deep.share, self._chance, told, repairs)
        async for done in read:
            progress("bytes of models verified", done.bytes, max(total_bytes, done.bytes))
            if deep.bytes_per_s:
                await asyncio.sleep(max(0.0, begun_s + done.bytes / deep.bytes_per_s - loop.time()))
        gone = [model for model in self.catalogue.models.values() if model.name in done.models]
        if repairs and gone:
            await self._hands.announce([removed(model, Reason.GONE) for model in gone])
        return done

    def _is_alive(self, announced: Announced) -> bool:
        return not 0 < announced.kept_until_s <= self._clock()

    # -- another region --

    async def lacking(self, source: Outside, rules: Sequence[Rule], told: Told) -> int:
        """How many packs of another region, which was followed, should be here by the rules and are not. What is on its
        way is looked for again, a little later. Raises ObjectError, CatalogueDamaged."""
        found = [
            announced async for announced in _each(source.catalogue) if self._lacks(announced, source, rules)
        ]
        if found:
            await asyncio.sleep(LACKING_AGAIN_S)
            await self.follow(lambda finding: None)
            found = [announced for announced in found if self._lacks(announced, source, rules)]
        for announced in found:
            reason = f"region {source.region.region} has it, and by the rules it should be here"
            told(Finding(Kind.LACKING, announced.pack.name, reason))
        return len(found)

    async def lacking_models(self, source: Outside, rules: Sequence[Rule], told: Told, repairs: bool) -> int:
        """The same of models. repairs: they are copied, which takes its time. Raises Damaged, ObjectError, CatalogueDamaged."""
        name, home = source.region.region, self.region.region
        found = await lacking_models(
            self.catalogue, self.objects, home, source.catalogue, name, rules, self._clock()
        )
        for model in found:
            reason = f"region {name} has it, and by the rules it should be here"
            done = ""
            if repairs:
                brought, wrong = await copied(model, source.objects, self.objects, home, name, self._clock)
                reason = wrong or reason
                if brought is not None:
                    await self._hands.announce([brought])
                    done = "copied"
            told(Finding(Kind.LACKING, model.name, reason, done))
        return len(found)

    def _lacks(self, announced: Announced, source: Outside, rules: Sequence[Rule]) -> bool:
        spec = announced.pack.header.spec
        if announced.origin or rule_for(rules, source.region.region, self.region.region, spec) is None:
            return False
        if self.erasure.covers(announced):
            return False
        [known] = self.catalogue.packs([announced.pack.id])
        return is_lacking(announced, known, self._clock())


async def _wrong_of(objects: Objects, pack: Pack) -> Wrong | str | None:
    """Or why nobody here can say. Raises ObjectUnavailable."""
    try:
        return await wrong_of(objects, pack)
    except (ObjectKeyUnknown, PackUnknown) as error:
        return f"could not be read by this version: {error}"


async def _each(catalogue: Catalogue) -> AsyncIterator[Announced]:
    for chunk in catalogue.chunks():
        for announced in chunk:
            yield announced
        await asyncio.sleep(0)


class _Hands:
    """Without repair, what would be announced is only known here, so that what hangs on it is judged right."""

    def __init__(self, outside: Outside, repairs: bool) -> None:
        self._outside = outside
        self._repairs = repairs
        self._writer: FeedWriter | None = None

    async def announce(self, some: Sequence[Said]) -> None:
        outside, catalogue = self._outside, self._outside.catalogue
        packs = [one for one in some if isinstance(one, Announced)]
        models = [one for one in some if isinstance(one, AnnouncedModel)]
        gone = [one for one in some if isinstance(one, Removed)]
        after_s = catalogue.void_until_s([one.pack.id for one in packs] + [one.name_id for one in models])
        if self._repairs:
            if self._writer is None:
                self._writer = FeedWriter(
                    outside.objects, fresh_writer(outside._chance), outside._clock, outside._chance
                )
            segments = await self._writer.announce(packs, models, gone, after_s)
        else:
            segments = [
                Segment("", 0, max(outside._clock(), after_s + 1), packs, models=models, removed=gone)
            ]
        for segment in segments:
            await catalogue.take_in(segment, is_own=True)

    async def delete(self, names: Sequence[str]) -> int:
        if not self._repairs:
            return len(names)  # that would be
        return len(names) - len(await delete_each(self._outside.objects.delete, names))
