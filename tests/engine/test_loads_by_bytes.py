"""Loads by bytes: a store that is healthy never trips, whatever its speed and the size of records; one that hangs does, soon."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.health.breaker import CLOSED, LATE_SHARE, Breaker
from kvstore.index.block import Block, Namespace
from kvstore.movement.load_queue import LoadQueue
from kvstore.movement.shared import BUCKET_LEAST_BYTES_PER_S, SharedLimits
from kvstore.movement.waiting import Prefetch
from tests.engine.healthy_store import BLOCKS_MAX, HASH_BYTES, LOOK_S, StoreNode
from tiers.base import NAMESPACE_BYTES
from tiers.namespace_spec import NamespaceSpec

KIB, MIB = 1 << 10, 1 << 20
STALL_S = 5.0
ORDERS = ("in turn", "side by side", "last first")
SIZES = {"64 KiB": 64 * KIB, "2 MiB": 2 * MIB, "20 MiB": 20 * MIB, "64 MiB": 64 * MIB}
SPEEDS = (10e6, 100e6, 250e6, 2e9)


def blocks_for(seconds: float, bytes_per_s: float, size_bytes: int) -> int:
    """Of one of four prompts that take so long together."""
    return max(4, min(500, int(seconds * bytes_per_s / size_bytes / 4)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("latency_s", [0.001, 0.04, 0.3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bytes_per_s", SPEEDS)
def test_a_healthy_store_never_trips_and_is_kept_busy(
    bytes_per_s: float, size: str, latency_s: float, order: str
) -> None:
    """Four engines ask at once, and again: all of it comes, the second time at nine tenths of the store's speed at least."""
    node = StoreNode([SIZES[size]], bytes_per_s, latency_s, order)
    blocks = blocks_for(15.0, bytes_per_s, SIZES[size])
    for _ in range(2):
        begun_s, prompts = node.store.now_s, [node.ask(0, blocks) for _ in range(4)]
        node.run(begun_s + 1000.0, lambda prompts=prompts: node.came.keys() >= set(prompts))
        assert node.source.loads.trips == 0, node.source.loads.reason
        assert [node.came[prompt][1] for prompt in prompts] == [blocks] * 4
    taken_s = node.store.now_s - begun_s
    flow_s = 4 * blocks * SIZES[size] / bytes_per_s
    round_trips = 4 + (
        flow_s * bytes_per_s / SIZES[size] if SIZES[size] > bytes_per_s else 0
    )  # the latter: one by one
    if order != "in turn":
        round_trips += 2 * flow_s  # what was begun together ends together: now and then nothing flows
    assert taken_s <= flow_s / 0.9 + round_trips * latency_s


@settings(max_examples=25, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.floats(0.0, 3.0)), min_size=1, max_size=12
    ),
    bytes_per_s=st.sampled_from([10e6, 50e6, 100e6, 1e9]),
    latency_s=st.sampled_from([0.001, 0.02, 0.2, 0.6]),
    order=st.sampled_from(ORDERS),
)
def test_mixtures_never_trip(
    asked: list[tuple[int, int, float]], bytes_per_s: float, latency_s: float, order: str
) -> None:
    """Prompts of records of all sizes, that come at any time, in a store that answers in any order."""
    node = StoreNode(list(SIZES.values()), bytes_per_s, latency_s, order)
    for space, blocks, pause_s in asked:
        node.ask(space, blocks)
        node.run(node.store.now_s + pause_s)
    node.run(5000.0, lambda: len(node.came) == len(asked))
    assert node.source.loads.trips == 0, node.source.loads.reason
    assert [node.came[n + 1][1] for n in range(len(asked))] == [blocks for _, blocks, _ in asked]
    assert not node.source.window.under_way_bytes and not node.source.urgent


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bytes_per_s", SPEEDS)
@pytest.mark.parametrize("after", [0, 200])
def test_a_store_that_hangs_trips_in_a_stall_and_the_time_for_its_bytes(
    after: int, bytes_per_s: float, size: str, order: str
) -> None:
    """From the first request on, or in the middle of many."""
    node = StoreNode([SIZES[size]], bytes_per_s, 0.02, order)
    for _ in range(4):
        node.ask(0, 500)
    node.run(10_000.0, lambda: node.engine.counters.promoted >= after)
    assert node.source.urgent
    hung_s, node.store.hangs = node.store.now_s, True
    node.run(hung_s + 1000.0, lambda: not node.source.loads.closed)
    own_s = max(SIZES[size], 8 * MIB) / BUCKET_LEAST_BYTES_PER_S
    assert node.source.loads.trips == 1
    assert node.store.now_s - hung_s <= STALL_S + own_s + 2 * LOOK_S
    while node.engine.background.step():
        pass
    assert len(node.came) == 4, "whoever waits is told so"


