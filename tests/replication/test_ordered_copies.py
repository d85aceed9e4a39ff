"""What a mirror copies because somebody ordered it: before all else, what no rule names too, and never what a rule forbids."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from replication.catalogue.catalogue import Catalogue
from replication.feed.tail import POLL_INTERVAL_S
from replication.formats.orders import Order, Progress, cancel_order, put_order, read_all_progress
from replication.formats.rules import Rule
from replication.formats.tombstones import Tombstone, bury
from replication.mirror.ordered_copies import ORDER_JOBS_MAX
from replication.region.order_watch import ORDERS_INTERVAL_S
from tests.objects import flip
from tests.replication.memory_rows import MemoryRows
from tests.replication.mirrored import SOON_S, World, pack, pulled, simulate
from tests.replication.models import make_model, publish

DAY_S = 86_400.0
ORDERED_S = ORDERS_INTERVAL_S + SOON_S  # to be seen and copied


@pytest.fixture(autouse=True)
def _disks(monkeypatch: pytest.MonkeyPatch) -> None:
    disks: dict[Path, MemoryRows] = {}
    monkeypatch.setattr(
        Catalogue, "open", lambda path, identity: Catalogue(disks.setdefault(path, MemoryRows()))
    )


async def ordered(world: World, region: str = "eu", **more: object) -> Order:
    now_s = world.clock()
    made = Order(made_s=now_s, until_s=now_s + DAY_S, **more)  # type: ignore[arg-type]
    return await put_order(world.buckets[region].objects, made)


async def told(world: World, order: Order) -> Progress:
    [progress] = await read_all_progress(world.eu.objects, order)
    return progress


def test_what_no_rule_names_is_copied_and_what_one_forbids_is_not() -> None:
    """Of all that an order names: what a rule copies is left to it, too, what none names is copied, what one skips, what is
    erased, over, or a copy itself, is not. Ordering it again, or another life of the mirror, copies nothing twice."""

    async def main(world: World) -> None:
        ruled, free, secret, gone = pack("1"), pack("2", "x"), pack("3", tenant="s"), pack("4", tenant="g")
        over, copy = pack("5", "x"), pack("6", "x")
        await world.na.make(ruled, free, secret, gone)
        await world.na.make(over, kept_until_s=int(world.clock()) + 5)
        await world.apac.make(copy)
        await world.na.objects.put(copy[0].pack.name, copy[1])
        await world.na.writer.announce([msgspec.structs.replace(copy[0], origin="apac")])
        tombstone = Tombstone(tenant="g", watched_until_s=int(world.clock() + DAY_S))
        await bury(world.eu.objects, tombstone)
        rules = Rule(tenants=("s",), copies=False), Rule(sources=("na",), models=("m",))
        await asyncio.sleep(10)
        mirrors = await world.mirror(*rules)
        await asyncio.sleep(ORDERED_S)
        assert set(world.eu.copies()) == {ruled[0].pack.id}
        order = await ordered(world)
        await asyncio.sleep(ORDERED_S)
        assert set(world.eu.copies()) == {ruled[0].pack.id, free[0].pack.id}
        assert world.eu.has(ruled, free)
        progress = await told(world, order)
        assert (progress.who, progress.ended, progress.problem) == ("mirror-na", True, "")
        size_bytes = free[0].pack.size_bytes
        assert (progress.packs, progress.done_bytes, progress.moved_bytes) == (1, size_bytes, size_bytes)
        state = mirrors[0].state()
        assert state.oldest_age_s is not None and state.oldest_age_s < 2 * POLL_INTERVAL_S
        await world.stop()
        await world.mirror(*rules)
        assert (await ordered(world)).made_s == order.made_s
        await asyncio.sleep(2 * ORDERED_S)
        assert len(world.eu.copies()) == 2 and await told(world, order) == progress
        assert not world.na.way.requests["put"] and not world.na.way.requests["delete"]

    simulate(main)


def test_ordered_copies_go_first() -> None:
    """Of hundreds of packs that a slow rule copies, those that are ordered are there within seconds, at the rate of the rule
    at most; the others go on."""

    async def main(world: World) -> None:
        many = [pack(("slow", n), "m") for n in range(300)]
        wanted = [pack(("wanted", n), "m", "acme") for n in range(20)]
        await world.na.make(*many, *wanted)
        size_bytes = many[0][0].pack.size_bytes
        [mirror] = await world.mirror(Rule(bytes_per_s=size_bytes))
        await asyncio.sleep(10)
        assert len(pulled(mirror).jobs) > 290
        order = await ordered(world, tenants=("ac*",))
        await asyncio.sleep(ORDERS_INTERVAL_S + 20 + SOON_S)
        assert world.eu.has(*wanted)
        assert (await told(world, order)).ended
        seconds = 10 + ORDERS_INTERVAL_S + 20 + SOON_S
        assert 20 < len(world.eu.copies()) <= 2 * (seconds + 2)
        await asyncio.sleep(300)
        assert world.eu.has(*many)
        assert len(world.eu.copies()) == 320

    simulate(main)


def test_a_budget_buys_the_most_valuable() -> None:
    """No more records than ordered, those that are worth keeping for longest."""

    async def main(world: World) -> None:
        made = [pack(n, "x") for n in range(10)]
        for number, one in enumerate(made):
            await world.na.make(one, kept_until_s=int(world.clock()) + 100_000 + number)
        await world.mirror(Rule(models=("nothing",)))
        order = await ordered(world, budget_bytes=3 * 2 * 64)
        await asyncio.sleep(ORDERED_S)
        assert set(world.eu.copies()) == {one[0].pack.id for one in made[-3:]}
        assert (await told(world, order)).packs == 3

    simulate(main)


def test_what_cannot_be_copied_ends_an_order_and_is_named() -> None:
    """A damaged pack is tried a few times, then the order is done without it, and says why; it never comes over damaged."""

    async def main(world: World) -> None:
        good, bad = pack("good", "x"), pack("bad", "x")
        await world.na.make(good, (bad[0], flip(bad[1], 8 * len(bad[1]) - 1)))
        await world.mirror(Rule(models=("nothing",)))
        order = await ordered(world)
        await asyncio.sleep(ORDERED_S + 60)
        progress = await told(world, order)
        assert (progress.ended, progress.failed, progress.done_packs) == (True, 1, 1)
        assert "1 packs could not be copied" in progress.problem and "checksum" in progress.problem
        assert world.eu.has(good) and bad[0].pack.name not in world.eu.objects.stored

    simulate(main)


def test_a_cancelled_order_stops_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not begun when it was cancelled is not copied, but for the few jobs of its window."""
    monkeypatch.setattr("replication.mirror.ordered_copies.ORDER_JOBS_MAX", 4)

    async def main(world: World) -> None:
        made = [pack(n, "x") for n in range(400)]
        await world.na.make(*made)
        await world.mirror(Rule(models=("nothing",)))
        order = await ordered(world)
        while not world.eu.copies():
            await asyncio.sleep(1)
        await cancel_order(world.eu.objects, order.id)
        await asyncio.sleep(ORDERS_INTERVAL_S + 1)
        there = len(world.eu.copies())
        assert 0 < there < 400
        await asyncio.sleep(600)
        assert len(world.eu.copies()) <= there + 4

    simulate(main)


