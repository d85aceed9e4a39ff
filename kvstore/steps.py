"""Steps: long work on the event loop, in pieces of about a millisecond.

    door ── next() ──▶ piece ── yield ──▶ other requests ── next() ──▶ piece ── … ──▶ return answer

A generator of steps yields after each bounded piece of work and returns its answer. Whoever drives it
serves others in between, so everything may have changed when it goes on: a piece relies on nothing
that an earlier piece looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
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


class Background:
    """Work that no request waits for, and that is too long for the one that caused it.

    begin ─▶ the first piece at once: most work is over with it ─▶ the rest in turn with requests (`serve`), or
                                                                  piece by piece with each tick (`step`)
    """

    def __init__(self) -> None:
        self._waiting: deque[Steps[None]] = deque()
        self._run: Callable[[Steps[None]], object] = self._waiting.append

    def __len__(self) -> int:
        """Of what waits for a tick."""
        return len(self._waiting)

    def begin(self, steps: Steps[None]) -> None:
        """Do the first piece now, and the others later."""
        if next(steps, self) is None:
            self._run(steps)

    def serve(self, run: Callable[[Steps[None]], object]) -> None:
        """From now on `run` does what is left, in turn with requests."""
        self._run = run
        while self._waiting:
            run(self._waiting.popleft())

    def step(self) -> bool:
        """The next piece of what waits for a tick. Returns whether there is more."""
        if self._waiting:
            steps = self._waiting.popleft()
            if next(steps, self) is None:
                self._waiting.append(steps)
        return bool(self._waiting)
