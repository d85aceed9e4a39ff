"""Shared levels: what every one of them must do, and what an engine does with one that is slow, loses or lies."""

from __future__ import annotations

import heapq
import queue
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.constants import DAY_S
from kvstore.durable.level import ObjectLevel
from kvstore.durable.persister import Life
from kvstore.durable.region_level import RegionLevel
from kvstore.engine import windows
from kvstore.engine.engine import Engine
from kvstore.engine.windows import Asked
from kvstore.index.block import Block, Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking
from kvstore.movement.shared import Fetched, SharedLevel, SharedLimits, Wanted
from kvstore.movement.sources import TOO_OLD_S
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_SHARED
from kvstore.steps import finish
from replication.erasure.erased import Erased
from replication.formats.region import init_region
from replication.region.read_through import ReadThrough
from replication.region.region_node import RegionNode
from tests.engine.fakes import SteppedIo, held
from tests.engine.shared_memory import SharedMemoryLevel
from tests.objects import MemoryObjects
from tiers.base import Get, Record
from tiers.bucket.objects import Objects
from tiers.checksum import digest, pack_columns
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader

MIB = 1 << 20
SIZE = 8192
COLUMNS = pack_columns([2048, 2048, 4096])
SPACE = NamespaceSpec(b"s" * 16, SIZE, 8, 16, columns=COLUMNS)


class Timers:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._calls, (self.now_s + delay_s, self._number, call))

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._calls and self._calls[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._calls)
            call()
        self.now_s = end_s


def name(number: int) -> bytes:
    return f"{number:08d}".encode()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def hashes(first: int, end: int) -> bytes:
    return b"".join(map(name, range(first, end)))


def fill(level: SharedMemoryLevel, count: int) -> None:
    """A chain of so many blocks, stored by another daemon."""
    for number in range(count):
        parent = SPACE.digest + name(number - 1) if number else b""
        data = content(number)
        sums = digest(data, COLUMNS)
        level.put(Record(SPACE.digest + name(number), parent, SIZE, sums, columns=COLUMNS), data)


# -- every shared level --


