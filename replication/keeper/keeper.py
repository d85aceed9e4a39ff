"""The keeper: of all processes of a region, the one that does its housekeeping, for as long as it holds the lease.

    keeper/3 ◀─ taken, read back ─▶ news: beat, beat, beat ─▶ dead ─── LEASE_S ───▶ keeper/4 ◀─ somebody else
                                     │ a higher term is there: it steps down

Whoever would keep looks at the news every few seconds. It takes the next term when there is none, when neither news nor terms have
changed for LEASE_S of its own clock, or, as a mirror, at once where a daemon keeps: a mirror knows what other regions have.

What must always hold:

* No answer is believed: a term is held by whoever's bytes are read back, a little later, from a store that may know no conditional
  writes.
* It is held (`holds`) for LEASE_S / 2 from the beginning of a beat that was stored, with our term in the list behind it and no
  higher one: who was stopped, asleep or cut off holds nothing when it goes on, before anybody else does. A directory that is
  away shows no term.
* Who takes the lease from somebody alive waits until that one has noticed. Who ends gives it back: it holds nothing before it says so.
* Every destructive step asks `holds` first. Should two hold all the same: what they do is the same, and done twice does no harm.
* Whose clock is off from the store's keeps nothing, and gives the lease back.
* News that cannot be written cost no lease: then the term itself is replaced at each beat.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from replication.constants import PROBLEM_LASTS_S
from replication.deleting import delete_each
from replication.errors import Damaged, ReplicationError
from replication.formats.keeping import (
    NEWS,
    NEWS_FORMAT,
    TERM_FORMAT,
    TERM_NAME,
    TERMS,
    Holder,
    News,
    Term,
    measure,
    ring,
    term_name,
)
from replication.formats.members import read_members
from replication.formats.region import Region, require_same
from replication.keeper.news_reader import LEASE_S, NEWS_INTERVAL_S, SURE_S, NewsReader
from replication.keeper.watch import Watch
from replication.problems import Problems
from replication.store_clock import StoreClock
from replication.waits import passed_s, within
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused, ObjectUnavailable

RESIGN_S: Final = 1.0  # at an end, for saying so
LEASE_JITTER_S: Final = 2.0  # a candidate waits for up to so much longer
HELD_S: Final = LEASE_S / 2  # from the beginning of a beat
BEAT_INTERVAL_S: Final = 15.0
SETTLE_S: Final = 1.5  # between putting a term and reading it back
STAND_BACK_S: Final = 120.0
TAKE_TRIES_MAX: Final = 8  # numbers that something else lies under, in one try
CLOCK_AGAIN_S: Final = 60.0  # between two looks at the store's clock, where ours is off
assert BEAT_INTERVAL_S < HELD_S and LEASE_S + LEASE_JITTER_S + SETTLE_S + NEWS_INTERVAL_S < 60

log = logging.getLogger("replication.keeper")


class Keeper:
    """One process that keeps a region, or would. Bound to the loop that it is made in."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        chance: random.Random,
        is_mirror: bool = False,
        clock: StoreClock | None = None,
    ) -> None:
        """clock: that of the store; learned here."""
        self.problems = Problems(objects.where)
        self.clock = clock or StoreClock()
        self.news = NewsReader(objects, self.problems, self.clock)
        self._watch = Watch(objects)
        self._woken = asyncio.Event()
        self._objects = objects
        self._region = region
        self._chance = chance = random.Random(chance.random())
        self.holder = Holder(f"{chance.getrandbits(64):016x}", socket.gethostname()[:255], is_mirror)
        self._term: Term | None = None  # that we hold, or did until we find that we do not
        self._learned_s = self._back_until_s = float("-inf")
        self._taken_s = self._holds_from_s = self._beaten_s = self._told_s = self._sure_s = 0.0
        self._beat = self._held = (
            0  # _held: the last term that was ours: what we put may arrive later than it was given up
        )
        self._known: dict[tuple[str, str], Term] = {}  # by name and ETag
        self._sign: tuple[str, str] | None = None  # the highest term there was, by name and ETag
        self._sign_s = passed_s()  # when that was a sign of life
        self._jitter_s = self._chance.uniform(0, LEASE_JITTER_S)
        self._stuck: set[str] = set()  # terms that cannot be deleted
        self._away: set[str] = set()  # see `delete_each`

    @property
    def holds(self) -> bool:
        """Whether this process keeps the region now."""
        return self._is_held(passed_s()) and self.clock.is_sure

    def _is_held(self, now_s: float) -> bool:
        return self._term is not None and self._holds_from_s <= now_s < self._beaten_s + HELD_S

    @property
    def silent_s(self) -> float:
        """How long nobody was seen to keep the region; 0 where this process does."""
        return 0.0 if self.holds else passed_s() - self.news.changed_s

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        news = self.news.fresh
        if self.holds:
            host, kept_s = self.holder.host, passed_s() - self._taken_s
        else:
            host, kept_s = (news.holder.host, news.kept_s + self.silent_s) if news is not None else ("", 0.0)
        return {
            "keeper": host,
            "keeps": self.holds,
            "kept_s": round(kept_s, 1),
            "keeper_age_s": round(self.silent_s, 1),
        }

    async def delete(self, names: Sequence[str]) -> int:
        """Objects of the region. Returns how many could be deleted; each of the others is a problem. Raises ObjectError;
        ObjectUnavailable where this process does not keep it (any more)."""
        self.require()
        left = await self._delete(names, self._away)
        if left:
            self.require()
        for name, why in left.items():
            self.problems.note(name, f"cannot be deleted: {why}", lasts_s=PROBLEM_LASTS_S)
        return len(names) - len(left)

    async def _delete(self, names: Sequence[str], away: set[str] | None = None) -> dict[str, str]:
        async def delete(some: Sequence[str]) -> None:
            self.require()
            await self._objects.delete(some)

        return await delete_each(delete, names, away)

    def require(self) -> None:
        """Raises ObjectUnavailable where this process does not keep the region now."""
        if not self.holds:
            raise ObjectUnavailable(f"{self._objects.where}: this process does not keep the region now")

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store can cause."""
        while True:
            try:
                await self._learn_clock()
                pause_s = await (self._look() if self._term is None else self._keep(self._term))
            except (ObjectError, ReplicationError) as error:
                log.debug("%s: the lease is looked at later: %s", self._objects.where, error)
                pause_s = NEWS_INTERVAL_S
            await within(pause_s * self._chance.uniform(0.9, 1.0), self._woken)
            self._woken.clear()

    async def _learn_clock(self) -> None:
        """News tell it for nothing, but later, and not where it was wrong before or where there are no news."""
        if self.clock.is_sure or passed_s() < self._learned_s:
            return
        self._learned_s = passed_s() + (CLOCK_AGAIN_S if self.clock.is_known else 0.0)
        try:
            await measure(self._objects, self.clock)
        except ObjectError as error:
            log.debug("%s: the store's clock is asked for later: %s", self._objects.where, error)

    async def resign(self) -> None:
        """This process ends, or may not keep: whoever would keep need not wait. What cannot be said is seen a little later."""
        term, held, self._term = self._term, self._is_held(passed_s()), None
        if term is None or not held:
            return
        try:
            async with asyncio.timeout(RESIGN_S):
                news = News(term.number, self.holder, self._beat + 1, 0, is_over=True)
                await self._objects.put(NEWS, NEWS_FORMAT.seal(news))
        except (ObjectError, TimeoutError) as error:
            log.info("%s: the lease ends by itself: %s", self._objects.where, error)

    async def stand_back(self) -> None:
        """This process cannot keep now: it gives the lease to whoever can, and takes none for a while."""
        self._back_until_s = passed_s() + STAND_BACK_S
        await self.resign()

    # -- what is new --

    async def refresh(self) -> None:
        """`run` does so."""

    def heads(self) -> Mapping[str, int] | None:
        """Of writers that wrote lately, up to which number; None: list them, and `tell`."""
        if not self.holds:
            return self.news.heads()
        return self._watch.asked()

    def digest(self, folder: str) -> bytes | None:
        return self._watch.folders.get(folder) if self.holds else self.news.digest(folder)

    def tell(self, heads: Mapping[str, int]) -> None:
        """They were listed and read; of use to others where this process keeps the region."""
        if self.holds and self._watch.tell(heads):
            self._told_s = float("-inf")
            self._woken.set()

    @property
    def needs_bell(self) -> bool:
        """Whether nobody listens to writers who do not ring."""
        if self.holds:
            return not self._watch.listens
        news = self.news.fresh
        return news is None or not news.listens

    # -- while somebody else keeps --

    async def _look(self) -> float:
        """Take the lease if it is due. Returns the pause until the next step."""
        now_s = passed_s()  # what is answered was true then, or later
        await self.news.refresh()
        if not self.clock.is_sure or now_s < self._back_until_s:
            return NEWS_INTERVAL_S
        latest = self.news.latest if now_s < self.news.changed_s + LEASE_S else None
        if latest is not None and not self._may_oust(latest.holder):
            return self._pause_s(now_s)
        highest = await self._highest()
        is_still = now_s >= self._due_s or (highest is not None and highest.number <= self.news.over)
        is_ours = highest is not None and (highest.number, highest.holder) == (self._held, self.holder)
        is_alive = not is_still and not is_ours and (highest is not None or latest is not None)
        if not is_alive or self._may_oust((highest.holder if highest is not None else None) or self.holder):
            await self._take(highest, is_alive)
        return self._pause_s(now_s) if self._term is None else 0.0

    @property
    def _due_s(self) -> float:
        """Without a sign of life until then, the lease is free."""
        return max(self._sign_s, self.news.changed_s) + LEASE_S + self._jitter_s

    def _pause_s(self, now_s: float) -> float:
        return min(NEWS_INTERVAL_S, max(1.0, self._due_s - now_s))

    def _may_oust(self, holder: Holder) -> bool:
        return self.holder.is_mirror and not holder.is_mirror

    async def _take(self, highest: Term | None, is_alive: bool) -> None:
        """The next term, if nobody else does. is_alive: whoever holds the one before."""
        await require_same(self._objects, self._region)  # a place that is away has no terms
        first = max(highest.number if highest is not None else 0, self.news.term) + 1
        for number in range(first, first + TAKE_TRIES_MAX):
            term = Term(number, self.holder)
            try:
                await self._objects.put(term.name, TERM_FORMAT.seal(term), only_new=True)
            except ObjectRefused:
                raise
            except ObjectError as error:
                log.info(
                    "%s: whether the lease is taken shows when it is read: %s", self._objects.where, error
                )
            await asyncio.sleep(SETTLE_S)
            if (there := await self._holder_of(term)) is None:
                continue  # something else lies there
            if there == self.holder:
                await self._took(term, is_alive)
            return
        raise ObjectRefused(f"{self._objects.where}: {TERMS}: {TAKE_TRIES_MAX} objects that are no terms")

    async def _holder_of(self, term: Term) -> Holder | None:
        """Of the term of this name as it is; None where there is something else. Raises ObjectError: none is there, say."""
        try:
            return (await TERM_FORMAT.fetch(self._objects, term.name)).holder
        except (Damaged, ObjectRefused):
            return None

    async def _took(self, term: Term, is_alive: bool) -> None:
        self._term, self._taken_s, self._held = term, passed_s(), term.number
        self._holds_from_s = self._taken_s + (HELD_S if is_alive else 0.0)
        self._beaten_s, self._told_s = -HELD_S, float("-inf")
        self._watch = Watch(self._objects)
        await ring(self._objects)
        log.info("keeping the region", extra={"bucket": self._objects.where, "term": term.number})

    # -- while we keep --

    async def _keep(self, term: Term) -> float:
        begun_s = passed_s()
        if not self.clock.is_sure:
            await self.resign()
            return NEWS_INTERVAL_S
        if begun_s >= self._beaten_s + HELD_S and not await self._is_ours(term):
            return 0.0  # stopped for too long: it is not for us to write news
        has_rung = await self._watch.look()
        is_due = begun_s + NEWS_INTERVAL_S > self._told_s + BEAT_INTERVAL_S
        if not has_rung and not is_due:
            return NEWS_INTERVAL_S
        term = await self._tell(term)
        is_sure = has_rung or begun_s >= self._sure_s + SURE_S
        if not await (self._is_ours(term) if is_sure else self._is_still_ours(term)):
            return 0.0
        self._beaten_s = self._told_s = begun_s
        if is_sure:
            said = await self._objects.head(term.name if term.beat == self._beat else NEWS)
            self.clock.learn(said.modified_s, begun_s)
            self._sure_s = begun_s
            await self._delete_before(term)
        return NEWS_INTERVAL_S

    async def _tell(self, term: Term) -> Term:
        """One beat. Returns the term as it is now."""
        self._beat += 1
        watch, kept_s = self._watch, max(0, int(passed_s() - self._taken_s))
        news = News(term.number, self.holder, self._beat, kept_s, watch.known, watch.folders, watch.listens)
        try:
            await self._objects.put(NEWS, NEWS_FORMAT.seal(news))
        except (ObjectRefused, ObjectDamaged) as error:
            self._term = term = replace(term, beat=self._beat)
            await self._objects.put(term.name, TERM_FORMAT.seal(term))  # where that fails, it is the place
            self.problems.note(NEWS, f"cannot be written: {error}", fix="may this process put objects there?")
        else:
            self.problems.over(NEWS)
            self.news.tell(news)
        return term

    async def _is_still_ours(self, term: Term) -> bool:
        """The same at a tenth of the price, unless something has changed: numbers follow one another."""
        is_highest = False
        try:
            info = await self._objects.head(term.name)
            if (info.name, info.e_tag) == self._sign:
                is_highest = not await self._is_there(term_name(term.number + 1))
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            is_highest = False
        return is_highest or await self._is_ours(term)

    async def _is_ours(self, term: Term) -> bool:
        """Whether nobody has taken it; else we hold nothing from now on. Raises ObjectError."""
        highest = await self._highest()
        if highest is not None and (highest.number, highest.holder) == (term.number, self.holder):
            return True
        log.info("the region is kept by another process", extra={"bucket": self._objects.where})
        self._term, self._sign_s = None, passed_s()
        self._jitter_s = self._chance.uniform(0, LEASE_JITTER_S)
        return False

    async def _is_there(self, name: str) -> bool:
        try:
            await self._objects.head(name)
        except ObjectMissing:
            return False
        return True

    async def _delete_before(self, term: Term) -> None:
        """Terms of others, and ours of before."""
        over = {known.name for known in self._known.values() if known.number < term.number}
        for name in sorted(over - self._stuck):
            for why in (await self._delete([name])).values():
                self._stuck.add(name)
                self.problems.note(name, f"an old term cannot be deleted: {why}", "keeper", level="warning")

    # -- terms --

    async def _highest(self) -> Term | None:
        """Of the terms that are there; None without any. Raises ObjectError, also where one cannot be read now."""
        members = await read_members(self._objects, TERMS, TERM_NAME, self._read, self.problems)
        if members.unavailable:
            raise ObjectUnavailable(members.unavailable)
        self._known = {(info.name, info.e_tag): term for info, term in members.found}
        info, term = members.found[-1] if members.found else (None, None)
        sign = (info.name, info.e_tag) if info is not None else None
        if sign != self._sign:
            self._sign = sign
            if term is None or term.number > self.news.term or term.beat:  # else the news say how old it is
                self._sign_s = passed_s()
        return term

    async def _read(self, info: ObjectInfo) -> Term:
        return self._known.get((info.name, info.e_tag)) or await TERM_FORMAT.fetch(self._objects, info.name)
