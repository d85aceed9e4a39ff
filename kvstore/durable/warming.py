"""Warming: a daemon's part in orders for its region, and what it tells of itself there.

    orders/ ─▶ selection of the catalogue, as much as the tier holds ─▶ packs, the best first ─▶ Warmer, engine's thread
                 ▲ again while a mirror copies for the order                    │ held │ loaded │ no room: that is all
                 ╰───────────────────────────────────────────────────────────────╯─▶ warming/<id>/<writer>
    an order of weights ─▶ a mirror has copied them ─▶ preloaded to this node's disk, by a process of its own
    nodes/<writer>   every ten minutes: what its tiers hold, how fast the bucket is, what was asked for

On the loop of the region's thread; what touches the engine is asked of it with one call and answered with one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import msgspec

from kvstore.constants import WARM_PACKS_MAX, WARM_ROUND_S, WARM_TRIES_MAX
from kvstore.durable.warmer import Brought, Warmer
from kvstore.protocol import answers
from replication.catalogue.selection import Chosen, choose
from replication.constants import CLOCK_SKEW_S, HEARTBEAT_LATE_S, NODE_INTERVAL_S, NODE_LOOK_S
from replication.formats.announced import Announced
from replication.formats.mirror_state import NOT_REACHED, read_mirrors
from replication.formats.nodes import NODE_FORMAT, NODES, Condition, Node, NodeErased
from replication.formats.orders import MIRROR, Order, To, read_progress
from replication.formats.tombstones import Tombstone
from replication.region.order_watch import OrderWatch, Report
from replication.region.region_node import RegionNode
from replication.tasks import kept_going
from tiers.errors import ObjectError
from tiers.together import each, together

NODE_ERASED_MAX: Final = 1024  # tombstones of which a node tells how far it is
NODE_ERASED_LOOK_S: Final = 2.0  # between two looks how far it is
NODE_RETRY_S: Final = 30.0  # after a bucket that failed
MODEL_LOOK_S: Final = 1.0  # between two looks how far the preload of a model is

log = logging.getLogger("kvstore.durable.warming")
T = TypeVar("T")

# Has a model, NAME or NAME@REVISION, preloaded onto this node's disk; its state, which changes as it comes. On the engine's thread.
OrderModel = Callable[[str], answers.Preload]


class Warming:
    """Of one daemon that has joined its region."""

    def __init__(
        self,
        node: RegionNode,
        warmer: Warmer,
        reply: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        is_new: bool,
        order: OrderModel | None = None,
        condition: Callable[[], Condition | None] = lambda: None,
        erased: Callable[[Sequence[Tombstone]], list[NodeErased]] = lambda tombstones: [],
    ) -> None:
        """condition: how this daemon is, asked on the engine's thread. order: None where models are not ordered here. reply: runs a call on the engine's thread. clock: unix seconds. is_new: DRAM holds nothing of an earlier life.
        erased: how far the engine is with these tombstones, asked on its thread."""
        self._node = node
        self._warmer = warmer
        self._reply = reply
        self._clock = clock
        self._order_model = order
        self._condition = condition
        self._erased = erased
        self._name = node.name
        self._watch = OrderWatch(
            node.objects, self._name, self._carry_out, node.mend, clock, is_new, node.problems, node.keeper
        )

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that the store or the disk can cause."""
        problems = self._node.problems
        await together(
            [
                kept_going("telling of this daemon", self._tell, problems),
                kept_going("taking orders", self._take_orders, problems),
            ]
        )

    async def _take_orders(self) -> None:
        await self._node.caught_up.wait()
        await self._watch.run()

    async def _asked(self, question: Callable[[Callable[[T], None]], None]) -> T:
        """What the engine's thread answers to a question; it is given whom to call with the answer."""
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()  # who gives up waiting does not take the answer from whoever gives it
        self._reply(lambda: question(answer.set_result))
        return await asyncio.wrap_future(answer)

    async def _ask(self, question: Callable[[], T]) -> T:
        """The same of a question that is answered at once."""
        return await self._asked(lambda done: done(question()))

    # -- what is told --

    async def _tell(self) -> None:
        restored, erased = False, list[NodeErased]()
        while True:
            try:
                if not restored:
                    await self._restore()
                    restored = True
                erased = await self._how_far(erased)
                told = msgspec.structs.replace(await self._ask(self._told), erased=erased)
                await NODE_FORMAT.put(self._node.objects, told)
                await self._until_next(told)
            except ObjectError as error:
                log.debug("what this daemon is told of is written later: %s", error)
                await asyncio.sleep(NODE_RETRY_S)

    async def _until_next(self, told: Node) -> None:
        """It is time to tell again, there are other problems than were told, or it is further with a tombstone."""
        for look in range(1, int(NODE_INTERVAL_S / NODE_ERASED_LOOK_S)):
            await asyncio.sleep(NODE_ERASED_LOOK_S)
            if await self._how_far(told.erased) != list(told.erased):
                return
            is_due = look % int(NODE_LOOK_S / NODE_ERASED_LOOK_S) == 0
            if is_due and _troubles(await self._ask(self._condition)) != _troubles(told.condition):
                return

    async def _how_far(self, told: Sequence[NodeErased]) -> list[NodeErased]:
        """With tombstones, where this is what was told last."""
        tombstones = sorted(self._node.erasure.swept, key=lambda one: one.serial)[-NODE_ERASED_MAX:]
        done = {(one.tombstone, one.serial) for one in told if one.is_done}
        if all((one.id, one.serial) in done for one in tombstones):
            return list(told)
        return await self._ask(lambda: self._erased(tombstones))

    async def _restore(self) -> None:
        """Go on counting where an earlier life was."""
        earlier, traffic = (
            await NODE_FORMAT.hint(self._node.objects, NODES + self._name),
            self._warmer.traffic,
        )
        if earlier is not None and traffic is not None:
            rows, at_s = earlier.asked, earlier.at_s
            await self._ask(lambda: traffic.restore(rows, at_s))

    def _told(self) -> Node:
        """On the engine's thread."""
        warmer = self._warmer
        return Node(
            writer=self._name,
            at_s=self._clock(),
            dram_bytes=warmer.capacity_bytes("dram"),
            nvme_bytes=warmer.capacity_bytes("nvme"),
            load_bytes_per_s=warmer.bytes_per_s,
            asked=warmer.traffic.rows() if warmer.traffic is not None else (),
            condition=self._condition(),
        )

    # -- orders --

    async def _carry_out(self, order: Order, report: Report) -> None:
        """Raises ObjectError, CatalogueDamaged."""
        if order.weights:
            await self._bring_weights(order, report)
            return
        holds_bytes = await self._ask(lambda: self._warmer.capacity_bytes(order.to))
        if not holds_bytes:
            report.problem = f"there is no {order.to} tier here"
            return
        budget_bytes = min(order.budget_bytes or holds_bytes, holds_bytes)
        done: set[bytes] = set()
        tries = 0
        while True:
            is_awaited, uncopied = await self._mirrors_copy(order)
            await self._node.up_to_date()
            chosen = await choose(self._node.catalogue, lambda one: self._is_wanted(order, one), budget_bytes)
            await self._bring(chosen, done, order.to, report)
            tries = 0 if is_awaited else tries + 1
            if report.full or not (is_awaited or (report.failed and tries < WARM_TRIES_MAX)):
                break
            await asyncio.sleep(WARM_ROUND_S)
        if report.failed:
            why = report.problem or "they could not be read"
            report.problem = f"{report.failed} packs are not here: {why}"
        else:
            report.problem = uncopied

    async def _bring_weights(self, order: Order, report: Report) -> None:
        """When mirrors have copied what they do not have here yet. Raises ObjectError."""
        if self._order_model is None:
            report.problem = 'models.orders is "off" here'
            return
        uncopied = ""
        while True:
            is_awaited, uncopied = await self._mirrors_copy(order)
            if not is_awaited:
                break
            await asyncio.sleep(WARM_ROUND_S)
        report.packs = len(order.weights)
        for name in order.weights:
            if problem := await self._preloaded(name, self._order_model, report):
                report.failed += 1
                report.problem = f"{name}: {problem}"
            else:
                report.done_packs += 1
        report.problem = report.problem or uncopied

    async def _preloaded(self, name: str, order: OrderModel, report: Report) -> str:
        """Why a model is not on this node's disk; "" if it is."""
        total_bytes, done_bytes = report.total_bytes, report.done_bytes
        state = await self._ask(lambda: order(name))
        begun = state["attempts"]
        while True:
            now = await self._ask(state.copy)
            here = done_bytes + now["bytes"] - now["left_bytes"]
            report.total_bytes = total_bytes + now["bytes"]
            report.moved(max(0, here - report.done_bytes))
            report.done_bytes = here
            if now["state"] == "there":
                return ""
            if now["state"] == "failed" and now["attempts"] - begun >= WARM_TRIES_MAX:
                return now["problem"]
            await asyncio.sleep(MODEL_LOOK_S)

    def _is_wanted(self, order: Order, announced: Announced) -> bool:
        is_over = 0 < announced.kept_until_s <= self._clock()
        return (
            not is_over
            and order.names(announced.pack.header.spec)
            and not self._node.erasure.covers(announced)
        )

    async def _mirrors_copy(self, order: Order) -> tuple[bool, str]:
        """Whether a mirror that is alive and well has not told yet that it has copied for this order; and why another one does
        not bring more, "" if none fails."""
        objects, now_s = self._node.objects, self._clock()
        uncopied, is_awaited = "", False
        for state in await read_mirrors(objects):
            if now_s - state.at_s >= HEARTBEAT_LATE_S + CLOCK_SKEW_S:
                continue
            progress = await read_progress(objects, order, MIRROR + state.source)
            if progress is not None and progress.ended:
                continue
            if state.problem in ("", NOT_REACHED):
                is_awaited = True
            else:
                uncopied = f"nothing is copied from {state.source}: {state.problem}"
        return is_awaited, uncopied

    async def _bring(self, chosen: Sequence[Chosen], done: set[bytes], to: To, report: Report) -> None:
        """A round: hand packs that are not `done` to the engine, in their order, until one finds no room."""
        report.begin()
        report.packs, report.total_bytes = len(chosen), sum(one.size_bytes for one in chosen)
        for one in chosen:
            if one.pack_id in done:
                report.done(one.size_bytes, 0)
        left = [one for one in chosen if one.pack_id not in done]

        async def hand_over(one: Chosen) -> None:
            if not report.full:
                await self._bring_one(one, done, to, report)

        await each(hand_over, left, WARM_PACKS_MAX)

    async def _bring_one(self, one: Chosen, done: set[bytes], to: To, report: Report) -> None:
        [announced] = self._node.known([one.pack_id])
        brought, moved_bytes = Brought(failed=1), 0
        if announced is not None:
            header = announced.pack.header
            hashes = list(header.each_hash())
            brought = await self._asked(
                lambda tell: self._warmer.bring(header.spec, header.parent, hashes, to, tell)
            )
            moved_bytes = brought.loaded * header.spec.record_bytes
        if brought.refused:
            report.full = True
        elif brought.failed or brought.problem:
            report.failed += 1
            report.problem = brought.problem or report.problem
        else:
            done.add(one.pack_id)
            report.done(one.size_bytes, moved_bytes)
            return
        report.moved(moved_bytes)


def _troubles(condition: Condition | None) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in condition.problems] if condition is not None else []