def test_nothing_is_begun_behind_a_job_that_takes_long() -> None:
    """A large record among small ones in a store that shares its bandwidth: they wait until it is there."""
    node = StoreNode([64 * KIB, 64 * MIB], 20e6, 0.01, "side by side")
    node.ask(0, 400)
    node.run(3.0)
    large = node.ask(1, 1)
    for _ in range(40):
        node.ask(0, 50)
    node.run(node.store.now_s + 60.0, lambda: large in node.came)
    assert node.came[large][1] == 1 and node.source.loads.trips == 0
    assert node.came[large][0] < 3.0 + LATE_SHARE * STALL_S + 64 * MIB / 20e6 + 2.0


def test_those_who_ask_take_turns() -> None:
    """A short prompt behind three long ones is there long before them."""
    node = StoreNode([2 * MIB], 100e6, 0.02)
    for _ in range(3):
        node.ask(0, 400)
    node.run(5.0)
    short = node.ask(0, 8)
    node.run(30.0, lambda: short in node.came)
    assert node.came[short][0] < 9.0 and len(node.came) == 1
    predicted_s = node.source.load_s(8 * 2 * MIB)
    assert predicted_s < 5.0 < node.source.speed.load_s(8 * 2 * MIB), "what takes turns is predicted to"


def test_what_does_not_come_in_time_is_refused_early() -> None:
    """Of a long prompt as much is loaded as comes before the engine loses patience, and the answer is there then."""
    node = StoreNode([2 * MIB], 100e6, 0.02)
    node.ask(0, 100)
    node.run(10.0)
    prompt = node.ask(0, 1000, patience_s=5.0)
    assert len(node.source.urgent) < 300
    node.run(node.store.now_s + 6.0)
    answered_s, blocks = node.came[prompt]
    assert 180 <= blocks <= 240 and answered_s - 10.0 < 5.5
    in_vain = node.ask(0, 1000, patience_s=0.001)
    assert node.came[in_vain][1] == 0


def test_prefetches_leave_room_for_loads() -> None:
    """While much is prefetched, a load that an engine waits for begins at once."""
    node = StoreNode([2 * MIB], 100e6, 0.02)
    node.ask(0, 100)
    node.run(10.0)
    space = node.engine.namespaces.get(node.spaces[0])
    hashes = [(number + BLOCKS_MAX * 99).to_bytes(HASH_BYTES, "big") for number in range(500)]
    waiter = Prefetch()
    for above, block_hash in zip([b"", *hashes], hashes, strict=False):
        node.engine.loader.fetch(space, block_hash, above, node.source, waiter)
    node.engine.loader.pump()
    node.run(12.0)
    assert node.source.ahead and node.source.jobs
    before = len(node.store.fetched)
    prompt = node.ask(0, 1)
    assert (
        node.store.fetched[before][:NAMESPACE_BYTES] == space.digest and len(node.store.fetched) == before + 1
    )
    node.run(14.0, lambda: prompt in node.came)
    assert node.came[prompt][0] < 13.6


