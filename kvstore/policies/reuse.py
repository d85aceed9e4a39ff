"""What is learned about reuse: hits to be expected for the time that a block stays.

    age of a block ──▶ │ 0…16│ 16…23 │ 23…32 │ 32…45 │ …  │        for each *kind* of block:
    blocks that got there│  900 │   880 │   850  │  …            risk
    … and were used then │   20 │    30 │    25  │  …            used

The clock counts the blocks that were asked for: what a block competes with is other
requests, not seconds, and a trace that is replayed at another speed is the same trace.

A kind is what all blocks of one request have in common: how often they were used (uses long
ago count less), the turn of the conversation, the size of the prompt; the last blocks of
prompts are kinds of their own (partly filled ones never come back, and this is how it is noticed). From used/risk
follows the chance of reuse at every age, and from that the *density* of a block of that
age: the best, over all times one could still keep it, of

    chance that it is used until then  ÷  time it is expected to take until used or dropped

The momentary chance would be wrong: it is lowest just after an answer, when people think.

* Kinds with little experience borrow from kinds used as often, and these from all.
* Counts are halved when they get large: new habits replace old ones.
* Blocks that left are remembered as ghosts, a bounded number of them, because a policy
  that learned only from what it kept would never find out what it should have kept.

The unit of work is the *stretch*: neighbours of one request with the same history. It is
counted, and grows older, as one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from zlib import crc32

from kvstore.blocks import Block
from kvstore.constants import (
    REUSE_AGE_MAX,
    REUSE_AGE_MIN,
    REUSE_AGES_PER_DOUBLING,
    REUSE_EVIDENCE_BLOCKS_MAX,
    REUSE_GHOSTS_MIN,
    REUSE_GHOSTS_SHARE,
    REUSE_LEARN_EVERY,
    REUSE_PRIOR_CHANCE,
    REUSE_PRIOR_FIRST_AGE,
    REUSE_PRIOR_STRETCHES,
    REUSE_SHARED_USES,
    REUSE_USES_FADE,
    REUSE_USES_HELD_MIN,
)
from kvstore.namespaces import Namespace
from kvstore.prompts import Prompt
from tiers.base import NAMESPACE_BYTES


def _ages() -> list[float]:
    ages = [float(REUSE_AGE_MIN)]
    while ages[-1] < REUSE_AGE_MAX:
        ages.append(ages[-1] * 2 ** (1 / REUSE_AGES_PER_DOUBLING))
    return ages


AGE_STARTS = _ages()  # AGE_STARTS[n] is where age n + 1 begins
AGES = len(AGE_STARTS) + 1
_STARTS = [0.0, *AGE_STARTS]
_WIDTHS = [end - start for start, end in zip(_STARTS, AGE_STARTS, strict=False)] + [AGE_STARTS[-1]]

# Before anything is known the younger is worth more: the chance falls with age, as under LRU.
_PRIOR = [REUSE_PRIOR_CHANCE * REUSE_PRIOR_FIRST_AGE] + [REUSE_PRIOR_CHANCE] * (AGES - 1)

TURN_GROUPS, SIZE_GROUPS = 6, 6
_USES_GROUP = [0, 0, 1, 2, 2, 3, 3, 3, 3] + [4] * 8 + [5] * 16 + [6] * 32  # 1, 2, 3–4, 5–8, …, more
USES_GROUPS = 8
USES_WITH_DETAIL = 4  # groups of uses that are told apart by turn and size, too
_PLAIN = USES_WITH_DETAIL * TURN_GROUPS * SIZE_GROUPS  # the first kind without
_LAST = _PLAIN + USES_GROUPS - USES_WITH_DETAIL  # the first kind of last blocks
KINDS = _LAST + USES_GROUPS
RELATIVES = USES_GROUPS + 1  # kinds used as often, and all last blocks
_TURN_GROUP = [0, 0, 1, 2, 3, 4, 4]  # 1, 2, 3, 4, 5–6, more
USES_COUNTED_MAX = 255.0
TURNS_COUNTED_MAX = 8


def _uses_group(uses: float) -> int:
    whole = int(uses + 0.5)
    return _USES_GROUP[whole] if whole < len(_USES_GROUP) else USES_GROUPS - 1


def kind_of(uses: float, turn: int, blocks: int) -> int:
    """The kind of a block (not the last) of a prompt."""
    group = _uses_group(uses)
    if group >= USES_WITH_DETAIL:
        return _PLAIN + group - USES_WITH_DETAIL
    turns = _TURN_GROUP[turn] if turn < len(_TURN_GROUP) else TURN_GROUPS - 1
    sizes = min(blocks.bit_length() // 2, SIZE_GROUPS - 1)
    return (group * TURN_GROUPS + turns) * SIZE_GROUPS + sizes


def kind_of_last(uses: float) -> int:
    """The kind of the last block of a prompt."""
    return _LAST + _uses_group(uses)


def _uses_group_of(kind: int) -> int:
    if kind >= _LAST:
        return kind - _LAST
    if kind >= _PLAIN:
        return USES_WITH_DETAIL + kind - _PLAIN
    return kind // (TURN_GROUPS * SIZE_GROUPS)


USES_GROUP_OF = [_uses_group_of(kind) for kind in range(KINDS)]
RELATIVES_OF = [USES_GROUP_OF[kind] if kind < _LAST else USES_GROUPS for kind in range(KINDS)]
UNKNOWN = kind_of(1, 1, 8)  # blocks that a restart found: of somebody's first turn, for all we know

EVERY_HASH = 1 << 32  # above all fingerprints


def fingerprint(key: bytes) -> int:
    """Of a block's key, the same in every process; by it samples are drawn."""
    return crc32(key[NAMESPACE_BYTES:])