class Replies:
    """Answers of another thread, taken when the test says so."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def run(self, seconds: float) -> None:
        """Wait for one, and take all that are there."""
        self._calls.get(timeout=seconds)()
        while not self._calls.empty():
            self._calls.get()()


def over_bucket(path: Path, objects: Objects) -> tuple[ObjectLevel, Replies]:
    """The object level over a bucket that has a chain of 40 blocks, in packs of 16."""
    replies = Replies()

    async def join() -> RegionNode:
        await init_region(objects, "acme", "na", time.time)
        chance = random.Random(1)
        return await RegionNode.join(objects, "acme", "na", path / "catalogue", "instance", chance, time.time)

    level = ObjectLevel(replies.post, SharedLimits())
    level.start(join)
    assert level.tried.wait(10.0)
    while not level.is_open:
        time.sleep(0.01)
    for first in range(0, 40, 16):
        numbers = range(first, min(first + 16, 40))
        sums = b"".join(digest(content(number), COLUMNS) for number in numbers)
        header = PackHeader(SPACE, name(first - 1) if first else b"", hashes(first, numbers[-1] + 1), sums)
        durable: list[bool] = []
        level.persist(
            header, [memoryview(content(number)) for number in numbers], Life(1000, 0), durable.append
        )
        replies.run(10.0)
        assert durable == [True]
    while level.status().get("blocks") != 40:  # announced
        time.sleep(0.01)
    return level, replies


def over_another_region(path: Path, objects: Objects) -> tuple[RegionLevel[ReadThrough], Replies]:
    """A level that reads the region of this bucket through, and belongs to another one."""
    replies, home = Replies(), Erased(time.time)

    async def follow() -> ReadThrough:
        await home.look(objects)
        return await ReadThrough.follow(
            objects, "acme", "na", path / "far", home, random.Random(1), time.time
        )

    level: RegionLevel[ReadThrough] = RegionLevel(
        "read-through na", replies.post, SharedLimits(), is_far=True
    )
    level.start(follow)
    space = Namespace(0, SPACE)
    until_s = time.monotonic() + 30
    while level.held(space, hashes(0, 40), 0) < 40:
        assert time.monotonic() < until_s, level.status()
        time.sleep(0.01)
    return level, replies


@pytest.fixture(params=["memory", "object", "read-through"])
def level(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SharedLevel, Timers | Replies]]:
    """A level that holds a chain of 40 blocks."""
    if request.param != "memory":
        objects = MemoryObjects()
        home = over_bucket(tmp_path, objects)
        if request.param == "object":
            yield home
        else:
            far = over_another_region(tmp_path, objects)
            yield far
            assert far[0].close()
        assert home[0].close()
    else:
        timers = Timers()
        level = SharedMemoryLevel(timers.later, latency_s=0.1)
        fill(level, 40)
        yield level, timers


def fetched(level: SharedLevel, timers: Timers | Replies, *wanted: Wanted) -> list[Fetched]:
    answers: list[list[Fetched]] = []
    level.fetch(wanted, lambda told: answers.append(list(told)))
    timers.run(10.0)
    assert len(answers) == 1, "done is called exactly once"
    return answers[0]


def test_the_catalogue_names_the_longest_prefix(level: tuple[SharedLevel, Timers | Replies]) -> None:
    """From any start, up to the first block that is not there; never before the start."""
    shared, space = level[0], Namespace(0, SPACE)
    assert shared.held(space, hashes(0, 60), 0) == 40
    assert shared.held(space, hashes(0, 60), 17) == 40
    assert shared.held(space, hashes(0, 12), 3) == 12
    assert shared.held(space, hashes(50, 60), 0) == 0
    assert shared.held(space, hashes(0, 60), 45) == 45


def test_what_is_fetched_is_what_was_stored(level: tuple[SharedLevel, Timers | Replies]) -> None:
    """Bytes, checksum and parent of each record, in the order of the request; a miss says so."""
    numbers = [7, 0, 39, 41]
    views = [memoryview(bytearray(SIZE)) for _ in numbers]
    keys = [SPACE.digest + name(number) for number in numbers]
    answers = fetched(*level, *map(Wanted, keys, views))
    assert [result for result, _ in answers] == [Get.HIT, Get.HIT, Get.HIT, Get.MISS]
    for number, view, (_, record) in zip(numbers[:3], views, answers, strict=False):
        assert record is not None and bytes(view) == content(number)
        assert record.checksum == digest(view, COLUMNS) and record.key == SPACE.digest + name(number)
        assert record.parent == (SPACE.digest + name(number - 1) if number else b"")


def test_a_view_of_another_size_is_a_miss(level: tuple[SharedLevel, Timers | Replies]) -> None:
    """A namespace whose records have another size cannot have stored this one."""
    view = memoryview(bytearray(SIZE - 1))
    assert fetched(*level, Wanted(SPACE.digest + name(1), view))[0][0] is Get.MISS


def test_a_probe_is_answered_once(level: tuple[SharedLevel, Timers | Replies]) -> None:
    """A level that works says so."""
    answers: list[bool] = []
    level[0].probe(answers.append)
    level[1].run(10.0)
    assert answers == [True]


# -- an engine over one --


class Node:
    """An engine whose only slower level is a shared one that has a chain of 600 blocks."""

    def __init__(self, path: Path, latency_s: float = 0.1, limits: SharedLimits | None = None) -> None:
        self.timers = Timers()
        self.level = SharedMemoryLevel(self.timers.later, latency_s, limits=limits)
        fill(self.level, 600)
        self.arena = open_arena(path, 16 * MIB, 2 * MIB, SIZE)
        self.io = SteppedIo()
        self.engine = Engine(
            self.arena, [], NamespaceRegistry(), self.io, clock=lambda: self.timers.now_s, shared=[self.level]
        )
        self.engine.adopt()
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(SPACE)
        self.answers: list[Acquired] = []

    def acquire(self, first: int, end: int, wait_s: float = 5.0) -> Acquired:
        parent = name(first - 1) if first else b""
        lease = self.engine.acquire(self.session, self.space, hashes(first, end), self.answers.append, parent)
        self.timers.run(wait_s)
        lease.expire()
        answer = self.answers.pop()
        for number, slot in zip(range(first, end), held(answer), strict=True):
            if slot is not None:
                data = self.arena.mapping[slot.offset : slot.offset + SIZE]
                assert data == content(number), "wrong bytes"
        return answer

    def held(self, end: int) -> int:
        return self.engine.find([self.space], hashes(0, end)).usable

    def close(self) -> None:
        self.engine.close_session(self.session)
        self.timers.run(1000.0)
        assert self.engine.check() == []
        self.arena.close(unlink=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena")
    yield made
    made.close()


def test_a_lookup_goes_on_where_the_owned_prefix_ends(node: Node) -> None:
    """Nothing is owned: 600 blocks are found, and 20 of them loaded with the right bytes; then DRAM has them."""
    assert node.held(700) == 600
    answer = node.acquire(0, 20)
    assert [slot.tier for slot in held(answer) if slot is not None] == [IN_SHARED] * 20
    node.engine.release(node.session, answer.lease)
    again = node.acquire(0, 30)
    tiers = [slot.tier for slot in held(again) if slot is not None]
    assert tiers == [IN_DRAM] * 20 + [IN_SHARED] * 10
    assert node.held(700) == 600


def test_a_run_from_the_middle_hangs_where_it_belongs(node: Node) -> None:
    """Blocks fetched behind a gap are no prefix of their own until the gap is filled."""
    node.acquire(10, 20)
    blocks = node.engine.namespaces.get(node.space).blocks
    assert blocks[name(10)].parent is blocks[name(9)]
    assert set(finish(node.engine.residency_steps(node.space, hashes(10, 20)))) == {IN_DRAM | 128}
    node.acquire(0, 10)
    assert set(finish(node.engine.residency_steps(node.space, hashes(0, 20)))) == {IN_DRAM}


def test_clearing_a_node_leaves_shared_levels_alone(node: Node) -> None:
    """What was cleared here is still found there, and fetched again; a namespace of which blocks are on their way is not
    forgotten meanwhile."""
    answer = node.acquire(0, 20)
    node.engine.release(node.session, answer.lease)
    told: list[dict[str, object]] = []
    node.engine.acquire(node.session, node.space, hashes(20, 24), node.answers.append, name(19))
    node.engine.clear("", b"", None, True, False, told.append)
    while not told:
        node.timers.now_s += 0.5  # the fetch stays where it is
        node.engine.clearing.step()
    assert (told[0]["cleared_blocks"], told[0]["forgotten_namespaces"]) == (20, 0)
    node.timers.run(5.0)
    again = node.acquire(0, 30)
    tiers = [slot.tier for slot in held(again) if slot is not None]
    assert tiers == [IN_SHARED] * 20 + [IN_DRAM] * 4 + [IN_SHARED] * 6
    assert node.held(700) == 600


def test_hundreds_of_records_are_in_flight(tmp_path: Path) -> None:
    """At 100 ms a request, and as soon as that is known, 512 records are there in a few round trips."""
    node = Node(tmp_path / "arena", 0.1, SharedLimits(jobs_max=64, batch_records=8, stall_s=5.0))
    node.acquire(512, 600)
    answer = node.acquire(0, 512, wait_s=0.5)
    assert all(held(answer)) and not answer.pending
    assert node.level.under_way_most == 64
    node.engine.release(node.session, answer.lease)
    node.close()


def test_what_two_want_is_fetched_once(node: Node) -> None:
    """A second request for blocks on their way waits for the same fetch."""
    first = node.engine.acquire(node.session, node.space, hashes(0, 8), node.answers.append)
    fetches = node.level.under_way_most
    node.engine.acquire(node.session, node.space, hashes(0, 8), node.answers.append)
    assert node.level.under_way_most == fetches
    node.timers.run(1.0)
    assert first.finished and len(node.answers) == 2
    assert all(slot is not None for answer in node.answers for slot in held(answer))


def test_a_level_that_loses_requests_is_left_alone_and_tried_again(node: Node) -> None:
    """Nobody waits longer than a stall; then the prefix ends where the owned one does, until it works again."""
    node.level.faults.lost = 1.0
    node.engine.acquire(node.session, node.space, hashes(0, 8), node.answers.append)
    node.timers.run(1.5)
    node.engine.look()
    assert held(node.answers.pop()) == [None] * 8
    assert node.held(700) == 0
    node.level.faults.lost = 0.0
    assert node.engine.loader.underway == 1, "a lost request keeps its slot: it might still come"


def test_a_catalogue_that_lies_costs_misses_only(node: Node) -> None:
    """Whatever it promises: what comes is right, and what does not come is a miss."""
    node.level.faults.lies = 0.5
    chance = random.Random(1)
    for _ in range(30):
        first = chance.randint(0, 650)
        answer = node.acquire(first, first + chance.randint(1, 16))
        if answer.lease:
            node.engine.release(node.session, answer.lease)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_missing_and_failed_records_are_misses(tmp_path: Path, seed: int) -> None:
    """Of thousands of records fetched with faults, none is handed out with a wrong byte."""
    node = Node(tmp_path / "arena")
    chance = random.Random(seed)
    came = asked = 0
    for _ in range(60):
        faults = node.level.faults
        faults.flipped, faults.missing, faults.failed = (chance.choice([0.0, 0.0, 0.3]) for _ in range(3))
        first = chance.randint(0, 550)
        answer = node.acquire(first, first + 40)
        came += sum(slot is not None for slot in held(answer))
        asked += len(held(answer))
        if answer.lease:
            node.engine.release(node.session, answer.lease)
        node.timers.run(120.0)
        node.engine.look()
        assert node.engine.check() == []
    assert 0 < came < asked
    node.close()


def test_a_record_under_another_parent_is_not_what_was_asked_for(node: Node) -> None:
    """A request that names a wrong parent gets a miss: the index hangs no block where it does not belong."""
    node.engine.acquire(node.session, node.space, hashes(5, 6), node.answers.append, parent=name(2))
    node.timers.run(1.0)
    assert held(node.answers.pop()) == [None]


def test_a_record_of_other_columns_is_not_what_was_asked_for(node: Node) -> None:
    """Its checksum is true, and no record of this namespace can have it: a miss."""
    data = content(0)
    node.level.put(Record(SPACE.digest + name(0), b"", SIZE, digest(data)), data)
    node.engine.acquire(node.session, node.space, hashes(0, 1), node.answers.append)
    node.timers.run(1.0)
    assert held(node.answers.pop()) == [None]


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_a_record_of_the_future_is_of_now(node: Node, ttl_s: float | None) -> None:
    """Whatever a bucket says, a record lives no longer than its TTL from its arrival on, and no clock goes by it."""
    expiry, space = node.engine.blocks.expiry, node.engine.namespaces.get(node.space)
    begun_s = int(expiry.now_s())
    data = content(0)
    record = Record(
        SPACE.digest + name(0), b"", SIZE, digest(data, COLUMNS), begun_s + 10 * 365 * DAY_S, COLUMNS
    )
    node.level.put(record, data)
    expiry.set_ttl(SPACE.digest, ttl_s, begun_s)
    answer = node.acquire(0, 1)
    node.engine.release(node.session, answer.lease)
    block = space.blocks.get(name(0))
    assert block is not None
    assert begun_s <= node.arena.record(block.slot).stored_s <= expiry.now_s() < begun_s + DAY_S
    node.timers.now_s += 61.0
    assert expiry.over([block]) == ({block} if ttl_s else set())


def test_what_came_too_old_is_not_promised_again(node: Node) -> None:
    """Behind its TTL a block of a bucket is a miss once; then no lookup promises it, for an hour or until the TTL is another one."""
    expiry = node.engine.blocks.expiry
    data = content(0)
    sums, stored_s = digest(data, COLUMNS), int(expiry.now_s()) - 100
    node.level.put(Record(SPACE.digest + name(0), b"", SIZE, sums, stored_s, COLUMNS), data)
    expiry.set_ttl(SPACE.digest, 60.0, 0.0)

    def promised() -> tuple[int, int]:
        groups = [(node.engine.namespaces.get(node.space), 16)]
        asked = Asked(groups, hashes(0, 1), 16, 16, 16, 16, Asking())
        return node.held(1), finish(windows.find_steps(node.engine, asked))[0]

    assert promised() == (1, 16)
    assert held(node.acquire(0, 1)) == [None]
    assert promised() == (0, 0)
    assert node.level.fetched == 1 and held(node.acquire(0, 1)) == [None] and node.level.fetched == 1
    node.timers.now_s += TOO_OLD_S
    assert promised() == (1, 16)
    node.acquire(0, 1)
    assert promised() == (0, 0)
    expiry.set_ttl(SPACE.digest, 1e9, 0.0)
    assert promised() == (1, 16)
    assert held(node.acquire(0, 1)) != [None]


@pytest.mark.parametrize("piece", [7, 1000])
def test_a_block_that_is_too_old_ends_a_long_prompt(
    node: Node, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it lies in what is looked at in a piece."""
    monkeypatch.setattr("kvstore.movement.sources.STEP_BLOCKS", piece)
    space = node.engine.namespaces.get(node.space)
    for position in (599, 595, 21, 20):
        block = Block(space, name(position))
        node.engine.loader.shared[0].was_too_old(block)
        assert node.held(600) == position


