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
import random
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueDamaged
from replication.formats.announced_models import AnnouncedModel
from replication.formats.rules import Rule
from replication.mirror.copying import Carrying, Ways
from replication.mirror.jobs import Job, Jobs
from replication.mirror.watermark import Hold
from replication.models.copy_model import ModelCopy

MODELS_AT_ONCE: Final = 2
NAME_CHARS: Final = 64  # of a model, where it is told in a state


class _Model(NamedTuple):
    """rule: whose rate it has."""

    announced: AnnouncedModel
    rule: Rule


class ModelCopying(Carrying):
    """Models of one source."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        paces: dict[Rule, float],
        ended: Callable[[Job], None],
        damaged: Callable[[CatalogueDamaged], None],
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        """catalogue: of the source. paces: see `Jobs`. clock: unix seconds. The others are those of `Carrying`."""
        super().__init__(ways, Jobs({}), ended, damaged, random.Random(chance.random()))
        self.copied = 0
        self._copied_bytes = 0  # of jobs that have ended
        self._catalogue = catalogue
        self._paces = paces
        self._clock = clock
        self._models: dict[bytes, _Model] = {}  # by the ids of jobs
        self._copies: dict[bytes, ModelCopy] = {}  # the latest of each job
        self._under_way = 0

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
        self.wake()
        return job

    def _take(self, now_s: float) -> Job | None:
        job = self.jobs.take(now_s, 1 << 62) if self._under_way < MODELS_AT_ONCE else None
        self._under_way += job is not None
        return job

    async def _bring(self, job: Job) -> None:
        try:
            await self._copy(job, self._models[job.pack_id].announced)
        finally:
            self._under_way -= 1

    async def _copy(self, job: Job, announced: AnnouncedModel) -> None:
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
        super()._done(job)

    def _object(self, job: Job) -> str | None:
        return self._models[job.pack_id].announced.name

    def _name(self, job: Job) -> str:
        return self.name(job.pack_id)
