"""Warming an engine because somebody ordered it: serving goes first, nothing that is held leaves, and every run is answered once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scale import warming
from kvstore.constants import WARM_RECORDS_MAX
from kvstore.durable import warming as warming_module
from kvstore.durable.traffic import Traffic
from kvstore.durable.warmer import Brought, Warmer
from kvstore.durable.warming import Warming
from kvstore.engine.engine import Engine
from kvstore.errors import NamespaceConflict
from kvstore.index import namespaces as namespaces_module
from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.movement.shared import SharedLimits
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from replication.constants import NODE_INTERVAL_S, NODE_LOOK_S
from replication.formats import nodes
from replication.formats.mirror_state import MIRROR_STATE_FORMAT, MIRRORS, MirrorState
from replication.formats.nodes import NODES, TRAFFIC_HALF_LIFE_S, Condition, NodeErased, Trouble, read_nodes
from replication.formats.orders import (
    ORDERS,
    PROGRESS,
    Order,
    Progress,
    To,
    put_order,
    put_progress,
    read_all_progress,
)
from replication.formats.region import init_region
from replication.formats.tombstones import Tombstone, bury
from replication.keeper.news_reader import SURE_S
from replication.region.order_watch import ORDER_HEARTBEAT_S
from replication.region.region_node import SWEEP_STAGED_S, RegionNode
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tests.engine.shared_memory import SharedMemoryLevel
from tests.engine.test_shared_levels import Timers
from tests.objects import FaultyObjects, MemoryObjects
from tests.replication.virtual_loop import run
from tiers.base import Record
from tiers.bucket.objects import Bytes, ObjectInfo, Objects
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader

MIB = 1 << 20
SIZE = 64 << 10  # 32 a slab
SLOTS = 64  # of two slabs
SPACE = NamespaceSpec(b"w" * 16, SIZE, 8, 16, {"model": "m", "tenant": "t"})


def name(number: int) -> bytes:
    return f"{number:08d}".encode()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


class Node:
    """An engine with DRAM for SLOTS blocks, perhaps NVMe, and a bucket that has a chain of `count` blocks."""

    def __init__(
        self,
        path: Path,
        count: int,
        device: FaultyDevice | None = None,
        shared: SharedLimits = SharedLimits(),  # noqa: B008 immutable
    ) -> None:
        self.timers, self.io = Timers(), SteppedIo()
        self.bucket = SharedMemoryLevel(self.timers.later, latency_s=0.02, name="object", limits=shared)
        for number in range(count):
            parent = SPACE.digest + name(number - 1) if number else b""
            data = content(number)
            self.bucket.put(Record(SPACE.digest + name(number), parent, SIZE, digest(data)), data)
        self.arena = open_arena(path, SLOTS * SIZE, 2 * MIB, 16384)
        self.engine = Engine(
            self.arena,
            [Drive(device, self.io)] if device is not None else [],
            NamespaceRegistry(),
            self.io,
            clock=lambda: self.timers.now_s,
            shared=[self.bucket],
        )
        self.engine.adopt()
        self.io.run()
        engine = self.engine
        self.warmer = Warmer(engine.blocks, engine.loader, engine.register, engine.loader.shared[0], None)
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(SPACE)
        self.answers: list[Brought] = []

    @property
    def namespace(self) -> Namespace:
        return self.engine.namespaces.get(self.space)

    def bring(self, first: int, end: int, to: To = "dram", spec: NamespaceSpec = SPACE) -> None:
        parent = name(first - 1) if first else b""
        self.warmer.bring(spec, parent, list(map(name, range(first, end))), to, self.answers.append)

    def go_on(self, seconds: float = 5.0) -> None:
        for _ in range(int(seconds / 0.01)):
            finish(self.warmer.steps())
            self.io.run()
            self.engine.tick()
            self.timers.run(0.01)

    def where(self, first: int, end: int) -> list[int]:
        blocks = self.namespace.blocks
        found = [blocks.get(name(number)) for number in range(first, end)]
        return [block.where & (IN_DRAM | IN_NVME) if block is not None else 0 for block in found]

    def store(self, first: int, end: int) -> None:
        """Blocks of other prompts, by an engine."""
        hashes = b"".join(map(name, range(first, end)))
        answer = self.engine.reserve(self.session, self.space, hashes, b"")
        for slot in granted(answer):
            self.arena.mapping[slot.offset : slot.offset + SIZE] = content(first + slot.position)
        sums = b"".join(digest(content(first + slot.position)) for slot in granted(answer))
        self.engine.commit(self.session, answer.lease, [slot.position for slot in granted(answer)], sums)

    def close(self) -> None:
        assert self.engine.check() == []
        self.arena.close(unlink=True)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def made(count: int, *more: Any) -> Node:
        nodes.append(Node(tmp_path / f"arena{len(nodes)}", count, *more))
        return nodes[-1]

    yield made
    for node in nodes:
        node.close()


def test_a_namespace_stays_known_while_it_is_warmed(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no blocks yet makes no room for another namespace before its run is over."""
    node = make(40)
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", len(node.engine.namespaces))
    node.bring(0, 40)
    with pytest.raises(NamespaceConflict, match="too many namespaces"):
        node.engine.register(NamespaceSpec(b"x" * 16, SIZE, 8, 16, {}))
    node.go_on()
    assert node.answers == [Brought(loaded=40)] and node.where(0, 40) == [IN_DRAM] * 40
    assert node.namespace.users == 0


