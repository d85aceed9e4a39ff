"""Breakers: when they trip, what that means for everybody, and how a tier comes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.health.breaker import (
    BREAKER_FAILURES_MAX,
    BREAKER_PAUSE_S_MAX,
    BREAKER_PAUSE_S_MIN,
    CLOSED,
    OPEN,
    PROBING,
    Breaker,
)
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking, Found
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
RECORD_BYTES = MIB // 2  # four slots a slab of 2 MiB
BLOCK_TOKENS = 16
STALL_S = 1.0


class TimedTier(FaultyDevice):
    """Reads take their time on the test's clock."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.read_s = 0.001
        self.reads = 0
        self.node: Node | None = None

    def read_rows(self, items):  # type: ignore[no-untyped-def]
        answers = super().read_rows(items)
        self.reads += len(items)
        assert self.node is not None
        self.node.now_s += self.read_s * len(items)
        return answers


class Node:
    """An engine with 32 places in DRAM, whose clock the test sets."""

    def __init__(self, path: Path) -> None:
        self.now_s = 1000.0
        self.others = 0
        self.tier = TimedTier(300)
        self.tier.node = self
        self.arena = open_arena(path, 16 * MIB, 2 * MIB, 16384)
        self.io = SteppedIo()
        self.engine = Engine(
            self.arena,
            [Drive(self.tier, self.io, stall_s=STALL_S)],
            NamespaceRegistry(),
            self.io,
            clock=lambda: self.now_s,
        )
        self.engine.adopt()
        self.io.run()
        self.watch = self.engine.watches[0]
        self.member = self.engine.nvme.members[0]
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(NamespaceSpec(b"a" * 16, RECORD_BYTES, 8, BLOCK_TOKENS))

    def names(self, chain: str, count: int = 10) -> bytes:
        return b"".join(f"{chain}{depth:02d}".encode().ljust(8) for depth in range(count))

    def put(self, chain: str, count: int = 10) -> int:
        self.now_s += 0.01
        hashes = self.names(chain, count)
        answer = self.engine.reserve(self.session, self.space, hashes, b"")
        size = RECORD_BYTES
        sums = b"".join(digest(self.arena.mapping[s.offset : s.offset + size]) for s in granted(answer))
        if granted(answer):
            self.engine.commit(self.session, answer.lease, [s.position for s in granted(answer)], sums)
        return len(granted(answer))

    def find(self, chain: str, block_s: float = 0.0) -> Found:
        """A lookup of an engine that computes a block in so long."""
        rate = BLOCK_TOKENS / block_s if block_s else 0.0
        return self.engine.find([self.space], self.names(chain), Asking(prefill_tokens_per_s=rate))

    def acquire(self, chain: str, answers: list[Acquired]) -> None:
        self.engine.acquire(self.session, self.space, self.names(chain), answers.append)

    def load(self, chain: str) -> int:
        answers: list[Acquired] = []
        self.acquire(chain, answers)
        self.io.run()
        if answers[0].lease:
            self.engine.release(self.session, answers[0].lease)
        return sum(slot is not None for slot in held(answers[0]))

    def evict(self) -> None:
        """Others take the place of everything in DRAM."""
        for _ in range(4):
            self.others += 1
            self.put(f"{self.others}-")
            self.io.run()

    def places(self, chain: str) -> list[int]:
        return list(finish(self.engine.residency_steps(self.space, self.names(chain))))

    def wait(self, seconds: float, step_s: float = 0.25) -> None:
        """Time passes, and what is due is done."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self.watch.look()
            self.engine.tick()
            self.io.run()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Chains a and b are on NVMe only, x is in DRAM, too."""
    made = Node(tmp_path / "arena")
    for chain in "abcdex":
        made.put(chain)
        made.io.run()
    made.put("y", 2)
    made.io.run()
    assert set(made.places("a") + made.places("b")) == {IN_NVME}
    assert made.engine.check() == []
    yield made
    made.tier.hangs, made.tier.fault_rate, made.tier.read_s = False, 0.0, 0.001
    made.wait(200.0, 5.0)
    assert made.member.loads.closed and not made.engine.blocks.writes.refused
    made.engine.close_session(made.session)
    assert made.engine.check() == []
    made.arena.close(unlink=True)


