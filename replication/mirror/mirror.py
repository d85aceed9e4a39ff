"""A mirror: one region copies from another one, as long as its process lives.

    state of an earlier life ─▶ join the source, again until it works ─▶ Pull, for ever
                                   state ─▶ mirrors/<source> in the bucket at home, every few seconds

It runs in the region that copies are made for, and pulls: the source is read and never written to. One for each source; a
source that is away, or refuses, stops no other one. A mirror that is killed begins again with a sweep.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from replication.audit.auditing import Elsewhere
from replication.catalogue.catalogue import Catalogue
from replication.constants import FAILURES_TOLD, HEARTBEAT_LATE_S
from replication.errors import Damaged, ReplicationError
from replication.feed.tail import TailStatus
from replication.formats.announced import Announced
from replication.formats.mirror_state import (
    IN_TIME_S,
    MIRROR_STATE_FORMAT,
    MIRRORS,
    NOT_REACHED,
    Failure,
    MirrorState,
    read_state,
)
from replication.formats.rules import Rule, choice_of
from replication.mirror.copying import Ways
from replication.mirror.pull import Pull
from replication.problems import Problem
from replication.region.region_node import RegionNode
from replication.store_clock import StoreClock
from replication.tasks import kept_going, reason_of
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectRefused, TierError
from tiers.together import together

MIRROR_JOIN_PAUSE_S: Final = 10.0
STATE_INTERVAL_S: Final = 5.0  # between two looks whether there is news to write down
STATE_READS_MAX: Final = 3  # of one that is damaged, before a start does without
HEARTBEAT_S: Final = 60.0  # written down even without news
assert STATE_INTERVAL_S < HEARTBEAT_S < HEARTBEAT_LATE_S < IN_TIME_S

log = logging.getLogger("replication.mirror")


class Joined(NamedTuple):
    """A region to copy from, and a catalogue of our own of it."""

    identity: str
    objects: Objects
    catalogue: Catalogue


class Mirror:
    """What `home`, whose bucket is `objects`, copies from one source."""

    def __init__(
        self,
        home: RegionNode,
        objects: Objects,
        source: str,
        join: Callable[[], Awaitable[Joined]],
        rules: Sequence[Rule],
        paces: dict[Rule, float],
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """join: raises ReplicationError, TierError. paces: shared by all mirrors of a process, so that a rule has one rate.
        clock: this machine's, unix seconds."""
        self.pull: Pull | None = None
        self._home = home
        self._objects = objects
        self._source = source
        self._join = join
        self._rules = rules
        self._paces = paces
        self._clock = home.clock
        self._own = clock
        self._chance = chance
        self._choice = choice_of(rules, source, home.region)
        self._earlier = MirrorState(source=source, rules=self._choice)
        self._complete_s = 0.0
        self._identity = ""
        self._problem = NOT_REACHED

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store or a disk can cause."""
        problems = self._home.problems
        await kept_going(f"mirror of {self._source}: recalling", self._recall, problems, may_end=True)
        await together(
            [
                kept_going(f"mirror of {self._source}: telling", self._keep_state, problems),
                kept_going(f"mirror of {self._source}", self._follow_on, problems),
            ]
        )

    @property
    def is_ready(self) -> bool:
        """Whether all that the source announced was read, once."""
        return self.pull is not None and self.pull.tail.caught_up.is_set()

    def origin(self, pack_id: bytes) -> str | None:
        """Of a pack that is at home and not announced there: see `Terms`."""
        return "" if self.pull is None else self.pull.origin(pack_id)

    def brings(self, announced: Announced) -> bool:
        """Whether it copies a pack again that is gone at home; until it has read its source: if it is a copy."""
        if self.pull is None or not self.is_ready:
            return bool(announced.origin)
        return self.pull.brings(announced.pack.id)

    @property
    def left_bytes(self) -> int:
        """Of packs and models that are to be copied, as far as it is known."""
        return 0 if self.pull is None else self.pull.jobs.left_bytes + self.pull.models.left_bytes

    def wrong(self) -> list[Problem]:
        """What is wrong in the bucket of the source."""
        return [] if self.pull is None else self.pull.problems.all()

    def state(self) -> MirrorState:
        """What this mirror has done, and what is left."""
        now_s, earlier, pull = self._clock(), self._earlier, self.pull
        if pull is None:
            age_s = _age_s(now_s, self._complete_s)
            return msgspec.structs.replace(earlier, at_s=now_s, problem=self._problem, oldest_age_s=age_s)
        copying, jobs, models = pull.copying, pull.jobs, pull.models
        failures = [
            Failure(models.name(job.pack_id), job.failure, job.attempts, job.since_s)
            for job in models.jobs.oldest_failing(FAILURES_TOLD)
        ]
        failures += [
            Failure(job.pack_id.hex(), job.failure, job.attempts, job.since_s)
            for job in jobs.oldest_failing(FAILURES_TOLD - len(failures))
        ]
        lost = [*earlier.lost_packs, *copying.lost_names, *models.lost_names]
        status, read = pull.tail.status(), pull.read
        passed = {one: number for one, number in pull.watermark.positions.items() if one in read}
        return MirrorState(
            source=self._source,
            identity=self._identity,
            rules=self._choice,
            at_s=now_s,
            looked_s=pull.known_s(),
            problem=status.failure if status.failures else _gap(status),
            watermark=passed,
            read=read,
            is_sweeping=pull.watermark.is_held,
            pending=len(jobs) + len(models.jobs),
            failed=jobs.failing + models.jobs.failing,
            failures=failures,
            lost=earlier.lost + copying.lost + models.lost,
            lost_packs=lost[-FAILURES_TOLD:],
            copied_packs=earlier.copied_packs + copying.copied_packs,
            copied_bytes=earlier.copied_bytes + copying.copied_bytes,
            oldest_age_s=_age_s(now_s, pull.complete_s),
            models=len(models.jobs),
            model_left_bytes=models.left_bytes,
            copied_models=earlier.copied_models + models.copied,
            copied_model_bytes=earlier.copied_model_bytes + models.copied_bytes,
            **copying.lags.figures(),
        )

    async def _recall(self) -> None:
        """Take over what an earlier life has written down; what stays damaged is done without."""
        damaged = 0
        while damaged < STATE_READS_MAX:
            try:
                self._earlier = await read_state(self._objects, self._source)
                break
            except (Damaged, ObjectRefused) as error:
                damaged += 1
                self._failed(str(error))
            except ObjectError as error:
                self._failed(str(error))
            await asyncio.sleep(MIRROR_JOIN_PAUSE_S)
        else:  # it was written by somebody who had looked by then, perhaps
            with suppress(ObjectError):
                looked_s = (await self._objects.head(MIRRORS + self._source)).modified_s
                self._earlier = msgspec.structs.replace(self._earlier, looked_s=looked_s)
        if self._earlier.rules != self._choice:  # what is at home by others says nothing
            self._earlier = msgspec.structs.replace(
                self._earlier, rules=self._choice, watermark={}, is_sweeping=True, oldest_age_s=None
            )
        if self._earlier.oldest_age_s is not None:
            self._complete_s = self._earlier.at_s - self._earlier.oldest_age_s

    async def _follow_on(self) -> None:
        """What fails of it ends this source's part only, and is told in its state."""
        try:
            await self._follow()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failed(reason_of(error))
            raise
        finally:
            self._carry_over()

    def _carry_over(self) -> None:
        """What was done goes on counting when the source is followed again."""
        if self.pull is not None:
            self._earlier, self._complete_s = self.state(), self.pull.complete_s
            self.pull = None

    async def _follow(self) -> None:
        self._identity, bucket, catalogue = await self._joined()
        try:
            if self._earlier.identity not in ("", self._identity):  # that was another region of this name
                self._earlier = MirrorState(source=self._source, rules=self._choice)
                self._complete_s = 0.0
            self.pull = Pull(
                Ways(self._source, bucket, self._home, self._objects),
                catalogue,
                self._rules,
                self._paces,
                self._earlier.watermark,
                self._complete_s,
                self._earlier.looked_s,
                StoreClock(self._own),
                self._chance,
            )
            log.info("following", extra={"source": self._source, "bucket": bucket.where})
            await self.pull.run()
        finally:
            catalogue.close()

    async def _joined(self) -> Joined:
        while True:
            try:
                return await self._join()
            except (ReplicationError, TierError) as error:
                self._failed(str(error))
            await asyncio.sleep(MIRROR_JOIN_PAUSE_S)

    def _failed(self, problem: str) -> None:
        self._problem = problem

    async def _keep_state(self) -> None:
        loop = asyncio.get_running_loop()
        written: MirrorState | None = None
        written_at_s = 0.0
        while True:
            state, now_s = self.state(), loop.time()
            if written is None or now_s - written_at_s >= HEARTBEAT_S or _is_news(state, written):
                try:
                    await MIRROR_STATE_FORMAT.put(self._objects, state)
                    written, written_at_s = state, now_s
                except ObjectError as error:
                    log.debug("the state of this mirror is not written: %s", error)
            await asyncio.sleep(STATE_INTERVAL_S)


