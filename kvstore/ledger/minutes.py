"""Minutes: what lookups and bytes came to in each of the last hours, all models and tenants together.

In memory only: a restart forgets them, and the hours on disk (`kvstore.ledger.totals`) go on. A lookup whose
account changes later changes the minute in which it was booked, so a minute can still lose hits to misses
when it is over; who shows them asks for the last few again.
"""

from __future__ import annotations

from kvstore.ledger.sums import Sums

LIVE_MINUTES_MAX = 360  # kept in memory, and answered

MINUTE_S = 60


class Minutes:
    """The last LIVE_MINUTES_MAX minutes in which something happened."""

    def __init__(self) -> None:
        self._minutes: dict[int, Sums] = {}  # by unix seconds of its start; first come, first gone

    def of(self, now_s: float) -> Sums:
        """The minute that counts now; the caller changes it."""
        minute_s = minute_of(now_s)
        sums = self._minutes.get(minute_s)
        if sums is None:
            if len(self._minutes) >= LIVE_MINUTES_MAX:
                del self._minutes[next(iter(self._minutes))]
            sums = self._minutes[minute_s] = Sums()
        return sums

    def since(self, since_s: float, now_s: float) -> list[tuple[int, Sums]]:
        """(start, sums) of the minutes that began then or later, and of the one that was under way, oldest first;
        none of those longer ago than LIVE_MINUTES_MAX, and none in which nothing happened."""
        first_s = max(minute_of(since_s), minute_of(now_s) - (LIVE_MINUTES_MAX - 1) * MINUTE_S)
        return sorted(
            ((minute_s, sums) for minute_s, sums in self._minutes.items() if minute_s >= first_s),
            key=lambda minute: minute[0],
        )


def minute_of(at_s: float) -> int:
    """When the minute began that this time is in."""
    return int(at_s) // MINUTE_S * MINUTE_S
