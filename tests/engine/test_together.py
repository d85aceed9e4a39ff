"""Blocks that would be the next victims in turn leave together: fewer steps, the same ones."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.traffic import SHAPES
from kvstore.constants import REUSE_AGE_MIN
from kvstore.index.block import Block
from kvstore.policies.base import Policy
from kvstore.policies.learned import Judged, Learned
from kvstore.policies.learned.experts import Density, Judge, Youngest
from kvstore.replay.cell import Node
from kvstore.residency.residency import Residency


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


@pytest.mark.parametrize("shape", ["chat", "agents", "study"])
def test_the_same_blocks_leave_as_one_by_one(
    shape: str, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every request of made-up traffic both hold the same blocks, and the books balance."""
    together, alone = Node(300, judged_by(Youngest)), Node(300, judged_by(Youngest))
    several = Judged.together
    for number, request in enumerate(SHAPES[shape](5, 6000)):
        hashes = name(request.hashes[:200])
        monkeypatch.setattr(Judged, "together", several)
        hits = together.ask(number, hashes)
        monkeypatch.setattr(Judged, "together", Policy.together)
        assert alone.ask(number, hashes) == hits
        spaces = [
            dict(node.engine.namespaces.get(node.space).blocks.walk_items()) for node in (together, alone)
        ]
        assert spaces[0].keys() == spaces[1].keys()
    assert together.engine.counters.evicted_dram == alone.engine.counters.evicted_dram == sum(runs) / 2
    assert max(runs) > 10
    assert together.engine.check() == alone.engine.check() == []


def test_a_choosy_judge_is_asked_for_each(runs: list[int]) -> None:
    """Who may refuse the next new block makes room for one at a time."""
    node = Node(200, judged_by(Density))
    for number in range(40):
        node.ask(number, name(range(1000 * number, 1000 * number + 30)))
    assert runs and max(runs) == 1
    assert node.engine.check() == []


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
    assert [b.hash for b in policy.together(last, 9)] == [name([53])]  # of another kind
    assert [b.hash for b in policy.together(tail, 9)] == [
        name([n]) for n in (52, 51, 50)
    ]  # then comes the fork
    assert [b.hash for b in policy.together(tail, 2)] == [name([n]) for n in (52, 51)]
    assert [b.hash for b in policy.together(fork, 9)] == [name([n]) for n in (61, 60)]
    node.engine.acquire(node.session, node.space, name([*stem, 50, 51]), lambda answer: None)
    assert [b.hash for b in policy.together(tail, 9)] == [name([52])]
