"""Pull: what one region takes from another one, once it has joined it.

    feed of the source ─▶ Tail ─▶ catalogue of the source ─▶ heard ─▶ jobs ─▶ Copying, ModelCopying ─▶ home
                                        │                              ▲
                                        └──── sweep: all of it ────────╯   at a start, after a leap, and every hour

Wanted is what the source made itself, what a rule lets through, what is alive and not erased at home, and what home does not know. The feed makes
it fast; the sweep makes it sure: it asks for every pack that the source's catalogue knows.

The source is only read. Of memory it takes JOBS_MAX jobs; what is heard beyond that is left to a sweep.

`complete_s` does not depend on the clocks of writers. What is heard now was not there yet when the feed was last read to its end with
all heads listed: it is younger than that. A writer's own time is believed where it lies between that moment and now.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from replication.catalogue.catalogue import TURN_LOOKS, Catalogue
from replication.constants import (
    CATALOGUE_CHUNK_PACKS,
    PROBLEM_LASTS_S,
    SEGMENT_ENTRIES_MAX,
    SOURCE_TOMBSTONES_S,
    SPECS_CHOSEN_MAX,
)
from replication.erasure.removed_models import REMOVED, put_removal, read_removals
from replication.errors import CatalogueDamaged, Damaged
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.announced_models import AnnouncedModel
from replication.formats.members import MEMBERS_READ_MAX, key_of
from replication.formats.rules import Rule, rule_for, weights_rule_for
from replication.formats.segment import Segment
from replication.formats.tombstones import BEHIND, TOMBSTONES, bring, put_behind, read_behind, read_tombstones
from replication.keeper.news_reader import Folders, NewsReader
from replication.mirror.copying import Copying, Ways, is_lacking
from replication.mirror.jobs import Job, Jobs
from replication.mirror.model_copying import ModelCopying
from replication.mirror.ordered_copies import OrderedCopies
from replication.mirror.ordered_models import OrderedModels
from replication.mirror.watermark import Hold, Watermark
from replication.problems import Problems
from replication.store_clock import StoreClock
from replication.tasks import kept_going
from replication.waits import within
from replication.watched import Watched
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused
from tiers.namespace_spec import NamespaceSpec
from tiers.together import together

JOBS_MAX: Final = 1 << 18  # waiting, 510 bytes each; what is more is found by a sweep
SWEEP_INTERVAL_S: Final = 3600.0
SWEEP_ROOM_PAUSE_S: Final = 1.0  # between two looks whether there is room for more jobs
SETTLE_S_MAX: Final = 60.0  # a start waits so long for feeds to be read to their end
assert CATALOGUE_CHUNK_PACKS + SEGMENT_ENTRIES_MAX < JOBS_MAX // 2

log = logging.getLogger("replication.pull")


class Pull:
    """It is the listener of the source's tail."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        rules: Sequence[Rule],
        paces: dict[Rule, float],
        watermark: dict[str, int],
        complete_s: float,
        known_s: float,
        there: StoreClock,
        chance: random.Random,
    ) -> None:
        """catalogue: of the source. paces: see `Jobs`. watermark, complete_s, known_s: where an earlier life was, 0 without one. there:
        the clock of the store of the source, by which its lives are; all else is by that at home."""
        clock = ways.home.clock
        self.jobs = Jobs(paces)
        self.watermark = Watermark(watermark)
        self.problems = Problems(ways.bucket.where)
        self._news = NewsReader(ways.bucket, self.problems, there)
        self._folders = Folders(self._news, TOMBSTONES, BEHIND, REMOVED)
        self.tail = Tail(ways.bucket, catalogue, clock, chance, self, news=self._news, closely=True)
        self.tail.problems = self.problems
        self.copying = Copying(ways, catalogue, self.jobs, self._ended, self.tail.mend, clock, chance)
        self.models = ModelCopying(ways, catalogue, paces, self._ended, self.tail.mend, clock, chance)
        self._orders = OrderedCopies(
            ways,
            catalogue,
            rules,
            self._ordered,
            clock,
            self.tail.mend,
            OrderedModels(ways, catalogue, rules, self.models, clock),
        )
        self._ways = ways
        self._catalogue = catalogue
        catalogue.clock = there
        self._rules = rules
        self._chosen: dict[bytes, Rule | None] = {}  # by spec
        self._clock = clock
        self._there = there
        self._begun_s = self._leapt_s = complete_s
        self._known_s, self._is_looked_through = known_s, False
        self._leap = asyncio.Event()
        if isinstance(ways.bucket, Watched):
            ways.bucket.when_it_works_again = self._go_on
        self._removals: set[str] = set()  # that were brought, by name and ETag

    def _go_on(self) -> None:
        """The source works again: what was to be tried later is tried now."""
        self.tail.wake()
        for carrying in (self.copying, self.models):
            carrying.jobs.rouse(float("inf"))
            carrying.wake()

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store or a disk can cause."""
        await within(SETTLE_S_MAX, self._ways.home.caught_up)  # else much would be copied that is there
        brought = await self._bring_tombstones(set())
        work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "following the feed": self.tail.run,
            "copying": self.copying.run,
            "copying models": self.models.run,
            "sweeping": self._sweep_now_and_then,
            "bringing tombstones": lambda: self._bring_more_tombstones(brought),
            "taking orders": self._take_orders,
        }
        await together(
            kept_going(f"mirror of {self._ways.source}: {name}", begin, self._ways.home.problems)
            for name, begin in work.items()
        )

    @property
    def read(self) -> dict[str, int]:
        """By writer, up to which segment the feed was read."""
        return {**self._catalogue.retired, **self._catalogue.positions}

    @property
    def complete_s(self) -> float:
        """What was announced before this moment is at home, or not for it; unix seconds, 0: all was never."""
        moments = [self.looked_s()]
        if self.watermark.is_held:
            moments.append(self._leapt_s)
        for jobs in (self.jobs, self.models.jobs):
            if (oldest_s := jobs.oldest_s()) is not None:
                moments.append(oldest_s)
        return min(moments)

    def known_s(self) -> float:
        """Home knows what the source said until this moment of the packs that both have: copies that wait or fail say nothing of that.
        Unix seconds, 0: it never did."""
        if self._is_looked_through and self.tail.complete_age_s is not None:
            longer_s = self.jobs.longer_s()
            self._known_s = self.looked_s() if longer_s is None else min(longer_s, self.looked_s())
        return self._known_s

    # -- what the tail says --

    async def heard(self, segment: Segment) -> None:
        hold = self.watermark.heard(segment.writer, segment.number)
        looked_s, now_s = self.looked_s(), self._clock()
        since_s = segment.written_s if looked_s <= segment.written_s <= now_s else looked_s
        for at in range(0, len(segment.entries), TURN_LOOKS):
            self._consider(segment.entries[at : at + TURN_LOOKS], since_s, hold)
            await asyncio.sleep(0)
        self._consider_models(segment.models, since_s, hold)
        self.watermark.release(hold)

    def leapt(self) -> None:
        if not self.watermark.is_held:
            self._leapt_s = self.complete_s
        self._known_s, self._is_looked_through = self.known_s(), False
        self.watermark.leap()
        self._leap.set()

    def origin(self, pack_id: bytes) -> str | None:
        """Of a pack, or a model, that is at home and not known there: the source, if it made it; None if a sweep brings it; else ""."""
        if (model := self._catalogue.model(pack_id)) is not None:
            if model.origin:
                return ""
            return None if self._weights_rule(model) is not None else self._ways.source
        try:
            [announced] = self._catalogue.packs([pack_id])
        except CatalogueDamaged as error:
            self.tail.mend(error)
            return None
        if announced is None or announced.origin:
            return ""
        return None if self._wanted([announced], None) else self._ways.source

    def brings(self, pack_id: bytes) -> bool:
        """Whether home gets this pack from here, where it is gone."""
        try:
            [announced] = self._catalogue.packs([pack_id])
        except CatalogueDamaged as error:
            self.tail.mend(error)
            return True
        return (
            announced is not None
            and not announced.origin
            and pack_id not in self.copying.lost_ids
            and self._rule(announced.pack.header.spec) is not None
            and is_lacking(announced, None, self._ways.home.clock.over_s)
        )

    # -- sweeping --

    async def _sweep_now_and_then(self) -> None:
        await within(SETTLE_S_MAX, self.tail.caught_up)
        while True:
            self._leap.clear()
            try:
                await self._sweep()
            except CatalogueDamaged as error:
                self.tail.mend(error)
            await within(SWEEP_INTERVAL_S, self._leap)

    async def _sweep(self) -> None:
        """Look through all that the source has; the wanted with the highest priority first."""
        renewals = self._catalogue.renewals
        must = self.watermark.must_sweep
        hold = self.watermark.sweep(self._catalogue.positions) if must else None
        since_s = self._leapt_s if must else self.looked_s()
        self._consider_models(list(self._catalogue.models.values()), since_s, hold)
        priorities = {rule.priority for rule in self._rules if not rule.of_weights}
        for priority in sorted(priorities, reverse=True):
            for chunk in self._catalogue.chunks():
                while len(self.jobs) > JOBS_MAX // 2:
                    await asyncio.sleep(SWEEP_ROOM_PAUSE_S)
                if self._catalogue.renewals != renewals:
                    return  # the leap that came with it brings another sweep
                for at in range(0, len(chunk), TURN_LOOKS):
                    self._consider(chunk[at : at + TURN_LOOKS], since_s, hold, priority)
                    await asyncio.sleep(0)
        self._is_looked_through = not self.watermark.must_sweep
        if hold is not None:
            self.watermark.release(hold)

    # -- tombstones --

    async def _bring_tombstones(self, brought: set[str]) -> set[str]:
        """What is erased at the source is erased at home. Returns which ones were brought so far."""
        problems = self.problems
        try:
            with suppress(ObjectError):  # without news, it looks itself
                await self._news.refresh()
            if not self._folders.are_due():
                return brought
            home = self._ways.home_bucket
            now_s = self._ways.home.clock.over_s
            found = (await read_tombstones(self._ways.bucket, brought, problems)).by_key
            over = {
                name for name, one in found.items() if not one.is_taken_back and one.watched_until_s <= now_s
            }
            brought |= over  # nothing is erased by it, at home either
            due = [one for one in found.items() if one[0] not in over]
            for at in range(0, len(due), MEMBERS_READ_MAX):
                some = due[at : at + MEMBERS_READ_MAX]
                puts = await together(self._is_put(TOMBSTONES + one.id, bring(home, one)) for _, one in some)
                brought |= {name for (name, _), is_put in zip(some, puts, strict=True) if is_put}
            if due:
                await self._ways.home.erasure.look()  # or it would be copied first, and erased then
            known, is_put = set(brought), True
            for behind in await read_behind(self._ways.bucket, known, problems):
                put = put_behind(home, behind.tombstone, behind.blocks, behind.links)
                is_put = await self._is_put(BEHIND + behind.tombstone, put) and is_put
            if is_put:
                brought |= known
            await self._bring_removals()
            if not len(problems):  # else something may be read the next time
                self._folders.listed()
        except (ObjectError, CatalogueDamaged) as error:
            log.debug("tombstones are brought later: %s", error)
        return brought

    async def _bring_removals(self) -> None:
        """The same of models. Raises ObjectError."""
        found = await read_removals(self._ways.bucket, self._removals, self.problems)
        for info, removal in found.found:
            is_over = self._ways.home.clock.over_s >= removal.watched_until_s
            if is_over or await self._is_put(info.name, put_removal(self._ways.home_bucket, removal)):
                self._removals.add(key_of(info))

    async def _is_put(self, name: str, work: Awaitable[object]) -> bool:
        """Whether home takes this; one that it refuses is a problem, is tried again, and takes no other one with it."""
        try:
            await work
        except (Damaged, ObjectDamaged, ObjectRefused) as error:
            text = f"erased at the source, and cannot be put at home: {error}"
            self.problems.note(name, text, lasts_s=PROBLEM_LASTS_S)
            return False
        return True

    async def _bring_more_tombstones(self, brought: set[str]) -> None:
        while True:
            await asyncio.sleep(SOURCE_TOMBSTONES_S)
            brought = await self._bring_tombstones(brought)

    # -- jobs --

    def _consider(
        self, entries: Sequence[Announced], since_s: float, hold: Hold | None, priority: int | None = None
    ) -> None:
        """Make jobs of what is wanted; of this priority only, if one is given."""
        wanted = self._wanted(entries, priority)
        if len(self.jobs) + len(wanted) > JOBS_MAX:
            self.leapt()
            return
        for announced, rule, is_here in wanted:
            job = self.jobs.get(announced.pack.id)
            if job is None:
                job = Job(announced.pack.id, announced.pack.size_bytes, rule, since_s, is_here)
                self.jobs.add(job)
            self.jobs.heard(job, since_s, is_here)
            if hold is not None:
                hold.left += 1
                job.holds.append(hold)
        if wanted:
            self.copying.wake()

    def _wanted(
        self, entries: Sequence[Announced], priority: int | None
    ) -> list[tuple[Announced, Rule, bool]]:
        """What home lacks of these, by which rule, and whether it has the pack and lacks a longer life only."""
        ruled = [
            (entry, rule)
            for entry in entries
            if not entry.origin and (rule := self._rule(entry.pack.header.spec)) is not None
            if priority in (None, rule.priority)
        ]
        known = self._ways.home.known([entry.pack.id for entry, _ in ruled])
        now_s, erasure = self._ways.home.clock.over_s, self._ways.home.erasure
        return [
            (entry, rule, there is not None)
            for (entry, rule), there in zip(ruled, known, strict=True)
            if is_lacking(entry, there, now_s)
            and not erasure.covers(entry)
            and entry.pack.id not in self.copying.lost_ids
        ]

    def _consider_models(self, models: Sequence[AnnouncedModel], since_s: float, hold: Hold | None) -> None:
        """The same of models."""
        for announced in models:
            rule = self._weights_rule(announced)
            is_lost = announced.id in self.models.lost_ids
            if rule is not None and not is_lost and self.models.is_lacking(announced):
                self.models.add(announced, rule, since_s, hold)

    def _weights_rule(self, announced: AnnouncedModel) -> Rule | None:
        return weights_rule_for(self._rules, self._ways.source, self._ways.home.region, announced.model)

    def _rule(self, spec: NamespaceSpec) -> Rule | None:
        name = msgspec.msgpack.encode(spec)
        if name not in self._chosen:
            if len(self._chosen) == SPECS_CHOSEN_MAX:
                self._chosen.clear()
            self._chosen[name] = rule_for(self._rules, self._ways.source, self._ways.home.region, spec)
        return self._chosen[name]

    async def _take_orders(self) -> None:
        """When the source is known: what is chosen of half of it is not the best."""
        await self.tail.caught_up.wait()
        await self._orders.run()

    def _ordered(self, lacking: Sequence[tuple[Announced, Rule]]) -> list[Job]:
        """The jobs of packs that home lacks, each sooner than by its own rule."""
        made = []
        by_rule: dict[Rule, list[Job]] = {}
        for announced, rule in lacking:
            job = self.jobs.get(announced.pack.id)
            if job is None:
                is_mirrored = self._rule(announced.pack.header.spec) is not None
                since_s = self.looked_s() if is_mirrored else self._clock()
                job = Job(announced.pack.id, announced.pack.size_bytes, rule, since_s)
                self.jobs.add(job)
            made.append(job)
            by_rule.setdefault(rule, []).append(job)
        for rule, jobs in by_rule.items():
            self.jobs.hasten(jobs, rule)
        self.copying.wake()
        return made

    def _ended(self, job: Job) -> None:
        for hold in job.holds:
            self.watermark.release(hold)

    def looked_s(self) -> float:
        """When the feed was last read to its end, with all heads listed, unix seconds."""
        age_s = self.tail.complete_age_s
        return self._begun_s if age_s is None else self._clock() - age_s
