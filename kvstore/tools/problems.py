"""Problems of a daemon or a mirror, in words: the same in `kvstore status`, `kvstore top` and wherever else a line is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.units import count, format_duration, plural

Told = Mapping[str, Any]  # kvstore.protocol.answers.Problem


def how_it_is(problems: Sequence[Told]) -> str:
    """In a word or two."""
    levels = [problem["level"] for problem in problems]
    found = (plural(levels.count(level), level) for level in ("problem", "warning") if level in levels)
    return ", ".join(found).upper() if "problem" in levels else ", ".join(found) or "ok"


def in_a_line(problem: Told, now_s: float) -> str:
    """Without what to do. now_s: unix seconds, by the clock of who tells it."""
    age = format_duration(max(0.0, now_s - problem["since_s"]))
    often = f", {count(problem['count'])} times" if problem["count"] > 1 else ""
    return f"{problem['kind']} {problem['subject']}: {problem['text']} (for {age}{often})"


def in_lines(problems: Sequence[Told], now_s: float) -> Iterator[str]:
    """With what to do."""
    for problem in problems:
        yield f"{problem['level'].upper():<12}{in_a_line(problem, now_s)}"
        if problem["fix"]:
            yield f"            -> {problem['fix']}"
