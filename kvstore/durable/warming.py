"""Warming: a daemon's part in orders for its region, and what it tells of itself there.

    orders/ ─▶ selection of the catalogue, as much as the tier holds ─▶ packs, the best first ─▶ Warmer, engine's thread
                 ▲ again while a mirror copies for the order                    │ held │ loaded │ no room: that is all
                 ╰───────────────────────────────────────────────────────────────╯─▶ warming/<id>/<writer>
    nodes/<writer>   every ten minutes: what its tiers hold, how fast the bucket is, what was asked for

On the loop of the region's thread; what touches the engine is asked of it with one call and answered with one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kvstore.constants import WARM_PACKS_MAX, WARM_ROUND_S, WARM_TRIES_MAX
from kvstore.durable.warmer import Brought, Warmer
from replication.announced import Announced
from replication.constants import CLOCK_SKEW_S, HEARTBEAT_LATE_S, NODE_INTERVAL_S
from replication.mirror_state import NOT_REACHED, read_mirrors
from replication.nodes import Node, put_node, read_node
from replication.order_watch import OrderWatch, Report
from replication.orders import MIRROR, Order, To, read_progress
from replication.region_node import RegionNode
from replication.selection import Chosen, choose
from replication.tasks import kept_going
from tiers.errors import ObjectError

log = logging.getLogger("kvstore.durable.warming")
T = TypeVar("T")


class Warming:
    """Of one daemon that has joined its region."""

    def __init__(
        self,
        node: RegionNode,
        warmer: Warmer,
        reply: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        is_new: bool,
    ) -> None:
        """reply: runs a call on the engine's thread. clock: unix seconds. is_new: DRAM holds nothing of an earlier life."""
        self._node = node
        self._warmer = warmer
        self._reply = reply
        self._clock = clock
        self._writer = node.writer  # by which this daemon is told from others, whatever id its feed has later
        self._watch = OrderWatch(
            node.objects, self._writer, self._carry_out, node.mend, clock, is_new, node.problems
        )

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        problems = self._node.problems
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kept_going("telling of this daemon", self._tell, problems))
            tasks.create_task(kept_going("taking orders", self._take_orders, problems))

    async def _take_orders(self) -> None:
        await self._node.caught_up.wait()
        await self._watch.run()

    async def _ask(self, question: Callable[[], T]) -> T:
        """The answer of the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._reply(lambda: _answer(loop, answer, question()))
        return await answer

    # -- what is told --

    async def _tell(self) -> None:
        restored = False
        while True:
            try:
                if not restored:
                    await self._restore()
                    restored = True
                await put_node(self._node.objects, await self._ask(self._told))
            except ObjectError as error:
                log.info("what this daemon is told of is written later: %s", error)
            await asyncio.sleep(NODE_INTERVAL_S)

    async def _restore(self) -> None:
        """Go on counting where an earlier life was."""
        earlier, traffic = await read_node(self._node.objects, self._writer), self._warmer.traffic
        if earlier is not None and traffic is not None:
            rows, at_s = earlier.asked, earlier.at_s
            await self._ask(lambda: traffic.restore(rows, at_s))

    def _told(self) -> Node:
        """On the engine's thread."""
        warmer = self._warmer
        return Node(
            writer=self._writer,
            at_s=self._clock(),
            dram_bytes=warmer.capacity_bytes("dram"),
            nvme_bytes=warmer.capacity_bytes("nvme"),
            load_bytes_per_s=warmer.bytes_per_s,
            asked=warmer.traffic.rows() if warmer.traffic is not None else (),
        )

    # -- orders --

    async def _carry_out(self, order: Order, report: Report) -> None:
        """Raises ObjectError, CatalogueDamaged."""
        holds_bytes = await self._ask(lambda: self._warmer.capacity_bytes(order.to))
        if not holds_bytes:
            report.problem = f"there is no {order.to} tier here"
            return
        budget_bytes = min(order.budget_bytes or holds_bytes, holds_bytes)
        work = _Work(order.to, report)
        while not report.full:
            is_awaited = await self._mirrors_copy(order, work)
            await self._node.up_to_date()
            chosen = await choose(self._node.catalogue, lambda one: self._is_wanted(order, one), budget_bytes)
            await self._bring(work.begin(chosen), work)
            if not is_awaited and not work.has_more:
                break
            if not report.full:
                await asyncio.sleep(WARM_ROUND_S)
        work.end()

    def _is_wanted(self, order: Order, announced: Announced) -> bool:
        is_over = 0 < announced.kept_until_s <= self._clock()
        return (
            not is_over
            and order.names(announced.pack.header.spec)
            and not self._node.erasure.covers(announced)
        )

    async def _mirrors_copy(self, order: Order, work: _Work) -> bool:
        """Whether a mirror that is alive and well has not told yet that it has copied for this order."""
        objects, now_s = self._node.objects, self._clock()
        work.uncopied, is_awaited = "", False
        for state in await read_mirrors(objects):
            if now_s - state.at_s >= HEARTBEAT_LATE_S + CLOCK_SKEW_S:
                continue
            progress = await read_progress(objects, order, MIRROR + state.source)
            if progress is not None and progress.ended:
                continue
            if state.problem in ("", NOT_REACHED):
                is_awaited = True
            else:
                work.uncopied = f"nothing is copied from {state.source}: {state.problem}"
        return is_awaited

    async def _bring(self, chosen: Iterator[Chosen], work: _Work) -> None:
        """Hand packs to the engine, in their order, until one finds no room."""

        async def hand_over() -> None:
            for one in chosen:
                if work.report.full:
                    return
                [announced] = self._node.known([one.pack_id])
                if announced:
                    brought = await self._bring_one(announced, work.to)
                    work.ended(one, brought, brought.loaded * announced.pack.header.spec.record_bytes)
                else:
                    work.ended(one, Brought(failed=1), 0)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(WARM_PACKS_MAX):
                tasks.create_task(hand_over())

    async def _bring_one(self, announced: Announced, to: To) -> Brought:
        loop, header = asyncio.get_running_loop(), announced.pack.header
        answer: asyncio.Future[Brought] = loop.create_future()
        hashes = list(header.each_hash())
        self._reply(
            lambda: self._warmer.bring(
                header.spec, header.parent, hashes, to, lambda brought: _answer(loop, answer, brought)
            )
        )
        return await answer


