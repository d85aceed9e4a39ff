"""A level of another region behind that of our own: what it adds, and that it takes nothing away."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.health.measuring import PROBE_PAUSE_S_MAX
from kvstore.index import forest
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking, Found
from kvstore.movement.shared import SharedLimits
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Acquired
from tests.engine.fakes import SteppedIo, held
from tests.engine.shared_memory import SharedMemoryLevel
from tests.engine.test_shared_levels import MIB, SIZE, SPACE, Timers, content, fill, hashes, name
from tiers.dram.arena import open_arena

HOME, FAR = 60, 100  # blocks that each level has
FAST_S = 0.001  # the latency of home


class Steady(random.Random):
    """Requests take as long as they take on average."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Measured(SharedMemoryLevel):
    """Nothing is known of its speed but what loads show."""

    def __init__(self, timers: Timers, name: str, blocks: int, is_far: bool) -> None:
        super().__init__(timers.later, FAST_S, limits=SharedLimits(stall_s=10.0), name=name)
        self.is_far = is_far
        self._chance = Steady(1)
        fill(self, blocks)

    def takes(self, latency_s: float) -> None:
        self._latency_s = latency_s


class Node:
    """An engine with a bucket of its own region, which has 60 blocks of a chain, and one of another region, which has 100."""

    def __init__(self, path: Path) -> None:
        self.timers = Timers()
        self.home = Measured(self.timers, "object", HOME, False)
        self.far = Measured(self.timers, "read-through na", FAR, True)
        self.arena = open_arena(path, 16 * MIB, 2 * MIB, SIZE)
        self.engine = Engine(
            self.arena, [], NamespaceRegistry(), SteppedIo(), clock=lambda: self.timers.now_s, shared=[self.home, self.far]
        )  # fmt: skip
        self.engine.adopt()
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(SPACE)
        self.answers: list[Acquired] = []

    def find(self, block_s: float = 0.0, ticket: int = 0) -> Found:
        """Ask for 120 blocks, each of which takes so long to compute; 0: nobody knows."""
        asking = Asking(ticket, False, 120 * 16, 0, 16 / block_s if block_s else 0.0)
        found = self.engine.find([self.space], hashes(0, 120), asking)
        self.engine.book([self.space], hashes(0, 120), found, asking)
        return found

    def load(self, first: int, end: int) -> int:
        """How many blocks of this run came, each of them right."""
        parent = name(first - 1) if first else b""
        lease = self.engine.acquire(self.session, self.space, hashes(first, end), self.answers.append, parent)
        self.timers.run(15.0)
        self.engine.look()
        lease.expire()
        answer = self.answers.pop()
        slots = held(answer)
        for number, slot in zip(range(first, end), slots, strict=True):
            if slot is not None:
                assert self.arena.mapping[slot.offset : slot.offset + SIZE] == content(number), "wrong bytes"
        if answer.lease:
            self.engine.release(self.session, answer.lease)
        return sum(slot is not None for slot in slots)

    def forget(self) -> None:
        """Empty DRAM, so that everything is asked of the levels again."""
        namespace = self.engine.namespaces.get(self.space)
        for block in forest.all_leaves_first(namespace):
            if block is not None:
                self.engine.blocks.drop(block, outcomes.EXPIRED)

    def tokens(self) -> dict[str, int]:
        (total,) = self.engine.accounts.totals.since(0.0)
        return {which: count for which, count in zip(outcomes.NAMES, total.tokens, strict=True) if count}

    def trips(self) -> dict[str, int]:
        return {source.name: source.loads.status()["trips"] for source in self.engine.loader.shared}  # type: ignore[misc]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena")
    yield made
    made.engine.close_session(made.session)
    made.timers.run(1000.0)
    assert made.engine.check() == []
    made.arena.close(unlink=True)


