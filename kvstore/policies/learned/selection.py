"""The contest: which judge would have the most hits, had it decided alone all the time.

    request ─▶ sampled blocks ─┬▶ shadow of judge 1 ─ hits ─┐
                               ├▶ shadow of judge 2 ─ hits ─┼▶ most hits lately: decides for the tiers
                               └▶ …                         ┘

A shadow is a cache of keys without bytes that follows one judge. It sees a sample of all
blocks, chosen by hash, and holds as large a share of the sample as the tiers hold of all
blocks; small caches are their own sample. The sample is thinned out little by little as the tiers
grow, so that shadows never take more than a bounded memory and time.

Until the first block leaves the tiers, all judges agree, and the first one decides: LRU, as
nothing is known. Afterwards another one decides only when it has been better by more than
chance would have it, and the first one again as soon as it is as good.

Most of what a contest loses it loses by believing chance: for each two judges it counts how
much their hits differ from request to request, and what is no more than that is no lead.
Tried, and no better: smaller shadows that learn while everything still fits, evicting first
what the new winner's shadow does not have, and letting judges take turns by their hits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from kvstore.index.prompts import Prompt
from kvstore.index.stretch import Stretch
from kvstore.policies.learned.experts import Judge
from kvstore.policies.learned.hazard import EVERY_HASH, Use, fingerprint
from kvstore.policies.learned.leaves import Leaves
from kvstore.steps import Steps

CONTEST_SAMPLE_MAX = 4608  # blocks in a shadow, about 300 bytes each; beyond it the sample shrinks
CONTEST_THINNED = 32  # the sample shrinks by what is too much, and by one in so many at least
CONTEST_THINNED_MOST = 4  # the sample shrinks by one in so many at most, at a time
# Blocks of a shadow looked at in one go: half a millisecond where none is in the cache.
CONTEST_THINNED_AT_ONCE = 512
# Blocks of a shadow that leave in one go, where the tiers hold much less than before.
CONTEST_LEFT_AT_ONCE = 256
CONTEST_DUE_MAX = 16  # requests that wait to be played; beyond it no shadow learns of one
CONTEST_USES_MAX = 512  # sampled blocks at the beginning of a prompt that take part
CONTEST_WINDOW_CAPACITIES = 3.0  # hits count half when a shadow was asked for so many times its blocks
# Hits count half after so many requests, if that takes longer: neighbours share one fate.
CONTEST_WINDOW_REQUESTS = 300
CONTEST_DOUBTS = 0.25  # a lead counts beyond so many standard deviations


class Seat(msgspec.Struct, gc=False, eq=False):
    """A block in a shadow. One that left has no stretch; its parent only if it was thinned out with children.

    kids: blocks that hang on it, those of thinned ones below it included.
    """

    key: bytes
    mark: int  # its fingerprint
    parent: Seat | None
    stretch: Stretch | None = None
    kids: int = 0


def _is_leaf(seat: Seat, stretch: Stretch | None) -> bool:
    return seat.stretch is stretch and not seat.kids


class Shadow:
    """What a judge would keep. Leaves go before their parents, as in the tiers."""

    def __init__(self, judge: Judge, shadows: int = 1) -> None:
        self.judge = judge
        self.below = EVERY_HASH  # as in the contest, when it was thinned out last
        self.hits = 0.0  # lately
        self.doubts = [0.0] * shadows  # variance of the difference to each one's, were requests independent
        self._seats: dict[bytes, Seat] = {}
        self._leaves: Leaves[Seat] = Leaves(_is_leaf)

    def __len__(self) -> int:
        return len(self._seats)

    def ask(self, uses: Iterable[Use], capacity: float) -> int:
        """A request used these blocks, in prompt order. Answers the hits."""
        hits, unbroken, room = 0, True, True
        parent: Seat | None = None
        run: list[Seat] = []
        for key, stretch in uses:
            seat = self._seats.get(key)
            if seat is not None:
                hits += unbroken
            else:
                unbroken = False
                room = room and self._make_room(capacity, stretch)
                if not room:
                    continue
                seat = self._seats[key] = Seat(key, fingerprint(key), parent)
                if parent is not None:
                    parent.kids += 1
            seat.stretch = stretch
            seat.kids += 1  # as a lease does: no room is made of the request's own blocks
            run.append(seat)
            parent = seat
        for seat in run:
            seat.kids -= 1
            if not seat.kids:
                self._leaves.push(seat, seat.stretch)
        return hits

    def shrink_steps(self, capacity: float) -> Steps[None]:
        """It holds much more than it may: let the cheapest go, a few at a time, until it holds a little more. It is not
        asked meanwhile."""
        while len(self._seats) > capacity + CONTEST_LEFT_AT_ONCE:
            for _ in range(CONTEST_LEFT_AT_ONCE):
                if self._leaves.cheapest(self.judge) is None:
                    return
                self._drop()
            yield

    def thin_out_steps(self, below: int) -> Steps[None]:
        """Keep only the blocks of the smaller sample; they hang on the nearest one that is left. It is not asked meanwhile."""
        self.below = below
        seats = list(self._seats.values())
        for first in range(0, len(seats), CONTEST_THINNED_AT_ONCE):
            yield
            for seat in seats[first : first + CONTEST_THINNED_AT_ONCE]:
                if seat.mark >= below:
                    del self._seats[seat.key]
                    self._take_out(seat, seat.kids)

    def _make_room(self, capacity: float, newcomer: Stretch) -> bool:
        while len(self._seats) >= capacity:
            worth = self._leaves.cheapest(self.judge)
            if worth is None or worth > self.judge.worth_of_new(newcomer.kind):
                return False
            self._drop()
        return True

    def _drop(self) -> None:
        """The cheapest goes. Only after `cheapest` found one."""
        seat = self._leaves.pop()
        del self._seats[seat.key]
        self._take_out(seat, 0)

    def _take_out(self, seat: Seat, kids: int) -> None:
        """A block goes, and so many hang on the nearest one above it that is left."""
        parent = seat.parent
        while parent is not None and parent.stretch is None:
            parent = parent.parent
        seat.stretch, seat.parent = None, parent if kids else None
        if parent is not None:
            parent.kids += kids - 1
            if not parent.kids:
                self._leaves.push(parent, parent.stretch)


class Contest:
    """All shadows, and the judge that decides now."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._shadows = [Shadow(judge, len(judges)) for judge in judges]
        self._winner = 0  # its number
        self.judge = judges[0]
        self.below = EVERY_HASH  # blocks whose hash has a smaller fingerprint are the sample
        self._full = False
        self._due: deque[tuple[list[Use], float]] = deque()  # to be played; the share of all blocks held then
        self._prompt: Prompt | None = None  # the request under way, which comes in pieces: …
        self._used: list[Use] = []
        self._refused: list[Use] = []  # … these are counted first, and are behind the others

    def saw(self, prompt: Prompt, used: list[Use], refused: list[Use], held: int) -> Steps[None] | None:
        """A piece of a request. `held`: how many blocks the tiers hold. Returns what is to be learned from requests that
        are complete, in steps, unless an earlier answer is not through and does that, too."""
        before, self._prompt = self._prompt, prompt
        is_idle = not self._due
        if prompt is not before and (self._used or self._refused):
            share = held / EVERY_HASH if self._full else float("inf")
            if len(self._due) < CONTEST_DUE_MAX:
                self._due.append(((self._used + self._refused)[:CONTEST_USES_MAX], share))
            self._used, self._refused = [], []
        self._used += used
        self._refused += refused
        return self._play() if is_idle and self._due else None

    def full(self) -> None:
        """A block left the tiers, or found no room there."""
        self._full = True

    def _play(self) -> Steps[None]:
        """Let every shadow do what the tiers did for each request that is due."""
        try:
            while self._due:
                uses, share = self._due[0]
                below = min(shadow.below for shadow in self._shadows)
                uses = [use for use in uses if fingerprint(use[0]) < below]  # smaller since they came
                answers = []
                for shadow in self._shadows:
                    capacity = max(1.0, share * shadow.below)
                    yield from shadow.shrink_steps(capacity)
                    answers.append(shadow.ask(uses, capacity))
                    yield
                yield from self._learn_steps(
                    answers, len(uses) / max(1.0, CONTEST_WINDOW_CAPACITIES * share * self.below)
                )
                self._due.popleft()
        finally:  # a lesson that raises is the last one of its round, not of the daemon
            self._due.clear()

    def _learn_steps(self, answers: Sequence[int], windows: float) -> Steps[None]:
        """The hits of all shadows in a request. windows: how much of one it is."""
        if self._full:
            self._score(answers, 0.5 ** min(windows, 1 / CONTEST_WINDOW_REQUESTS))
            self._choose()
        behind = [shadow for shadow in self._shadows if shadow.below > self.below]
        if behind:
            # One with each request: all at once would hold up the loop.
            yield from behind[0].thin_out_steps(self.below)
        elif (most := max(map(len, self._shadows))) > CONTEST_SAMPLE_MAX:
            excess = min(most - CONTEST_SAMPLE_MAX, most // CONTEST_THINNED_MOST)
            self.below -= max(self.below // CONTEST_THINNED, self.below * excess // most)

    def _score(self, answers: Sequence[int], fading: float) -> None:
        for shadow, hits in zip(self._shadows, answers, strict=True):
            shadow.hits = shadow.hits * fading + hits
            shadow.doubts = [
                doubt * fading + (hits - other) ** 2
                for doubt, other in zip(shadow.doubts, answers, strict=True)
            ]

    def _choose(self) -> None:
        """Who leads beyond doubt decides; the first judge needs no more than to be as good."""
        winner, first = self._shadows[self._winner], self._shadows[0]
        best = max(self._shadows, key=lambda shadow: shadow.hits)
        if best.hits - winner.hits > CONTEST_DOUBTS * best.doubts[self._winner] ** 0.5:
            self._winner = self._shadows.index(best)
        elif first.hits >= winner.hits:
            self._winner = 0
        self.judge = self._shadows[self._winner].judge