class _Work:
    """What is left of an order, from round to round. has_more: a further round may bring what failed. uncopied: why a mirror
    does not bring more, "" if none fails."""

    def __init__(self, to: To, report: Report) -> None:
        self.to = to
        self.report = report
        self.has_more = False
        self.uncopied = ""
        self._done: set[bytes] = set()
        self._tries: dict[bytes, int] = {}
        self._chosen: dict[bytes, Chosen] = {}

    def begin(self, chosen: Sequence[Chosen]) -> Iterator[Chosen]:
        """A round with what is chosen now; those of it to bring."""
        self._chosen = {one.pack_id: one for one in chosen}
        self.has_more = False
        report, done = self.report, self._done & self._chosen.keys()
        report.packs, report.done_packs = len(chosen), len(done)
        report.total_bytes = sum(one.size_bytes for one in chosen)
        report.done_bytes = sum(self._chosen[pack_id].size_bytes for pack_id in done)
        return iter([one for one in chosen if one.pack_id not in done and self._may_try(one.pack_id)])

    def ended(self, one: Chosen, brought: Brought, moved_bytes: int) -> None:
        """What became of a pack."""
        report = self.report
        report.problem = brought.problem or report.problem
        if brought.refused:
            report.full = True
            report.moved(moved_bytes)
        elif brought.failed or brought.problem:
            self._tries[one.pack_id] = self._tries.get(one.pack_id, 0) + 1
            self.has_more |= self._may_try(one.pack_id)
            report.moved(moved_bytes)
        else:
            self._done.add(one.pack_id)
            report.done(one.size_bytes, moved_bytes)

    def end(self) -> None:
        """No more rounds."""
        report = self.report
        report.failed = sum(pack_id in self._chosen and pack_id not in self._done for pack_id in self._tries)
        if report.failed:
            why = report.problem or "they could not be read"
            report.problem = f"{report.failed} packs are not here: {why}"
        elif self.uncopied:
            report.problem = self.uncopied
        elif not report.full:
            report.problem = ""  # what failed once came in the end

    def _may_try(self, pack_id: bytes) -> bool:
        return self._tries.get(pack_id, 0) < WARM_TRIES_MAX


def _answer(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T) -> None:
    """Answer a future of another thread's loop."""

    def settle() -> None:
        if not future.done():
            future.set_result(value)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # that loop is closed: nobody waits any more
        pass
