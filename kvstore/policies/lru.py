"""Leaf-first LRU: of the blocks nothing hangs on, the one used longest ago leaves first."""

from __future__ import annotations

from kvstore.policies.learned.experts import Youngest
from kvstore.policies.learned.leaves import LeafFirst


class LeafLru(LeafFirst):
    """LRU over the leaves of one tier."""

    judge = Youngest()

    def __init__(self, bit: int) -> None:
        super().__init__(bit, by_kind=False)