def test_a_prefix_is_there_before_it_is_asked_for(make: Callable[..., Node]) -> None:
    """Blocks are loaded once; what is held is not asked for again, whoever has brought it; a lookup hits them."""
    node = make(40)
    node.bring(0, 20)
    node.bring(20, 40)
    node.go_on()
    assert node.answers == [Brought(loaded=20)] * 2
    assert node.where(0, 40) == [IN_DRAM] * 40
    node.bucket.faults.lost = 1.0
    assert node.engine.find([node.space], b"".join(map(name, range(40)))).usable == 40
    node.bring(0, 40)
    node.go_on(0.1)
    assert node.answers[2:] == [Brought(held=40)] and node.bucket.fetched == 40


def test_nothing_that_is_held_leaves_for_it(make: Callable[..., Node]) -> None:
    """Free slots are filled, in the order of the prefix, and no more; what was there is there."""
    node = make(60)
    node.store(100, 150)
    node.bring(0, 60)
    node.go_on()
    [brought] = node.answers
    assert (brought.loaded, brought.failed) == (14, 0) and brought.refused > 0
    assert node.where(100, 150) == [IN_DRAM] * 50 and node.engine.counters.evicted_dram == 0
    assert node.where(0, 60) == [IN_DRAM] * 14 + [0] * 46


def test_a_quota_is_kept(make: Callable[..., Node]) -> None:
    """A tenant does not get more by an order than it may have, and displaces nothing of its own."""
    node = make(60)
    node.store(100, 105)
    node.engine.retention.quota(SPACE.digest.hex(), None, 10 * SIZE, None, lambda *_: None)
    node.go_on(1)
    node.bring(0, 60)
    node.go_on()
    [brought] = node.answers
    assert brought.loaded == 5 and brought.refused > 0
    assert sum(map(bool, node.where(100, 105))) == 5 and sum(map(bool, node.where(0, 60))) == 5


def test_serving_goes_first(make: Callable[..., Node]) -> None:
    """While a load of an engine waits for its turn nothing is begun; so much is under way at a time, at most."""
    node = make(60, None, SharedLimits(jobs_max=1, batch_records=4))
    acquired: list[Acquired] = []
    node.bring(30, 60)
    lease = node.engine.acquire(node.session, node.space, b"".join(map(name, range(30))), acquired.append)
    source = node.engine.loader.shared[0]
    while source.urgent:
        assert not source.ahead and node.bucket.fetched <= 30 and not any(node.where(30, 60))
        node.go_on(0.01)
    node.go_on(0.02)
    assert 0 < len(source.ahead) + node.bucket.fetched - 30 <= WARM_RECORDS_MAX
    node.go_on()
    assert node.answers == [Brought(loaded=30)]
    node.engine.release(node.session, lease.number)


