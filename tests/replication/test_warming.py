"""Orders: what is chosen, who takes them, what mirrors copy for them, and what is told of it."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replication.catalogue.catalogue import Catalogue
from replication.catalogue.selection import Chosen, choose, records_bytes
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from replication.formats.nodes import TRAFFIC_HALF_LIFE_S, Asked, Node, durable_share
from replication.formats.orders import (
    ORDER_BYTES_MAX,
    ORDERS,
    PROGRESS,
    Order,
    Progress,
    cancel_order,
    clear_over,
    put_order,
    put_progress,
    read_all_progress,
    read_orders,
    read_progress,
)
from replication.formats.rules import Rule
from replication.mirror.jobs import Job, Jobs
from replication.region.order_watch import (
    ORDER_HEARTBEAT_S,
    ORDER_TELL_S,
    ORDERS_INTERVAL_S,
    OrderWatch,
    Report,
)
from tests.objects import FaultyObjects, MemoryObjects, flip
from tests.replication.durable import hash_of, spec_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable
from tiers.packs.packs import PackHeader, describe

NOW_S = 1e9
DAY_S = 86_400.0


def order(**more: Any) -> Order:
    return Order(**{"made_s": NOW_S, "until_s": NOW_S + DAY_S, **more})


# -- what is chosen --


def pack_of(
    parent: object | None, names: Sequence[object], kept_until_s: int, kind: int = 0, record_bytes: int = 4096
) -> Announced:
    """A pack of these blocks behind `parent`."""
    spec = spec_of(kind, record_bytes=record_bytes)
    hashes, sums = (b"".join(map(one, names)) for one in (hash_of, lambda name: digest(f"{name}".encode())))
    header = PackHeader(spec, b"" if parent is None else hash_of(parent), hashes, sums)
    return Announced(describe(header)[0], kept_until_s=kept_until_s)


@st.composite
def forests(draw: st.DrawFn) -> list[Announced]:
    """Packs that hang on blocks of others, on nothing, or on what is not there, in any order and of any worth."""
    made: list[tuple[int, Announced, list[str]]] = []
    for number in range(draw(st.integers(0, 12))):
        above = draw(st.one_of(st.none(), st.just("lost"), st.sampled_from(made) if made else st.none()))
        names = [f"{number}/{index}" for index in range(draw(st.integers(1, 3)))]
        kept = draw(st.integers(0, 5))
        if isinstance(above, tuple):
            kind, _, blocks = above
            made.append((kind, pack_of(draw(st.sampled_from(blocks)), names, kept, kind), names))
        else:
            kind = draw(st.integers(0, 1))
            made.append((kind, pack_of(above, names, kept, kind, 4096), names))
    return draw(st.permutations([announced for _, announced, _ in made]))


def chosen_of(
    packs: Sequence[Announced], budget_bytes: int = 0, wants: Callable[[Announced], bool] = lambda one: True
) -> list[Chosen]:
    catalogue = Catalogue(MemoryRows())
    for announced in packs:
        catalogue.add_packs([announced])
    return run(choose(catalogue, wants, budget_bytes))


@settings(max_examples=300, deadline=None)
@given(forests(), st.integers(0, 20), st.integers(0, 2), st.integers(0, 9))
def test_what_is_chosen_is_closed_and_within_the_budget(
    packs: list[Announced], budget_records: int, unwanted_kind: int, unwanted_kept: int
) -> None:
    """Each pack once, behind the one it hangs on, none of what is not wanted, no more bytes than allowed; without a limit
    everything that can be used."""
    by_id = {announced.pack.id: announced for announced in packs}
    unwanted = spec_of(unwanted_kind).digest

    def wants(announced: Announced) -> bool:
        return announced.pack.header.spec.digest != unwanted and announced.kept_until_s != unwanted_kept

    chosen = chosen_of(packs, budget_records * 4096, wants)
    had: set[bytes] = set()
    for pack_id, size_bytes in chosen:
        header = by_id[pack_id].pack.header
        assert wants(by_id[pack_id]) and size_bytes == records_bytes(by_id[pack_id])
        assert not header.parent or header.spec.digest + header.parent in had, "a child before its parent"
        had |= {header.spec.digest + block for block in header.each_hash()}
    assert len({one.pack_id for one in chosen}) == len(chosen)
    if budget_records:
        assert sum(one.size_bytes for one in chosen) <= budget_records * 4096
    else:
        usable: set[bytes] = set()
        while True:
            more = [
                one
                for one in filter(wants, packs)
                if not one.pack.header.parent
                or one.pack.header.spec.digest + one.pack.header.parent in usable
            ]
            before = len(usable)
            usable |= {o.pack.header.spec.digest + h for o in more for h in o.pack.header.each_hash()}
            if len(usable) == before:
                break
        assert {one.pack_id for one in chosen} == {one.pack.id for one in more}


def test_the_most_valuable_go_first() -> None:
    """What is worth keeping for longest comes first, what is kept for ever before all, older ones before newer ones; a
    prefix that is too long makes room for the next one."""
    packs = [pack_of(None, [f"{name}"], kept) for name, kept in enumerate((5, 9, 0, 5))]
    ids = [announced.pack.id for announced in packs]
    assert [one.pack_id for one in chosen_of(packs)] == [ids[2], ids[1], ids[0], ids[3]]
    assert [one.pack_id for one in chosen_of(packs, 2 * 4096)] == [ids[2], ids[1]]
    root, leaf = pack_of(None, ["r", "s"], 3), pack_of("s", ["l"], 8)
    short = pack_of(None, ["t"], 2)
    assert [one.pack_id for one in chosen_of([leaf, root, short])] == [
        root.pack.id,
        leaf.pack.id,
        short.pack.id,
    ]
    assert [one.pack_id for one in chosen_of([root, leaf], 2 * 4096)] == [root.pack.id]


def test_a_catalogue_that_is_made_anew_meanwhile_is_not_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would be missing: whoever asked begins again."""
    monkeypatch.setattr("replication.catalogue.catalogue.CATALOGUE_CHUNK_PACKS", 2)
    catalogue = Catalogue(MemoryRows())
    catalogue.add_packs([pack_of(None, [name], 1) for name in range(6)])

    async def main() -> None:
        asyncio.get_running_loop().call_soon(catalogue.renew)
        with pytest.raises(CatalogueDamaged):
            await choose(catalogue, lambda one: True)

    run(main())