def test_one_job_that_hangs_trips_though_others_came_back() -> None:
    """Nothing is begun behind it, so that it shows."""
    node = StoreNode([2 * MIB], 100e6, 0.02)
    for _ in range(4):
        node.ask(0, 500)
    node.run(3.0)
    node.store.loses_one = True
    node.run(1000.0, lambda: not node.source.loads.closed)
    drain_s = node.source.window.size_bytes / 100e6
    assert (
        node.store.now_s
        <= 3.0 + LATE_SHARE * STALL_S + drain_s + STALL_S + 8 * MIB / BUCKET_LEAST_BYTES_PER_S + 3 * LOOK_S
    )


def test_what_comes_back_is_progress() -> None:
    """However long jobs wait for each other, as long as one after the other comes back."""
    now_s = 0.0
    breaker = Breaker("test", 1.0, lambda: now_s, lambda: None)
    jobs = [breaker.begin(1) for _ in range(5)]
    for job in jobs:
        breaker.start(job)
    for job in jobs[:4]:
        now_s += 0.9
        breaker.look()
        assert breaker.state == CLOSED and breaker.is_late
        breaker.end(job, True)
    now_s += 1.1
    breaker.look()
    assert breaker.trips == 1


def test_a_stall_is_judged_by_bytes() -> None:
    """The time for its own bytes at the least speed is not held against a job."""
    now_s = 0.0
    breaker = Breaker("test", 1.0, lambda: now_s, lambda: None, least_bytes_per_s=1e6)
    job = breaker.begin(10_000_000)
    breaker.start(job)
    now_s = 10.9
    breaker.look()
    assert breaker.closed and breaker.is_late
    now_s = 11.1
    breaker.look()
    assert not breaker.closed


def test_a_queue_takes_turns_and_each_block_once() -> None:
    """Blocks of several lines come once; lines take turns; what is discarded does not come."""
    space = Namespace(0, NamespaceSpec(b"q" * 16, 100, 8, 16))
    blocks = [Block(space, number.to_bytes(8, "big")) for number in range(8)]
    queue = LoadQueue()
    for block in blocks[:5]:
        queue.add(block, "long")
    for block in (blocks[3], blocks[6], blocks[7]):
        queue.add(block, "short")
    queue.discard(blocks[6])
    assert (len(queue), queue.size_bytes, queue.lines) == (6, 600, 2)
    taken = []
    while (block := queue.first()) is not None:
        assert queue.take() is block
        queue.end_turn()
        taken.append(blocks.index(block))
    assert taken == [0, 3, 1, 7, 2, 4]
    assert (len(queue), queue.size_bytes, queue.lines) == (0, 0, 0)


def test_what_others_took_is_not_looked_at_when_nothing_waits() -> None:
    """A line whose blocks were all taken from another one goes with the last of them, and is not walked through."""
    space = Namespace(0, NamespaceSpec(b"q" * 16, 100, 8, 16))
    queue = LoadQueue()
    for number in range(1000):
        block = Block(space, number.to_bytes(8, "big"))
        queue.add(block, "short")
        queue.add(block, "long")
    while len(queue):
        assert queue.first() is not None
        queue.take()  # without an end of its turn: all come from the first line
    assert queue.lines == 0


def test_a_long_line_is_not_searched_for_garbage() -> None:
    """However many blocks wait, the garbage collector has nothing of theirs to look at."""
    space = Namespace(0, NamespaceSpec(b"q" * 16, 100, 8, 16))
    queue, before = LoadQueue(), set(map(id, gc.get_objects()))
    for number in range(5000):
        queue.add(Block(space, number.to_bytes(8, "big")), "long")
    made = [found for found in gc.get_objects() if id(found) not in before and found is not before]
    assert len(queue) == 5000 and max(len(gc.get_referents(found)) for found in made) < 100


def test_small_stalls_have_small_windows() -> None:
    """However short a stall is set, what goes on as it did does not hang."""
    for stall_s in (0.2, 1.0, 30.0):
        node = StoreNode([256 * KIB], 50e6, 0.005, limits=SharedLimits(64, 64, stall_s))
        for _ in range(4):
            node.ask(0, 300)
        node.run(100.0, lambda node=node: len(node.came) == 4)
        assert node.source.loads.trips == 0 and len(node.came) == 4
