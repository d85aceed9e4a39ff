"""Problems as a daemon or a mirror tells them: those that do not work as they are first, and of these the oldest.

While a place refuses or does not answer, an object of it that fails for the same reason is no problem of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.protocol import answers
from replication.problems import Problem
from replication.watched import KINDS

PROBLEMS_SHOWN: Final = 64  # in an answer


def facts_of(problems: Iterable[Problem], now_s: float) -> list[answers.Problem]:
    """docs/cli.md names the fields. now_s: unix seconds."""
    problems = list(problems)
    places = [one.text for one in problems if one.kind in KINDS]
    found = [one for one in problems if one.kind != "object" or not any(_is_of(one, text) for text in places)]
    found.sort(key=lambda one: (one.level != "problem", -one.age_s))
    return [
        {
            "kind": one.kind,
            "subject": one.subject,
            "level": one.level,
            "text": one.text,
            "fix": one.fix,
            "since_s": round(now_s - one.age_s, 1),
            "count": one.count,
        }
        for one in found[:PROBLEMS_SHOWN]
    ]


def _is_of(object_: Problem, place: str) -> bool:
    """Whether an object ("s3://bucket/prefix: news") fails as all of this place does: there, and for the same reason."""
    where, reason = object_.subject.partition(": ")[0], object_.text.rpartition(": ")[2]
    return place.endswith(f": {reason}") and f"{where}: " in place