@pytest.mark.parametrize("seed", range(3))
def test_a_mirror_that_is_killed_goes_on_with_an_order(seed: int) -> None:
    """Killed anywhere while it copies for an order, the next life copies the rest, and nothing twice but what was under way."""

    async def main(world: World) -> None:
        chance = random.Random(seed)
        made = [pack(n, "x") for n in range(150)]
        await world.na.make(*made)
        world.na.way.faults.delay_s = 2.0
        order = await ordered(world)
        for _ in range(3):
            await world.mirror(Rule(models=("nothing",)))
            await asyncio.sleep(chance.uniform(1, 20))
            await world.stop()
        await world.mirror(Rule(models=("nothing",)))
        await asyncio.sleep(300)
        assert world.eu.has(*made) and (await told(world, order)).ended
        assert set(world.eu.copies()) == {one[0].pack.id for one in made}
        assert len(world.eu.copies()) <= 150 + 3 * ORDER_JOBS_MAX

    simulate(main)


def test_an_order_of_weights_brings_what_no_rule_names_before_the_rest() -> None:
    """NAME is the revision that the source was given last, with its caches; NAME@REVISION another one; a rule that skips forbids
    it; KV stays where it is; the order tells how far it is, and that it is done."""

    async def main(world: World) -> None:
        old, new = (
            make_model("m", revision, chunks=20, published_s=at_s)
            for revision, at_s in (("old", 1.0), ("new", 2.0))
        )
        caches = make_model("m", "new", seed="c", about={"vllm": "0.32"})
        secret, waiting = make_model("secret"), make_model("waiting", chunks=600)
        await publish(world.na.objects, old, secret, waiting, clock=world.clock)
        await asyncio.sleep(10.0)
        await publish(world.na.objects, new, caches, clock=world.clock)
        kv = pack("kv", model="m")
        await world.na.make(kv)
        world.eu.way.faults.delay_s = 0.5
        skips = Rule(models=("secret",), of_weights=True, copies=False)
        await world.mirror(skips, Rule(models=("waiting",), of_weights=True, bytes_per_s=100))
        await asyncio.sleep(ORDERED_S)
        order = await ordered(world, weights=("m", "secret"))
        await asyncio.sleep(ORDERED_S)
        progress = await told(world, order)
        assert (progress.ended, progress.problem, progress.done_packs) == (True, "", 2)
        assert progress.done_bytes == progress.total_bytes == progress.moved_bytes == 2300
        there = {name for name in world.eu.objects.stored if name.startswith("models/manifests/")}
        assert there == {new.name} and caches.name in world.eu.objects.stored
        assert not world.eu.copies()
        exact = await ordered(world, weights=("m@old",))
        await asyncio.sleep(ORDERED_S)
        assert old.name in world.eu.objects.stored and secret.name not in world.eu.objects.stored
        orders = await read_all_progress(world.eu.objects, exact)
        assert [one.ended for one in orders] == [True]

    simulate(main)


def test_an_order_of_weights_that_fails_says_so() -> None:
    """After three tries; its job tries on."""

    async def main(world: World) -> None:
        made = make_model("m")
        await publish(world.na.objects, made, clock=world.clock)
        await world.na.objects.delete([next(iter(made.chunks))])
        await world.mirror(Rule())
        order = await ordered(world, weights=("m",))
        await asyncio.sleep(ORDERED_S + 60.0)
        progress = await told(world, order)
        assert (progress.ended, progress.failed) == (True, 1) and "1 models" in progress.problem

    simulate(main)


def test_orders_of_kv_have_the_ids_they_always_had() -> None:
    """And those of weights are orders of another id to who does not know weights."""
    kv = Order(models=("a*",), made_s=1.0, until_s=2.0)
    assert kv.id == "a12151cde481adcb9b784d1d2db52fef"
    weights = msgspec.structs.replace(kv, models=(), weights=("m",), to="nvme")
    assert weights.id != msgspec.structs.replace(weights, weights=()).id
    assert not weights.names_of("m", "") and kv.names_of("ab", "")
