"""What is learned about reuse: hits to be expected for the time that a block stays.

    age of a block ──▶ │ 0…16│ 16…23 │ 23…32 │ 32…45 │ …  │        for each *kind* of block:
    blocks that got there│  900 │   880 │   850  │  …            risk
    … and were used then │   20 │    30 │    25  │  …            used

The clock counts the blocks that were asked for: what a block competes with is other
requests, not seconds, and a trace that is replayed at another speed is the same trace.

A kind is what all blocks of one request have in common: how often they were used (uses long
ago count less), the turn of the conversation, the size of the prompt; the last blocks of prompts are
kinds of their own (partly filled ones never come back, and this is how it is noticed). Tried, and no
better: an experience of its own for each of the largest applications, known by their first block.

From used/risk follows the chance of reuse at every age, and from that the *density* of a block of
that age: the best, over all times one could still keep it, of

    chance that it is used until then  ÷  time it is expected to take until used or dropped

The momentary chance would be wrong: it is lowest just after an answer, when people think.

* Counts are looked at when they grew by a share of themselves: often while little is known,
  seldom later. Kinds with little experience borrow from kinds used as often, and these from all.
* Counts are halved when they get large: new habits replace old ones.
* Blocks that left are remembered as ghosts, a bounded number of them, because a policy
  that learned only from what it kept would never find out what it should have kept.

The unit of work is the *stretch*: neighbours of one request with the same history. It is
counted, and grows older, as one. Of a large cache's stretches only a sample is counted.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from operator import add
from zlib import crc32

from kvstore.constants import REUSE_GHOSTS_MIN, require
from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.index.stretch import Stretch
from kvstore.policies.learned.ghosts import Ghosts
from tiers.base import NAMESPACE_BYTES

REUSE_AGE_MIN = 16  # blocks asked for since the last use; all ages below are one
REUSE_AGES_PER_DOUBLING = 2  # ages that are counted apart between one age and its double
REUSE_AGE_MAX = 1 << 30  # everything older is of one age
REUSE_GHOSTS_SHARE = 16  # one block is remembered for this many that are held
REUSE_USES_FADE = 24.0  # uses count half when the whole cache was asked for so many times since
REUSE_USES_HELD_MIN = 20  # uses fade as if so many blocks were held, if fewer are
REUSE_PRIOR_STRETCHES = 30.0  # a kind's own experience outweighs that of its relatives from here on
REUSE_PRIOR_CHANCE = 0.03  # before anything is known: of reuse within one age
REUSE_PRIOR_FIRST_AGE = 5  # times that chance within the first age, which is so much wider
REUSE_EVIDENCE_BLOCKS_MAX = 65_536.0  # a kind's counts are halved here, so that new habits replace old ones
REUSE_COUNT_ALL_MAX = 131_072  # blocks held; with more, one request of two, of four and so on is counted
REUSE_COUNTED_MAX = 1e6  # relatives are compared when all counts have doubled, or grew by so many
REUSE_GROWN_SHARE = 4  # a kind's counts are looked at when they grew by one in so many
REUSE_AGE_EVERY = 4  # requests between two looks at what grew older
require(REUSE_AGE_MIN < REUSE_AGE_MAX and REUSE_AGES_PER_DOUBLING >= 1, "there is more than one age")
require(REUSE_PRIOR_CHANCE * REUSE_PRIOR_FIRST_AGE < 1, "a chance is at most one")


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

_NOTHING = array("d", [0.0]) * AGES
_UNKNOWN = array("d", [-1.0]) * AGES  # densities that are not worked out

TURN_GROUPS, SIZE_GROUPS = 6, 7
_USES_GROUP = [0, 0, 1, 2, 2, 3, 3, 3, 3] + [4] * 8 + [5] * 16 + [6] * 32  # 1, 2, 3–4, 5–8, …, more
USES_GROUPS = 8
USES_WITH_DETAIL = 4  # groups of uses that are counted by turn and size, too
_PLAIN = USES_WITH_DETAIL * TURN_GROUPS * SIZE_GROUPS  # the first kind without
_LAST = _PLAIN + USES_GROUPS - USES_WITH_DETAIL  # the first kind of last blocks
KINDS = _LAST + USES_GROUPS
RELATIVES = USES_GROUPS + 1  # kinds used as often, and all last blocks
_TURN_GROUP = [0, 0, 1, 2, 3, 4, 4]  # 1, 2, 3, 4, 5–6, more
USES_COUNTED_MAX = 255.0


def _uses_group(uses: float) -> int:
    whole = int(uses + 0.5)
    return _USES_GROUP[whole] if whole < len(_USES_GROUP) else USES_GROUPS - 1


def kind_of(uses: float, turn: int, blocks: int) -> int:
    """The kind of a block (not the last) of a prompt."""
    group = _uses_group(uses)
    if group >= USES_WITH_DETAIL:
        return _PLAIN + group - USES_WITH_DETAIL
    turns = _TURN_GROUP[turn] if turn < len(_TURN_GROUP) else TURN_GROUPS - 1
    sizes = min(blocks.bit_length() * 2 // 3, SIZE_GROUPS - 1)
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
UNKNOWN = kind_of(1, 1, 8)  # blocks that a restart found: taken as those of a first turn

_SCATTER = 0x9E37_79B1  # of 2**32 the golden section: its multiples are in step with no traffic
EVERY_HASH = 1 << 32  # above all fingerprints


def fingerprint(key: bytes) -> int:
    """Of a block's key, the same in every process; by it samples are drawn."""
    return crc32(key[NAMESPACE_BYTES:])