def test_onto_nvme_through_dram(make: Callable[..., Node]) -> None:
    """More than DRAM holds goes onto NVMe; DRAM has nothing of it afterwards, and what an engine uses meanwhile stays."""
    device = FaultyDevice(256)
    node = make(200, device)
    node.bring(0, 200, "nvme")
    node.go_on()
    assert node.answers == [Brought(loaded=200)]
    assert node.where(0, 200) == [IN_NVME] * 200
    assert node.arena.stats().used_bytes == 0
    node.bring(0, 10)
    node.go_on()
    assert node.answers[1:] == [Brought(loaded=10)] and node.bucket.fetched == 200
    assert node.where(0, 10) == [IN_DRAM | IN_NVME] * 10


def test_nvme_is_not_overfilled(make: Callable[..., Node]) -> None:
    """When NVMe has no free slot the rest is refused, and little that was there has left for it."""
    device = FaultyDevice(100)
    node = make(200, device)
    node.bring(0, 200, "nvme")
    node.go_on()
    [brought] = node.answers
    assert brought.refused > 0 and brought.loaded + brought.failed <= 200
    assert node.engine.counters.evicted_nvme <= WARM_RECORDS_MAX
    assert device.stats().used_bytes <= device.stats().capacity_bytes


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_every_run_is_answered_once(make: Callable[..., Node], seed: int) -> None:
    """Records that are lost, missing, flipped or refused: each run is answered once, its blocks add up, and what is in
    DRAM is true."""
    chance = random.Random(seed)
    node = make(60)
    faults = node.bucket.faults
    faults.failed, faults.missing, faults.flipped = (chance.choice((0.0, 0.2)) for _ in range(3))
    for first in range(0, 60, 15):
        node.bring(first, first + 15)
    node.go_on(20)
    faults.failed = faults.missing = faults.flipped = 0.0
    node.go_on(120)
    assert len(node.answers) == 4
    for brought in node.answers:
        assert brought.held + brought.loaded + brought.failed == 15 and not brought.refused
    assert 0 < sum(b.loaded for b in node.answers) <= sum(map(bool, node.where(0, 60)))  # some came late
    for block in node.namespace.blocks.values():
        if block.where & IN_DRAM:
            assert bytes(node.arena.view(block.slot)) == content(int(block.hash))


def test_a_namespace_that_does_not_fit_is_told(make: Callable[..., Node]) -> None:
    """A pack of a record size that this arena cannot hold, or of a namespace that is another one here, is a problem in words."""
    node = make(1)
    node.engine.namespaces.used(node.namespace)
    node.bring(0, 1, spec=NamespaceSpec(b"x" * 16, 16 * MIB, 8, 16))
    node.bring(0, 1, spec=NamespaceSpec(SPACE.digest, 4096, 8, 16))
    assert ["record_bytes" in brought.problem for brought in node.answers] == [True, True]


def test_traffic_fades_and_goes_on_after_a_restart() -> None:
    """Tokens are counted by model and tenant, and count half after a day."""
    now_s = 0.0
    traffic = Traffic(lambda: now_s)
    space = Namespace(0, SPACE)
    traffic.count(space, 10, 5)
    now_s += TRAFFIC_HALF_LIFE_S
    traffic.count(space, 10, 10)
    [row] = traffic.rows()
    assert (row.model, row.tenant, row.asked_tokens, row.durable_tokens) == ("m", "t", 240.0, 200.0)
    later = Traffic(lambda: now_s + TRAFFIC_HALF_LIFE_S)
    later.restore([row], now_s)
    [again] = later.rows()
    assert (again.asked_tokens, again.durable_tokens) == (120.0, 100.0)


# -- a daemon's part in orders --


