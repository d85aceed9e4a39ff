"""Times as people write them: "36h" in, 129600.0 out, and back."""

from __future__ import annotations

import re

_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_duration(text: str) -> float:
    """Seconds of "90", "90s", "15min", "36h" or "7d". Raises ValueError saying what is allowed."""
    match = _PATTERN.fullmatch(text)
    if match is None or match.group(2) not in _UNITS:
        raise ValueError('not a time: allowed are seconds, or a number with s, min, h, d or w, like "36h"')
    return float(match.group(1)) * _UNITS[match.group(2)]


def short_duration(seconds: float) -> str:
    """In the largest unit that leaves no rest: 5400 -> "90 min"."""
    for unit, factor in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} s"
