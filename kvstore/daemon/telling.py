"""Problems as a daemon or a mirror tells them: those that do not work as they are first, and of these the oldest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.protocol import answers
from replication.problems import Problem

PROBLEMS_SHOWN: Final = 64  # in an answer


def facts_of(problems: Iterable[Problem], now_s: float) -> list[answers.Problem]:
    """docs/cli.md names the fields. now_s: unix seconds."""
    ordered = sorted(problems, key=lambda one: (one.level != "problem", -one.age_s))
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
        for one in ordered[:PROBLEMS_SHOWN]
    ]