class Stretch:
    """Blocks of one request that are alike. `alive`: those not used since, held or ghosts."""

    __slots__ = ("alive", "asked_turn", "kind", "touched", "turn", "uses")

    def __init__(self, touched: int, kind: int, uses: float, turn: int, asked_turn: int) -> None:
        self.touched = touched
        self.kind = kind
        self.uses = uses
        self.turn = turn  # of the request that brought the blocks
        self.asked_turn = asked_turn  # of the request that used them last
        self.alive = 0

    def next_turn(self) -> int:
        """The turn of a request that goes on behind these blocks."""
        return 1 if self.uses >= REUSE_SHARED_USES else min(self.turn + 1, TURNS_COUNTED_MAX)


Use = tuple[bytes, Stretch]  # key of a block, and what its use was


class Tally:
    """Of one kind: how many blocks reached each age, how many were used in it. hits: the chance that
    one is ever used again, as long as ages are counted."""

    __slots__ = ("density", "hits", "risk", "used")

    def __init__(self) -> None:
        self.risk = [0.0] * AGES
        self.used = [0.0] * AGES
        self.learn(_PRIOR)

    def learn(self, chance: Sequence[float]) -> None:
        """What follows from the chance of use within each age."""
        self.density = _densities(chance)
        self.hits = 1.0 - math.prod(1.0 - now for now in chance)

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
    """For each age: the best ratio of hits to time, over all times to keep the block from here on."""
    answer = []
    for start in range(AGES):
        left, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for age in range(start, AGES):
            now = left * chance[age]
            hits += now
            time += (left - now / 2) * (_WIDTHS[age] / 2 if age == start else _WIDTHS[age])
            left -= now
            if hits > best * time:
                best = hits / time
            elif left < best * time - hits:  # even sure hits at once would not make it better
                break
        answer.append(best)
    return answer