class FakeWarmer:
    """Has what it is given at once, fails when it is told to, and has room for so many blocks."""

    def __init__(self) -> None:
        self.traffic = Traffic(lambda: 0.0)
        self.bytes_per_s = 5.0
        self.held: set[bytes] = set()
        self.order: list[bytes] = []
        self.fails: set[bytes] = set()
        self.room = 10**6

    def capacity_bytes(self, to: To) -> int:
        return 10**9 if to == "dram" else 0

    def bring(self, spec: Any, parent: bytes, hashes: list[bytes], to: To, done: Callable[..., None]) -> None:
        held = loaded = refused = failed = 0
        for block in hashes:
            if block in self.held:
                held += 1
            elif block in self.fails:
                failed += 1
            elif len(self.held) >= self.room:
                refused += 1
            else:
                self.held.add(block)
                self.order.append(block)
                loaded += 1
        asyncio.get_running_loop().call_later(0.1, done, Brought(held, loaded, failed, refused))


class Region:
    """A region with packs of one block, and a daemon whose engine is fake."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.get_running_loop()
        self.objects = MemoryObjects("na", self.clock)
        self.path, self.node, self.tasks = path, None, list[asyncio.Task[Any]]()
        self.warmer = FakeWarmer()

    def clock(self) -> float:
        return 1e9 + self.loop.time()

    async def join(self, name: str = "me") -> RegionNode:
        await init_region(self.objects, "acme", "na", self.clock)
        return await RegionNode.join(
            self.objects, "acme", "na", self.path / name, name, random.Random(0), self.clock
        )

    async def persist(self, node: RegionNode, number: int, kept_s: float = 1e6) -> bytes:
        record = digest(name(number)) * 4
        spec = NamespaceSpec(SPACE.digest, len(record), 8, 16, SPACE.fields)
        header = PackHeader(spec, b"", name(number), digest(record))
        assert await node.persist(header, [memoryview(record)], 0, int(self.clock() + kept_s))
        return name(number)

    async def begin(self, is_new: bool = False) -> RegionNode:
        node = await self.join()
        reply = self.loop.call_soon
        warming = Warming(node, self.warmer, reply, self.clock, is_new)  # type: ignore[arg-type]  # what it needs of one
        self.tasks = [asyncio.ensure_future(node.run()), asyncio.ensure_future(warming.run())]
        return node

    async def stop(self, node: RegionNode) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        node.close()

    async def told(self, order: Order) -> Progress:
        return next(one for one in await read_all_progress(self.objects, order) if not one.is_mirror)


def order_of(region: Region, **more: Any) -> Order:
    return Order(made_s=region.clock(), until_s=region.clock() + 86_400, **more)


def test_a_daemon_carries_out_an_order_and_tells_of_itself(tmp_path: Path) -> None:
    """The most valuable first, within the budget; in its end told, and kept by a restart that finds all of it there. What fails is tried
    again a few times, and named."""

    async def main() -> None:
        region = Region(tmp_path)
        node = await region.begin()
        names = [await region.persist(node, number, 1e6 + number) for number in range(20)]
        await asyncio.sleep(10)
        order = await put_order(region.objects, order_of(region, budget_bytes=10 * 64))
        await asyncio.sleep(40)
        told = await region.told(order)
        assert (told.ended, told.packs, told.done_bytes, told.problem) == (True, 10, 640, "")
        assert region.warmer.order == names[:9:-1]
        [itself] = (await read_nodes(region.objects)).read
        assert (itself.writer, itself.dram_bytes, itself.nvme_bytes) == (node.name, 10**9, 0)
        region.warmer.fails = {names[3]}
        other = await put_order(region.objects, order_of(region))
        await asyncio.sleep(120)
        told = await region.told(other)
        assert (told.ended, told.failed, told.done_packs) == (True, 1, 19) and "1 packs" in told.problem
        nvme = await put_order(region.objects, order_of(region, to="nvme"))
        await asyncio.sleep(40)
        told = await region.told(nvme)
        assert told.ended and "no nvme tier" in told.problem
        await region.stop(node)
        for is_new in (False, True):
            region.warmer.held.clear()
            region.warmer.fails.clear()
            node = await region.begin(is_new)
            await asyncio.sleep(60)
            assert len(region.warmer.held) == (20 if is_new else 0)
            await region.stop(node)

    run(main())


def test_other_problems_are_told_soon(tmp_path: Path) -> None:
    """What a daemon tells of itself is told again when it has other problems than it told, within a minute or so, and else no sooner
    than planned: not for another count or text of the same."""

    def about(*problems: Trouble) -> Condition:
        figures: dict[str, int] = dict.fromkeys(
            ("sessions", "dram_used_bytes", "nvme_used_bytes", "asked_tokens", "hit_tokens"), 0
        )
        return Condition(host="here", version="1", up_s=1.0, problems=list(problems), **figures)

    async def main() -> None:
        region = Region(tmp_path)
        node = await region.join()
        now = [about()]
        warming = Warming(
            node,
            region.warmer,
            region.loop.call_soon,
            region.clock,
            False,
            condition=lambda: now[0],  # type: ignore[arg-type]
        )
        region.tasks = [asyncio.ensure_future(node.run()), asyncio.ensure_future(warming.run())]

        async def told() -> nodes.Node:
            [found] = (await read_nodes(region.objects)).read
            return found

        await asyncio.sleep(30)
        first = await told()
        assert first.condition == now[0]
        now[0] = about(Trouble("disk", "nvme0", "problem", "is full", 1.0))
        await asyncio.sleep(2 * NODE_LOOK_S)
        second = await told()
        assert second.condition == now[0] and second.at_s < first.at_s + 2 * NODE_LOOK_S
        now[0] = about(Trouble("disk", "nvme0", "problem", "is full, 3 times", 1.0))
        await asyncio.sleep(3 * NODE_LOOK_S)
        assert await told() == second
        await asyncio.sleep(NODE_INTERVAL_S)
        assert (await told()).condition == now[0]
        await region.stop(node)

    run(main())


def test_the_latest_erasings_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tombstones than a node tells of, those that were erased last, again or for the first time, however they are listed: somebody
    may be waiting for them."""
    monkeypatch.setattr("kvstore.durable.warming.NODE_ERASED_MAX", 4)

    async def main() -> None:
        region = Region(tmp_path)

        async def erase(number: int, serial: int) -> str:
            stone = Tombstone(tenant=f"gone {number}", watched_until_s=1 << 39, serial=serial)
            return (await bury(region.objects, stone)).id

        ids = [await erase(number, 1000 - number) for number in range(9)]
        node = await region.join()

        def erased(some: Sequence[Tombstone]) -> list[NodeErased]:
            return [NodeErased(one.id, one.serial, 0, False) for one in some]

        warming = Warming(node, region.warmer, region.loop.call_soon, region.clock, False, erased=erased)  # type: ignore[arg-type]
        region.tasks = [asyncio.ensure_future(node.run()), asyncio.ensure_future(warming.run())]

        async def told() -> set[str]:
            [found] = (await read_nodes(region.objects)).read
            return {one.tombstone for one in found.erased}

        await asyncio.sleep(60)
        assert await told() == set(ids[:4])
        await erase(7, 2000)
        await asyncio.sleep(60)
        assert await told() == {*ids[:3], ids[7]}
        await region.stop(node)

    run(main())


