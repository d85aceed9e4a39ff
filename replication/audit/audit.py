"""The audit: whether a bucket has what was announced, and nothing else; and what is done where it does not.

    packs/ listed ─▶ known? ─┬─ no ─▶ there, not announced: orphans.py ─▶ announced, or deleted
                             └─ yes, and as long as announced ─▶ seen
    catalogue ─▶ not seen? ─▶ asked again twice ─▶ not there: removed;  of another size: removed, deleted
    doubts ─▶ read to the end ─▶ the same

Models are audited behind packs (model_audit.py).

Each page of the listing is held against the catalogue as it is then. A pack that became known after the listing began is not
looked for. (Listing and catalogue could not be merged as two sorted lists: objects are sorted by namespace first, rows are not.)

What must always hold:

* What is gone is removed for everybody, by an entry of the feed, and by whoever keeps the region.
* Nothing is removed because the place is away: a directory that is not mounted lists as empty, a marker is not there.
* Nothing is removed that was there when it was asked for, seconds apart; nothing deleted that the catalogue knows, and that
  has the bytes that were announced.
* Where nobody copies a pack here again, what follows a block that is not durable is removed, too: else the blocks behind
  the hole would count as held, and the hole would never be filled. Its packs are orphans then, and are announced again by a
  later audit when their parent is durable again.

It takes a bit for each pack, and AUDIT_DOUBTED_MAX packs. Nothing holds the loop for longer than AUDIT_SLICE_PACKS take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from replication.audit.model_audit import ModelAudit, ModelReport
from replication.audit.orphans import Finding, Hands, Kind, Orphans, Terms
from replication.catalogue.catalogue import Catalogue
from replication.catalogue.seen import Seen
from replication.constants import AUDIT_REQUESTS_MAX
from replication.erasure.erasure import Erasure
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from replication.formats.region import Region, require_same
from replication.formats.removed import Reason, removed
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import (
    ObjectDamaged,
    ObjectKeyUnknown,
    ObjectMissing,
    ObjectRefused,
    ObjectUnavailable,
    PackDamaged,
    PackUnknown,
)
from tiers.packs.pack_io import is_pack_later, verified_pack
from tiers.packs.packs import PACKS, Pack, pack_identity
from tiers.together import together

AUDIT_AGAIN_S: Final = 60.0  # before what is not there is asked for again
AUDIT_SLICE_PACKS: Final = 128  # held against the catalogue at a time: 1 to 2 ms
VERIFY_PACKS: Final = 4  # read whole at a time
AUDIT_DOUBTED_MAX: Final = 4096  # packs that were not there once

log = logging.getLogger("replication.audit")
T = TypeVar("T")


class Report(msgspec.Struct):
    """listed: packs that are there. announced: packs that are, in the catalogue. missing, damaged,
    hanging: announced packs that were removed; hanging ones follow a block that is not durable. restored, deleted: orphans. left: orphans that were not judged. strange: objects that
    are no packs. models: of models. is_whole: False where there is more than one audit could remember: another one is needed."""

    listed: int = 0
    listed_bytes: int = 0
    announced: int = 0
    announced_bytes: int = 0
    missing: int = 0
    hanging: int = 0
    damaged: int = 0
    restored: int = 0
    deleted: int = 0
    left: int = 0
    strange: int = 0
    models: ModelReport = ModelReport()
    is_whole: bool = True


class Wrong(NamedTuple):
    """With a pack. text: for people."""

    reason: Reason
    text: str


class _Found(NamedTuple):
    """A pack that was read, and of which object."""

    announced: Announced
    wrong: Wrong | None
    version: ObjectInfo | None


class Audit:
    """Of one bucket and a catalogue of it. One at a time."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        catalogue: Catalogue,
        erasure: Erasure,
        hands: Hands,
        clock: Callable[[], float],
        again_s: float = AUDIT_AGAIN_S,
    ) -> None:
        """region: whose bucket it is. clock: unix seconds. again_s: pause before what is not there is asked for again."""
        self.forgets_behind = True  # nobody copies packs here, in any order: what hangs on nothing is removed
        # Whether somebody copies this one here again; with any other one that is gone, what hangs on it is removed.
        self.is_brought: Callable[[Announced], bool] = lambda announced: not self.forgets_behind
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None
        self._objects = objects
        self._region = region
        self._catalogue = catalogue
        self._erasure = erasure
        self._hands = hands
        self._clock = clock
        self._again_s = again_s
        self.models = ModelAudit(objects, catalogue, hands, clock, self._check_place, again_s)

    async def run(
        self,
        terms: Terms,
        told: Callable[[Finding], None] = lambda finding: None,
        report: Report | None = None,
    ) -> Report:
        """One audit; told of each thing that is found. report: is filled in. Raises RegionError, ObjectError, CatalogueDamaged: half of it
        may be done then, and nothing is wrong because of that."""
        await self._check_place()
        renewals, report = self._catalogue.renewals, report or Report()
        await self._erasure.look()
        orphans = Orphans(
            self._objects, self._catalogue, self._erasure, self._hands, terms, self._clock, told
        )
        doubted = await self._compare(orphans, report, told)
        self._check_same(renewals)
        await orphans.end()
        report.restored, report.deleted, report.left = orphans.restored, orphans.deleted, orphans.left
        report.is_whole = report.is_whole and orphans.is_whole
        holes = [] if terms.restores_all or not self.forgets_behind else await self._holes()
        if doubted or holes:
            await asyncio.sleep(self._again_s)
            await self.verify([entry.pack.id for entry in doubted], report, told)
            self._check_same(renewals)
            await self._remove_holes(holes, report, told)
        self._check_same(renewals)
        report.models = await self.models.run(terms, told)
        return report

    # -- comparing --

    async def _compare(
        self, orphans: Orphans, report: Report, told: Callable[[Finding], None]
    ) -> list[Announced]:
        """All that is there. Returns what is announced, and was not there once more when it was asked for."""
        seen, behind, counts = Seen(), self._catalogue.next_number, self._catalogue.counts
        report.announced, report.announced_bytes = counts.packs, counts.bytes
        async for page in self._objects.list(PACKS):
            unknown: list[ObjectInfo] = []
            for some in _slices(page):
                unknown += self._unknown(some, seen, report, told)
                await asyncio.sleep(0)
            self.progress("packs compared", report.listed, max(report.listed, counts.packs))
            if unknown:
                await orphans.take(unknown)
        doubted: list[Announced] = []
        for unseen in self._catalogue.chunks_without(seen, behind):
            doubted += await self._not_there(unseen)
            if len(doubted) >= AUDIT_DOUBTED_MAX:
                report.is_whole = False
                break
        return doubted

    async def _not_there(self, unseen: Sequence[Announced]) -> list[Announced]:
        await asyncio.sleep(0)
        due = list(filter(self._is_due, unseen))
        found: list[Announced] = []
        for some in _slices(due, AUDIT_REQUESTS_MAX):
            are_there = await together(map(self._is_there, some))
            found += [entry for entry, is_there in zip(some, are_there, strict=True) if not is_there]
        return found

    def _unknown(
        self, infos: Sequence[ObjectInfo], seen: Seen, report: Report, told: Callable[[Finding], None]
    ) -> list[ObjectInfo]:
        """Those of a listing that the catalogue does not know. What it knows, and is as long as it should be, is seen."""
        some: list[tuple[ObjectInfo, bytes]] = []
        for info in infos:
            identity = pack_identity(info.name)
            if identity is None:
                report.strange += 1
                told(Finding(Kind.STRANGE, info.name, "no name of a pack"))
            else:
                some.append((info, identity[1]))
                report.listed += 1
                report.listed_bytes += info.size_bytes
        unknown = []
        for (info, _), known in zip(some, self._catalogue.numbered([one for _, one in some]), strict=True):
            if known is None or known.announced.pack.name != info.name:
                unknown.append(info)
            elif known.announced.pack.size_bytes == info.size_bytes:
                seen.add(known.number)
        return unknown

    def _is_due(self, announced: Announced) -> bool:
        """Whether a pack has to be there: its life is not over, and it is not erased."""
        is_over = 0 < announced.kept_until_s <= self._clock()
        return not is_over and not self._erasure.covers(announced)

    async def _is_there(self, announced: Announced) -> bool:
        """As long as it was announced; also where nobody can say."""
        try:
            return (await self._objects.head(announced.pack.name)).size_bytes == announced.pack.size_bytes
        except ObjectMissing:
            return False
        except (ObjectDamaged, ObjectRefused) as error:
            log.warning("%s: not judged: %s", self._objects.where, error)
            return True

    # -- what is not there --

    async def verify(
        self, ids: Sequence[bytes], report: Report, told: Callable[[Finding], None] = lambda finding: None
    ) -> None:
        """Read packs that somebody missed, or found to be wrong, from the first byte to the last: what is gone, wrong or refused is
        removed. Raises RegionError, ObjectError, CatalogueDamaged."""
        renewals, found = self._catalogue.renewals, list[_Found]()
        due = [one for one in await self._catalogue.packs_all(ids) if one is not None and self._is_due(one)]
        for some in _slices(due, VERIFY_PACKS):
            found += [one for one in await together(map(self._verified, some)) if one.wrong is not None]
        await self._check_place()  # behind the answers: a place that is away has nothing
        self._check_same(renewals)
        for reason in Reason:
            packs = [one.announced for one in found if one.wrong is not None and one.wrong.reason == reason]
            report.missing += len(packs) if reason == Reason.GONE else 0
            report.damaged += len(packs) if reason != Reason.GONE else 0
            await self._remove(packs, reason, report)
        for announced, wrong, version in found:
            assert wrong is not None
            is_same = wrong.reason == Reason.DAMAGED and await self._version(announced.pack) == version
            is_deleted = is_same and await self._hands.delete([announced.pack.name])
            kind = Kind.MISSING if wrong.reason == Reason.GONE else Kind.DAMAGED
            if version is not None and version.size_bytes != announced.pack.size_bytes:
                kind = Kind.SIZE
            told(Finding(kind, announced.pack.name, wrong.text, "deleted" if is_deleted else "removed"))

    async def _verified(self, announced: Announced) -> _Found:
        try:
            version = await self._version(announced.pack)
            return _Found(announced, await wrong_of(self._objects, announced.pack), version)
        except (ObjectUnavailable, ObjectKeyUnknown, PackUnknown):  # who doubts it still says so again
            return _Found(announced, None, None)

    async def _remove(self, packs: Sequence[Announced], reason: Reason, report: Report) -> None:
        """Say that these are gone, and what hangs on nothing else, unless a mirror brings them again."""
        said = [removed(one, reason) for one in packs if self.is_brought(one)]
        said += await self._catalogue.removals([one for one in packs if not self.is_brought(one)], reason)
        report.hanging += sum(one.reason == Reason.HANGING for one in said)
        await self._hands.announce(said)

    async def _version(self, pack: Pack) -> ObjectInfo | None:
        """Of the object as it is now: it may be put again while it is read."""
        try:
            return await self._objects.head(pack.name)
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            return None

    async def _holes(self) -> list[Announced]:
        """Packs that follow a block which is not durable, as far as memory tells."""
        found: list[Announced] = []
        for chunk in self._catalogue.chunks():
            found += filter(self._hangs_on_nothing, chunk)
            await asyncio.sleep(0)
            if len(found) >= AUDIT_DOUBTED_MAX:
                break
        return found

    def _hangs_on_nothing(self, announced: Announced) -> bool:
        header = announced.pack.header
        return bool(header.parent) and not self._catalogue.may_have(header.spec.digest + header.parent)

    async def _remove_holes(
        self, holes: Sequence[Announced], report: Report, told: Callable[[Finding], None]
    ) -> None:
        """Those whose parent has not become known meanwhile, and that nobody has removed."""
        known = await self._catalogue.packs_all([entry.pack.id for entry in holes])
        gone = [entry for entry in known if entry is not None and self._hangs_on_nothing(entry)]
        for entry in gone:
            told(
                Finding(Kind.PARENTLESS, entry.pack.name, "it follows a block that is not durable", "removed")
            )
        await self._remove(gone, Reason.HANGING, report)

    async def _check_place(self) -> None:
        """That this is the region still. Raises RegionError, ObjectError."""
        await require_same(self._objects, self._region)

    def _check_same(self, renewals: int) -> None:
        if self._catalogue.renewals != renewals:
            raise CatalogueDamaged("the catalogue was made anew meanwhile")


