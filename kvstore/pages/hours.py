"""Time on the x axis: hours put together into as many bars as a plot has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kvstore.totals import HOUR_S
from kvstore.wording import moment

BARS_MAX = 76
TICKS_MAX = 9
_SPANS = (1, 2, 3, 4, 6, 8, 12, 24, 48, 96, 168, 336, 672)  # hours of one bar


@dataclass(slots=True)
class Bars:
    """hours: of one bar. begins: when each begins (unix seconds), without gaps. sums: by outcome, and by move."""

    hours: int
    begins: list[int]
    tokens: list[dict[str, int]] = field(default_factory=list)
    moved: list[dict[str, int]] = field(default_factory=list)

    @property
    def per(self) -> str:
        """ "per hour", "per 6 hours", "per day" """
        if self.hours % 24 == 0:
            days = self.hours // 24
            return "per day" if days == 1 else f"per {days} days"
        return "per hour" if self.hours == 1 else f"per {self.hours} hours"

    def places(self) -> list[str]:
        """What each bar is called."""
        return [moment(begin) for begin in self.begins]

    def ticks(self) -> list[tuple[float, str]]:
        """Round times below the middle of their bars: the date at midnight, else the time of day."""
        count = len(self.begins)
        wanted = max(1, count / TICKS_MAX) * self.hours
        every = next((span for span in _SPANS if span >= wanted), 24 * 28)
        found: list[tuple[float, str]] = []
        for number, begin in enumerate(self.begins):
            if begin // HOUR_S % every and count > 2:
                continue
            at = datetime.fromtimestamp(begin, UTC)
            midnight = at.hour == 0 or every >= 24
            found.append(((number + 0.5) / count, f"{at.day} {at:%b}" if midnight else f"{at:%H:%M}"))
        return found


def bars(hours: Sequence[Mapping[str, Any]], until_s: float) -> Bars:
    """`by.hour` of a report as bars, from its first hour to `until_s`."""
    first, last = hours[0]["hour_s"], max(hours[-1]["hour_s"], int(until_s) // HOUR_S * HOUR_S)
    count = (last - first) // HOUR_S + 1
    span = next((s for s in _SPANS if count <= s * BARS_MAX), _SPANS[-1])
    step = span * HOUR_S
    begin = first // step * step
    made = Bars(span, list(range(begin, last + 1, step)))
    made.tokens = [{} for _ in made.begins]
    made.moved = [{} for _ in made.begins]
    for hour in hours:
        at = (hour["hour_s"] - begin) // step
        for sums, counts in ((made.tokens, hour["outcomes"]), (made.moved, hour["bytes"])):
            for name, value in counts.items():
                sums[at][name] = sums[at].get(name, 0) + value
    return made