class Counting(FaultyObjects):
    """asked: requests by kind, of orders and of what nodes say: the rest is planned elsewhere."""

    def __init__(self, inner: Objects, chance: random.Random) -> None:
        super().__init__(inner, chance)
        self.asked: Counter[str] = Counter()

    def _note(self, kind: str, name: str) -> None:
        self.asked[kind] += name.startswith((ORDERS, NODES, PROGRESS))

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        self._note("put", name)
        return await super().put(name, content, only_new)

    async def get(self, name: str) -> memoryview:
        self._note("get", name)
        return await super().get(name)

    async def head(self, name: str) -> ObjectInfo:
        self._note("head", name)
        return await super().head(name)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        self._note("list", prefix)
        async for page in super().list(prefix, after):
            yield page


def test_looking_for_orders_costs_what_the_plan_says(tmp_path: Path) -> None:
    """Requests of a daemon that nothing is ordered of, over two hours."""

    async def main() -> None:
        region = Region(tmp_path)
        node = await region.join()
        node.catalogue.close()
        way = Counting(region.objects, random.Random(0))
        region.objects = way  # type: ignore[assignment]  # what a daemon sees
        node = await region.begin()
        await asyncio.sleep(60)
        before = way.asked.copy()
        await asyncio.sleep(7200)
        spent = way.asked - before
        planned = warming()
        # This daemon keeps its region, too: it looks for what is new there, and for nodes that come back no more, for everybody.
        looks = 1 / SURE_S + 1 / SWEEP_STAGED_S
        assert (spent["put"] + spent["list"]) / 7200 == pytest.approx(planned.puts + looks, rel=0.02)
        assert spent["get"] + spent["head"] == planned.gets == 0
        await region.stop(node)

    run(main())


