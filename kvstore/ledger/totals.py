"""Totals: what lookups and bytes came to, by hour, model and tenant, and the prefixes that saved most.

    hour │ model │ tenant │ lookups │ tokens by outcome │ bytes moved │ prefill seconds saved

Kept in memory, and in `totals.sqlite` in the data directory, so that a report of last week
survives restarts: changed rows are written every few seconds from an I/O thread (a kill
loses no more than that), rows older than TOTALS_KEPT_DAYS are dropped. So are the minutes of
the last six hours (`kvstore.ledger.minutes`): a span that begins or ends within them does so
at the minute, an older one at the hour.

The prefixes are those that lookups found as their longest hit: a system prompt shared by
many, a conversation that goes on. Of these the heaviest PREFIXES_KEPT are counted with the
space-saving algorithm (Metwally, Agrawal, El Abbadi 2005): a new one takes the place of the
lightest and inherits its count as its possible error.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.constants import STEP_BLOCKS, STEP_SLOW_BLOCKS
from kvstore.index.block import Namespace
from kvstore.ledger.minutes import MINUTE_S, Minute, Minutes, minute_of, oldest_minute
from kvstore.ledger.minutes import Key as MinuteKey
from kvstore.ledger.since_start import SinceStart
from kvstore.ledger.sums import EVERYBODY_ELSE, Sums
from kvstore.protocol import answers, outcomes
from kvstore.steps import Steps, finish
from tiers.files import put_aside

# Hours × models × tenants; beyond it the oldest hours are merged into one row each.
TOTALS_ROWS_MAX = 20_000
TOTALS_PUT_TOGETHER = 64  # rows that are merged at a time
TOTALS_KEPT_DAYS = 90
TOTALS_BUSY_TIMEOUT_S = 2.0  # for another process that reads the file
PREFIXES_KEPT = 256  # heaviest prefixes that are counted

log = logging.getLogger("kvstore.ledger.totals")

HOUR_S = 3600

Key = tuple[int, str, str, str]  # hour (unix seconds of its start), region, model, tenant


@dataclass(slots=True)
class Total(Sums):
    """One row."""

    hour_s: int
    region: str
    model: str
    tenant: str

    def as_dict(self) -> answers.Hour:
        """As it is in answers; the fields are documented in docs/cli.md."""
        return {
            "hour_s": self.hour_s,
            "region": self.region,
            "model": self.model,
            "tenant": self.tenant,
            **self.sums_as_dict(),
        }


class Rows(NamedTuple):
    """All sums that one lookup, or one move of bytes, is part of."""

    hour: Total
    minute: Minute
    start: Sums


@dataclass(slots=True)
class Prefix:
    """A prefix and what it saved. error_tokens: how much of that may belong to one it replaced."""

    namespace: str
    model: str
    tenant: str
    block_hash: str
    tokens: int
    uses: int
    tokens_saved: int
    error_tokens: int
    first_s: float
    last_s: float


class Totals:
    """All rows. `path` None keeps nothing on disk. Called from the engine's thread, but for `save`."""

    def __init__(self, region: str = "", path: Path | None = None) -> None:
        self.region = region
        self.problem = ""  # why the last `save` failed
        self._path = path
        self._hours: dict[int, dict[Key, Total]] = {}  # rows by the hour that they are of; none is empty
        self._count = 0  # of all rows
        self._prefixes: dict[tuple[str, str], Prefix] = {}  # by namespace and hash, in hex
        self._changed: set[Key] = set()
        self._gone: set[Key] = set()  # rows that were put together, to be deleted with the next save
        self._prefixes_changed = False
        self.minutes = Minutes()
        self._minutes_changed: set[MinuteKey] = set()
        self.since_start = SinceStart()
        self._newest: dict[int, tuple[Rows, Key, MinuteKey]] = {}  # of the current minute, by namespace
        self._newest_minute_s = 0
        self._only_hour_s = -1  # the only hour that still has a row for each model and tenant
        if path is not None:
            self._read(path)

    # -- counting --

    def of(self, namespace: Namespace, now_s: float) -> Rows:
        """The rows that count now for this namespace; the caller changes them."""
        minute_s = minute_of(now_s)
        if minute_s != self._newest_minute_s:
            self._newest.clear()
            self._newest_minute_s = minute_s
        newest = self._newest.get(namespace.id)
        if newest is None:
            fields = namespace.spec.fields
            model, tenant = fields.get("model", ""), fields.get("tenant", "")
            hour = self._row((hour_of(now_s), self.region, model, tenant))
            minute = self.minutes.of(now_s, model, tenant)
            rows = Rows(hour, minute, self.since_start.of(model, tenant))
            newest = self._newest[namespace.id] = rows, _key_of(hour), minute.key
        rows, hour_key, minute_key = newest
        self._changed.add(hour_key)
        self._minutes_changed.add(minute_key)
        return rows

    def changed(self, rows: Rows) -> None:
        """Rows of some time ago were changed: they are written with the next save."""
        self._changed.add(_key_of(rows.hour))
        self._minutes_changed.add(rows.minute.key)

    def used(
        self, namespace: Namespace, block_hash: bytes, tokens: int, saved: int, now_s: float
    ) -> tuple[str, str]:
        """A lookup hit the prefix that ends with this block: `tokens` long, of which it saved `saved`.

        Answers its name, for `unused`.
        """
        key = (namespace.digest.hex(), block_hash.hex())
        prefix = self._prefixes.get(key)
        if prefix is None:
            error = self._displace() if len(self._prefixes) >= PREFIXES_KEPT else 0
            fields = namespace.spec.fields
            model, tenant = fields.get("model", ""), fields.get("tenant", "")
            prefix = Prefix(key[0], model, tenant, key[1], tokens, 0, error, error, now_s, now_s)
            self._prefixes[key] = prefix
        prefix.uses += 1
        prefix.tokens_saved += saved
        prefix.last_s = now_s
        self._prefixes_changed = True
        return key

    def unused(self, key: tuple[str, str], tokens: int) -> None:
        """So many tokens that `used` counted as saved did not come."""
        prefix = self._prefixes.get(key)
        if prefix is not None:
            prefix.tokens_saved = max(prefix.error_tokens, prefix.tokens_saved - tokens)
            self._prefixes_changed = True

    def _displace(self) -> int:
        """Give up the lightest prefix; answers what it had saved."""
        lightest = min(self._prefixes.values(), key=lambda prefix: prefix.tokens_saved)
        del self._prefixes[lightest.namespace, lightest.block_hash]
        return lightest.tokens_saved

    def _row(self, key: Key) -> Total:
        total = self._get(key)
        if total is None:
            if self._count >= TOTALS_ROWS_MAX and key[0] != self._only_hour_s:
                self._put_together(key[0])
            if self._count >= TOTALS_ROWS_MAX:  # all of this hour
                key = (*key[:2], EVERYBODY_ELSE, EVERYBODY_ELSE)
            total = self._get(key) or self._add(Total(*key))
            self._gone.discard(key)
        return total

    def _get(self, key: Key) -> Total | None:
        return self._hours.get(key[0], {}).get(key)

    def _add(self, row: Total) -> Total:
        self._hours.setdefault(row.hour_s, {})[_key_of(row)] = row
        self._count += 1
        return row

    def _put_together(self, hour_s: int) -> None:
        """Make one row of some rows of the oldest hours, so that there is room for new ones; of hours to come last, which the clock
        said when it was wrong."""
        left = TOTALS_PUT_TOGETHER
        for other_s in sorted(self._hours, key=lambda other_s: (other_s > hour_s, other_s)):
            if other_s != hour_s:
                left -= self._put_hour_together(other_s, left)
            if left <= 0:
                return
        if left == TOTALS_PUT_TOGETHER:  # nothing else is left: not looked for again before the next hour
            self._only_hour_s = hour_s

    def _put_hour_together(self, hour_s: int, rows_max: int) -> int:
        """Some of the rows of an hour. Returns how many fewer there are."""
        rows, before = self._hours[hour_s], self._count
        for key in list(islice(rows, rows_max + 1)):
            others = (*key[:2], EVERYBODY_ELSE, EVERYBODY_ELSE)
            if key != others:
                (self._get(others) or self._add(Total(*others))).add(rows.pop(key))
                self._count -= 1
                self._gone.add(key)
                self._changed.add(others)
        return before - self._count

    # -- reading --

    def since(self, since_s: float) -> list[Total]:
        """Rows of the hours that began then or later, oldest first, and the hour that was under way."""
        first_s = hour_of(since_s)
        return [
            row for hour_s in sorted(self._hours) if hour_s >= first_s for row in self._hours[hour_s].values()
        ]

    def heaviest(self, count: int, since_s: float = 0.0) -> list[Prefix]:
        """The prefixes that saved most, best first, of those hit in these hours."""
        first_s = hour_of(since_s)
        hit = (prefix for prefix in self._prefixes.values() if prefix.last_s >= first_s)
        return nlargest(count, hit, key=lambda prefix: prefix.tokens_saved)

    def check_slices(self) -> Iterator[list[str]]:
        """One line per row that cannot be true, in slices."""
        rows = iter(self.since(0.0))
        while piece := list(islice(rows, STEP_BLOCKS)):
            yield [
                f"totals: {row.model} {row.tenant} at {row.hour_s}: {row.tokens_asked} tokens asked for in "
                f"{row.lookups} lookups, outcomes {row.tokens}"
                for row in piece
                if min(row.lookups, *row.tokens) < 0 or sum(row.tokens) != row.tokens_asked
            ]

    def span_steps(self, since_s: float, until_s: float, now_s: float) -> Steps[Period]:
        """What came to between two times, as nearly as it is known: by the minute within the last hours, else whole hours. Of hours that
        are yet to come nothing: the clock was wrong once."""
        oldest_s = oldest_minute(now_s)
        begin_s = minute_of(since_s) if since_s >= oldest_s else hour_of(since_s)
        end_s = now_s
        if until_s < now_s:
            step_s = MINUTE_S if max(begin_s, hour_of(until_s)) >= oldest_s else HOUR_S
            end_s = min(now_s, max(begin_s + step_s, until_s // step_s * step_s))
        both = hour_of(begin_s), hour_of(end_s)
        parts = {hour_s for hour_s in both if hour_s < begin_s or hour_s + HOUR_S > end_s != now_s}
        found: list[Total] = []
        for hour_s in sorted({*self._hours, *parts}):
            if hour_s in parts:
                found += yield from self._part_steps(hour_s, begin_s, end_s)
            elif begin_s <= hour_s <= hour_of(now_s) and (hour_s + HOUR_S <= end_s or end_s == now_s):
                found += self._hours.get(hour_s, {}).values()
        return Period(found, begin_s, end_s)

    def _part_steps(self, hour_s: int, begin_s: float, end_s: float) -> Steps[list[Total]]:
        """Of an hour, what its minutes in this time came to."""
        rows: dict[tuple[str, str], Total] = {}
        minutes = self.minutes.between(max(begin_s, hour_s), min(end_s, hour_s + HOUR_S))
        for number, minute in enumerate(list(minutes), 1):
            name = minute.model, minute.tenant
            rows.setdefault(name, Total(hour_s, self.region, *name)).add(minute)
            if number % TOTALS_PUT_TOGETHER == 0:
                yield
        return list(rows.values())

    # -- keeping --

    def snapshot(self, now_s: float) -> Snapshot | None:
        """What changed since the last one, for `save`; None if nothing did."""
        snapshot = self.begin_snapshot(now_s)
        if snapshot is not None:
            finish(self.fill_steps(snapshot))
        return snapshot

    def begin_snapshot(self, now_s: float) -> Snapshot | None:
        """What `fill_steps` is to put into it: what changed since the last one; None if nothing did. Forgets what is too old."""
        oldest_s = self._oldest_s(now_s)
        for hour_s in [hour_s for hour_s in self._hours if hour_s < oldest_s]:
            self._count -= len(self._hours.pop(hour_s))
        changed, minutes_changed, gone = self._changed, self._minutes_changed, self._gone
        self._changed, self._minutes_changed, self._gone = set(), set(), set()
        if self._path is None or not (changed or self._prefixes_changed):
            return None
        prefixes = msgspec.json.encode(list(self._prefixes.values())) if self._prefixes_changed else None
        self._prefixes_changed = False
        return Snapshot([], prefixes, oldest_s, gone, [], oldest_minute(now_s), changed, minutes_changed)

    def fill_steps(self, snapshot: Snapshot) -> Steps[None]:
        """Encode its rows, as they are by then."""
        for number, key in enumerate(snapshot.changed, 1):
            if (row := self._get(key)) is not None:
                snapshot.rows.append((*key, msgspec.json.encode(row)))
            if number % STEP_SLOW_BLOCKS == 0:
                yield
        for number, name in enumerate(snapshot.minutes_changed, 1):
            if (minute := self.minutes.get(name)) is not None:
                snapshot.minutes.append((*name, msgspec.json.encode(minute)))
            if number % STEP_SLOW_BLOCKS == 0:
                yield

    def _oldest_s(self, now_s: float) -> int:
        """What is older is forgotten: by the clock, and by the newest hour but one, too. A clock that somebody sets forward by mistake
        takes nothing away before it has counted in two hours."""
        kept_s = TOTALS_KEPT_DAYS * 24 * HOUR_S
        oldest_s = int(now_s - kept_s)
        if all(hour_s >= oldest_s for hour_s in self._hours):
            return oldest_s
        newest = nlargest(2, self._hours)
        return min(oldest_s, newest[-1] + HOUR_S - kept_s)

    def unsaved(self, snapshot: Snapshot) -> None:
        """A snapshot could not be saved: its rows are part of the next one."""
        self._changed |= snapshot.changed
        self._minutes_changed |= snapshot.minutes_changed
        self._gone.update(key for key in snapshot.gone if self._get(key) is None)
        self._prefixes_changed |= snapshot.prefixes is not None

    def save(self, snapshot: Snapshot) -> bool:
        """Write a snapshot; blocks on the disk, so from an I/O thread. Never raises."""
        assert self._path is not None
        try:
            with closing(_open(self._path)) as base, base:
                base.executemany("REPLACE INTO totals VALUES (?, ?, ?, ?, ?)", snapshot.rows)
                base.execute("DELETE FROM totals WHERE hour_s < ?", (snapshot.oldest_s,))
                base.executemany("REPLACE INTO minutes VALUES (?, ?, ?, ?)", snapshot.minutes)
                base.execute("DELETE FROM minutes WHERE minute_s < ?", (snapshot.oldest_minute_s,))
                base.executemany(
                    "DELETE FROM totals WHERE (hour_s, region, model, tenant) = (?, ?, ?, ?)", snapshot.gone
                )
                if snapshot.prefixes is not None:
                    base.execute("REPLACE INTO kept VALUES ('prefixes', ?)", (snapshot.prefixes,))
            self.problem = ""
            return True
        except (sqlite3.Error, OSError) as error:
            log.warning("totals are not saved: %s: %s", self._path, error)
            self.problem = str(error)
            return False

    def _read(self, path: Path) -> None:
        """What an earlier daemon saved. A file that cannot be read is put aside, not deleted."""
        try:
            with closing(_open(path)) as base:
                for (content,) in base.execute("SELECT content FROM totals ORDER BY hour_s"):
                    row = msgspec.json.decode(content, type=Total)
                    row.tokens += [0] * (outcomes.OUTCOMES - len(row.tokens))  # of an older version
                    self._add(row)
                for (content,) in base.execute("SELECT content FROM minutes ORDER BY minute_s"):
                    minute = msgspec.json.decode(content, type=Minute)
                    minute.tokens += [0] * (outcomes.OUTCOMES - len(minute.tokens))
                    self.minutes.restore(minute)
                for (content,) in base.execute("SELECT content FROM kept WHERE name = 'prefixes'"):
                    for prefix in msgspec.json.decode(content, type=list[Prefix]):
                        self._prefixes[prefix.namespace, prefix.block_hash] = prefix
        except (sqlite3.Error, OSError, msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
            log.warning("totals of earlier days are lost: %s: %s", path, error)
            self._hours.clear()
            self._count = 0
            self._prefixes.clear()
            self.minutes = Minutes()
            put_aside(path)


class Snapshot(NamedTuple):
    """Rows as they go into the file: those of `changed` and `minutes_changed`, less those that went meanwhile."""

    rows: list[tuple[int, str, str, str, bytes]]
    prefixes: bytes | None
    oldest_s: int
    gone: set[Key]
    minutes: list[tuple[int, str, str, bytes]]
    oldest_minute_s: int
    changed: set[Key]
    minutes_changed: set[MinuteKey]


class Period(NamedTuple):
    """Rows of a time, of which the first and the last may be parts of an hour."""

    rows: list[Total]
    begin_s: float
    end_s: float


def _open(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=TOTALS_BUSY_TIMEOUT_S)
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")  # after a crash of the machine the last seconds may be gone
    base.execute(
        "CREATE TABLE IF NOT EXISTS totals (hour_s INTEGER, region TEXT, model TEXT, tenant TEXT, "
        "content BLOB, PRIMARY KEY (hour_s, region, model, tenant)) WITHOUT ROWID"
    )
    base.execute(
        "CREATE TABLE IF NOT EXISTS minutes (minute_s INTEGER, model TEXT, tenant TEXT, content BLOB, "
        "PRIMARY KEY (minute_s, model, tenant)) WITHOUT ROWID"
    )
    base.execute("CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, content BLOB) WITHOUT ROWID")
    return base


def hour_of(at_s: float) -> int:
    """When the hour began that this time is in."""
    return int(at_s) // HOUR_S * HOUR_S


def _key_of(row: Total) -> Key:
    return row.hour_s, row.region, row.model, row.tenant