# -- orders --


def test_ordering_twice_is_ordering_once() -> None:
    """The same words in any order are one object that is prolonged, and keeps its life; others are others; one that is over is begun anew."""

    async def main() -> None:
        objects = MemoryObjects("na", lambda: 0.0)
        first = await put_order(objects, order(models=("a", "b")))
        again = await put_order(
            objects, order(models=("b", "a"), made_s=NOW_S + 60, until_s=NOW_S + 2 * DAY_S)
        )
        assert (again.id, again.made_s, again.until_s) == (first.id, NOW_S, NOW_S + 2 * DAY_S)
        shorter = await put_order(objects, order(models=("a", "b"), made_s=NOW_S + 90, until_s=NOW_S + 100))
        assert shorter == again
        others = [
            order(),
            order(models=("a",)),
            order(tenants=("a",)),
            order(budget_bytes=1),
            order(to="nvme"),
        ]
        assert len({one.id for one in (first, *others)}) == 6
        assert len((await read_orders(objects, {})).found) == 1
        later = NOW_S + 3 * DAY_S
        anew = await put_order(objects, order(models=("a", "b"), made_s=later, until_s=later + DAY_S))
        assert anew.made_s == later

    run(main())


def test_damage_and_other_formats_are_no_orders() -> None:
    """A flipped bit, a name of another order, a later format, too many bytes: left out, and nobody fails."""

    async def main() -> None:
        objects = MemoryObjects("na", lambda: 0.0)
        good = await put_order(objects, order())
        name = ORDERS + good.id
        content = objects.stored[name]
        for bit in range(0, 8 * len(content), 7):
            objects.stored[name] = flip(content, bit)
            found = list((await read_orders(objects, {})).by_key.values())
            assert found in ([], [good])  # zeros that are not covered
        for other in (b"KVORDR2\n" + content[8:], content + bytes(ORDER_BYTES_MAX), b""):
            objects.stored[name] = other
            assert not (await read_orders(objects, {})).found
        objects.stored[name] = content
        await objects.put(ORDERS + "0" * 32, content)
        assert list((await read_orders(objects, {})).by_key.values()) == [good]

    run(main())