def elsewhere(mirrors: Sequence[Mirror]) -> Elsewhere:
    """What all mirrors into a region know together, for the audit of its bucket."""

    def origin(pack_id: bytes) -> str | None:
        origins = {mirror.origin(pack_id) for mirror in mirrors}
        return None if None in origins else max(origins, key=str, default="")

    def lost() -> None:
        for mirror in mirrors:
            if mirror.pull is not None:
                mirror.pull.leapt()

    def brings(announced: Announced) -> bool:
        return any(mirror.brings(announced) for mirror in mirrors)

    return Elsewhere(lambda: all(mirror.is_ready for mirror in mirrors), origin, brings, lost)


def _gap(status: TailStatus) -> str:
    """Why the feed is not followed to its end, "" if it is."""
    return status.gap_reasons[0] if status.gap_reasons else ""


def _age_s(now_s: float, complete_s: float) -> float | None:
    return max(0.0, now_s - complete_s) if complete_s else None


def _is_news(state: MirrorState, written: MirrorState) -> bool:
    """Whether anything but the age has changed, or the age has fallen much: a mirror that was cut off has caught up."""
    fields = (
        "identity", "problem", "watermark", "is_sweeping", "pending", "failed", "lost", "copied_packs",
        "copied_models", "model_left_bytes",
    )  # fmt: skip
    age_s, written_age_s = state.oldest_age_s or 0.0, written.oldest_age_s or 0.0
    is_younger = age_s < written_age_s - HEARTBEAT_S / 2
    return is_younger or any(getattr(state, field) != getattr(written, field) for field in fields)
