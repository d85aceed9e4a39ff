"""Auditing: when the keeper of a region audits its bucket.

    a day has passed ─┐
    a gap in a feed ──┴─▶ Audit ─▶ gap: the feed goes on behind it, and a snapshot takes everybody there
    doubts of readers ──▶ their packs are read by the keeper itself ─▶ gone, wrong or refused: removed
    removals of models ─▶ said in the feed, and their manifests deleted

After a gap the packs themselves say what the lost segments said.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from replication.audit.audit import AUDIT_AGAIN_S, Audit, Report
from replication.audit.model_audit import ModelReport
from replication.audit.orphans import PARENTLESS_S, RESTORED_KEPT_S, Finding, Terms
from replication.constants import ORPHAN_GRACE_S
from replication.deleting import unchanged
from replication.erasure.removed_models import REMOVED
from replication.errors import CatalogueDamaged, CatalogueUnwritable, ReplicationError
from replication.feed.feed import Gap
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.doubts import DOUBTS, read_doubts
from replication.formats.removed import Removed, Said
from replication.keeper.keeper import Keeper
from replication.keeper.news_reader import Folders
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError
from tiers.together import together

AUDIT_INTERVAL_S: Final = 24 * 3600.0  # on average
AUDIT_LOOK_S: Final = 10.0  # between two looks whether one is due
AUDIT_RETRY_S: Final = 300.0  # after one that failed
AUDIT_GAP_S: Final = 20.0  # a gap may be filled for so long
AUDIT_BLIND_S: Final = (
    600.0  # that it waits for sources of a mirror that have not been read yet, and are away
)
assert AUDIT_AGAIN_S < AUDIT_RETRY_S < ORPHAN_GRACE_S < PARENTLESS_S < RESTORED_KEPT_S

log = logging.getLogger("replication.auditing")


class Elsewhere(msgspec.Struct, frozen=True):
    """What a mirror knows of its sources. is_ready: all of them were read. origin: see `Terms`. brings: whether it copies a pack
    again that is gone here. lost: called when packs were forgotten here."""

    is_ready: Callable[[], bool]
    origin: Callable[[bytes], str | None]
    brings: Callable[[Announced], bool]
    lost: Callable[[], None]


class Auditing:
    """Of one process in its region."""

    def __init__(
        self,
        objects: Objects,
        audit: Audit,
        tail: Tail,
        keeper: Keeper,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """skew_s: by which clocks differ. clock: unix seconds."""
        self.elsewhere: Elsewhere | None = None  # of a mirror
        self.audits = 0
        self.total = Report()  # of all of them, but for what is there
        self._objects = objects
        self._audit = audit
        self._tail = tail
        self._keeper = keeper
        self._skew_s = skew_s
        self._clock = clock
        self._chance = random.Random(chance.random())  # drawn from often: what others draw stays the same
        self._again_s: float | None = None  # loop's time: then the one that failed is begun anew
        self._gap_due_s: float | None = None
        self._blind_s = float("inf")  # since when a gap waits for a mirror's sources
        self._doubts = Folders(keeper, DOUBTS)
        self._removals = Folders(keeper, REMOVED)

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        while True:
            await asyncio.sleep(AUDIT_LOOK_S)
            now_s, gaps = asyncio.get_running_loop().time(), self._tail.gaps
            if not gaps:
                self._gap_due_s = None
            elif self._gap_due_s is None:
                self._gap_due_s = now_s + AUDIT_GAP_S
            if not self._keeper.holds:
                continue
            self._audit.forgets_behind = self.elsewhere is None
            if self.elsewhere is not None:
                self._audit.is_brought = self.elsewhere.brings
            await self._guarded(self._look_at_doubts)
            await self._guarded(self._look_at_removals)
            is_gap_due = self._gap_due_s is not None and self._gap_due_s <= now_s
            if not is_gap_due and not self._is_due(now_s):
                continue
            self._gap_due_s, self._again_s = None, None
            if not await self._guarded(partial(self._run, gaps if is_gap_due else ())):
                self._run_again()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether it came to its end, or found the catalogue damaged; else it is to be done later."""
        try:
            await work()
        except CatalogueDamaged as error:
            self._tail.mend(error)
            return not isinstance(error, CatalogueUnwritable)
        except (ObjectError, ReplicationError) as error:
            log.debug("%s: the audit goes on later: %s", self._objects.where, error)
            return False
        return True

    async def _look_at_doubts(self) -> None:
        """One node's after the other; those of a node are deleted when all of them were looked at, unless it has
        told others meanwhile."""
        if self._tail.complete_age_s is None or not self._doubts.are_due():
            return
        members = await read_doubts(self._objects, self._keeper.problems)
        for info, doubted in members.found:
            report = Report()
            await self._audit.verify(doubted.packs, report)
            self._count(report)
            self._bring_again(report)
            await self._keeper.delete(await unchanged(self._objects, [info]))
        if not members.unavailable:
            self._doubts.listed()

    async def _look_at_removals(self) -> None:
        models = self._audit.models
        if self._removals.are_due() and await models.look_for_removals(self._keeper.problems):
            self._removals.listed()
        await models.take_announced()

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        total = self.total
        return {
            "audits": self.audits,
            "missing_packs": total.missing,
            "damaged_packs": total.damaged,
            "restored_packs": total.restored,
            "deleted_orphans": total.deleted,
            "missing_models": total.models.missing,
            "restored_models": total.models.restored,
        }

    async def _run(self, gaps: Sequence[Gap]) -> None:
        age_s = self._tail.complete_age_s
        is_blind = self.elsewhere is not None and not self.elsewhere.is_ready()
        now_s = asyncio.get_running_loop().time()
        self._blind_s = min(self._blind_s, now_s) if is_blind and gaps else float("inf")
        if (is_blind and now_s < self._blind_s + AUDIT_BLIND_S) or (age_s is None and not gaps):
            self._run_again()
            return
        complete_s = 0.0 if age_s is None else self._clock() - age_s
        terms = Terms(complete_s - ORPHAN_GRACE_S - 2 * self._skew_s, bool(gaps))
        if is_blind:  # nobody goes on behind a gap without an audit: it leaves what a source may have sent to a later one
            terms = Terms(float("-inf"), bool(gaps), lambda pack_id: None)
        elif self.elsewhere is not None:
            terms = terms._replace(origin=self.elsewhere.origin)
        report = await self._audit.run(terms, _logged)
        self.audits += 1
        self._count(report)
        if gaps and report.is_whole:
            self._tail.leave_behind(gaps)
        self._bring_again(report)
        if is_blind or not report.is_whole:
            self._run_again()
        log.info("audited %s: %s", self._objects.where, report)

    def _is_due(self, now_s: float) -> bool:
        """By chance, which has no memory: it does not matter how often another process begins to keep."""
        if self._again_s is not None:
            return self._again_s <= now_s
        return self._chance.random() < AUDIT_LOOK_S / AUDIT_INTERVAL_S

    def _run_again(self) -> None:
        self._again_s = asyncio.get_running_loop().time() + AUDIT_RETRY_S * self._chance.uniform(0.5, 1.0)

    def _bring_again(self, report: Report) -> None:
        lost = report.missing + report.damaged + report.models.missing + report.models.damaged
        if self.elsewhere is not None and lost:
            self.elsewhere.lost()

    def _count(self, report: Report) -> None:
        for name in ("missing", "damaged", "restored", "deleted"):
            setattr(self.total, name, getattr(self.total, name) + getattr(report, name))
        self.total.models = ModelReport(*map(sum, zip(self.total.models, report.models, strict=True)))


def _logged(finding: Finding) -> None:
    log.warning("%s: %s: %s: %s", finding.kind, finding.pack, finding.reason, finding.repaired or "left")


class NodeHands:
    """Of a node that announces, and keeps its region: what `Hands` promises."""

    def __init__(self, announce: Callable[[Said], Awaitable[None]], keeper: Keeper) -> None:
        self._announce = announce
        self._keeper = keeper

    async def announce(self, some: Sequence[Said]) -> None:
        if any(isinstance(one, Removed) for one in some):
            self._keeper.require()
        await together(map(self._announce, some))

    async def delete(self, names: Sequence[str]) -> int:
        return await self._keeper.delete(names)