def test_progress_is_of_one_life_of_an_order() -> None:
    """Progress is told by id; what belongs to an earlier life, is damaged, or lies under another name, counts for nothing;
    what is cancelled or over is removed with it, and nothing else is."""

    async def main() -> None:
        objects = MemoryObjects("na", lambda: 0.0)
        one, other = await put_order(objects, order()), await put_order(objects, order(to="nvme"))
        for of in (one, other):
            for who in ("a", "mirror-na"):
                await put_progress(objects, of, Progress(who=who, made_s=of.made_s, done_bytes=7))
        assert [p.is_mirror for p in await read_all_progress(objects, one)] == [False, True]
        assert await read_progress(objects, msgspec.structs.replace(one, made_s=1.0), "a") is None
        await objects.put(f"{PROGRESS}{one.id}/b", objects.stored[f"{PROGRESS}{one.id}/a"])
        await objects.put(f"{PROGRESS}{one.id}/c", b"nonsense")
        assert len(await read_all_progress(objects, one)) == 2
        assert await cancel_order(objects, one.id) and not await cancel_order(objects, one.id)
        assert len(await read_all_progress(objects, other)) == 2
        await put_progress(objects, one, Progress(who="late", made_s=one.made_s))
        await clear_over(objects, NOW_S)
        assert {name.split("/")[1] for name in objects.stored if "/" in name} == {other.id}
        await clear_over(objects, NOW_S + 2 * DAY_S)
        assert not [name for name in objects.stored if "/" in name]

    run(main())


