"""Problems: what is wrong in a bucket, or with what works on it, now. For people: in the log when it begins, in a status until
it is over.

    note(subject, reason) ─▶ told once, as long as the reason stays ─▶ over(subject)

A subject is the name of an object, or of a task. Bounded: of more than PROBLEMS_MAX the latest are known; all are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Final

from replication.constants import PROBLEMS_TOLD

PROBLEMS_MAX: Final = 256  # known of one place

log = logging.getLogger("replication.problems")


class Problems:
    """Of one place. noted: how often something was wrong that was not known to be."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.noted = 0
        self._reasons: dict[str, str] = {}  # by subject

    def __len__(self) -> int:
        return len(self._reasons)

    def note(self, subject: str, reason: str) -> None:
        known = self._reasons.pop(subject, None)
        self._reasons[subject] = reason
        if known is None:
            self.noted += 1
        if known != reason:
            log.warning("%s: %s: %s", self.where, subject, reason)
        if len(self._reasons) > PROBLEMS_MAX:
            del self._reasons[next(iter(self._reasons))]

    def over(self, subject: str) -> None:
        if self._reasons.pop(subject, None) is not None:
            log.info("%s: %s: is right again", self.where, subject)

    def keep(self, folder: str, subjects: Set[str]) -> None:
        """Those below a folder that are not among these are over."""
        for subject in [one for one in self._reasons if one.startswith(folder) and one not in subjects]:
            self.over(subject)

    def told(self) -> list[str]:
        """The first few, a line each."""
        shown = list(self._reasons.items())[:PROBLEMS_TOLD]
        lines = [f"{subject}: {reason}" for subject, reason in shown]
        more = len(self._reasons) - len(shown)
        return [*lines, *([f"and {more} more"] if more else [])]