def test_another_region_goes_on_where_home_ends(node: Node) -> None:
    """Home gives what it has, the other one the rest, with the right bytes; each token is told by where it was, and what came
    is a block of DRAM like any other."""
    assert node.find(ticket=1) == Found(FAR, FAR, shared=FAR, far=FAR - HOME)
    assert node.tokens() == {"shared": HOME * 16, "read_through": (FAR - HOME) * 16, "never_seen": 20 * 16}
    assert node.load(0, FAR) == FAR
    assert (node.home.fetched, node.far.fetched) == (HOME, FAR - HOME)
    assert node.find(ticket=2) == Found(FAR, FAR)
    assert node.tokens()["dram"] == FAR * 16


def test_what_home_has_by_now_comes_from_home(node: Node) -> None:
    """When a mirror has brought the rest, nothing is read through any more."""
    fill(node.home, FAR)
    assert node.find() == Found(FAR, FAR, shared=FAR)
    assert node.load(0, FAR) == FAR and node.far.fetched == 0


def test_home_away_is_read_through(node: Node) -> None:
    """While the bucket at home does not answer, the other region has all of it."""
    node.home.faults.failed = 1.0
    for _ in range(10):
        node.load(0, 8)
    node.forget()
    assert node.find() == Found(FAR, FAR, shared=FAR, far=FAR)
    assert node.load(0, FAR) == FAR


@pytest.mark.parametrize("fault", ["lost", "failed"])
def test_another_region_that_fails_costs_home_nothing(node: Node, fault: str) -> None:
    """After one wait prompts end where home ends; its breaker is its own, and when it works again so do its hits."""
    setattr(node.far.faults, fault, 1.0)
    for _ in range(20):
        node.forget()
        assert node.load(0, FAR) >= HOME
        node.engine.look()
    assert node.find() == Found(HOME, HOME)
    assert node.trips()["object"] == 0 < node.trips()["read-through na"]
    node.forget()
    assert node.find() == Found(HOME, HOME, shared=HOME)
    setattr(node.far.faults, fault, 0.0)
    if fault == "failed":  # lost requests keep their slots
        for _ in range(100):
            node.timers.run(1.0)
            node.engine.look()
        assert node.find() == Found(FAR, FAR, shared=FAR, far=FAR - HOME)


def test_a_far_latency_takes_nothing_from_home(node: Node) -> None:
    """The other region takes 2 s until bytes flow, and 40 blocks are computed in 0.4 s: they are refused, and those at home are not;
    where they take 4 s to compute, they are loaded."""
    node.far.takes(2.0)
    for _ in range(16):  # measures
        for first, end in ((0, 1), (1, HOME), (HOME, HOME + 1), (HOME + 1, FAR)):
            node.load(first, end)
        node.forget()
    assert node.find(block_s=0.01) == Found(HOME, FAR, outcomes.SLOWER, shared=FAR, far=FAR - HOME)
    assert node.find(block_s=0.1).usable == FAR


def test_a_region_that_was_slow_is_measured_again(node: Node) -> None:
    """Refused because it was slow once: records are fetched for nobody, less and less often, until it is fast; then it is used."""
    node.far.takes(2.0)
    for first, end in ((HOME, HOME + 1), (HOME + 1, HOME + 9)):
        node.load(first, end)
    node.forget()
    before = node.far.fetched
    for _ in range(600):
        assert node.find(block_s=0.01).usable == HOME
        node.engine.look()
        node.timers.run(1.0)
    assert 5 < node.far.fetched - before < 30
    before = node.far.fetched
    for _ in range(300):  # nobody wants it
        node.engine.look()
        node.timers.run(1.0)
    assert node.far.fetched - before <= 1
    node.far.takes(FAST_S)
    for _ in range(4 * int(PROBE_PAUSE_S_MAX)):
        usable = node.find(block_s=0.01).usable
        node.engine.look()
        node.timers.run(1.0)
    assert usable == FAR
    assert node.engine.counters.acquired_shared == 9, "what is measured is nobody's hit"
