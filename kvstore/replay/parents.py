"""Parents: which id each hash id of a trace follows.

A hash id stands for a block and everything before it, so it follows the same id wherever it is
named. Recorders that cut prompts, or made-up traces, may name one behind several others: then hits
are only about right, which is told. What cannot be replayed at all are ids that come before and after
each other: no prompt begins so.
"""

from __future__ import annotations

from collections import Counter

Edge = tuple[int, int]  # hash id, the one it follows


class Parents:
    """Of one file."""

    def __init__(self) -> None:
        self._first: dict[
            int, int | None
        ] = {}  # where each was named first: None at the beginning of a prompt
        self._others: dict[Edge, int] = {}  # where it was named behind another one, and in which line first
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
        left = self._in_circles_or_above()
        for (hash_id, parent), line in self._others.items():
            if hash_id in left and parent in left and self._follows(parent, hash_id, left):
                return line, (hash_id, parent)
        return None

    def _edges(self) -> list[Edge]:
        first = [(hash_id, parent) for hash_id, parent in self._first.items() if parent is not None]
        return [*first, *self._others]

    def _in_circles_or_above(self) -> set[int]:
        """What is left when ids that nothing follows are taken away, again and again."""
        edges = self._edges()
        followers = Counter(parent for _, parent in edges)
        parents: dict[int, list[int]] = {}
        for hash_id, parent in edges:
            parents.setdefault(hash_id, []).append(parent)
        ends = [hash_id for hash_id in self._first if not followers[hash_id]]
        left = set(self._first)
        while ends:
            end = ends.pop()
            left.discard(end)
            for parent in parents.get(end, ()):
                followers[parent] -= 1
                if not followers[parent]:
                    ends.append(parent)
        return left

    def _follows(self, hash_id: int, other: int, among: set[int]) -> bool:
        """Whether an id comes behind another one, in whatever prompts."""
        parents: dict[int, list[int]] = {}
        for child, parent in self._edges():
            if child in among and parent in among:
                parents.setdefault(child, []).append(parent)
        seen, stack = {hash_id}, [hash_id]
        while stack:
            for parent in parents.get(stack.pop(), ()):
                if parent == other:
                    return True
                if parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return False