def breaker(clock: list[float], heard: list[str]) -> Breaker:
    made = Breaker("test", STALL_S, lambda: clock[0], lambda: heard.append(made.state), random.Random(1))
    return made


def fail(made: Breaker) -> None:
    job = made.begin(1)
    made.start(job)
    made.end(job, is_well=False)


def test_failures_in_a_row_trip_and_a_success_between_forgives() -> None:
    """Three failures trip; two, a success and two more do not."""
    heard: list[str] = []
    made = breaker([0.0], heard)
    for is_well in (False, False, True, False, False):
        made.end(made.begin(1), is_well)
    assert made.state == CLOSED
    fail(made)
    assert (made.state, made.trips, heard) == (OPEN, 1, [OPEN])


def test_a_job_that_hangs_trips_but_not_one_that_waits_for_a_thread() -> None:
    """The time counts from when a thread began."""
    clock = [0.0]
    made = breaker(clock, [])
    job = made.begin(1)
    clock[0] = 100.0
    made.look()
    assert made.state == CLOSED
    made.start(job)
    clock[0] += STALL_S * 1.001
    made.look()
    assert made.state == OPEN and "did not come back" in made.reason
    made.end(job, is_well=True)


def test_pauses_double_up_to_their_limit_and_start_small_after_a_calm_time() -> None:
    """Each failed probe doubles the pause; a trip soon after a recovery goes on from there."""
    clock = [0.0]
    made = breaker(clock, [])
    for _ in range(BREAKER_FAILURES_MAX):
        fail(made)
    pauses = []
    for _ in range(9):
        pauses.append(made.retry_in_s())
        assert not made.may_probe()
        clock[0] += made.retry_in_s()
        assert made.may_probe()
        job = made.begin(1, probe=True)
        assert made.state == PROBING
        made.end(job, is_well=False)
    assert BREAKER_PAUSE_S_MIN <= pauses[0] <= 1.2 * BREAKER_PAUSE_S_MIN
    assert all(1.6 < late / soon < 2.5 for soon, late in pairwise(pauses[:6]))
    assert BREAKER_PAUSE_S_MAX <= pauses[-1] <= 1.2 * BREAKER_PAUSE_S_MAX
    clock[0] += made.retry_in_s()
    made.end(made.begin(1, probe=True), is_well=True)
    assert made.state == CLOSED
    for calm_s, soon in ((1.0, False), (1000.0, True)):
        clock[0] += calm_s
        for _ in range(BREAKER_FAILURES_MAX):
            fail(made)
        assert (made.retry_in_s() < 2 * BREAKER_PAUSE_S_MIN) == soon
        clock[0] += made.retry_in_s()
        made.end(made.begin(1, probe=True), is_well=True)


def test_nothing_is_probed_while_an_old_job_hangs() -> None:
    """However long the pause is over: first every job from before the trip must be back."""
    clock = [0.0]
    made = breaker(clock, [])
    job = made.begin(1)
    made.start(job)
    clock[0] = 5.0
    made.look()
    clock[0] = 500.0
    assert not made.may_probe()
    made.end(job, is_well=True)
    assert made.state == OPEN and made.may_probe()


def test_a_probe_that_hangs_opens_again() -> None:
    """It counts as failed, and its late end changes nothing."""
    clock = [0.0]
    made = breaker(clock, [])
    for _ in range(BREAKER_FAILURES_MAX):
        fail(made)
    clock[0] = 10.0
    job = made.begin(1, probe=True)
    made.start(job)
    clock[0] += STALL_S * 1.001
    made.look()
    assert made.state == OPEN and made.trips == 1
    made.end(job, is_well=True)
    assert made.state == OPEN