async def wrong_of(objects: Objects, pack: Pack) -> Wrong | None:
    """What is wrong with a pack, read from the first byte to the last; None if nothing is. Asked twice: the way may be to blame once.
    Raises ObjectKeyUnknown and PackUnknown, where nobody here can say, and ObjectUnavailable."""
    found = None
    for _ in range(2):
        try:
            await verified_pack(objects, pack)
            return None
        except (ObjectKeyUnknown, PackUnknown):
            raise  # others may have the key, or know the format
        except ObjectMissing as error:
            return Wrong(Reason.GONE, str(error))
        except PackDamaged as error:
            if await is_pack_later(objects, pack.name):
                raise PackUnknown(str(error)) from error
            found = Wrong(Reason.DAMAGED, str(error))
        except (ObjectDamaged, ObjectRefused) as error:
            found = Wrong(Reason.REFUSED, str(error))
    if found is not None and found.reason == Reason.DAMAGED:
        if await _content(objects, pack) != await _content(objects, pack):
            return None  # the way is to blame: what is damaged in the store comes back the same
    return found


async def _content(objects: Objects, pack: Pack) -> bytes:
    """Or why there is none."""
    try:
        return bytes(await objects.get_within(pack.name, pack.size_bytes))
    except (ObjectMissing, ObjectDamaged, ObjectRefused) as error:
        return str(error).encode()


def _slices(items: Sequence[T], most: int = AUDIT_SLICE_PACKS) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), most):
        yield items[at : at + most]