Use = tuple[bytes, Stretch]  # key of a block, and what its use was
Lesson = tuple[Sequence[float], Sequence[float], Sequence[float], float]  # what `chances` needs


class Tally:
    """Of one kind: how many blocks reached each age, how many were used in it. relatives: the kinds whose
    experience it borrows.

    What follows from the counts is worked out when it is needed: for most ages, and for many kinds, it never is.
    """

    __slots__ = ("_chance", "_hits", "_lesson", "densities", "grown", "relatives", "risk", "used")

    def __init__(self, relatives: int) -> None:
        self.relatives = relatives
        self.risk, self.used = array("d", _NOTHING), array("d", _NOTHING)
        self.learn(_PRIOR, 1.0)

    def learn(self, prior: Sequence[float], weight: float) -> None:
        """Believe the counts of now, and `prior` and `weight` as `chances` has them."""
        self.grown = 0  # blocks counted since
        self._lesson: Lesson | None = (self.used[:], self.risk[:], prior, weight)
        self._chance, self._hits = _NOTHING, -1.0  # until they are worked out, as …
        self.densities = _UNKNOWN  # … these are, by age

    def chance(self) -> array[float]:
        """Of use within each age."""
        if self._lesson is not None:
            self._chance = array("d", chances(*self._lesson))
            self._lesson = None
        return self._chance

    def hits(self) -> float:
        """The chance that a block of this kind is ever used again, as long as ages are counted."""
        if self._hits < 0.0:
            self._hits = 1.0 - math.prod([1.0 - now for now in self.chance()])
        return self._hits

    def reached(self, age: int, blocks: int, grown: dict[Tally, None]) -> None:
        """So many blocks are as old as this. `grown` collects who should learn from it."""
        risk = self.risk
        risk[age] += blocks
        self.grown += blocks
        if self.grown * REUSE_GROWN_SHARE >= risk[0]:
            grown[self] = None

    def were_used(self, age: int, blocks: int, grown: dict[Tally, None]) -> None:
        """The same of blocks that were used at this age."""
        self.used[age] += blocks
        self.grown += blocks
        if self.grown * REUSE_GROWN_SHARE >= self.risk[0]:
            grown[self] = None

    def density(self, age: int) -> float:
        """Hits to be expected, for the time it takes, of keeping a block of that age. Worked out once."""
        if self.densities is _UNKNOWN:
            self.densities = _UNKNOWN[:]
        density = self.densities[age] = _density(self.chance(), age)
        return density

    def halve_if_full(self) -> None:
        if self.risk[0] > REUSE_EVIDENCE_BLOCKS_MAX:
            self.risk = array("d", [count / 2 for count in self.risk])
            self.used = array("d", [count / 2 for count in self.used])


def chances(
    used: Sequence[float], risk: Sequence[float], prior: Sequence[float], weight: float
) -> list[float]:
    """The chance of use within each age, neighbours helping each other.

    `prior` counts as much as the evidence of `weight` blocks.
    """
    chance = [
        (hits + (hits_before + hits_behind) / 2 + weight * before)
        / (seen + (seen_before + seen_behind) / 2 + weight)
        for hits, hits_before, hits_behind, seen, seen_before, seen_behind, before in zip(
            used, _earlier(used), _later(used), risk, _earlier(risk), _later(risk), prior, strict=True
        )
    ]
    return [min(now, 1.0) for now in chance] if max(chance) > 1.0 else chance


def _earlier(counts: Sequence[float]) -> list[float]:
    """For each age the count of the age before; the first one's own."""
    return [counts[0], *counts[:-1]]


def _later(counts: Sequence[float]) -> list[float]:
    return [*counts[1:], counts[-1]]


