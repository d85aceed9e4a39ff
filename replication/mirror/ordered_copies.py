"""Ordered copies: what a mirror does when its region is to be warmed.

    order ─▶ selection of the source's catalogue ─▶ what home lacks ─▶ jobs, before all others, ORDER_JOBS_MAX at a time ─▶ told

An order is a rule for what no rule names, and a priority for what one does. What a rule skips stays where it is, whoever
orders it: it may not be anywhere else. An ordered copy goes at the rate of its rule, beside what the rule copies anyway.

What the source makes later is left to the rules. What fails is left to its job, which tries on.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from replication.catalogue.catalogue import Catalogue
from replication.catalogue.selection import choose
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from replication.formats.orders import MIRROR, Order
from replication.formats.rules import Rule, first_rule
from replication.mirror.copying import Ways, is_lacking
from replication.mirror.jobs import Job
from replication.mirror.ordered_models import ORDER_PRIORITY, OrderedModels, ended
from replication.region.order_watch import OrderWatch, Report
from tiers.namespace_spec import NamespaceSpec

ORDER_JOBS_MAX: Final = 64  # of one order, waiting or under way: what is cancelled leaves no more behind
ORDER_JOBS_PAUSE_S: Final = 0.5  # between two looks whether some have ended

_LOOK_PACKS = 64  # compared with home in one turn of the loop


class OrderedCopies:
    """Of one source."""

    def __init__(
        self,
        ways: Ways,
        catalogue: Catalogue,
        rules: Sequence[Rule],
        make_jobs: Callable[[Sequence[tuple[Announced, Rule]]], Sequence[Job]],
        clock: Callable[[], float],
        mend: Callable[[CatalogueDamaged], None],
        models: OrderedModels,
    ) -> None:
        """models: carries out orders of weights. catalogue: of the source. make_jobs: has packs copied, each by this rule; those that have jobs, sooner. clock: unix seconds."""
        self._ways = ways
        self._catalogue = catalogue
        self._rules = rules
        self._make_jobs = make_jobs
        self._clock = clock
        self._models = models
        who, problems = MIRROR + ways.source, ways.home.problems
        news = ways.home.keeper
        self._watch = OrderWatch(
            ways.home_bucket, who, self._carry_out, mend, clock, problems=problems, news=news
        )

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store or a disk can cause."""
        await self._watch.run()

    def _rule(self, order: Order, spec: NamespaceSpec) -> Rule | None:
        return ordered_rule(order, self._rules, self._ways.source, self._ways.home.region, spec)

    async def _carry_out(self, order: Order, report: Report) -> None:
        """Raises CatalogueDamaged, ObjectError."""
        if order.weights:
            await self._models.carry_out(order, report)
            return
        lacking = await self._lacking(order)
        report.packs, report.total_bytes = len(lacking), sum(lacking.values())
        left = list(lacking)[::-1]
        under_way: dict[Job, int] = {}
        while left or under_way:
            if left and len(under_way) <= ORDER_JOBS_MAX // 2:
                ids = [left.pop() for _ in range(min(len(left), ORDER_JOBS_MAX - len(under_way)))]
                jobs = self._make_jobs(self._still_lacking(order, ids))
                under_way.update((job, job.attempts) for job in jobs)
                self._came(lacking, ids, jobs, report)
            for job in ended(under_way, report):
                report.done(job.size_bytes, job.size_bytes)
            if left or under_way:
                await asyncio.sleep(ORDER_JOBS_PAUSE_S)
        if report.failed:
            report.problem = f"{report.failed} packs could not be copied: {report.problem}"

    async def _lacking(self, order: Order) -> Mapping[bytes, int]:
        """Packs that are ordered and not at home, in order, with the bytes of their objects."""
        chosen = await choose(
            self._catalogue, lambda announced: self._is_wanted(order, announced), order.budget_bytes
        )
        lacking: dict[bytes, int] = {}
        for start in range(0, len(chosen), _LOOK_PACKS):
            ids = [one.pack_id for one in chosen[start : start + _LOOK_PACKS]]
            for announced in self._catalogue.packs(ids):
                if announced is not None and self._is_lacking(announced):
                    lacking[announced.pack.id] = announced.pack.size_bytes
            await asyncio.sleep(0)
        return lacking

    def _is_wanted(self, order: Order, announced: Announced) -> bool:
        is_over = 0 < announced.kept_until_s <= self._ways.home.clock.over_s
        return (
            not is_over
            and self._rule(order, announced.pack.header.spec) is not None
            and not self._ways.home.erasure.covers(announced)
        )

    def _is_lacking(self, announced: Announced) -> bool:
        """Whether this mirror has to bring it: copies of others are brought by the mirrors of their origin."""
        [known] = self._ways.home.known([announced.pack.id])
        return (
            not announced.origin
            and known is None
            and is_lacking(announced, known, self._ways.home.clock.over_s)
        )

    def _still_lacking(self, order: Order, ids: Sequence[bytes]) -> list[tuple[Announced, Rule]]:
        return [
            (announced, rule)
            for announced in self._catalogue.packs(ids)
            if announced is not None and self._is_lacking(announced)
            if (rule := self._rule(order, announced.pack.header.spec)) is not None
        ]

    def _came(
        self, lacking: Mapping[bytes, int], ids: Sequence[bytes], jobs: Sequence[Job], report: Report
    ) -> None:
        """Those without a job came meanwhile, or are over."""
        for pack_id in set(ids) - {job.pack_id for job in jobs}:
            report.done(lacking[pack_id], 0)


def ordered_rule(
    order: Order, rules: Sequence[Rule], source: str, to: str, spec: NamespaceSpec
) -> Rule | None:
    """The rule by which an order has a namespace copied from one region to another; None if it has not."""
    if not order.names(spec):
        return None
    rule = first_rule(rules, source, to, spec)
    if rule is None:
        return Rule(models=order.models, tenants=order.tenants, priority=ORDER_PRIORITY)
    return dataclasses.replace(rule, priority=ORDER_PRIORITY) if rule.copies else None