class Taker:
    """Somebody who takes orders, and a bucket that may fail."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.objects = MemoryObjects("na", self.clock)
        self.way = FaultyObjects(self.objects, random.Random(0))
        self.taken: list[Order] = []
        self.cancelled = 0
        self.mended = 0
        self.fails: list[Exception] = []
        self.takes_s = 60.0

    def clock(self) -> float:
        return NOW_S + self.loop.time()

    async def carry_out(self, one: Order, report: Report) -> None:
        self.taken.append(one)
        report.packs, report.total_bytes = 1, 100
        try:
            if self.fails:
                raise self.fails.pop(0)
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        report.done(100, 60)

    def mend(self, error: CatalogueDamaged) -> None:
        self.mended += 1

    def watch(self, is_new: bool = False) -> asyncio.Task[None]:
        watch = OrderWatch(self.way, "me", self.carry_out, self.mend, self.clock, is_new)
        return asyncio.ensure_future(watch.run())


def simulate(main: Callable[[Taker], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await main(Taker())

    run(whole())


def test_an_order_is_taken_once_and_told() -> None:
    """Soon after it was put; how far it is, is told while it goes on; when it is done it is not taken again, not even by a
    next life, unless nothing is left of the earlier one. Nothing is written more often than needed."""

    async def main(taker: Taker) -> None:
        task = taker.watch()
        await asyncio.sleep(100)
        put = await put_order(taker.objects, order(until_s=taker.clock() + DAY_S))
        await asyncio.sleep(ORDERS_INTERVAL_S + 1)
        [told] = await read_all_progress(taker.objects, put)
        assert (told.total_bytes, told.done_bytes, told.ended) == (100, 0, False)
        await asyncio.sleep(taker.takes_s + 2 * ORDER_TELL_S)
        [told] = await read_all_progress(taker.objects, put)
        assert (told.done_bytes, told.moved_bytes, told.ended, told.problem) == (100, 60, True, "")
        assert told.bytes_per_s == pytest.approx(60 / taker.takes_s)
        writes = taker.way.requests["put"]
        assert writes <= 2 + math.ceil(taker.takes_s / ORDER_HEARTBEAT_S) + 1
        await asyncio.sleep(3600)
        assert len(taker.taken) == 1 and taker.way.requests["put"] == writes
        task.cancel()
        for is_new in (False, True):
            task = taker.watch(is_new)
            await asyncio.sleep(600)
            assert len(taker.taken) == 1 + is_new
            task.cancel()

    simulate(main)


def test_an_order_that_is_gone_or_over_is_left() -> None:
    """What is cancelled, and what has had its time, is stopped within a look; one that is made anew is taken anew."""

    async def main(taker: Taker) -> None:
        taker.takes_s = 1e6
        task = taker.watch()
        one = await put_order(taker.objects, order())
        await put_order(taker.objects, order(to="nvme", until_s=NOW_S + 300))
        await asyncio.sleep(20)
        assert len(taker.taken) == 2 and not taker.cancelled
        await cancel_order(taker.objects, one.id)
        await asyncio.sleep(20)
        assert taker.cancelled == 1
        await asyncio.sleep(300)
        assert taker.cancelled == 2
        now_s = taker.clock()
        await put_order(taker.objects, order(made_s=now_s, until_s=now_s + DAY_S))
        await asyncio.sleep(20)
        assert len(taker.taken) == 3 and not task.done()

    simulate(main)


def test_what_fails_is_tried_again() -> None:
    """A bucket that fails, at the look, at the telling, in between, and a damaged catalogue delay an order, and are told."""

    async def main(taker: Taker) -> None:
        taker.fails = [CatalogueDamaged("rows"), ObjectUnavailable("away")]
        task = taker.watch()
        put = await put_order(taker.objects, order())
        await asyncio.sleep(1.5 * ORDERS_INTERVAL_S)
        [told] = await read_all_progress(taker.objects, put)
        assert "away" in told.problem or "rows" in told.problem
        await asyncio.sleep(taker.takes_s + 60)
        [told] = await read_all_progress(taker.objects, put)
        assert told.ended and told.problem == "" and taker.mended == 1 and len(taker.taken) == 3
        taker.way.faults.failed = 1.0
        await asyncio.sleep(3600)
        assert not task.done()

    simulate(main)


# -- copies that are ordered --


def test_hastened_jobs_go_first() -> None:
    """A job that waits by its rule, that is under way, or that rests after a failure, goes by the order's rule from then on; one of a
    higher priority stays as it is, and no job is done twice."""
    slow, ordered, above = Rule(bytes_per_s=1), Rule(priority=5), Rule(priority=9)
    jobs = Jobs({})
    made = [Job(bytes([number]), 10, above if number == 5 else slow, float(number)) for number in range(6)]
    for job in made:
        jobs.add(job)
    assert jobs.take(0.0, 100) is made[5] and jobs.take(0.0, 100) is made[0]
    jobs.retry(made[0], 3.0, "away")
    assert jobs.take(1.0, 100) is None
    jobs.hasten([made[0], made[3], made[4], made[5]], ordered)
    assert [job.rule for job in made] == [ordered, slow, slow, ordered, ordered, above]
    assert [jobs.take(1.0, 100) for _ in range(3)] == [made[3], made[4], None]
    assert jobs.take(3.0, 100) is made[0] and jobs.take(4.0, 100) is None
    assert jobs.take(10.0, 100) is made[1] and jobs.due_s() == 20.0


# -- what daemons tell --


def test_the_share_of_traffic_that_was_durable() -> None:
    """By model and tenant, the latest counting most; nothing where hardly anybody was asked, and nothing durable of what is not here."""
    old = Node(writer="a", at_s=NOW_S - TRAFFIC_HALF_LIFE_S, dram_bytes=1, nvme_bytes=2, asked=[
        Asked("m", "x", 1000_000.0, 0.0), Asked("n", "x", 500_000.0, 500_000.0)])  # fmt: skip
    new = Node(
        writer="b", at_s=NOW_S, dram_bytes=1, nvme_bytes=0, asked=[Asked("m", "x", 500_000.0, 500_000.0)]
    )

    def share(of: str, here: str = "mn") -> float | None:
        return durable_share([old, new], lambda m, _: m in of, lambda m, _: m in here, NOW_S)

    assert share("m") == pytest.approx(0.5) and share("n") == pytest.approx(1.0)
    assert share("mn") == pytest.approx(750 / 1250)
    assert share("mn", "m") == pytest.approx(500 / 1250) and share("z") is None
    few = Node(writer="c", at_s=NOW_S, dram_bytes=1, nvme_bytes=0, asked=[Asked("m", "x", 9999.0, 9.0)])
    assert durable_share([few], lambda *_: True, lambda *_: True, NOW_S) is None
    assert durable_share([], lambda *_: True, lambda *_: True, NOW_S) is None
    assert (old.holds_bytes("dram"), old.holds_bytes("nvme")) == (1, 2)


def test_an_order_with_a_negative_budget_is_damaged() -> None:
    """Whoever writes one by hand is not obeyed."""

    async def main() -> None:
        objects = MemoryObjects("na", lambda: 0.0)
        await put_order(objects, order(budget_bytes=-1))
        assert not (await read_orders(objects, {})).found

    run(main())