def _density(chance: Sequence[float], start: int) -> float:
    """For one age: the best ratio of hits to time, over all times to keep the block from here on."""
    hits = now = chance[start]
    time = (1.0 - now / 2) * (_WIDTHS[start] / 2)
    left = 1.0 - now
    best = hits / time if hits > 0.0 else 0.0
    if left < best * time - hits:
        return best
    for now_if_left, width in zip(chance[start + 1 :], _WIDTHS[start + 1 :], strict=True):
        now = left * now_if_left
        hits += now
        time += (left - now / 2) * width
        left -= now
        if hits > best * time:
            best = hits / time
        elif left < best * time - hits:  # even sure hits at once would not make it better
            break
    return best


def _pieces(
    hashes: Sequence[bytes], olds: Sequence[Stretch | None], prompt: Prompt
) -> Iterator[tuple[int, int]]:
    """Where neighbours of the same history begin and end; the last block of a prompt begins anew."""
    starts = [0]
    if olds.count(olds[0]) < len(olds):
        starts += [at for at, (before, old) in enumerate(pairwise(olds), 1) if old is not before]
    if prompt.last in hashes:
        starts = sorted({*starts, hashes.index(prompt.last)})
    return pairwise([*starts, len(hashes)])


def _sampled(hashes: Sequence[bytes], below: int) -> Iterable[int]:
    """Positions of the blocks whose fingerprints are smaller; see `fingerprint`."""
    if below == EVERY_HASH:
        return range(len(hashes))
    return [at for at, crc in enumerate(map(crc32, hashes)) if crc < below]


