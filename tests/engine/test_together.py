"""Blocks that would be the next victims in turn leave together: fewer steps, the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from benchmarks.traffic import SHAPES
from kvstore.index.block import Block
from kvstore.policies.base import Policies, Policy
from kvstore.policies.learned import Judged, Learned
from kvstore.policies.learned.experts import Density, Judge, Youngest
from kvstore.policies.learned.hazard import EVERY_HASH, REUSE_AGE_MIN
from kvstore.policies.learned.leaves import LeafFirst
from kvstore.policies.lru import LeafLru
from kvstore.policies.names import SELECTABLE
from kvstore.residency.residency import Residency
from kvstore.steps import Steps, finish
from kvstore.tools.replay.cell import Node
from kvstore.tools.replay.slots import CountedSlots


def name(hashes: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in hashes)


def judged_by(judge: type[Judge]) -> Learned:
    """Ours with one judge only, so that none takes over."""
    family = Learned()
    family.contest = type(family.contest)([Density(family.reuse) if judge is Density else judge()])
    return family


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks left at once, each time."""
    lengths: list[int] = []
    left = Residency.left_dram

    def noting(blocks: Residency, *run: Block, **why: int) -> None:
        lengths.append(len(run))
        left(blocks, *run, **why)

    monkeypatch.setattr(Residency, "left_dram", noting)
    return lengths


@pytest.mark.parametrize(
    "make", [lambda: judged_by(Youngest), lambda: Policies(LeafLru)], ids=["ours", "lru"]
)
@pytest.mark.parametrize("shape", ["chat", "agents", "study"])
def test_the_same_blocks_leave_as_one_by_one(
    shape: str, make: Callable[[], Policies], runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every request of made-up traffic both hold the same blocks, and the books balance."""
    together, alone = Node(300, make()), Node(300, make())
    several = LeafFirst.together
    for number, request in enumerate(SHAPES[shape](5, 6000)):
        hashes = name(request.hashes[:200])
        monkeypatch.setattr(LeafFirst, "together", several)
        hits = together.ask(number, hashes)
        monkeypatch.setattr(LeafFirst, "together", Policy.together)
        assert alone.ask(number, hashes) == hits
        spaces = [
            dict(node.engine.namespaces.get(node.space).blocks.walk_items()) for node in (together, alone)
        ]
        assert spaces[0].keys() == spaces[1].keys()
    assert together.engine.counters.evicted_dram == alone.engine.counters.evicted_dram == sum(runs) / 2
    assert max(runs) > 10
    assert together.engine.check() == alone.engine.check() == []


@pytest.mark.parametrize("name_of_policy", sorted(SELECTABLE))
def test_every_policy_takes_runs_together(name_of_policy: str, runs: list[int]) -> None:
    """Whichever is chosen: what one request brought leaves at once, and not block by block."""
    node = Node(300, SELECTABLE[name_of_policy]())
    for number in range(6):
        node.ask(number, name(range(1000 * number, 1000 * number + 100)))
    assert sum(runs) == node.engine.counters.evicted_dram == 300
    assert len(runs) <= 6
    assert node.engine.check() == []


def test_a_choosy_judge_is_asked_for_each(runs: list[int]) -> None:
    """Who may refuse the next new block makes room for one at a time."""
    node = Node(200, judged_by(Density))
    for number in range(40):
        node.ask(number, name(range(1000 * number, 1000 * number + 30)))
    assert runs and max(runs) == 1
    assert node.engine.check() == []


@pytest.mark.parametrize("judge", [Youngest, Density])
def test_a_reserve_asks_for_no_slot_twice(judge: type[Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs grows with its blocks, and not with their square, however many leave at once."""
    node, asked = Node(600, judged_by(judge)), list[int]()
    reserve = CountedSlots.reserve_run

    def noting(places: CountedSlots, keys: Sequence[bytes], *more: Any) -> list[int]:
        asked.append(len(keys))
        return reserve(places, keys, *more)

    monkeypatch.setattr(CountedSlots, "reserve_run", noting)
    for number in range(12):
        asked.clear()
        node.ask(number, name(range(1000 * number, 1000 * number + 300)))
        assert sum(asked) <= 2 * 300
    assert node.engine.check() == []


def test_a_lesson_is_learned_when_there_is_time() -> None:
    """What the contest learns of a request is left to who drives the policies: a step for each judge."""
    lessons = list[Steps[None]]()
    family = Learned(lessons.append)
    node = Node(100, family)
    for number in range(8):
        node.ask(number, name(range(100 * number, 100 * number + 30)))
    assert len(lessons) == 1 and not any(map(len, family.contest._shadows))
    assert sum(1 for _ in lessons[0]) == 7 * 5
    assert all(map(len, family.contest._shadows))
    node.ask(9, name(range(30)))
    assert len(lessons) == 2


@pytest.mark.parametrize("late", [1, 2, 5])
def test_a_late_lesson_is_fair(late: int) -> None:
    """Judges that keep the same blocks have the same hits, though the sample was thinned out since a request came."""
    lessons = list[Steps[None]]()
    family = Learned(lessons.append)
    node = Node(8192, family)
    for number in range(48):
        prompt = name(range(1000 * (number // 2), 1000 * (number // 2) + 512))  # each is asked for twice
        node.ask(number, prompt)
        if number % late == 0:
            for lesson in lessons:
                finish(lesson)
            lessons.clear()
    shadows = family.contest._shadows[:4]
    assert family.contest.below < EVERY_HASH and shadows[-1].below < EVERY_HASH
    assert len({round(shadow.hits, 3) for shadow in shadows}) == 1 and shadows[0].hits > 0


def test_what_something_else_hangs_on_stays() -> None:
    """A fork, a pin and another use end the blocks that leave with a victim."""
    node = Node(100, judged_by(Youngest))
    stem = list(range(REUSE_AGE_MIN))
    node.ask(0, name([*stem, 50, 51, 52, 53]))
    node.ask(1, name([*stem, 60, 61, 62]))
    policy = node.engine.blocks.dram_policy(node.engine.namespaces.get(node.space))
    block = node.engine.namespaces.get(node.space).blocks.get
    last, tail, fork = block(name([53])), block(name([52])), block(name([61]))
    assert last is not None and tail is not None and fork is not None
    assert [b.hash for b in policy.together(last, 9)] == [
        name([n]) for n in (53, 52, 51, 50)
    ]  # of one request
    assert [b.hash for b in policy.together(tail, 9)] == [
        name([n]) for n in (52, 51, 50)
    ]  # then comes the fork
    assert [b.hash for b in policy.together(tail, 2)] == [name([n]) for n in (52, 51)]
    assert [b.hash for b in policy.together(fork, 9)] == [name([n]) for n in (61, 60)]
    node.engine.acquire(node.session, node.space, name([*stem, 50, 51]), lambda answer: None)
    assert [b.hash for b in policy.together(tail, 9)] == [name([52])]


def test_a_refused_block_is_asked_for_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of which some blocks are let in, the first one that is not ends it."""
    node = Node(100, judged_by(Density))
    node.ask(0, name(range(100)))
    asked: list[bytes] = []

    def admits(policy: Judged, space: object, block_hash: bytes, prompt: object) -> bool:
        asked.append(block_hash)
        return block_hash != name([1003])

    monkeypatch.setattr(Judged, "admits", admits)
    node.ask(1, name(range(1000, 1010)))
    assert asked == [name([number]) for number in (1000, 1001, 1002, 1003)]
    counters = node.engine.counters
    assert (counters.not_admitted, counters.reserve_no_room, counters.evicted_dram) == (1, 7, 3)
    assert node.engine.check() == []
