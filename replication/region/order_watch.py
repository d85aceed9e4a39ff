"""The order watch: how a daemon, or a mirror, takes orders of its region, and tells how far it is.

    orders/ ─▶ look, every 2 s ──▶ a new one ─▶ carry out ─▶ ended ─▶ told, and not taken again
                                   │ gone or over: cancelled
                                   └─ Report ─▶ warming/<id>/<who>, every 5 s where there is news

What could not be done because the bucket or the catalogue failed is begun again after a pause. A process that is killed
takes the order again when it is back, unless it had told that it was done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec

from replication.constants import ORDERS_MAX
from replication.errors import CatalogueDamaged
from replication.formats.orders import ORDERS, Order, Progress, put_progress, read_orders, read_progress
from replication.keeper.news_reader import Folders, Source
from replication.problems import Problems
from replication.tasks import kept_going
from replication.waits import within
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError
from tiers.together import Group

ORDERS_LOOK_S: Final = 2.0  # between two looks at what the news say of them
ORDERS_INTERVAL_S: Final = 15.0  # between two lists, where there are no news
ORDER_TELL_S: Final = 5.0  # between two writings of progress, where there is news
ORDER_HEARTBEAT_S: Final = 20.0  # written even without
ORDER_RETRY_S: Final = 10.0  # after a bucket or a catalogue that failed

log = logging.getLogger("replication.order_watch")

_Key = tuple[str, float]  # an order's id, and when it was made


class Report(Progress, kw_only=True):
    """Progress as it is being made. began_s: loop's time."""

    began_s: float

    def begin(self) -> None:
        """All over again: what was done is found to be held. What was moved stays counted."""
        self.packs = self.done_packs = self.total_bytes = self.done_bytes = self.failed = 0
        self.full, self.problem = False, ""

    def done(self, size_bytes: int, moved_bytes: int) -> None:
        """A pack is where it was ordered to."""
        self.done_packs += 1
        self.done_bytes += size_bytes
        self.moved(moved_bytes)

    def moved(self, size_bytes: int) -> None:
        if size_bytes:
            self.moved_bytes += size_bytes
            taken_s = asyncio.get_running_loop().time() - self.began_s
            self.bytes_per_s = self.moved_bytes / taken_s if taken_s > 0 else 0.0


class OrderWatch:
    """Of one daemon or mirror and the bucket of its region."""

    def __init__(
        self,
        objects: Objects,
        who: str,
        carry_out: Callable[[Order, Report], Awaitable[None]],
        mend: Callable[[CatalogueDamaged], None],
        clock: Callable[[], float],
        is_new: bool = False,
        problems: Problems | None = None,
        news: Source | None = None,
    ) -> None:
        """carry_out: may raise ObjectError, CatalogueDamaged, and is called again then; mend: told of the latter. clock: unix seconds.
        is_new: nothing is left of what an earlier life of this daemon loaded, so what it told is not believed. problems: orders that
        cannot be read, or carried out, are noted there. news: of the region."""
        self._objects = objects
        self._who = who
        self._carry_out = carry_out
        self._mend = mend
        self._clock = clock
        self._is_new = is_new
        self._problems = problems if problems is not None else Problems(objects.where)
        self._folder = Folders(news, ORDERS)
        self._orders: dict[str, Order] = {}  # by name and ETag
        self._taken: dict[_Key, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        self._taken.clear()
        async with Group() as group:
            while True:
                try:
                    await self._look(group)
                except ObjectError as error:
                    log.debug("%s: orders are looked for later: %s", self._objects.where, error)
                await asyncio.sleep(ORDERS_LOOK_S)

    async def _look(self, group: Group) -> None:
        if self._folder.are_due(ORDERS_INTERVAL_S):
            members = await read_orders(self._objects, self._orders, self._problems)
            self._orders = members.by_key
            if not members.unavailable:
                self._folder.listed()
        now_s = self._clock()
        latest = sorted(self._orders.values(), key=lambda order: -order.made_s)[:ORDERS_MAX]
        wanted = {(order.id, order.made_s): order for order in latest if now_s < order.until_s}
        for key in self._taken.keys() - wanted.keys():
            self._taken.pop(key).cancel()
        for key, order in wanted.items():
            if key not in self._taken:
                take, name = partial(self._take, order), f"order {order.id}"
                self._taken[key] = group.begin(kept_going(name, take, self._problems, may_end=True))

    async def _take(self, order: Order) -> None:
        """From the first look at an order until its end is told."""
        while True:
            try:
                told = await read_progress(self._objects, order, self._who)
                break
            except ObjectError as error:
                log.debug("%s: an order is taken later: %s", self._objects.where, error)
            await asyncio.sleep(ORDER_RETRY_S)
        if told is not None and told.ended and not self._is_new:
            return
        log.info("warming", extra={"order": order.id, "to": order.to, "budget_bytes": order.budget_bytes})
        began_s = asyncio.get_running_loop().time()
        report = Report(who=self._who, made_s=order.made_s, began_s=began_s)
        ended = asyncio.Event()
        async with Group() as group:
            group.begin(self._tell(order, report, ended))
            await self._work(order, report)
            ended.set()
        log.info("warmed", extra={"order": order.id, "bytes": report.done_bytes, "problem": report.problem})

    async def _work(self, order: Order, report: Report) -> None:
        while not report.ended:
            report.begin()
            try:
                await self._carry_out(order, report)
                report.ended = True
                return
            except ObjectError as error:
                report.problem = str(error)
            except CatalogueDamaged as error:
                self._mend(error)
                report.problem = str(error)
            await asyncio.sleep(ORDER_RETRY_S)

    async def _tell(self, order: Order, report: Report, ended: asyncio.Event) -> None:
        """Until it has told that the order is done."""
        loop = asyncio.get_running_loop()
        written: Progress | None = None
        written_at_s = 0.0
        while written is None or not written.ended:
            report.at_s = self._clock()
            progress = msgspec.convert(report, Progress, from_attributes=True)
            is_news = written is None or msgspec.structs.replace(written, at_s=progress.at_s) != progress
            if is_news or loop.time() - written_at_s >= ORDER_HEARTBEAT_S:
                try:
                    await put_progress(self._objects, order, progress)
                    written, written_at_s = progress, loop.time()
                except ObjectError as error:
                    log.debug("%s: progress is told later: %s", self._objects.where, error)
            if written is not progress and ended.is_set():
                await asyncio.sleep(ORDER_TELL_S)
            elif written is None or not written.ended:
                await within(ORDER_TELL_S, ended)
