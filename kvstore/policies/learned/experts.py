"""Judges: what a block is worth, by its kind and by how long it was not used.

    judge      a block is worth …                       good where …
    ─────────────────────────────────────────────────────────────────────────────────────
    Youngest   more, the later it was used (LRU)        everything is new, or just changed
    Density    the hits that its like brought           habits last: conversations, agents
    Seasoned   the same, thrice for each doubling       habits last, and some prompts
               of its own uses                          are popular
    Frequent   more, the oftener it was used (LFU)      a few prompts are popular, for ever
    Loyal      the same, and newcomers must beat it     the working set does not fit: loops

A worth is compared with others of the same judge only; the cheapest block leaves. No judge
is the best for all traffic: `kvstore.policies.learned.selection` finds out which one is now. All of
them read the same queues (`kvstore.policies.learned.leaves`), so that the choice may change at any time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstore.policies.learned.hazard import USES_GROUP_OF, Reuse

ALWAYS = float("inf")
_SEASONED = [3.0**group for group in USES_GROUP_OF]
_FAR = 2.0**60  # further than any clock: the number of uses decides, then the last use


class Judge(ABC):
    """Values blocks. `touched` is the clock of `Reuse` at the last use. `choosy`: not every block is let in."""

    choosy = False

    @abstractmethod
    def worth(self, kind: int, touched: int) -> float:
        """Of a block that is held."""

    def worth_of_new(self, kind: int) -> float:
        """Of one that would come: it is let in unless the cheapest that is held is worth more."""
        return ALWAYS


class Density(Judge):
    """Hits to be expected per time of staying, as learned from this traffic."""

    choosy = True

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse

    def worth(self, kind: int, touched: int) -> float:
        return self._reuse.density(kind, touched)

    def worth_of_new(self, kind: int) -> float:
        return self._reuse.density(kind, self._reuse.now)


class Seasoned(Density):
    """The same, and what the block itself has shown: threefold for each doubling of its uses."""

    def worth(self, kind: int, touched: int) -> float:
        return self._reuse.density(kind, touched) * _SEASONED[kind]

    def worth_of_new(self, kind: int) -> float:
        return self._reuse.density(kind, self._reuse.now) * _SEASONED[kind]


class Youngest(Judge):
    """Least recently used leaves."""

    def worth(self, kind: int, touched: int) -> float:
        return touched


class Frequent(Judge):
    """Least frequently used leaves; of equals, least recently."""

    def worth(self, kind: int, touched: int) -> float:
        return USES_GROUP_OF[kind] * _FAR + touched


class Loyal(Frequent):
    """A block stays until one comes that was used more often."""

    choosy = True

    def worth_of_new(self, kind: int) -> float:
        return USES_GROUP_OF[kind] * _FAR


def all_judges(reuse: Reuse) -> list[Judge]:
    """The first one is trusted until another proves better: where nothing is known, the least recently used
    leaves. Others do better on average there; none is so seldom far behind the best."""
    return [Youngest(), Seasoned(reuse), Density(reuse), Frequent(), Loyal()]
