"""Time on the x axis: hours put together into as many bars as a plot has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvstore.ledger.totals import HOUR_S
from kvstore.units import format_time

BARS_MAX = 76
TICKS_MAX = 9
_SPANS = (1, 2, 3, 4, 6, 8, 12, 24, 48, 96, 168, 336, 672)  # hours of one bar


class Bars:
    """`by.hour` of a report as bars without gaps, from its first hour to `until_s`.

    hours: of one bar. begins: when each begins, in unix seconds. tokens: of each, by outcome. moved: bytes of
    each, by way.
    """

    def __init__(self, hours: Sequence[Mapping[str, Any]], until_s: float) -> None:
        first, last = hours[0]["hour_s"], max(hours[-1]["hour_s"], int(until_s) // HOUR_S * HOUR_S)
        wanted = ((last - first) // HOUR_S + 1) / BARS_MAX
        self.hours = next((span for span in _SPANS if span >= wanted), _SPANS[-1])
        step = self.hours * HOUR_S
        begin = first // step * step
        self.begins = list(range(begin, last + 1, step))
        self.tokens: list[dict[str, int]] = [{} for _ in self.begins]
        self.moved: list[dict[str, int]] = [{} for _ in self.begins]
        for hour in hours:
            at = (hour["hour_s"] - begin) // step
            for sums, counts in ((self.tokens[at], hour["outcomes"]), (self.moved[at], hour["bytes"])):
                for name, value in counts.items():
                    sums[name] = sums.get(name, 0) + value

    @property
    def per(self) -> str:
        """ "per hour", "per 6 hours", "per day" """
        count, unit = (self.hours // 24, "day") if self.hours % 24 == 0 else (self.hours, "hour")
        return f"per {unit}" if count == 1 else f"per {count} {unit}s"

    def places(self) -> list[str]:
        """What each bar is called."""
        return [format_time(begin) for begin in self.begins]

    def ticks(self) -> list[tuple[float, str]]:
        """Round times below the middle of their bars: the date at midnight, else the time of day."""
        count = len(self.begins)
        wanted = max(1, count / TICKS_MAX) * self.hours
        every = next((span for span in _SPANS if span >= wanted), _SPANS[-1])
        found: list[tuple[float, str]] = []
        for number, begin in enumerate(self.begins):
            if begin // HOUR_S % every and count > 2:
                continue
            at = datetime.fromtimestamp(begin, UTC)
            is_day = at.hour == 0 or every >= 24
            found.append(((number + 0.5) / count, f"{at.day} {at:%b}" if is_day else f"{at:%H:%M}"))
        return found
