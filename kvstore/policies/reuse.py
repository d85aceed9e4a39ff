"""What is learned about reuse: hits to be expected per second that a block stays.

    age of a block ──▶ │ 0…1 │ 1…1.4 │ 1.4…2 │ 2…2.8 │ …  │        for each *kind* of block:
    blocks that got there│  900 │   880 │   850  │  …            risk
    … and were used then │   20 │    30 │    25  │  …            used

A kind is what all blocks of one request have in common: how often they were used, the turn
of the conversation, the size of the prompt; the last block of a prompt is a kind of its
own (partly filled ones never come back, and this is how it is noticed). From used/risk
follows the chance of reuse at every age, and from that the *density* of a block of that
age: the best, over all times one could still keep it, of

    chance that it is used until then  ÷  seconds it is expected to take until used or dropped

The momentary chance would be wrong: it is lowest just after an answer, when people think.

* Kinds with little experience borrow from kinds used as often, and these from all.
* Counts are halved when they get large: new habits replace old ones.
* Blocks that left are remembered as ghosts, a bounded number of them, because a policy
  that learned only from what it kept would never find out what it should have kept.

The unit of work is the *stretch*: neighbours of one request with the same history. It is
counted, and grows older, as one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence

from kvstore.blocks import Block
from kvstore.constants import (
    REUSE_AGE_S_MAX,
    REUSE_AGE_S_MIN,
    REUSE_AGES_PER_DOUBLING,
    REUSE_EVIDENCE_BLOCKS_MAX,
    REUSE_GHOSTS_MIN,
    REUSE_GHOSTS_SHARE,
    REUSE_LEARN_EVERY,
    REUSE_PRIOR_CHANCE,
    REUSE_PRIOR_FIRST_AGE,
    REUSE_PRIOR_STRETCHES,
    REUSE_SHARED_USES,
)
from kvstore.namespaces import Namespace
from kvstore.prompts import Prompt


def _ages() -> list[float]:
    ages = [REUSE_AGE_S_MIN]
    while ages[-1] < REUSE_AGE_S_MAX:
        ages.append(ages[-1] * 2 ** (1 / REUSE_AGES_PER_DOUBLING))
    return ages


AGES_S = _ages()  # AGES_S[n] is where age n + 1 begins
AGES = len(AGES_S) + 1
_STARTS_S = [0.0, *AGES_S]
_WIDTHS_S = [end - start for start, end in zip(_STARTS_S, AGES_S, strict=False)] + [AGES_S[-1]]

# Before anything is known the younger is worth more: the chance falls with age, as under LRU.
_PRIOR = [REUSE_PRIOR_CHANCE * REUSE_PRIOR_FIRST_AGE] + [REUSE_PRIOR_CHANCE] * (AGES - 1)

USES_GROUPS, TURN_GROUPS, SIZE_GROUPS = 6, 6, 6
USES_WITH_DETAIL = 4  # groups of uses that are told apart by turn and size, too
LAST_BLOCK = USES_WITH_DETAIL * TURN_GROUPS * SIZE_GROUPS + (USES_GROUPS - USES_WITH_DETAIL)
KINDS = LAST_BLOCK + 1
_USES_GROUP = [0, 0, 1, 2, 2, 3, 3, 3, 3] + [4] * 24  # 1, 2, 3–4, 5–8, 9–32, more
_TURN_GROUP = [0, 0, 1, 2, 3, 4, 4]  # 1, 2, 3, 4, 5–6, more
USES_COUNTED_MAX = 255
TURNS_COUNTED_MAX = 8


def kind_of(uses: int, turn: int, blocks: int) -> int:
    """The kind of a block (not the last) of a prompt."""
    group = _USES_GROUP[uses] if uses < len(_USES_GROUP) else USES_GROUPS - 1
    if group >= USES_WITH_DETAIL:
        return LAST_BLOCK - USES_GROUPS + group
    turns = _TURN_GROUP[turn] if turn < len(_TURN_GROUP) else TURN_GROUPS - 1
    sizes = min(blocks.bit_length() // 2, SIZE_GROUPS - 1)
    return (group * TURN_GROUPS + turns) * SIZE_GROUPS + sizes


def relatives_of(kind: int) -> int:
    """Which group a kind borrows from: the kinds used as often."""
    if kind >= LAST_BLOCK - (USES_GROUPS - USES_WITH_DETAIL):
        return USES_WITH_DETAIL + kind - (LAST_BLOCK - (USES_GROUPS - USES_WITH_DETAIL))
    return kind // (TURN_GROUPS * SIZE_GROUPS)


class Stretch:
    """Blocks of one request that are alike. `alive`: those not used since, held or ghosts."""

    __slots__ = ("alive", "asked_turn", "kind", "touched_s", "turn", "uses")

    def __init__(self, touched_s: float, kind: int, uses: int, turn: int, asked_turn: int) -> None:
        self.touched_s = touched_s
        self.kind = kind
        self.uses = uses
        self.turn = turn  # of the request that brought the blocks
        self.asked_turn = asked_turn  # of the request that used them last
        self.alive = 0

    def next_turn(self) -> int:
        """The turn of a request that goes on behind these blocks."""
        return 1 if self.uses >= REUSE_SHARED_USES else min(self.turn + 1, TURNS_COUNTED_MAX)


class Tally:
    """Of one kind: how many blocks reached each age, how many were used in it."""

    __slots__ = ("density", "risk", "used")

    def __init__(self) -> None:
        self.risk = [0.0] * AGES
        self.used = [0.0] * AGES
        self.density = _densities(_PRIOR)

    def halve_if_full(self) -> None:
        if self.risk[0] > REUSE_EVIDENCE_BLOCKS_MAX:
            self.risk = [count / 2 for count in self.risk]
            self.used = [count / 2 for count in self.used]


def chances(
    used: Sequence[float], risk: Sequence[float], prior: Sequence[float], weight: float
) -> list[float]:
    """The chance of use within each age, neighbours helping each other.

    `prior` counts as much as the evidence of `weight` blocks.
    """
    answer = []
    last = AGES - 1
    for age in range(AGES):
        low, high = max(age - 1, 0), min(age + 1, last)
        hits = used[age] + (used[low] + used[high]) / 2
        seen = risk[age] + (risk[low] + risk[high]) / 2
        chance = (hits + weight * prior[age]) / (seen + weight)
        answer.append(min(chance, 1.0))
    return answer


def _densities(chance: Sequence[float]) -> list[float]:
    """For each age: the best ratio of hits to seconds over all times to keep the block from here on."""
    answer = []
    for start in range(AGES):
        left, hits, seconds, best = 1.0, 0.0, 0.0, 0.0
        for age in range(start, AGES):
            now = left * chance[age]
            hits += now
            seconds += (left - now / 2) * (_WIDTHS_S[age] / 2 if age == start else _WIDTHS_S[age])
            left -= now
            if hits > best * seconds:
                best = hits / seconds
            elif left < best * seconds - hits:  # even sure hits at once would not make it better
                break
        answer.append(best)
    return answer


class Reuse:
    """The experience of all tiers of one daemon, and the memory of blocks that left."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.epoch = 0  # grows when densities change
        self._tallies = [Tally() for _ in range(KINDS)]
        self._ghosts: OrderedDict[bytes, Stretch] = OrderedDict()
        self._held = 0  # blocks of living stretches that are no ghosts
        self._aging: list[deque[Stretch]] = [deque() for _ in range(AGES)]
        self._requests = 0
        self._stretches = self._blocks = 0.0  # so far, halved now and then: how long stretches are
        self._learn_next = 0
        self._priors: list[list[float]] = [list(_PRIOR) for _ in range(USES_GROUPS + 1)]

    # -- what happens --

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        """A request used these blocks, or has just brought them."""
        self._begin(now_s)
        self._blocks += len(run)
        turn = prompt.turn = self._turn_of(run, prompt)
        before: Stretch | None = None
        current: Stretch | None = None
        for block in run:
            old = block.stretch
            if old is None:
                old = self._ghosts.pop(block.key, None)
                self._held += 1
            if current is None or old is not before or block.hash == prompt.last:
                before = old
                current = self._stretch(old, turn, prompt, block.hash == prompt.last)
            current.alive += 1
            if old is not None:
                self._used(old)
            block.stretch = current
            self._tallies[current.kind].risk[0] += 1

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        """A request brought these blocks and they were not let in: ghosts from the start."""
        self._begin(now_s)
        self._blocks += len(hashes)
        before: Stretch | None = None
        current: Stretch | None = None
        for block_hash in hashes:
            key = namespace.digest + block_hash
            old = self._ghosts.pop(key, None)
            if old is not None:
                prompt.turn = old.next_turn()
                self._used(old)
            if current is None or old is not before or block_hash == prompt.last:
                before = old
                current = self._stretch(old, prompt.turn or 1, prompt, block_hash == prompt.last)
            current.alive += 1
            self._ghosts[key] = current
            self._tallies[current.kind].risk[0] += 1
        self._trim_ghosts()

    def forgotten(self, block: Block) -> None:
        """No tier has the block any more: from now on it is a ghost."""
        stretch, block.stretch = block.stretch, None
        if stretch is None:
            return
        self._held -= 1
        self._ghosts[block.key] = stretch
        self._trim_ghosts()

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > max(REUSE_GHOSTS_MIN, self._held // REUSE_GHOSTS_SHARE):
            self._ghosts.popitem(last=False)[1].alive -= 1

    # -- what is expected --

    def density(self, kind: int, touched_s: float) -> float:
        """Hits per second to be expected of keeping a block of this kind."""
        return self._tallies[kind].density[bisect_right(AGES_S, self.now_s - touched_s)]

    def density_of_new(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> float:
        """The same of a block that is not here yet."""
        ghost = self._ghosts.get(namespace.digest + block_hash)
        if block_hash == prompt.last:
            return self._tallies[LAST_BLOCK].density[0]
        turn = ghost.next_turn() if ghost is not None else prompt.turn or 1
        prompt.turn = turn  # what follows in this prompt goes on behind it
        uses = ghost.uses + 1 if ghost is not None else 1
        return self._tallies[kind_of(uses, turn, prompt.blocks)].density[0]

    # -- helpers --

    def _begin(self, now_s: float) -> None:
        self.now_s = now_s
        self._requests += 1
        if self._requests % REUSE_LEARN_EVERY == 0:
            self._grow_older()
            self._learn()

    def _turn_of(self, run: Sequence[Block], prompt: Prompt) -> int:
        """The turn that follows the deepest block of the run which is known, or what came before it."""
        for block in reversed(run):
            known = block.stretch or self._ghosts.get(block.key)
            if known is not None:
                return known.next_turn()
        if prompt.turn:
            return prompt.turn
        parent = run[0].parent
        return parent.stretch.asked_turn if parent is not None and parent.stretch is not None else 1

    def _stretch(self, old: Stretch | None, turn: int, prompt: Prompt, is_last: bool) -> Stretch:
        uses = min(old.uses + 1, USES_COUNTED_MAX) if old is not None else 1
        kind = LAST_BLOCK if is_last else kind_of(uses, turn, prompt.blocks)
        stretch = Stretch(self.now_s, kind, uses, old.turn if old is not None else turn, turn)
        self._stretches += 1
        self._aging[0].append(stretch)
        return stretch

    def _used(self, stretch: Stretch) -> None:
        stretch.alive -= 1
        self._tallies[stretch.kind].used[bisect_right(AGES_S, self.now_s - stretch.touched_s)] += 1

    def _grow_older(self) -> None:
        """Move stretches that reached the next age there."""
        for age in range(AGES - 2, -1, -1):
            queue, older = self._aging[age], self._aging[age + 1]
            born_until_s = self.now_s - AGES_S[age]
            while queue and queue[0].touched_s <= born_until_s:
                stretch = queue.popleft()
                if stretch.alive:
                    self._tallies[stretch.kind].risk[age + 1] += stretch.alive
                    older.append(stretch)
        oldest = self._aging[-1]
        while oldest and not oldest[0].alive:
            oldest.popleft()

    def _weight(self) -> float:
        """How many blocks are as good as REUSE_PRIOR_STRETCHES: neighbours share one fate."""
        if self._stretches > REUSE_EVIDENCE_BLOCKS_MAX:
            self._stretches, self._blocks = self._stretches / 2, self._blocks / 2
        return REUSE_PRIOR_STRETCHES * max(1.0, self._blocks / max(self._stretches, 1.0))

    def _learn(self) -> None:
        """Look at the counts of the next kind that has any; of all, when every kind had its turn."""
        while self._learn_next < KINDS:
            tally = self._tallies[self._learn_next]
            group = relatives_of(self._learn_next)
            self._learn_next += 1
            if tally.risk[0]:
                tally.density = _densities(
                    chances(tally.used, tally.risk, self._priors[group], self._weight())
                )
                tally.halve_if_full()
                self.epoch += 1
                return
        self._learn_next = 0
        self._learn_priors()

    def _learn_priors(self) -> None:
        groups = [([0.0] * AGES, [0.0] * AGES) for _ in range(USES_GROUPS + 1)]
        for kind, tally in enumerate(self._tallies):
            if tally.risk[0]:
                used, risk = groups[relatives_of(kind)]
                for age in range(AGES):
                    used[age] += tally.used[age]
                    risk[age] += tally.risk[age]
        every_used = [sum(used[age] for used, _ in groups) for age in range(AGES)]
        every_risk = [sum(risk[age] for _, risk in groups) for age in range(AGES)]
        weight = self._weight()
        common = chances(every_used, every_risk, _PRIOR, weight)
        self._priors = [chances(used, risk, common, weight) for used, risk in groups]