def test_a_full_tier_ends_an_order(tmp_path: Path) -> None:
    """What has no room is not asked for again; it is told how much is there."""

    async def main() -> None:
        region = Region(tmp_path)
        node = await region.begin()
        for number in range(40):
            await region.persist(node, number)
        region.warmer.room = 7
        order = await put_order(region.objects, order_of(region))
        await asyncio.sleep(60)
        told = await region.told(order)
        assert (told.ended, told.full, told.done_packs, told.problem) == (True, True, 7, "")
        await region.stop(node)

    run(main())


def test_a_daemon_waits_for_mirrors_that_are_well(tmp_path: Path) -> None:
    """What a mirror brings for an order is loaded, too, before a daemon is done; one that is dead, or whose source is away, is not
    waited for, and the latter is told."""

    async def main() -> None:
        region = Region(tmp_path)
        node = await region.begin()
        states = {"dead": ("", -3600.0), "sick": ("away", 0.0), "well": ("", 0.0)}

        async def beat() -> None:
            for source, (problem, age_s) in states.items():
                state = MirrorState(source=source, at_s=region.clock() + age_s, problem=problem)
                await region.objects.put(MIRRORS + source, MIRROR_STATE_FORMAT.seal(state))

        await beat()
        order = await put_order(region.objects, order_of(region))
        await asyncio.sleep(60)
        assert not (await region.told(order)).ended
        late = await region.persist(node, 1)
        await put_progress(
            region.objects, order, Progress(who="mirror-well", made_s=order.made_s, ended=True)
        )
        await asyncio.sleep(20)
        told = await region.told(order)
        assert (
            told.ended and late in region.warmer.held and told.problem == "nothing is copied from sick: away"
        )
        await region.stop(node)

    assert warming_module.WARM_ROUND_S < ORDER_HEARTBEAT_S
    run(main())


def test_an_order_of_weights_is_preloaded(tmp_path: Path) -> None:
    """Each model once; what could not be had is named; a daemon that preloads none says so, and loads no KV for it."""

    async def main() -> None:
        for can in (True, False):
            region = Region(tmp_path / str(can))
            node = await region.join()
            asked: list[str] = []

            def order(model: str, asked: list[str] = asked) -> Any:
                """It is there a moment later, or it never is."""
                asked.append(model)
                state = {
                    "state": "running", "bytes": 100, "left_bytes": 100, "attempts": 0, "problem": "the disk is too small",
                }  # fmt: skip
                done: dict[str, Any] = {"state": "there", "left_bytes": 0}
                if model == "large":
                    done = {"state": "failed", "attempts": 9}
                asyncio.get_running_loop().call_later(5.0, state.update, done)
                return state

            warming = Warming(
                node,
                region.warmer,
                region.loop.call_soon,
                region.clock,
                False,
                order if can else None,  # type: ignore[arg-type]  # what it needs of one
            )
            region.tasks = [asyncio.ensure_future(node.run()), asyncio.ensure_future(warming.run())]
            await region.persist(node, 1)
            good = await put_order(region.objects, order_of(region, weights=("a", "b@1"), to="nvme"))
            await asyncio.sleep(60)
            told = await region.told(good)
            assert told.ended and not region.warmer.order
            if can:
                assert (told.done_packs, told.done_bytes, told.problem) == (2, 200, "")
                bad = await put_order(region.objects, order_of(region, weights=("large",), to="nvme"))
                await asyncio.sleep(60)
                told = await region.told(bad)
                assert asked == ["a", "b@1", "large"]
                assert (told.failed, told.problem) == (1, "large: the disk is too small")
            else:
                assert told.problem == 'models.orders is "off" here'
            await region.stop(node)

    run(main())
