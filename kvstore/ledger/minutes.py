"""Minutes: what lookups and bytes came to in each of the last hours, by model and tenant.

    minute ─▶ (model, tenant) ─▶ sums          kept in memory, and in `totals.sqlite` (`kvstore.ledger.totals`)

A lookup whose account changes later changes the minute in which it was booked, so a minute can still lose hits to misses
when it is over; who shows them asks for the last few again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstore.ledger.sums import EVERYBODY_ELSE, Sums

LIVE_MINUTES_MAX = 360  # kept, and answered
MINUTE_ROWS_MAX = 16  # models × tenants of one minute that have a row of their own

MINUTE_S = 60

Key = tuple[int, str, str]  # minute (unix seconds of its start), model, tenant


@dataclass(slots=True)
class Minute(Sums):
    """One row."""

    minute_s: int
    model: str
    tenant: str

    @property
    def key(self) -> Key:
        return self.minute_s, self.model, self.tenant


class Minutes:
    """The last LIVE_MINUTES_MAX minutes in which something happened."""

    def __init__(self) -> None:
        self._minutes: dict[int, dict[tuple[str, str], Minute]] = {}  # by its start; first come, first gone

    def of(self, now_s: float, model: str = "", tenant: str = "") -> Minute:
        """The row that counts now; the caller changes it."""
        minute_s = minute_of(now_s)
        rows = self._minutes.get(minute_s)
        if rows is None:
            if len(self._minutes) >= LIVE_MINUTES_MAX:
                del self._minutes[next(iter(self._minutes))]
            rows = self._minutes[minute_s] = {}
        name = model, tenant
        if name not in rows and len(rows) >= MINUTE_ROWS_MAX - 1:
            name = EVERYBODY_ELSE, EVERYBODY_ELSE
        row = rows.get(name)
        if row is None:
            row = rows[name] = Minute(minute_s=minute_s, model=name[0], tenant=name[1])
        return row

    def restore(self, row: Minute) -> None:
        """One that an earlier daemon saved."""
        self._minutes.setdefault(row.minute_s, {})[row.model, row.tenant] = row

    def get(self, key: Key) -> Minute | None:
        """The row of that name, where it is kept still."""
        return self._minutes.get(key[0], {}).get(key[1:])

    def since(self, since_s: float, now_s: float) -> list[tuple[int, list[Minute]]]:
        """(start, rows) of the minutes that began then or later, and of the one that was under way, oldest first;
        none of those longer ago than LIVE_MINUTES_MAX or yet to come, and none in which nothing happened."""
        first_s = max(minute_of(since_s), oldest_minute(now_s))
        return sorted(
            (
                (minute_s, list(rows.values()))
                for minute_s, rows in self._minutes.items()
                if first_s <= minute_s <= now_s
            ),
            key=lambda minute: minute[0],
        )

    def between(self, begin_s: float, end_s: float) -> Iterator[Minute]:
        """The rows of the minutes that began in this time."""
        for minute_s, rows in self._minutes.items():
            if begin_s <= minute_s < end_s:
                yield from rows.values()


def minute_of(at_s: float) -> int:
    """When the minute began that this time is in."""
    return int(at_s) // MINUTE_S * MINUTE_S


def oldest_minute(now_s: float) -> int:
    """When the oldest minute began of which something is kept."""
    return minute_of(now_s) - (LIVE_MINUTES_MAX - 1) * MINUTE_S


def together(rows: Iterable[Sums]) -> Sums:
    """The sum of all models and tenants."""
    total = Sums()
    for row in rows:
        total.add(row)
    return total
