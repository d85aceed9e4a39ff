"""Applications: requests whose prompts begin with the same block, the largest few of them.

    first block ─▶ count, of a bounded number of first blocks ─▶ the largest have a place: 1, 2, …
                                                               └▶ all others: 0

Who shares a system prompt behaves alike: what comes back, and when, differs more between a chat
and a batch job than between long and short prompts. So the largest applications have an
experience of their own (`kvstore.policies.learned.hazard`). One that has nearly all requests needs none:
its experience is everybody's.

Counting is *space saving* (Metwally et al., ICDT 2005): a newcomer takes over the smallest count, so
that whoever has more than one request in so many is always among the counted.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvstore.constants import (
    APPLICATION_REQUESTS_MIN,
    APPLICATION_SHARE_MAX,
    APPLICATIONS_COUNTED_MAX,
    APPLICATIONS_FADE_REQUESTS,
    APPLICATIONS_MAX,
)


class Count(msgspec.Struct, gc=False, eq=False):
    """Requests of one first block; `inherited` of them may be those of the one whose count it took over."""

    requests: float
    inherited: float

    def own(self) -> float:
        """At least so many."""
        return self.requests - self.inherited


class Applications:
    """Places of first blocks. `taken` is told the number of a place that somebody new gets."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._counts: dict[bytes, Count] = {}
        self._places: dict[bytes, int] = {}
        self._free = list(range(APPLICATIONS_MAX, 0, -1))
        self._requests = 0.0  # of all, faded as the counts are
        self._left = APPLICATIONS_FADE_REQUESTS

    def place(self, first: bytes) -> int:
        """The place of the prompts that begin with this block; 0 if they have none."""
        return self._places.get(first, 0)

    def saw(self, first: bytes) -> None:
        """A request, or a piece of one, whose prompt begins with this block."""
        count = self._counts.get(first)
        if count is None:
            inherited = 0.0
            if len(self._counts) >= APPLICATIONS_COUNTED_MAX:
                smallest = min(self._counts, key=lambda counted: self._counts[counted].requests)
                inherited = self._counts.pop(smallest).requests
            count = self._counts[first] = Count(inherited, inherited)
        count.requests += 1.0
        self._requests += 1.0
        if self._free and first not in self._places and self._deserves(count):
            self._give(first)
        self._left -= 1
        if not self._left:
            self._fade()

    def _deserves(self, count: Count) -> bool:
        own = count.own()
        return APPLICATION_REQUESTS_MIN <= own <= APPLICATION_SHARE_MAX * self._requests

    def _give(self, first: bytes) -> None:
        self._places[first] = self._free.pop()
        self._taken(self._places[first])

    def _fade(self) -> None:
        """Requests long ago count less. Who has become twice as large takes over a place."""
        self._left = APPLICATIONS_FADE_REQUESTS
        self._requests /= 2
        for count in self._counts.values():
            count.requests, count.inherited = count.requests / 2, count.inherited / 2
        others = (first for first in self._counts if first not in self._places)
        waiting = sorted((first for first in others if self._deserves(self._counts[first])), key=self._own)
        for first in sorted(self._places, key=self._own):
            if not waiting or self._own(waiting[-1]) < 2 * self._own(first):
                break
            self._free.append(self._places.pop(first))
            self._give(waiting.pop())

    def _own(self, first: bytes) -> float:
        count = self._counts.get(first)
        return count.own() if count is not None else 0.0
