"""The audit: whether a bucket has what was announced, and nothing else; and what is done where it does not.

    packs/ listed ─▶ known? ─┬─ no ─▶ there, not announced: orphans.py ─▶ announced, or deleted
                             └─ yes, and as long as announced ─▶ seen
    catalogue ─▶ not seen? ─▶ asked again twice ─▶ not there: forgotten;  of another size: deleted, forgotten

Models are audited behind packs (model_audit.py).

Each page of the listing is held against the catalogue as it is then. A pack that became known after the listing began is not
looked for. (Listing and catalogue could not be merged as two sorted lists: objects are sorted by namespace first, rows are not.)

What must always hold:

* Nothing is forgotten because the place is away: a directory that is not mounted lists as empty, a marker is not there.
* Nothing is forgotten that was there when it was asked for, seconds apart; nothing deleted that the catalogue knows, and that
  has the bytes that were announced.
* Where nobody copies a pack here again, what follows a block that is not durable is forgotten, too: else the blocks behind
  the hole would count as held, and the hole would never be filled. Its packs are orphans then, and are announced again by a
  later audit when their parent is durable again.

It takes a bit for each pack, and AUDIT_DOUBTED_MAX packs. Nothing holds the loop for longer than AUDIT_SLICE_PACKS take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from replication.audit.model_audit import ModelAudit, ModelReport
from replication.audit.orphans import Finding, Hands, Kind, Orphans, Terms, deleted, keys_of
from replication.catalogue.catalogue import Catalogue
from replication.catalogue.seen import Seen
from replication.constants import AUDIT_REQUESTS_MAX
from replication.erasure.erasure import Erasure
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from replication.formats.region import Region, require_same
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused
from tiers.packs.packs import PACKS, pack_identity
from tiers.together import together

AUDIT_AGAIN_S: Final = 60.0  # before what is not there is asked for again
AUDIT_SLICE_PACKS: Final = 128  # held against the catalogue at a time: 1 to 2 ms
AUDIT_DOUBTED_MAX: Final = 4096  # packs that were not there once

log = logging.getLogger("replication.audit")
T = TypeVar("T")


class Report(msgspec.Struct):
    """listed: packs that are there. announced: packs that are, in the catalogue. missing, damaged,
    hanging: announced packs that were forgotten; hanging ones follow a block that is not durable. restored, deleted: orphans. left: orphans that were not judged. strange: objects that
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
        self.forgets_behind = True  # with a pack, what hangs on it
        self.progress: Callable[[str, int, int], None] = lambda what, done, total: None
        self._objects = objects
        self._region = region
        self._catalogue = catalogue
        self._erasure = erasure
        self._hands = hands
        self._clock = clock
        self._again_s = again_s
        self._models = ModelAudit(objects, catalogue, hands, clock, self._check_place, again_s)

    async def run(self, terms: Terms, told: Callable[[Finding], None] = lambda finding: None) -> Report:
        """One audit; told of each thing that is found. Raises RegionError, ObjectError, CatalogueDamaged: half of it may be
        done then, and nothing is wrong because of that."""
        await self._check_place()
        renewals, report = self._catalogue.renewals, Report()
        await self._erasure.look()
        orphans = Orphans(
            self._objects, self._catalogue, self._erasure, self._hands, terms, self._clock, told
        )
        doubted = await self._compare(orphans, report, told)
        self._check_same(renewals)
        await orphans.end()
        report.restored, report.deleted, report.left = orphans.restored, orphans.deleted, orphans.left
        report.is_whole = report.is_whole and orphans.is_whole
        holes = [] if terms.restores_all or not self.forgets_behind else await self._hanging()
        if doubted or holes:
            await asyncio.sleep(self._again_s)
            gone = await self._forget_missing(doubted, renewals, report, told)
            self._check_same(renewals)
            gone += self._forget_hanging(holes, report, told)
            if gone and self.forgets_behind:
                await self._forget_behind(gone)
        self._check_same(renewals)
        report.models = await self._models.run(terms, told)
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
            reasons = await together(map(self._reason, some))
            found += [entry for entry, reason in zip(some, reasons, strict=True) if reason]
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

    async def _reason(self, announced: Announced) -> str:
        """Why a pack is not what was announced; "" if it is."""
        try:
            info = await self._objects.head(announced.pack.name)
        except ObjectMissing:
            return "announced, and not there"
        except (ObjectDamaged, ObjectRefused) as error:
            log.warning("%s: not judged: %s", self._objects.where, error)
            return ""
        if info.size_bytes != announced.pack.size_bytes:
            return f"{info.size_bytes} bytes: announced were {announced.pack.size_bytes}"
        return ""

    # -- what is not there --

    async def _forget_missing(
        self, doubted: Sequence[Announced], renewals: int, report: Report, told: Callable[[Finding], None]
    ) -> list[Announced]:
        """Those that are still not there, or of another size. Returns them."""
        gone: list[Announced] = []
        for some in _slices(doubted, AUDIT_REQUESTS_MAX):
            reasons = await together(map(self._reason, some))
            await self._check_place()  # behind the answers: a place that is away has nothing
            self._check_same(renewals)
            known = self._catalogue.packs([entry.pack.id for entry in some])
            for entry, reason, still in zip(some, reasons, known, strict=True):
                if not reason or still is None or not self._is_due(entry):
                    continue
                is_there = not reason.startswith("announced")
                if is_there and not await deleted(self._hands, entry.pack.name):
                    continue
                self._catalogue.lose(entry.pack.id)
                gone.append(entry)
                report.damaged += is_there
                report.missing += not is_there
                kind = Kind.SIZE if is_there else Kind.MISSING
                told(Finding(kind, entry.pack.name, reason, "deleted" if is_there else "forgotten"))
        return gone

    async def _hanging(self) -> list[Announced]:
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

    def _forget_hanging(
        self, holes: Sequence[Announced], report: Report, told: Callable[[Finding], None]
    ) -> list[Announced]:
        """Those whose parent has not become known meanwhile. Returns them."""
        gone = [entry for entry in holes if self._hangs_on_nothing(entry)]
        for entry in gone:
            if self._catalogue.lose(entry.pack.id):
                report.hanging += 1
                told(
                    Finding(
                        Kind.PARENTLESS,
                        entry.pack.name,
                        "it follows a block that is not durable",
                        "forgotten",
                    )
                )
        return gone

    async def _forget_behind(self, gone: Iterable[Announced]) -> None:
        """What hangs on these, if none of its parents' packs is left."""
        keys = {key for entry in gone for key in keys_of(entry.pack.header)}
        is_found = True
        while is_found:
            is_found = False
            for chunk in self._catalogue.chunks():
                for entry in chunk:
                    header = entry.pack.header
                    above = header.spec.digest + header.parent
                    if header.parent and above in keys and self._catalogue.find([above]) == [None]:
                        self._catalogue.lose(entry.pack.id)
                        keys.update(keys_of(header))
                        is_found = True
                await asyncio.sleep(0)

    async def _check_place(self) -> None:
        """That this is the region still. Raises RegionError, ObjectError."""
        await require_same(self._objects, self._region)

    def _check_same(self, renewals: int) -> None:
        if self._catalogue.renewals != renewals:
            raise CatalogueDamaged("the catalogue was made anew meanwhile")


def _slices(items: Sequence[T], most: int = AUDIT_SLICE_PACKS) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), most):
        yield items[at : at + most]
