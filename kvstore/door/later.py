"""Answers that come later than their request, and the timer that gives them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.protocol import frames


class Later:
    """An answer that does not exist yet; several may wait for it."""

    def __init__(self) -> None:
        self.answer: frames.Answer | None = None
        self._waiting: list[Callable[[frames.Answer], None]] = []

    def set(self, answer: frames.Answer) -> None:
        """Here it is. Only the first one counts."""
        if self.answer is None:
            self.answer = answer
            waiting, self._waiting = self._waiting, []
            for take in waiting:
                take(answer)

    def then(self, take: Callable[[frames.Answer], None]) -> None:
        """Call `take` with the answer, once it is there."""
        if self.answer is not None:
            take(self.answer)
        else:
            self._waiting.append(take)


class Timer(Protocol):
    """What `Api.call_later` returns."""

    def cancel(self) -> None:
        """It is not needed any more."""
