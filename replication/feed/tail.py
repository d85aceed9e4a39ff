"""The tail: what keeps the catalogue of a daemon up to date with its region.

    start ─▶ filter from rows ─▶ (nothing known: newest snapshot) ─▶ pass ─▶ wait ─▶ pass ─▶ …
    pass    FeedReader.poll ─▶ Catalogue.add, until there is no more ─▶ a gap: newest snapshot ─▶ caught up
    a gap that no snapshot covers ─▶ the keeper is told ─▶ it writes one; and where it has the gap itself
                                  ─▶ audit of the packs (auditing.py) ─▶ leave_behind: a snapshot, and on

A pass takes what there is, segment by segment, and lets others run in between. What cannot be read now is tried again
in the next pass, and nothing behind it is taken meanwhile. A store that fails is left alone for longer and longer. A
catalogue that is damaged is made anew; one that cannot be written is not, and is tried again in the next pass.

The keeper of the region writes snapshots, rarely: when reading the tail costs as much as reading a snapshot. Two at once do no harm.
Nobody else writes anything.
A listener is told what is learned: segments as they come, and that more than they say may have changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final, Protocol

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.constants import KIB, PROBLEM_LASTS_S
from replication.errors import CatalogueDamaged, CatalogueUnwritable
from replication.feed.feed import HEAD_TRUST_S, FeedReader, Gap
from replication.feed.snapshots import SNAPSHOTS_KEPT, Manifest, Snapshots, segments_behind
from replication.formats.keeping import STUCK, put_stuck, stuck
from replication.formats.region import require_place
from replication.formats.segment import Segment
from replication.keeper.keeper import Keeper
from replication.keeper.news_reader import Folders, Source
from replication.problems import Problems
from replication.waits import within
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError

POLL_INTERVAL_S: Final = 5.0
POLL_INTERVAL_PER_WRITER_S: Final = 0.1
POLL_JITTER: Final = 0.2  # share of the interval, up and down
BACKOFF_S_MIN: Final = 1.0  # after a failed pass; doubles
BACKOFF_S_MAX: Final = 30.0  # that it answers again is known within a minute
SNAPSHOT_SEGMENTS_MIN: Final = 1024  # in the tail, before a new one is worth it
SILENT_WRITERS_MAX: Final = 256  # that are not retired yet; of more a snapshot is written,
CROWD_INTERVAL_S: Final = 3600.0  # … this far apart
SNAPSHOT_TRY_PASSES: Final = 8  # in a row that could not read all, before a snapshot is tried
STUCK_AFTER_S: Final = 20.0  # with a gap; then the keeper is told, and again after as long a pause
STUCK_SNAPSHOT_S: Final = 300.0  # between two snapshots for those who are stuck
CATALOGUE: Final = "catalogue"
CATALOGUE_FIX: Final = (
    "make room on the disk of the data directory, or give the files to the user of this process; it is tried again, and "
    "what is new in the region is not known meanwhile"
)
SEGMENT_COST_BYTES: Final = 64 * KIB  # of a snapshot: reading so much takes as long as getting a segment
assert POLL_INTERVAL_S < HEAD_TRUST_S

log = logging.getLogger("replication.tail")


class TailStatus(msgspec.Struct, frozen=True):
    """age_s: seconds since a pass that read all there was began, None before the first. segments, entries: read since the start.
    damaged: segments that did not match their checksum, each time counted. failures: passes in a row that could
    not look. failure: why something could not be read last, "" if never."""

    writers: int
    positions: Mapping[str, int]
    age_s: float | None
    segments: int
    entries: int
    damaged: int
    gaps: tuple[Gap, ...]
    gap_reasons: tuple[str, ...]  # in words, of each
    failures: int
    failure: str
    unsound: int  # entries that cannot be true, and are left out
    unsound_reason: str  # what is wrong with the latest
    snapshot: str  # the one read or written last, "" if none
    renewals: int  # of a damaged catalogue


class Listener(Protocol):
    """Told what a tail learns, after the catalogue has."""

    async def heard(self, segment: Segment) -> None:
        """This was read. Of each writer in order, and again after a leap. Lets others run every few milliseconds."""

    def leapt(self) -> None:
        """A snapshot was read, or the catalogue is made anew."""


class Tail:
    """One for each daemon and region. Everything is called on the event loop's thread.

    caught_up: a pass has read all there was, once.
    """

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        clock: Callable[[], float],
        chance: random.Random,
        listener: Listener | None = None,
        keeper: Keeper | None = None,
        news: Source | None = None,
        closely: bool = False,
    ) -> None:
        """clock: unix seconds, of what is written. listener: told what is learned. keeper: None: this process keeps nothing there.
        news: of a region that is followed from outside, for long. closely: see `FeedReader`."""
        self.caught_up = asyncio.Event()
        self.problems = keeper.problems if keeper is not None else Problems(objects.where)
        self._objects = objects
        self._catalogue = catalogue
        self._is_unwritable = False
        self._chance = chance
        self._listener = listener
        self._keeper = keeper
        self._snapshots = Snapshots(objects, clock, chance, None if keeper is None else keeper.delete)
        self.news: Source | None = keeper or news
        if keeper is not None:
            keeper.news.told = self._hear
            self._snapshots.now_s = keeper.clock
        self._closely = closely
        self.ours: Callable[[], str] = lambda: ""  # see `FeedReader`
        self._reader = self._begun()
        self._woken = asyncio.Event()
        self._renewals = catalogue.renewals  # of what the reader goes on from
        self._tried = ""  # the snapshot that was read last
        self._whole = ""  # one that was read to its end, or written: all of it is known
        self._compared = ""  # one that covers nothing that is not known
        self._owes_comparison = False  # with the newest snapshot: since the last full look
        self._is_new = True  # nothing was read since the catalogue was opened or made anew
        self._segments = self._entries = self._damaged_before = 0
        self._unsound, self._unsound_reason = 0, ""
        self._failures = self._unread_passes = self._since_check = 0
        self._failure = ""
        self._read_all_at_s: float | None = None
        self._sure_at_s: float | None = None
        self._complete_at_s, self._complete_renewals = (
            0.0,
            -1,
        )  # when all heads were listed; of the catalogue then
        self._left_behind: list[Gap] = []  # in the next pass
        self._stuck_there = Folders(self.news, STUCK)
        self._stuck_s = self._helped_s = float("-inf")  # loop's time
        self._crowd_s = float("-inf")  # loop's time of the last snapshot that was written for silent writers

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        self._restart()
        while True:
            self._woken.clear()
            try:
                await self._pass()
                self._failures = 0
                if not self._is_unwritable:
                    self.problems.over(CATALOGUE, CATALOGUE)
            except ObjectError as error:
                self._failed(str(error))
            except CatalogueDamaged as error:
                self._failed(str(error))
                self._renew(error)
            await within(self._pause_s(), self._woken)

    async def look(self) -> bool:
        """One pass, of a tail that does not run: whether all there was is known now. Raises ObjectError, CatalogueDamaged."""
        await self._pass()
        return self._reader.all_read

    def wake(self) -> None:
        """Look now: something was announced."""
        self._reader.list_heads()
        self._woken.set()

    def _hear(self) -> None:
        """Somebody has written. Where many write, what they write is read together, less often."""
        if self._keeper is not None and self._keeper.holds:
            return  # it was told by us
        if self._interval_s <= POLL_INTERVAL_S:
            self._woken.set()

    @property
    def _interval_s(self) -> float:
        return max(POLL_INTERVAL_S, POLL_INTERVAL_PER_WRITER_S * self._reader.writers)

    def make_sure(self) -> None:
        """Ask all writers, now: `sure_age_s` is young soon."""
        self._reader.ask_all()
        self._woken.set()

    def mend(self, error: CatalogueDamaged) -> None:
        """Somebody found the catalogue damaged: it is made anew, unless it just was, or cannot be written."""
        self._renew(error)
        if not self._is_unwritable:
            self._woken.set()

    def leave_behind(self, gaps: Iterable[Gap]) -> None:
        """What these hide was learned from the packs themselves: write a snapshot, with which everybody goes on behind them, and do
        so. One that has closed or changed by then stays."""
        self._left_behind += gaps
        self._woken.set()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What is missing now."""
        return tuple(self._reader.gaps.values())

    @property
    def complete_age_s(self) -> float | None:
        """So long ago the catalogue, as it is, had all that was announced; None if it never had."""
        if self._complete_renewals != self._catalogue.renewals:
            return None
        return asyncio.get_running_loop().time() - self._complete_at_s

    @property
    def age_s(self) -> float | None:
        """See `TailStatus`."""
        if self._read_all_at_s is None:
            return None
        return asyncio.get_running_loop().time() - self._read_all_at_s

    @property
    def sure_age_s(self) -> float | None:
        """So long ago a pass began in which all writers were asked, and that read all there was; None before the first. Heads
        are hints: one that is missing or old hides for some minutes what its writer has said."""
        return None if self._sure_at_s is None else asyncio.get_running_loop().time() - self._sure_at_s

    def status(self) -> TailStatus:
        return TailStatus(
            writers=self._reader.writers,
            positions=self._catalogue.positions,
            age_s=self.age_s,
            segments=self._segments,
            entries=self._entries,
            damaged=self._damaged_before + self._reader.damaged,
            gaps=tuple(self._reader.gaps.values()),
            gap_reasons=tuple(
                f"feed/{writer}: {self._reader.reasons.get(writer, '')}" for writer in self._reader.gaps
            ),
            failures=self._failures,
            failure=self._failure or self._reader.last_failure,
            unsound=self._unsound,
            unsound_reason=self._unsound_reason,
            snapshot=self._tried,
            renewals=self._catalogue.renewals,
        )

    async def _pass(self) -> None:
        if self._is_unwritable:
            self._reopen()
        elif self._catalogue.renewals != self._renewals:
            self._restart()
        await self._catalogue.load()
        if self._is_new and not (self._catalogue.positions or self._catalogue.compared):
            await self._read_snapshot()
        self._is_new = False
        await self._leave_gaps()
        began_s = asyncio.get_running_loop().time()
        await self._refresh()
        await self._read_feeds()
        self._unread_passes = 0 if self._reader.all_read else self._unread_passes + 1
        # What cannot be read for long may be in a snapshot by now, which somebody wrote who could.
        is_stuck = (
            bool(self._reader.gaps) or self._unread_passes % SNAPSHOT_TRY_PASSES == SNAPSHOT_TRY_PASSES - 1
        )
        if is_stuck and await self._read_snapshot():
            await self._read_feeds()
        await self._tell_if_stuck()
        if self._reader.has_listed and self._reader.all_read:
            await self._hold_against_snapshot(self._reader.listed)
        if self._reader.all_read:
            self._read_all_at_s = began_s
            if self._reader.has_listed:  # news are older than they are read
                self._complete_at_s, self._complete_renewals = began_s, self._renewals
            if self._reader.is_full:
                self._sure_at_s = began_s
            self.caught_up.set()
        if self._reader.all_read:
            await self._write_snapshot_if_due()

    async def _tell_if_stuck(self) -> None:
        """What this process lacks, the keeper may have read when it was there."""
        now_s = asyncio.get_running_loop().time()
        if not self._reader.gaps:
            self._stuck_s = now_s
        if self._keeper is None or self._keeper.holds or now_s < self._stuck_s + STUCK_AFTER_S:
            return
        self._stuck_s = now_s
        try:
            await put_stuck(self._objects, self._keeper.holder)
        except ObjectError as error:
            log.info("%s: the keeper is told of a gap later: %s", self._objects.where, error)

    async def _hold_against_snapshot(self, listed: Set[str]) -> None:
        """Whatever the newest snapshot covers is known here: what retired writers have said is nowhere else. listed: writers of
        whom something is there. Where the place does not prove to be the place, nothing follows from what is not there.
        Other looks than full ones ask for no snapshots, unless a writer has vanished."""
        catalogue = self._catalogue
        vanished = catalogue.positions.keys() - listed
        self._owes_comparison |= self._reader.is_full
        if not (self._owes_comparison or vanished):
            return
        name = await self._snapshots.newest_name()
        if not name or (name == self._compared and not vanished):
            self._owes_comparison = False
            return
        await require_place(self._objects)
        newest = await self._snapshots.newest()
        if newest is None:
            return
        known = _known(catalogue)
        is_behind = any(known.get(writer, 0) < number for writer, number in newest.positions.items())
        has_missed = newest.number - catalogue.compared > SNAPSHOTS_KEPT
        if (is_behind or has_missed) and newest.name != self._whole:
            await self._read_snapshot(newest.name)
            if not self._whole:  # an older one will do: whoever is retired is covered by all that are kept
                return
        self._owes_comparison = False
        self._compared = newest.name
        catalogue.compare(newest.number)
        for _ in catalogue.removed():  # those that are old go
            await asyncio.sleep(0)
        catalogue.retire(vanished & newest.positions.keys())
        gone = (vanished | catalogue.retired.keys()) - newest.positions.keys()
        catalogue.forget_writers(gone)
        self._reader.drop(gone)

    def _renew(self, error: CatalogueDamaged) -> None:
        """Make the catalogue anew, if nobody else has: whoever finds it damaged may. What cannot be written is left as it is."""
        if isinstance(error, CatalogueUnwritable):
            self._is_unwritable = True
            self.problems.note(CATALOGUE, str(error), CATALOGUE, CATALOGUE_FIX, lasts_s=PROBLEM_LASTS_S)
            return
        if self._catalogue.renewals == self._renewals:
            log.warning("%s: the catalogue is made anew: %s", self._objects.where, error)
            try:
                self._catalogue.renew()
            except CatalogueDamaged as failure:
                self._failed(str(failure))
            if self._listener is not None:
                self._listener.leapt()

    def _reopen(self) -> None:
        """Go on where the catalogue is: what was read and could not be written is read again. Raises CatalogueDamaged."""
        self._catalogue.reopen()
        self._is_unwritable = False
        self._restart()
        if self._listener is not None:
            self._listener.leapt()

    def _restart(self) -> None:
        """Go on from what the catalogue knows."""
        self._renewals = self._catalogue.renewals
        self._damaged_before += self._reader.damaged
        self._sure_at_s = None
        self._reader = self._begun()
        self._tried = self._whole = self._compared = ""
        self._is_new = True
        self._left_behind.clear()  # what an audit held against the packs is no more

    def _begun(self) -> FeedReader:
        """Where the catalogue is."""
        reader = FeedReader(self._objects, _known(self._catalogue), self.news, self._closely)
        reader.ours = self._own_writer
        if self._keeper is not None:
            reader.now_s = self._keeper.clock
        return reader

    def _own_writer(self) -> str:
        return self.ours()

    async def _leave_gaps(self) -> None:
        gaps = [gap for gap in self._left_behind if gap == self._reader.gaps.get(gap.writer)]
        passed = {gap.writer: gap.first_there - 1 for gap in gaps}
        if passed and self._keeper is not None:
            if self._keeper.holds:  # first: who is killed in between would go on alone
                self._tried = (await self._snapshots.write(self._catalogue, passed)).name
            else:
                passed = {}
        self._left_behind.clear()
        if passed:
            self._catalogue.jump(passed)
            self._reader.jump(passed)
            if self._listener is not None:
                self._listener.leapt()

    async def _read_feeds(self) -> None:
        more = True
        while more:
            page = await self._reader.poll()
            for segment in page.segments:
                if self._catalogue.renewals != self._renewals:
                    raise CatalogueDamaged("the catalogue was made anew meanwhile")
                await self._catalogue.take_in(segment)
                self._segments += 1
                self._entries += len(segment.entries)
                self._note_unsound(segment)
                if self._listener is not None:
                    await self._listener.heard(segment)
                await asyncio.sleep(0)
            self._since_check += len(page.segments)
            more = page.more
        if self._keeper is not None and self._reader.has_listed:
            self._keeper.tell(self._reader.numbers)

    async def _refresh(self) -> None:
        """Without news, everybody looks himself."""
        try:
            if self.news is not None:
                await self.news.refresh()
        except ObjectError as error:
            log.debug("%s: no news: %s", self._objects.where, error)

    def _note_unsound(self, segment: Segment) -> None:
        """What one entry says that cannot be is not believed; its pack is found by an audit."""
        if segment.unsound:
            if segment.reason != self._unsound_reason:
                log.warning("%s: left out: %s", self._objects.where, segment.reason)
            self._unsound += segment.unsound
            self._unsound_reason = segment.reason

    async def _read_snapshot(self, name: str = "") -> bool:
        """Whether there was one that was not tried yet, or this one."""
        newest = await self._snapshots.newest()
        if newest is None or (newest.name == self._tried and newest.name != name):
            return False
        read = await self._snapshots.read_newest(self._catalogue)
        self._tried = newest.name
        self._whole = read.name if read is not None else ""
        if self._catalogue.renewals == self._renewals:
            self._reader.jump(self._catalogue.positions)
        if self._listener is not None:
            self._listener.leapt()
        return read is not None

    async def _write_snapshot_if_due(self) -> None:
        """That it cannot be written delays nothing: the next thousand segments bring the next attempt."""
        if self._keeper is None or not self._keeper.holds:
            return
        try:
            waiting = await self._stuck(self._keeper.problems)
            is_owed = bool(waiting) or self._is_crowded()
            if self._since_check < SNAPSHOT_SEGMENTS_MIN and not is_owed:
                return
            newest = await self._snapshots.newest()
            if newest is not None and newest.number != self._catalogue.compared:
                self._reader.ask_all()  # one that covers less than the one before is never written
                return
            if not is_owed and not _is_due(newest, self._catalogue.positions):
                self._since_check = 0
                return
            self._since_check = 0
            self._crowd_s = asyncio.get_running_loop().time()
            written = await self._snapshots.write(self._catalogue)
            self._tried = self._whole = self._compared = written.name
            self._catalogue.compare(written.number)
            await self._keeper.delete(waiting)
            retired = await self._snapshots.retire()
        except ObjectError as error:
            log.warning("%s: no snapshot: %s", self._objects.where, error)
            return
        log.info(
            "snapshot %s: %d packs in %d parts; %s", written.name, written.packs, len(written.parts), retired
        )

    async def _stuck(self, problems: Problems) -> list[str]:
        """What those have put who wait for a snapshot, if it is time for one. Raises ObjectError."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._helped_s + STUCK_SNAPSHOT_S or not self._stuck_there.are_due():
            return []
        names = await stuck(self._objects, problems)
        if names:
            self._helped_s = now_s
        else:
            self._stuck_there.listed()
        return names

    def _is_crowded(self) -> bool:
        """Whether so many writers are silent that a snapshot is worth it, which lets them be retired."""
        silent = len(self._reader.listed) - self._reader.writers
        now_s = asyncio.get_running_loop().time()
        return silent > SILENT_WRITERS_MAX and now_s - self._crowd_s > CROWD_INTERVAL_S

    def _failed(self, failure: str) -> None:
        log.debug("%s: not read: %s", self._objects.where, failure)
        self._failures += 1
        self._failure = failure

    def _pause_s(self) -> float:
        pause_s = self._interval_s
        if self._failures:
            pause_s = max(pause_s, min(BACKOFF_S_MIN * 2.0 ** min(self._failures, 32), BACKOFF_S_MAX))
        return pause_s * self._chance.uniform(1 - POLL_JITTER, 1 + POLL_JITTER)


def _known(catalogue: Catalogue) -> dict[str, int]:
    """By writer, retired ones included, where to go on."""
    return {**catalogue.retired, **catalogue.positions}


def _is_due(newest: Manifest | None, positions: Mapping[str, int]) -> bool:
    """Whether reading the tail costs as much as reading the snapshot before it."""
    behind = segments_behind(newest, positions)
    size_bytes = newest.size_bytes if newest is not None else 0
    return behind >= SNAPSHOT_SEGMENTS_MIN and behind * SEGMENT_COST_BYTES >= size_bytes
