"""Problems: what is wrong now, and what to do about it. One list for people and programs: log, status, page, metrics, doctor.

    note(subject, text) ─▶ begins: a warning │ goes on: counted; a line after a minute, then one each five │ over(subject): a line

A kind is a word that programs may rely on; a subject is what it is about: the name of an object, of a task, of a region, of a
disk. Whoever fails notes it each time it fails, and that is all it says: no line of the log of its own. One that comes and goes
is told as seldom as one that stays. Bounded: of more than PROBLEMS_MAX the latest are known; all are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from replication.constants import PROBLEMS_TOLD

PROBLEMS_MAX: Final = 256  # known of one place
REMIND_FIRST_S, REMIND_S = 60.0, 300.0  # between two lines of the log about one that lasts
CALM_S: Final = 300.0  # over for so long: it is logged at once when it begins anew

Level = Literal["problem", "warning"]
Key = tuple[str, str]  # kind, subject

log = logging.getLogger("replication.problems")


class Problem(msgspec.Struct, frozen=True):
    """level: "problem" where something does not work as it is, "warning" where it is slow, or may fail later. fix: what to do, one
    line. age_s: since it began. count: how often it was met. is_logged: who met it has a line of the log for it."""

    kind: str
    subject: str
    text: str
    fix: str = ""
    level: Level = "problem"
    age_s: float = 0.0
    count: int = 1
    is_logged: bool = False

    def line(self) -> str:
        """For people."""
        return f"{self.kind} {self.subject}: {self.text}"


@dataclass(slots=True)
class _Known:
    problem: Problem
    begun_s: float
    until_s: float  # then it is over, unless it was noted again


@dataclass(slots=True)
class _Said:
    """Of the log. is_open: its last line says that it is so."""

    due_s: float
    is_open: bool = True
    ended_s: float = 0.0


class Problems:
    """Of one place, or of one process. noted: how often something was wrong that was not known to be."""

    def __init__(self, where: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """where: names the place for people, "" where the subjects do."""
        self.where = where
        self.noted = 0
        self._clock = clock
        self._known: dict[Key, _Known] = {}
        self._said: dict[Key, _Said] = {}

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self,
        subject: str,
        text: str,
        kind: str = "object",
        fix: str = "",
        level: Level = "problem",
        lasts_s: float = float("inf"),
        count: int = 0,
        is_logged: bool = False,
    ) -> None:
        """It is so, once more. lasts_s: it is over when it is not noted again for so long. count: how often it was met, where that
        is known; else it is counted here. is_logged: who notes it has a line of the log for it."""
        key, now_s = (kind, subject), self._clock()
        known = self._known.pop(key, None)
        if known is None:
            self.noted += 1
        count = count or (known.problem.count + 1 if known is not None else 1)
        begun_s = known.begun_s if known is not None else now_s
        problem = Problem(kind, self._full(subject), text, fix, level, now_s - begun_s, count)
        self._known[key] = _Known(problem, begun_s, now_s + lasts_s)
        if not is_logged:
            self._say(key, problem, now_s)
        if len(self._known) > PROBLEMS_MAX:
            del self._known[next(iter(self._known))]

    def over(self, subject: str, kind: str = "object") -> None:
        known = self._known.pop((kind, subject), None)
        said = self._said.get((kind, subject))
        if known is None or said is None or not said.is_open:
            return
        said.is_open, said.ended_s = False, self._clock()
        problem = known.problem
        log.info(
            "%s %s: is right again", kind, problem.subject,
            extra={"kind": kind, "lasted_s": round(said.ended_s - known.begun_s, 1), "count": problem.count},
        )  # fmt: skip

    def keep(self, folder: str, subjects: Set[str]) -> None:
        """Objects below a folder that are not among these are right again."""
        for kind, subject in list(self._known):
            if kind == "object" and subject.startswith(folder) and subject not in subjects:
                self.over(subject)

    def only(self, problems: Iterable[Problem]) -> None:
        """These are all there are now, as somebody has seen who looks at everything again and again."""
        found = {(problem.kind, problem.subject): problem for problem in problems}
        for kind, subject in [key for key in self._known if key not in found]:
            self.over(subject, kind)
        for one in found.values():
            self.note(
                one.subject, one.text, one.kind, one.fix, one.level, count=one.count, is_logged=one.is_logged
            )

    def all(self) -> list[Problem]:
        """Those of now, the oldest first."""
        now_s = self._clock()
        for kind, subject in [key for key, known in list(self._known.items()) if known.until_s <= now_s]:
            self.over(subject, kind)
        ordered = sorted(self._known.values(), key=lambda known: known.begun_s)
        return [msgspec.structs.replace(one.problem, age_s=round(now_s - one.begun_s, 1)) for one in ordered]

    def told(self) -> list[str]:
        """The first few, a line each."""
        shown = [f"{subject}: {known.problem.text}" for (_, subject), known in list(self._known.items())]
        more = len(shown) - PROBLEMS_TOLD
        return [*shown[:PROBLEMS_TOLD], *([f"and {more} more"] if more > 0 else [])]

    def _full(self, subject: str) -> str:
        return f"{self.where}: {subject}" if self.where else subject

    def _say(self, key: Key, problem: Problem, now_s: float) -> None:
        said = self._said.get(key)
        if said is None or not (said.is_open or now_s - said.ended_s < CALM_S):
            self._said.pop(key, None)
            self._said[key] = _Said(now_s + REMIND_FIRST_S)
            facts: dict[str, object] = {"kind": problem.kind, "to_do": problem.fix}
            log.warning("%s %s: %s", problem.kind, problem.subject, problem.text, extra=facts)
        elif now_s >= said.due_s:
            said.due_s, said.is_open = now_s + REMIND_S, True
            facts = {"kind": problem.kind, "for_s": round(problem.age_s), "count": problem.count}
            log.warning("%s %s: still: %s", problem.kind, problem.subject, problem.text, extra=facts)
        if len(self._said) > PROBLEMS_MAX:
            del self._said[next(iter(self._said))]
