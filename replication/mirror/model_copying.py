"""Copying of models: what a mirror does with those that it has to bring, beside packs.

    add ─▶ jobs, highest priority first, MODELS_AT_ONCE ─▶ ModelCopy ─▶ announced at home, with its origin ─▶ ended
                                                             ╰─ failed: again, after a pause that grows, from where it was

Chunks go at the rate of the model's rule, which they share with the packs of that rule. A job ends as one of a pack does: when home
knows the model, or when nobody needs it any more: it is removed, another content has taken its name, or the source, though it is
there, has not had its manifest for LOST_AFTER_S. A model that cannot be copied holds up no other one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.constants import FAILURES_TOLD
from replication.errors import Damaged, IntentLost, ModelDiffers, ModelRemoved
from replication.formats.announced_models import AnnouncedModel
from replication.formats.region import MARKER
from replication.formats.rules import Rule
from replication.mirror.copying import COPY_BACKOFF_S_MIN, Ways, has_object
from replication.mirror.jobs import Job, Jobs
from replication.mirror.watermark import Hold
from replication.models.copy_model import ModelCopy
from replication.tasks import TO_END, reason_of
from replication.waits import within
from tiers.errors import ObjectError, ObjectMissing

MODELS_AT_ONCE: Final = 2
MODEL_BACKOFF_S_MAX: Final = 300.0  # after a store that failed
MODEL_DAMAGED_BACKOFF_S_MAX: Final = 3600.0
LOST_AFTER_S: Final = 3600.0
NAME_CHARS: Final = 64  # of a model, where it is told in a state

log = logging.getLogger("replication.model_copying")


class _Model(NamedTuple):
    """rule: whose rate it has."""

    announced: AnnouncedModel
    rule: Rule


class ModelCopying:
    """Of one source. lost: announced there and gone."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        paces: dict[Rule, float],
        ended: Callable[[Job], None],
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """catalogue: of the source. paces: see `Jobs`. ended: called when a job is done. clock: unix seconds."""
        self.jobs = Jobs({})
        self.copied = 0
        self.lost = 0
        self.lost_models: deque[str] = deque(maxlen=FAILURES_TOLD)
        self._copied_bytes = 0  # of jobs that have ended
        self._ways = ways
        self._catalogue = catalogue
        self._paces = paces
        self._ended = ended
        self._clock = clock
        self._chance = random.Random(chance.random())
        self._models: dict[bytes, _Model] = {}  # by the ids of jobs
        self._copies: dict[bytes, ModelCopy] = {}  # the latest of each job
        self._under_way = 0
        self._woken = asyncio.Event()

    @property
    def copied_bytes(self) -> int:
        return self._copied_bytes + sum(copy.copied_bytes for copy in self._copies.values())

    @property
    def left_bytes(self) -> int:
        """Of models that are to be copied, as far as it is known."""
        return sum(self.left_of(model_id) for model_id in self._models)

    def left_of(self, model_id: bytes) -> int:
        copy, model = self._copies.get(model_id), self._models.get(model_id)
        return copy.left_bytes if copy is not None else model.announced.size_bytes if model is not None else 0

    def name(self, model_id: bytes) -> str:
        """Of a job's model, for people."""
        announced = self._models[model_id].announced
        return f"{announced.model}@{announced.revision}"[:NAME_CHARS]

    def is_lacking(self, announced: AnnouncedModel) -> bool:
        """Whether home does not know it, and the source made it, or has the last copy of what home made."""
        known = self._ways.home.catalogue.models.get(announced.name)
        is_ours = announced.origin in ("", self._ways.home.region)
        return is_ours and (known is None or known.content != announced.content)

    def add(self, announced: AnnouncedModel, rule: Rule, since_s: float, hold: Hold | None) -> Job:
        """Have it copied; its job, which may be there already. since_s: unix seconds, before which it was not announced."""
        job = self.jobs.get(announced.id)
        if job is None:
            job = Job(announced.id, announced.size_bytes, dataclasses.replace(rule, bytes_per_s=0), since_s)
            self.jobs.add(job)
            self._models[job.pack_id] = _Model(announced, rule)
        elif rule.priority > job.rule.priority:
            self.jobs.hasten([job], dataclasses.replace(rule, bytes_per_s=0))
        self.jobs.heard(job, since_s)
        if hold is not None:
            hold.left += 1
            job.holds.append(hold)
        self._woken.set()
        return job

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store or a disk can cause."""
        loop = asyncio.get_running_loop()
        self._under_way = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._woken.clear()
                if self._under_way < MODELS_AT_ONCE and (job := self.jobs.take(loop.time(), 1 << 62)):
                    self._under_way += 1
                    tasks.create_task(self._carry_out(job))
                    continue
                due_s = self.jobs.due_s() if self._under_way < MODELS_AT_ONCE else None
                await within(None if due_s is None else max(due_s - loop.time(), 0.001), self._woken)

    async def _carry_out(self, job: Job) -> None:
        announced = self._models[job.pack_id].announced
        try:
            try:
                await self._bring(job, announced)
            except ObjectMissing:
                if not await self._is_lost(job, announced):
                    raise
                self._lose(announced)
        except ModelRemoved as error:
            log.info("not copied: %s", error)
            self._done(job)
        except (Damaged, ModelDiffers) as error:
            job.missing_since_s = None
            self._retry(job, str(error), MODEL_DAMAGED_BACKOFF_S_MAX)
        except (ObjectError, IntentLost) as error:
            self._retry(job, str(error), MODEL_BACKOFF_S_MAX)
        except (asyncio.CancelledError, *TO_END):
            raise
        except BaseException as error:
            log.error("a model is not copied", exc_info=error)
            self._retry(job, reason_of(error), MODEL_DAMAGED_BACKOFF_S_MAX)
        else:
            self._done(job)
        self._under_way -= 1
        self._woken.set()

    async def _bring(self, job: Job, announced: AnnouncedModel) -> None:
        now = self._catalogue.models.get(announced.name)
        if not self.is_lacking(announced) or (now is not None and now.id != announced.id):
            return
        ways, rule = self._ways, self._models[job.pack_id].rule
        self._copied_bytes += copy.copied_bytes if (copy := self._copies.pop(job.pack_id, None)) else 0
        who = f"mirror {ways.source} {ways.home.region}"
        copy = self._copies[job.pack_id] = ModelCopy(
            ways.bucket, ways.home_bucket, announced, who, self._clock, partial(self._paced, rule)
        )
        await copy.run()
        origin = "" if announced.origin == ways.home.region else ways.source
        await ways.home.announce(msgspec.structs.replace(announced, origin=origin))
        self.copied += 1

    async def _paced(self, rule: Rule, size_bytes: int) -> None:
        if rule.bytes_per_s:
            now_s = asyncio.get_running_loop().time()
            begin_s = max(now_s, self._paces.get(rule, 0.0))
            self._paces[rule] = begin_s + size_bytes / rule.bytes_per_s
            await asyncio.sleep(begin_s - now_s)

    def _done(self, job: Job) -> None:
        copy = self._copies.pop(job.pack_id, None)
        self._copied_bytes += copy.copied_bytes if copy is not None else 0
        del self._models[job.pack_id]
        self.jobs.done(job)
        self._ended(job)

    def _retry(self, job: Job, failure: str, longest_s: float) -> None:
        if job.failure != failure:
            log.warning("not copied: %s", failure)
        pause_s = min(COPY_BACKOFF_S_MIN * 2.0 ** min(job.attempts, 32), longest_s)
        now_s = asyncio.get_running_loop().time()
        self.jobs.retry(job, now_s + pause_s * self._chance.uniform(0.5, 1.0), failure)

    async def _is_lost(self, job: Job, announced: AnnouncedModel) -> bool:
        """As of a pack: the place is there, and the manifest is not, for long."""
        now_s = asyncio.get_running_loop().time()
        if job.missing_since_s is None:
            job.missing_since_s = now_s
        if now_s - job.missing_since_s < LOST_AFTER_S:
            return False
        bucket = self._ways.bucket
        return bool(await has_object(bucket, MARKER)) and await has_object(bucket, announced.name) is False

    def _lose(self, announced: AnnouncedModel) -> None:
        self._catalogue.forget_model(announced.name)
        self.lost += 1
        self.lost_models.append(f"{announced.model}@{announced.revision}"[:NAME_CHARS])
        log.warning("%s: %s: announced, and lost", self._ways.bucket.where, announced.name)
