"""Ours: several judges of what a block is worth, and a contest between them that never ends.

    request ─▶ Reuse     what kind of block is it, and how often do such blocks come back?
            └▶ Contest   who would have kept the right ones lately?   ─▶ a judge
    no room ─▶ Leaves    the cheapest leaf, as this judge sees it

Leaves go before their parents. A new block that is worth less than the cheapest one held is
not let in. One experience and one contest serve all tiers and size classes: what counts is
what the node has, wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.policies.base import Policies
from kvstore.policies.learned.experts import Judge, all_judges
from kvstore.policies.learned.hazard import Reuse, Use
from kvstore.policies.learned.leaves import LeafFirst
from kvstore.policies.learned.selection import Contest
from kvstore.steps import Steps, finish


class Learned(Policies):
    """All policies of a node, which share one experience."""

    def __init__(self, later: Callable[[Steps[None]], object] = finish) -> None:
        self.reuse = Reuse()
        self.contest = Contest(all_judges(self.reuse))
        super().__init__(lambda bit: Judged(bit, self), later)

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        used = self.reuse.observe(run, prompt, now_s, self.contest.below)
        self._saw(prompt, used, [])

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        refused = self.reuse.refused(namespace, hashes, prompt, self.contest.below)
        self.contest.full()
        self._saw(prompt, [], refused)

    def _saw(self, prompt: Prompt, used: list[Use], refused: list[Use]) -> None:
        lesson = self.contest.saw(prompt, used, refused, self.reuse.held)
        if lesson is not None:
            self.later(lesson)

    def worth(self, block: Block) -> float:
        return self.reuse.hits(block.stretch.kind) if block.stretch is not None else 0.0

    def forgotten(self, run: Sequence[Block], names: Sequence[int]) -> None:
        self.reuse.forgotten(run, names)
        self.contest.full()


class Judged(LeafFirst):
    """One tier's leaves, as the winner of the contest sees them."""

    def __init__(self, bit: int, policies: Learned) -> None:
        super().__init__(bit, by_kind=True)
        self._reuse = policies.reuse
        self._contest = policies.contest

    @property
    def judge(self) -> Judge:
        return self._contest.judge

    def is_choosy(self) -> bool:
        return self.judge.choosy

    def admits(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> bool:
        worth = self.leaves.cheapest(self.judge)
        if worth is None:
            return True
        return worth <= self.judge.worth_of_new(self._reuse.kind_of_new(namespace, block_hash, prompt))