def test_every_looked_up_token_is_accounted_for(node: Node) -> None:
    """Hits of a shared level are told as such; the sums stay what was asked for."""
    found = node.engine.find([node.space], hashes(0, 700), Asking(ticket=1, tokens=700 * 16))
    node.engine.book([node.space], hashes(0, 700), found, Asking(ticket=1, tokens=700 * 16))
    (total,) = node.engine.accounts.totals.since(0.0)
    assert found.usable == 600 and sum(total.tokens) == total.tokens_asked == 700 * 16
    assert not any(node.engine.accounts.check_slices())


@pytest.mark.parametrize("first", [0, 20])
def test_a_prefetch_reaches_shared_levels(node: Node, first: int) -> None:
    """What a queued request will ask for is in DRAM before it does, from the beginning or behind a part that the engine has."""
    node.acquire(0, 5)
    parent = name(first - 1) if first else b""
    coming = finish(node.engine.prefetch_steps(node.space, hashes(first, 320), parent))
    assert coming == (315 if not first else 300)
    node.timers.run(30.0)
    answer = node.acquire(first, 320, wait_s=0.0)
    assert [slot.tier for slot in held(answer) if slot is not None] == [IN_DRAM] * (320 - first)
    assert node.level.fetched == 5 + coming


def test_a_prefetch_of_a_level_that_is_away_is_nothing(node: Node) -> None:
    """While its breaker is open nothing is asked of it."""
    node.level.faults.failed = 1.0
    for at in range(8):
        node.acquire(10 * at, 10 * at + 10)
    assert not node.engine.loader.shared[0].loads.closed
    assert finish(node.engine.prefetch_steps(node.space, hashes(0, 320))) == 0


def test_wrong_bytes_are_counted_for_the_level_that_they_came_from(node: Node) -> None:
    """A node without a disk blames none."""
    node.level.faults.flipped = 1.0
    assert held(node.acquire(0, 5)) == [None] * 5
    counted = {name: n for name, n in node.engine.counters.as_dict().items() if name.startswith("corrupt")}
    assert counted == {"corrupt_dram": 0, "corrupt_nvme": 0, "corrupt_shared": 5}