class Reuse:
    """The experience of all tiers of one daemon, and the memory of blocks that left."""

    def __init__(self) -> None:
        self.now = 0  # the clock: blocks asked for so far
        self.held = 0  # blocks with a stretch that are no ghosts
        self._tallies = [Tally() for _ in range(KINDS)]
        self._ghosts: OrderedDict[bytes, Stretch] = OrderedDict()
        self._aging: list[deque[Stretch]] = [deque() for _ in range(AGES)]
        self._requests = 0
        self._stretches = self._blocks = 0.0  # so far, halved now and then: how long stretches are
        self._learn_next = 0
        self._priors: list[list[float]] = [list(_PRIOR) for _ in range(RELATIVES)]

    # -- what happens --

    def observe(self, run: Sequence[Block], prompt: Prompt, below: int) -> list[Use]:
        """A request used these blocks, or has just brought them. Answers the uses of a sample."""
        self._begin(len(run))
        olds = [block.stretch or self._ghosts.pop(block.key, None) for block in run]
        prompt.turn = self._turn_of(run[0], olds, prompt)
        sample: list[Use] = []
        before: Stretch | None = None
        current: Stretch | None = None
        count = 0  # blocks of this stretch so far
        for block, old in zip(run, olds, strict=True):
            if current is None or old is not before or block.hash == prompt.last:
                self._count(before, current, count)
                before, count = old, 0
                current = self._stretch(old, prompt.turn, prompt, block.hash == prompt.last)
            count += 1
            self.held += block.stretch is None
            block.stretch = current
            if crc32(block.hash) < below:
                sample.append((block.key, current))
        self._count(before, current, count)
        return sample

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, below: int) -> list[Use]:
        """A request brought these blocks and they were not let in: ghosts from the start."""
        self._begin(len(hashes))
        sample: list[Use] = []
        before: Stretch | None = None
        current: Stretch | None = None
        count = 0
        for block_hash in hashes:
            key = namespace.digest + block_hash
            old = self._ghosts.pop(key, None)
            if old is not None:
                prompt.turn = old.next_turn()
            if current is None or old is not before or block_hash == prompt.last:
                self._count(before, current, count)
                before, count = old, 0
                current = self._stretch(old, prompt.turn or 1, prompt, block_hash == prompt.last)
            count += 1
            self._ghosts[key] = current
            if crc32(block_hash) < below:
                sample.append((key, current))
        self._count(before, current, count)
        self._trim_ghosts()
        return sample

    def forgotten(self, block: Block) -> None:
        """No tier has the block any more: from now on it is a ghost."""
        stretch, block.stretch = block.stretch, None
        if stretch is None:
            return
        self.held -= 1
        self._ghosts[block.key] = stretch
        self._trim_ghosts()

    def _trim_ghosts(self) -> None:
        while len(self._ghosts) > max(REUSE_GHOSTS_MIN, self.held // REUSE_GHOSTS_SHARE):
            self._ghosts.popitem(last=False)[1].alive -= 1

    # -- what is expected --

    def density(self, kind: int, touched: int) -> float:
        """Hits to be expected, for the time it takes, of keeping a block of this kind."""
        return self._tallies[kind].density[bisect_right(AGE_STARTS, self.now - touched)]

    def hits(self, kind: int) -> float:
        """The chance that a block of this kind, just used, is ever used again."""
        return self._tallies[kind].hits

    def kind_of_new(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> int:
        """The kind that a block would have which is not here yet."""
        ghost = self._ghosts.get(namespace.digest + block_hash)
        uses = self._uses_after(ghost)
        if block_hash == prompt.last:
            return kind_of_last(uses)
        turn = ghost.next_turn() if ghost is not None else prompt.turn or 1
        prompt.turn = turn  # what follows in this prompt goes on behind it
        return kind_of(uses, turn, prompt.blocks)

    # -- helpers --

    def _begin(self, blocks: int) -> None:
        self.now += blocks
        self._blocks += blocks
        self._requests += 1
        if self._requests % REUSE_LEARN_EVERY == 0:
            self._grow_older()
            self._learn()

    def _turn_of(self, first: Block, olds: Sequence[Stretch | None], prompt: Prompt) -> int:
        """The turn that follows the deepest block of a run which is known, or what came before it."""
        known = next((old for old in reversed(olds) if old is not None), None)
        if known is not None:
            return known.next_turn()
        if prompt.turn:
            return prompt.turn
        parent = first.parent
        return parent.stretch.asked_turn if parent is not None and parent.stretch is not None else 1

    def _stretch(self, old: Stretch | None, turn: int, prompt: Prompt, is_last: bool) -> Stretch:
        uses = self._uses_after(old)
        kind = kind_of_last(uses) if is_last else kind_of(uses, turn, prompt.blocks)
        stretch = Stretch(self.now, kind, uses, old.turn if old is not None else turn, turn)
        self._stretches += 1
        self._aging[0].append(stretch)
        return stretch

    def _uses_after(self, old: Stretch | None) -> float:
        """Uses, this one included. Those before count less, the more was asked for since."""
        if old is None:
            return 1.0
        turnover = REUSE_USES_FADE * max(self.held, REUSE_USES_HELD_MIN)
        return min(1.0 + old.uses * math.exp2((old.touched - self.now) / turnover), USES_COUNTED_MAX)

    def _count(self, old: Stretch | None, new: Stretch | None, blocks: int) -> None:
        """So many blocks of one stretch were used and belong to another one now."""
        if new is None:
            return
        new.alive += blocks
        self._tallies[new.kind].risk[0] += blocks
        if old is not None:
            old.alive -= blocks
            self._tallies[old.kind].used[bisect_right(AGE_STARTS, self.now - old.touched)] += blocks

    def _grow_older(self) -> None:
        """Move stretches that reached the next age there."""
        for age in range(AGES - 2, -1, -1):
            queue, older = self._aging[age], self._aging[age + 1]
            born_until = self.now - AGE_STARTS[age]
            while queue and queue[0].touched <= born_until:
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
            group = RELATIVES_OF[self._learn_next]
            self._learn_next += 1
            if tally.risk[0]:
                tally.learn(chances(tally.used, tally.risk, self._priors[group], self._weight()))
                tally.halve_if_full()
                return
        self._learn_next = 0
        self._learn_priors()

    def _learn_priors(self) -> None:
        groups = [([0.0] * AGES, [0.0] * AGES) for _ in range(RELATIVES)]
        for kind, tally in enumerate(self._tallies):
            if tally.risk[0]:
                used, risk = groups[RELATIVES_OF[kind]]
                for age in range(AGES):
                    used[age] += tally.used[age]
                    risk[age] += tally.risk[age]
        every_used = [sum(used[age] for used, _ in groups) for age in range(AGES)]
        every_risk = [sum(risk[age] for _, risk in groups) for age in range(AGES)]
        weight = self._weight()
        common = chances(every_used, every_risk, _PRIOR, weight)
        self._priors = [chances(used, risk, common, weight) for used, risk in groups]
