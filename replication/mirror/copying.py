"""Copying: what a mirror does with its jobs.

    take ─▶ get, verify, put ─▶ announce at home, with its origin ─▶ known there: done
               │ a slot, and room in memory     │ packs that are ready meanwhile go together
               │ some get while others put      │
               ╰────────── failed: again, after a pause that grows ◀──╯

What must always hold:

* Nothing is announced at home that is not there, byte by byte what its header says.
* A copy keeps its origin, and nobody copies copies: no pack goes in circles.
* A job ends when home knows the pack, for as long as the source does; or when nobody needs it any more: its life is over, it
  is erased at home, or the source, though it is there, has not had it for LOST_AFTER_S. A damaged pack is tried for ever,
  less and less often.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.constants import FAILURES_TOLD, MIB
from replication.errors import CatalogueDamaged, Damaged, IntentLost, ModelDiffers, ModelRemoved
from replication.formats.announced import Announced, lasts_longer
from replication.formats.mirror_state import Lags
from replication.formats.region import MARKER
from replication.mirror.jobs import Job, Jobs
from replication.region.region_node import RegionNode
from replication.tasks import TO_END, reason_of
from replication.waits import within
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectMissing, ObjectUnavailable, PackDamaged
from tiers.packs.pack_io import copy_pack
from tiers.packs.packs import Pack
from tiers.together import Group

COPIES_MAX: Final = 16  # under way at a time
COPY_BYTES_MAX: Final = 256 * MIB  # of packs in memory; one that is larger is copied alone
# Being got: if all were got at once, all would be put at once, and each side would wait for the other.
COPY_GETS_MAX: Final = 8
COPY_GET_BYTES_MAX: Final = 128 * MIB  # of those being got
UNANNOUNCED_MAX: Final = 4096  # packs put, and being announced
COPY_PAUSE_S_MIN: Final = 0.001  # of waiting for a time to come
COPY_BACKOFF_S_MIN: Final = 2.0  # after a copy that failed; doubles
COPY_BACKOFF_S_MAX: Final = 300.0
DAMAGED_BACKOFF_S_MAX: Final = 3600.0
LOST_IDS_MAX: Final = 1 << 16
LOST_AFTER_S: Final = 3600.0  # that the source does not have what it announced
assert COPY_GETS_MAX < COPIES_MAX and COPY_GET_BYTES_MAX < COPY_BYTES_MAX

log = logging.getLogger("replication.copying")


class Ways(NamedTuple):
    """From where to where: the name of a region and its bucket; this region, and its bucket."""

    source: str
    bucket: Objects
    home: RegionNode
    home_bucket: Objects


class Carrying(ABC):
    """Carries out the jobs of one source, of packs or of models. lost: how many were announced there and are gone; lost_names: the
    latest of them, for people."""

    def __init__(
        self,
        ways: Ways,
        jobs: Jobs,
        ended: Callable[[Job], None],
        damaged: Callable[[CatalogueDamaged], None],
        chance: random.Random,
    ) -> None:
        """ended: called when a job is done. damaged: called when the catalogue of the source is found to be."""
        self.jobs = jobs
        self.lost = 0
        self.lost_ids: dict[
            bytes, None
        ] = {}  # that no sweep is to find again: the keeper of the source removes them
        self.lost_names: deque[str] = deque(maxlen=FAILURES_TOLD)
        self._ways = ways
        self._ended = ended
        self._damaged = damaged
        self._chance = chance
        self._woken = asyncio.Event()

    @abstractmethod
    def _take(self, now_s: float) -> Job | None:
        """The job to begin now, which is under way from here on; None if none can. now_s: loop's time."""

    @abstractmethod
    async def _bring(self, job: Job) -> None:
        """Until home lacks nothing of it. However this ends, it is not under way any more."""

    @abstractmethod
    def _object(self, job: Job) -> str | None:
        """What the source must have of it, by name; None where it is announced no more."""

    @abstractmethod
    def _name(self, job: Job) -> str:
        """For people."""

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store or a disk can cause."""
        loop = asyncio.get_running_loop()
        async with Group() as group:
            while True:
                self._woken.clear()
                job = self._take(loop.time())
                if job is not None:
                    group.begin(self._carry_out(job))
                    continue
                await within(self._pause_s(loop.time()), self._woken)

    def wake(self) -> None:
        """There are new jobs."""
        self._woken.set()

    def _pause_s(self, now_s: float) -> float | None:
        """Until time brings the next job; None where it waits for something else."""
        due_s = self.jobs.due_s()
        return None if due_s is None or due_s <= now_s else max(due_s - now_s, COPY_PAUSE_S_MIN)

    async def _carry_out(self, job: Job) -> None:
        try:
            try:
                await self._bring(job)
            except ObjectMissing:
                if not await self._is_lost(job):
                    raise
                self._lose(job)
        except ModelRemoved as error:
            log.info("not copied: %s", error)
            self._done(job)
        except (PackDamaged, Damaged, ModelDiffers) as error:
            job.missing_since_s = None
            self._retry(job, str(error), DAMAGED_BACKOFF_S_MAX)
        except (ObjectError, IntentLost) as error:
            self._retry(job, str(error), COPY_BACKOFF_S_MAX)
        except CatalogueDamaged as error:
            self._damaged(error)
            self._retry(job, str(error), COPY_BACKOFF_S_MAX)
        except (asyncio.CancelledError, *TO_END):
            raise
        except BaseException as error:
            log.error("a copy failed", exc_info=error)
            self._retry(job, reason_of(error), DAMAGED_BACKOFF_S_MAX)
        else:
            self._done(job)
        self._woken.set()

    def _done(self, job: Job) -> None:
        self.jobs.done(job)
        self._ended(job)

    def _retry(self, job: Job, failure: str, longest_s: float) -> None:
        if not job.failure:
            log.debug("not copied: %s", failure)
        pause_s = min(COPY_BACKOFF_S_MIN * 2.0 ** min(job.attempts, 32), longest_s)
        now_s = asyncio.get_running_loop().time()
        self.jobs.retry(job, now_s + pause_s * self._chance.uniform(0.5, 1.0), failure)

    async def _is_lost(self, job: Job) -> bool:
        """Whether what was missing again is missing for good: the place is there, the object is not."""
        now_s = asyncio.get_running_loop().time()
        if job.missing_since_s is None:
            job.missing_since_s = now_s
        if now_s - job.missing_since_s < LOST_AFTER_S:
            return False
        name, bucket = self._object(job), self._ways.bucket
        if not await _has_object(bucket, MARKER):
            return False
        # Asked again, because the place may have come back just now.
        return name is None or await _has_object(bucket, name) is False

    def _lose(self, job: Job) -> None:
        name = self._name(job)
        self.lost_ids[job.pack_id] = None
        if len(self.lost_ids) > LOST_IDS_MAX:
            del self.lost_ids[next(iter(self.lost_ids))]
        self.lost += 1
        self.lost_names.append(name)
        log.warning("%s: %s: announced, and lost", self._ways.bucket.where, name)


async def _has_object(objects: Objects, name: str) -> bool | None:
    """Whether a place has an object; None where it does not say."""
    try:
        await objects.head(name)
    except ObjectMissing:
        return False
    except ObjectError:
        return None
    return True


class Copying(Carrying):
    """Packs of one source."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        jobs: Jobs,
        ended: Callable[[Job], None],
        damaged: Callable[[CatalogueDamaged], None],
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """catalogue: of the source. clock: unix seconds. The others are those of `Carrying`."""
        super().__init__(ways, jobs, ended, damaged, chance)
        self.lags = Lags()
        self.copied_packs = 0
        self.copied_bytes = 0
        self._catalogue = catalogue
        self._clock = clock
        self._copied: dict[int, int] = {}  # bytes of each job that is under way and no renewal, by its id()
        self._getting: dict[int, int] = {}  # bytes of each job that is not got yet, by its id()
        self._unannounced = 0

    def _take(self, now_s: float) -> Job | None:
        if self._unannounced >= UNANNOUNCED_MAX:
            return None
        self.jobs.rouse(now_s)
        if (renewal := self.jobs.take_renewal()) is not None:
            return renewal
        if len(self._copied) == COPIES_MAX or len(self._getting) == COPY_GETS_MAX:
            return None
        room_bytes = 1 << 62  # any pack fits, alone
        if self._copied:
            room_bytes = min(
                COPY_BYTES_MAX - sum(self._copied.values()), COPY_GET_BYTES_MAX - sum(self._getting.values())
            )
        job = self.jobs.take(now_s, room_bytes)
        if job is not None:
            self._copied[id(job)] = self._getting[id(job)] = job.size_bytes
        return job

    async def _bring(self, job: Job) -> None:
        try:
            announced = self._lacking(job)
            if announced is not None and not job.is_put and not self._is_known(job):
                if job.is_renewal:
                    self.jobs.gone(job)
                    raise ObjectUnavailable(f"{announced.pack.name}: is gone at home meanwhile")
                await self._copy(job, announced.pack)
                job.is_put = True
        finally:
            self._copied.pop(id(job), None)
            self._got(job)
        self._unannounced += 1
        try:
            while announced is not None:  # its life may grow meanwhile
                await self._ways.home.announce(msgspec.structs.replace(announced, origin=self._ways.source))
                announced = self._lacking(job)
        finally:
            self._unannounced -= 1
        if job.is_put:
            self.copied_packs += 1
            self.copied_bytes += job.size_bytes
            if job.since_s:
                self.lags.add(max(0.0, self._clock() - job.since_s))

    async def _copy(self, job: Job, pack: Pack) -> None:
        await copy_pack(self._ways.bucket, self._ways.home_bucket, pack, partial(self._got, job))

    def _got(self, job: Job) -> None:
        self._getting.pop(id(job), None)
        self._woken.set()

    def _lacking(self, job: Job) -> Announced | None:
        """What the source says of a pack, if home does not know as much of it and should."""
        [announced] = self._catalogue.packs([job.pack_id])
        if announced is None and self._catalogue.void_until_s([job.pack_id]):
            return None  # it was removed
        if announced is None:  # made anew, and not as far yet
            raise ObjectMissing(f"{self._ways.bucket.where}: pack {job.pack_id.hex()}: is not announced")
        [known] = self._ways.home.known([job.pack_id])
        is_wanted = is_lacking(
            announced, known, self._ways.home.clock.over_s
        ) and not self._ways.home.erasure.covers(announced)
        return announced if is_wanted else None

    def _is_known(self, job: Job) -> bool:
        return self._ways.home.known([job.pack_id]) != [None]

    def _object(self, job: Job) -> str | None:
        [announced] = self._catalogue.packs([job.pack_id])
        return None if announced is None else announced.pack.name

    def _name(self, job: Job) -> str:
        return job.pack_id.hex()


def is_lacking(announced: Announced, known: Announced | None, now_s: float) -> bool:
    """Whether home, where this is `known` of a pack, needs what the source says of it."""
    is_over = 0 < announced.kept_until_s <= now_s
    return not is_over and (known is None or lasts_longer(announced, known))
