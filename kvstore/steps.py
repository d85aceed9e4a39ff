"""Steps: long work on the event loop, in pieces of about a millisecond.

    door ── next() ──▶ piece ── yield ──▶ other requests ── next() ──▶ piece ── … ──▶ return answer

A generator of steps yields after each bounded piece of work and returns its answer. Whoever drives it
serves others in between, so everything may have changed when it goes on: a piece relies on nothing
that an earlier piece looked at.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def finish(steps: Steps[T]) -> T:
    """Do all of it at once, where nobody waits for the loop. Returns its answer."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: T = end.value
            return answer