def test_a_dead_tier_costs_one_timeout_and_not_one_per_request(node: Node) -> None:
    """While reads hang, those who wait are told at the trip; a hundred later requests wait for nothing."""
    node.tier.hangs = True
    answers: list[Acquired] = []
    node.acquire("a", answers)
    node.acquire("b", answers)
    node.io.run()
    assert not answers
    begun_s = node.now_s
    while not answers:
        node.now_s += 0.25
        node.watch.look()
    assert node.now_s - begun_s <= STALL_S + 0.25
    assert [held(answer) for answer in answers] == [[None] * 10] * 2
    for _ in range(100):
        found = node.find("a")
        assert found == Found(0, 10, outcomes.UNAVAILABLE)
        node.acquire("a", answers)
    assert len(answers) == 102 and node.member.loads.trips == 1
    assert finish(node.engine.prefetch_steps(node.space, node.names("b"))) == 0
    assert node.engine.check() == []
    assert node.put("n") == 10
    assert node.find("n") == Found(10, 10, outcomes.UNAVAILABLE)  # DRAM is used all the same


def test_it_closes_when_the_tier_recovers_and_nothing_is_lost(node: Node) -> None:
    """After the reads that hung came back, a probe closes the breaker, and every block is loaded again."""
    node.tier.hangs = True
    answers: list[Acquired] = []
    node.acquire("a", answers)
    node.io.run()
    node.wait(2.0)
    assert node.member.loads.state == OPEN
    node.tier.hangs = False
    node.io.run()  # the hung reads come back, into their own slots
    assert node.engine.check() == []
    probes = node.engine.counters.nvme_probes
    node.wait(3.0)
    assert node.member.loads.state == CLOSED
    assert node.engine.counters.nvme_probes == probes + 1
    assert node.load("a") == 10 and node.load("b") == 10
    assert node.engine.counters.promote_failed == 0


def test_slots_of_hanging_reads_are_not_used_by_others(node: Node) -> None:
    """Until a read comes back nobody else gets its slot, however many blocks want room."""
    node.tier.hangs = True
    answers: list[Acquired] = []
    node.acquire("a", answers)
    node.io.run()
    node.wait(2.0)
    underway = node.engine.loader.underway
    assert underway > 0
    stored = sum(node.put(f"n{number}"[:2], 10) for number in range(4))
    assert stored > 0
    used = node.arena.stats().classes[0].used
    assert used == node.arena.stats().records + underway
    node.tier.hangs = False
    node.io.run()
    assert node.engine.check() == []


def test_read_errors_trip_and_lose_no_block(node: Node) -> None:
    """A tier that fails every read is left alone after three; its blocks are there when it recovers."""
    node.tier.fault_rate = 1.0
    assert node.load("a") == 0
    assert node.member.loads.state == OPEN and node.member.loads.reason == "3 failures in a row"
    assert set(node.places("a")) == {IN_NVME}
    node.tier.fault_rate = 0.0
    node.wait(5.0)
    assert node.load("a") == 10


def test_a_record_that_fails_twice_is_dropped_without_a_trip(node: Node) -> None:
    """One bad record among good ones is given up at its second failure; the breaker stays closed."""
    bad = b"a" * 16 + b"a09".ljust(8)
    true_get = node.tier.read_rows

    def get(items):  # type: ignore[no-untyped-def]
        answers = true_get(items)
        return [
            (type(a[0]).FAILED, None) if key == bad else a
            for (_, key, _), a in zip(items, answers, strict=True)
        ]

    node.tier.read_rows = get  # type: ignore[method-assign]
    assert node.load("a") == 9
    assert node.places("a")[9] == IN_NVME
    node.load("a")
    assert node.places("a")[9] == 0
    assert node.member.loads.closed
    del node.tier.read_rows


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_stores_that_fail_or_hang_let_dram_go_on(node: Node, how: str) -> None:
    """With stores failing or hanging new blocks find room all the same, and are written when it recovers."""
    node.tier.fault_rate, node.tier.hangs = float(how == "fails"), how == "hangs"
    for number in range(8):
        node.put(f"n{number}")
        node.io.run()
        node.wait(0.5)
    assert node.member.stores.state != CLOSED
    assert node.put("o", 6) == 6
    assert node.engine.check() == []
    node.tier.fault_rate, node.tier.hangs = 0.0, False
    node.wait(40.0, 0.5)
    assert node.member.stores.state == CLOSED
    assert all(place & IN_NVME for place in node.places("o")[:6])
    assert not node.engine.blocks.writes.refused


