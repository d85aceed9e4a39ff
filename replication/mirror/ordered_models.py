"""Ordered models: what a mirror does when a region is to have the weights of named models.

    order ─▶ NAME: the revision that the source has had last; NAME@REVISION ─▶ what home lacks ─▶ jobs, before all others ─▶ told

As of packs: an order is a rule for what no rule names, and what a rule skips stays where it is. Its caches come with a model.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from replication.catalogue.catalogue import Catalogue
from replication.formats.announced_models import AnnouncedModel
from replication.formats.orders import Order
from replication.formats.rules import Rule, first_weights_rule
from replication.mirror.copying import Ways
from replication.mirror.jobs import Job
from replication.mirror.model_copying import ModelCopying
from replication.models.published import latest_first
from replication.region.order_watch import Report
from tiers.bucket.objects import Objects

ORDER_PRIORITY: Final = 1001  # of copies that are ordered: above all rules
ORDER_LOOK_S: Final = 1.0
ORDER_ATTEMPTS_MAX: Final = 3  # then a pack or a model counts as failed; its job tries on


async def newest_revision(objects: Objects, model: str) -> str:
    """The one that was published last; "" without any. Raises ObjectError."""
    found = await latest_first(objects, model)
    return found[0].revision if found else ""


async def named_models(objects: Objects, catalogue: Catalogue, names: Iterable[str]) -> list[AnnouncedModel]:
    """What is announced of these, each NAME or NAME@REVISION. Raises ObjectError."""
    wanted = set()
    for name in names:
        model, _, revision = name.partition("@")
        wanted.add((model, revision or await newest_revision(objects, model)))
    return [model for model in catalogue.models.values() if (model.model, model.revision) in wanted]


def ended(under_way: dict[Job, int], report: Report) -> list[Job]:
    """Those of these jobs, with their attempts when they were ordered, that are done. They leave, and so do those that have failed
    too often since."""
    done = []
    for job, attempts in list(under_way.items()):
        if job.is_done:
            done.append(job)
        elif job.attempts - attempts >= ORDER_ATTEMPTS_MAX:
            report.failed += 1
            report.problem = job.failure
        else:
            continue
        del under_way[job]
    return done


class OrderedModels:
    """Of one source."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        rules: Sequence[Rule],
        copying: ModelCopying,
        clock: Callable[[], float],
    ) -> None:
        """catalogue: of the source. clock: unix seconds."""
        self._ways = ways
        self._catalogue = catalogue
        self._rules = rules
        self._copying = copying
        self._clock = clock

    async def carry_out(self, order: Order, report: Report) -> None:
        """Until all of it is at home, or has failed too often. Raises ObjectError."""
        under_way: dict[Job, int] = {}
        for model in await named_models(self._ways.bucket, self._catalogue, order.weights):
            rule = ordered_weights_rule(
                self._rules, self._ways.source, self._ways.home.region, model.model, order
            )
            if rule is not None and self._copying.is_lacking(model):
                job = self._copying.add(model, rule, self._clock(), None)
                under_way[job] = job.attempts
        report.packs, report.total_bytes = len(under_way), sum(job.size_bytes for job in under_way)
        done_bytes = 0
        while under_way:
            for job in ended(under_way, report):
                report.done_packs += 1
                done_bytes += job.size_bytes
            here = done_bytes + sum(job.size_bytes - self._copying.left_of(job.pack_id) for job in under_way)
            report.moved(max(0, here - report.done_bytes))
            report.done_bytes = here
            if under_way:
                await asyncio.sleep(ORDER_LOOK_S)
        if report.failed:
            report.problem = f"{report.failed} models could not be copied: {report.problem}"


def ordered_weights_rule(
    rules: Sequence[Rule], source: str, to: str, model: str, order: Order
) -> Rule | None:
    """The rule by which an order has a model copied; None if it has not."""
    rule = first_weights_rule(rules, source, to, model)
    if rule is None:
        return Rule(models=order.weights, of_weights=True, priority=ORDER_PRIORITY)
    return dataclasses.replace(rule, priority=ORDER_PRIORITY) if rule.copies else None