class Reuse:
    """The experience of all tiers of one daemon, and the memory of blocks that left."""

    def __init__(self) -> None:
        self.now = 0  # the clock: blocks asked for so far
        self.held = 0  # blocks with a stretch that are no ghosts
        self._tallies = [Tally(relatives) for relatives in RELATIVES_OF]
        self._ghosts = Ghosts()
        self._aging: list[deque[Stretch]] = [deque() for _ in range(AGES)]
        self._requests = 0
        self._is_counted = True  # the run under way
        self._stretches = self._blocks = 0.0  # so far, halved now and then: how long stretches are
        self._grown: dict[Tally, None] = {}  # whose counts should be looked at, in this order
        self._counted = self._newly_counted = 0.0  # blocks of all kinds: when the priors were made, and since
        self._priors: list[list[float]] = [list(_PRIOR) for _ in range(RELATIVES)]

    # -- what happens --

    def observe(self, run: Sequence[Block], prompt: Prompt, now_s: float, below: int) -> list[Use]:
        """A request used these blocks of one namespace, or has just brought them. Answers the uses of a sample."""
        self._begin(len(run))
        hashes = [block.hash for block in run]
        olds = [block.stretch for block in run]
        new = olds.count(None)
        if new:
            missing = (block_hash for block_hash, old in zip(hashes, olds, strict=True) if old is None)
            back = iter(self._ghosts.pop_run(run[0].namespace.names_of(missing)))
            olds = [old or next(back) for old in olds]
        prompt.turn = self._turn_of(run[0], olds, prompt)
        for start, end in _pieces(hashes, olds, prompt):
            old = olds[start]
            stretch = self._stretch(old, prompt.turn, prompt, hashes[start] == prompt.last, now_s)
            self._count(old, stretch, end - start)
            for block in run[start:end]:
                block.stretch = stretch
        self.held += new
        sample = ((run[at], run[at].stretch) for at in _sampled(hashes, below))
        return [(block.key, stretch) for block, stretch in sample if stretch is not None]

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, below: int) -> list[Use]:
        """A request brought these blocks and they were not let in: ghosts from the start."""
        self._begin(len(hashes))
        names, ghosts = namespace.names_of(hashes), self._ghosts
        olds = ghosts.pop_run(names)
        for start, end in _pieces(hashes, olds, prompt):
            old = olds[start]
            if old is not None:
                prompt.turn = old.next_turn()
            stretch = self._stretch(old, prompt.turn or 1, prompt, hashes[start] == prompt.last)
            self._count(old, stretch, end - start)
            ghosts.add(zip(names[start:end], repeat(stretch)))
        sample = ((hashes[at], ghosts.get(names[at])) for at in _sampled(hashes, below))
        return [
            (namespace.digest + block_hash, stretch) for block_hash, stretch in sample if stretch is not None
        ]

    def forgotten(self, run: Sequence[Block], names: Sequence[int]) -> None:
        """No tier has these blocks of one namespace any more: from now on they are ghosts."""
        gone = [
            (name, block.stretch) for name, block in zip(names, run, strict=True) if block.stretch is not None
        ]
        for block in run:
            block.stretch = None
        self.held -= len(gone)
        self._ghosts.add(gone)

    # -- what is expected --

    def density(self, kind: int, touched: int) -> float:
        """Hits to be expected, for the time it takes, of keeping a block of this kind."""
        tally, age = self._tallies[kind], bisect_right(AGE_STARTS, self.now - touched)
        density = tally.densities[age]
        return density if density >= 0.0 else tally.density(age)

    def hits(self, kind: int) -> float:
        """The chance that a block of this kind, just used, is ever used again."""
        return self._tallies[kind].hits()

    def kind_of_new(self, namespace: Namespace, block_hash: bytes, prompt: Prompt) -> int:
        """The kind that a block would have which is not here yet."""
        ghost = self._ghosts.get(*namespace.names_of([block_hash]))
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
        self._ghosts.bound(max(REUSE_GHOSTS_MIN, self.held // REUSE_GHOSTS_SHARE))
        one_in = 1 << (self.held // REUSE_COUNT_ALL_MAX).bit_length()
        self._is_counted = (self._requests * _SCATTER >> 16) % one_in == 0
        if self._requests % REUSE_AGE_EVERY == 0:
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

    def _stretch(
        self, old: Stretch | None, turn: int, prompt: Prompt, is_last: bool, now_s: float = 0.0
    ) -> Stretch:
        uses = self._uses_after(old)
        kind = kind_of_last(uses) if is_last else kind_of(uses, turn, prompt.blocks)
        stretch = Stretch(self.now, kind, uses, old.turn if old is not None else turn, turn, now_s)
        self._stretches += 1
        if self._is_counted:
            self._aging[0].append(stretch)
        return stretch

    def _uses_after(self, old: Stretch | None) -> float:
        """Uses, this one included. Those before count less, the more was asked for since."""
        if old is None:
            return 1.0
        turnover = REUSE_USES_FADE * max(self.held, REUSE_USES_HELD_MIN)
        return min(1.0 + old.uses * math.exp2((old.touched - self.now) / turnover), USES_COUNTED_MAX)

    def _count(self, old: Stretch | None, new: Stretch, blocks: int) -> None:
        """So many blocks of one stretch were used and belong to another one now."""
        if self._is_counted:
            new.alive += blocks
            self._tallies[new.kind].reached(0, blocks, self._grown)
            self._newly_counted += blocks
        if old is not None and old.alive:
            old.alive -= blocks
            age = bisect_right(AGE_STARTS, self.now - old.touched)
            self._tallies[old.kind].were_used(age, blocks, self._grown)

    def _grow_older(self) -> None:
        """Move stretches that reached the next age there."""
        tallies, grown, counted = self._tallies, self._grown, 0
        for age in range(AGES - 2, -1, -1):
            queue = self._aging[age]
            if not queue:
                continue
            born_until = math.floor(self.now - AGE_STARTS[age])
            older, take = self._aging[age + 1].append, queue.popleft
            while queue and queue[0].touched <= born_until:
                stretch = take()
                alive = stretch.alive
                if alive:
                    tallies[stretch.kind].reached(age + 1, alive, grown)
                    counted += alive
                    older(stretch)
        self._newly_counted += counted
        oldest = self._aging[-1]
        while oldest and not oldest[0].alive:
            oldest.popleft()

    def _weight(self) -> float:
        """How many blocks are as good as REUSE_PRIOR_STRETCHES: neighbours share one fate."""
        if self._stretches > REUSE_EVIDENCE_BLOCKS_MAX:
            self._stretches, self._blocks = self._stretches / 2, self._blocks / 2
        return REUSE_PRIOR_STRETCHES * max(1.0, self._blocks / max(self._stretches, 1.0))

    def _learn(self) -> None:
        """Look at the counts of one kind of those that have grown, and at what relatives have in common."""
        if self._newly_counted >= self._counted:
            self._learn_priors()
        tally = next(iter(self._grown), None)
        if tally is None:
            return
        del self._grown[tally]
        tally.learn(self._priors[tally.relatives], self._weight())
        tally.halve_if_full()

    def _learn_priors(self) -> None:
        self._counted = min(self._counted + self._newly_counted, REUSE_COUNTED_MAX)
        self._newly_counted = 0.0
        groups = [([0.0] * AGES, [0.0] * AGES) for _ in range(RELATIVES)]
        for tally in self._tallies:
            if tally.risk[0]:
                used, risk = groups[tally.relatives]
                groups[tally.relatives] = list(map(add, used, tally.used)), list(map(add, risk, tally.risk))
        every_used = [sum(of_age) for of_age in zip(*(used for used, _ in groups), strict=True)]
        every_risk = [sum(of_age) for of_age in zip(*(risk for _, risk in groups), strict=True)]
        weight = self._weight()
        common = chances(every_used, every_risk, _PRIOR, weight)
        self._priors = [chances(used, risk, common, weight) for used, risk in groups]