def test_a_disk_that_cannot_be_written_is_still_read(node: Node) -> None:
    """The breaker of stores does not keep loads from NVMe."""
    node.engine.nvme.members[0].stores._trip("test")
    assert not node.engine.blocks.writes.accepting
    assert node.load("a") == 10


def test_a_slow_tier_is_refused_and_wins_back(node: Node) -> None:
    """Ten times slower than computing it is refused for that reason; fast again, it is used again, by probes alone."""
    assert node.load("a") == 10
    node.evict()
    assert node.find("a", block_s=0.01) == Found(10, 10, outcomes.SLOWER)
    node.tier.read_s = 0.1
    for _ in range(4):
        assert node.load("a") == 10
        node.evict()
    reads = node.tier.reads
    refused = node.find("b", block_s=0.01)
    assert refused.why == outcomes.SLOWER and refused.usable < refused.held == 10
    assert node.tier.reads == reads, "a user's request was the probe"
    node.tier.read_s = 0.0001
    for _ in range(30):
        if node.find("b", block_s=0.01).usable == 10:
            break
        node.wait(1.0)
    assert node.find("b", block_s=0.01).usable == 10
    assert node.tier.reads > reads
    assert node.engine.counters.refused_slower > 0


def test_nobody_asking_means_no_probe(node: Node) -> None:
    """A refused tier is measured because somebody was refused since, not for ever."""
    node.load("a")
    node.tier.read_s = 0.1
    for _ in range(4):
        node.evict()
        node.load("a")
    assert node.find("b", block_s=0.001).usable < 10
    node.wait(30.0)
    probes = node.engine.counters.nvme_probes
    assert probes > 0
    node.wait(300.0, 5.0)
    assert node.engine.counters.nvme_probes == probes


def test_a_probe_that_finds_a_corrupt_record_books_it(node: Node) -> None:
    """The index forgets what a probe found damaged, and the breaker goes by the tier having answered."""
    node.tier.hangs = True
    answers: list[Acquired] = []
    node.acquire("a", answers)
    node.io.run()
    node.wait(2.0)
    for depth in range(10):
        node.tier.flip(b"a" * 16 + f"a{depth:02d}".encode().ljust(8))
    node.tier.hangs = False
    node.io.run()
    for depth in range(10):
        key = b"a" * 16 + f"b{depth:02d}".encode().ljust(8)
        node.engine.loader.devices[0].wanted(key)
        node.tier.flip(key)
    node.wait(5.0)
    assert node.member.loads.closed
    assert node.engine.counters.corrupt_nvme > 0
    assert node.engine.check() == []


def test_while_loads_wait_one_store_is_under_way(node: Node) -> None:
    """Loads go before stores: the demoter keeps to one job until they are through."""
    answers: list[Acquired] = []
    node.acquire("a", answers)
    assert node.member.speed.waiting_bytes
    node.put("n", 2)
    node.put("m", 2)
    assert node.member.stores.jobs == 1
    node.io.run()
    assert node.member.stores.jobs == 0 and not node.engine.blocks.writes.waiting


def test_status_tells_breakers_speeds_and_queues(node: Node) -> None:
    """What kvstore status shows of a sick disk."""
    node.load("a")
    node.tier.fault_rate = 1.0
    node.load("b")
    told = node.engine.status()
    breakers = {str(b["name"]): b for b in told["breakers"]}  # type: ignore[attr-defined]
    assert breakers["nvme loads"]["state"] == OPEN and breakers["nvme loads"]["trips"] == 1
    assert breakers["nvme stores"]["state"] == CLOSED
    (speed,) = told["speeds"]  # type: ignore[misc]
    assert speed["bytes_per_s"] > 0 and speed["samples"] > 0
    assert IN_DRAM in {place & IN_DRAM for place in node.places("a")}
