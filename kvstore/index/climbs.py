"""Climbs: from a block up along its parents, so many at a time, with notes of how far they came.

    block ─▶ parent ─▶ … 256 … ─▶ ● ─▶ … ─▶ ● ─▶ … ─▶ end        the first climb: step by step
               ● ────────────────────────────────────▶ end        the next one, from there or below: a few steps

A chain may have hundreds of thousands of blocks, and a turn of the event loop has time for some thousands. A note says
that no block from here to there is an end. It stays true when blocks come: a block that is known keeps its parent as
long as it is known, and a first block that gets one is climbed on from. It does not when there are more ends: `forget`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

CLIMB_LOOKS = 8192  # of one climb in one turn, about a millisecond
CLIMB_NOTE_EVERY = 256  # steps between two notes of a long climb
CLIMB_NOTES_MAX = 65_536  # beyond it all are forgotten: what they say is found again


class Linked(Protocol):
    """What has something above it."""

    parent: Self | None


L = TypeVar("L", bound=Linked)


class Climbs(Generic[L]):
    """Climbs that look for the same ends."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: dict[L, L] = {}

    def climb(self, start: L, is_end: Callable[[L], bool], looks: int = CLIMB_LOOKS) -> tuple[L, int]:
        """The first one from there upwards that is an end or has nothing above it, and how many looks are left. Where none is left,
        it may be neither: the next climb goes on from there."""
        notes, at, passed, was_noted = self._notes, start, [start], False
        while looks > 0 and not is_end(at):
            noted = notes.get(at)
            if noted is not None or was_noted or looks % CLIMB_NOTE_EVERY == 0:
                passed.append(at)
            was_noted = noted is not None
            above = noted or at.parent
            if above is None:
                break
            at = above
            looks -= 1
        if len(passed) > 1 or not looks:
            if len(notes) > CLIMB_NOTES_MAX:
                notes.clear()
            notes.update((one, at) for one in passed if one is not at)
        return at, looks

    def forget(self) -> None:
        """There may be more ends now."""
        self._notes = {}
