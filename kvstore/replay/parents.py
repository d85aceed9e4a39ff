"""Parents: which id each hash id of a trace follows.

A hash id stands for a block and everything before it, so it follows the same id wherever it is
named. Recorders that cut prompts, or made-up traces, may name one behind several others: then hits
are only about right, and a message says so. What cannot be replayed at all are ids that come before and after
each other: no prompt begins so.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

Edge = tuple[int, int]  # hash id, the one it follows


class Parents:
    """Of one file."""

    def __init__(self) -> None:
        self._first: dict[int, int | None] = {}  # what each followed when it was named first; None: nothing
        self._others: dict[Edge, int] = {}  # what it followed later, and in which line first
        self._unchained: set[int] = set()

    def note(self, ids: list[int], line: int) -> None:
        """A prompt. No id is in it twice."""
        following: list[int | None] = [None, *ids][:-1]
        known = list(map(self._first.setdefault, ids, following))
        if known == following:
            return
        for hash_id, before, parent in zip(ids, known, following, strict=True):
            if before != parent:
                self._unchained.add(hash_id)
                if parent is not None:
                    self._others.setdefault((hash_id, parent), line)

    @property
    def unchained(self) -> int:
        """How many ids follow several others, or begin some prompts and not all."""
        return len(self._unchained)

    def circle(self) -> tuple[int, Edge] | None:
        """A line, and an id that it puts behind one that follows it elsewhere; None if there is none."""
        if not self._others:
            return None
        graph: TopologicalSorter[int] = TopologicalSorter()
        for hash_id, parent in self._first.items():
            if parent is not None:
                graph.add(hash_id, parent)
        for hash_id, parent in self._others:
            graph.add(hash_id, parent)
        try:
            graph.prepare()
        except CycleError as error:
            edges = [(hash_id, parent) for parent, hash_id in pairwise(error.args[1])]
            return next((self._others[edge], edge) for edge in edges if edge in self._others)
        return None
