"""Keeps on disk what the write budget has spent, so that no kill makes the budget larger.

    spent, by the hour │ ahead: what may be spent before this is written again

What is written ahead counts as spent after a kill, whether it was or not; after a clean stop it is
what really was. So the next daemon never knows of less than went to the disk.

`write_budget.json` in the data directory: times are those of the wall clock, and replaced whole. A start in the same boot goes by
the machine's own clock, so that a wall clock that is set forward gives no second budget. A file
that is damaged counts as a day's budget spent; it is put aside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstore.constants import MIB
from kvstore.health.write_budget import Ledger, WriteBudget
from kvstore.io_pool import Io
from kvstore.retention.clock import boot_id
from tiers.files import put_aside, replace_file
from tiers.reading import Unreadable, read_json, require_damaged

WRITE_BUDGET_FILE_BYTES_MAX = 1 * MIB  # of a day, by the hour: a few KB

log = logging.getLogger("kvstore.health.write_budget")


class WriteBudgetFile:
    """Keeps one `WriteBudget`, whose times are those of `clock`."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        boot: str | None = None,
    ) -> None:
        """boot: the identity of this boot of the machine, where it is not to be looked up."""
        self._boot = boot_id() if boot is None else boot
        self._path = path
        self._clock = clock
        self._wall_clock = wall_clock
        self._writing = False
        self.problem = ""  # why it could not be written the last time; logged once

    def open(self, bytes_per_day: int, record_bytes_max: int = 0) -> WriteBudget:
        """The budget, less what earlier daemons spent of it. Blocks on the disk. Raises OpenError."""
        spent = self._read(bytes_per_day) if bytes_per_day else []
        write_budget = WriteBudget(bytes_per_day, self._clock, spent, True, record_bytes_max)
        if bytes_per_day:
            self._write_now(write_budget, write_budget.ledger())
        return write_budget

    def keep(self, write_budget: WriteBudget, io: Io) -> None:
        """Have it written when little is left of what was written ahead; one write at a time."""
        if self._writing or not write_budget.wants_keeping:
            return

        def written(done: bool) -> None:
            self._writing = False
            if done:
                write_budget.kept(ledger)

        self._writing = True
        ledger = write_budget.ledger()
        io.submit(lambda: self._write(ledger), written, failed=False)

    def close(self, write_budget: WriteBudget) -> None:
        """A clean stop: nothing is spent any more but what is under way. Blocks on the disk."""
        if write_budget.limited:
            self._write_now(write_budget, write_budget.ledger(is_last=True))

    def _write_now(self, write_budget: WriteBudget, ledger: Ledger) -> None:
        if self._write(ledger):
            write_budget.kept(ledger)

    def _write(self, ledger: Ledger) -> bool:
        ahead_s = self._wall_clock() - self._clock()
        spent = [(at_s + ahead_s, size_bytes) for at_s, size_bytes in ledger.spent]
        kept = msgspec.structs.replace(ledger, spent=spent, boot_id=self._boot, wall_ahead_s=ahead_s)
        content = msgspec.json.encode(kept)
        try:
            replace_file(self._path, content)
        except OSError as error:
            if not self.problem:
                log.warning("nothing is written to NVMe while this file cannot be: %s: %s", self._path, error)
            self.problem = error.strerror or str(error)
            return False
        self.problem = ""
        return True

    def _read(self, bytes_per_day: int) -> list[tuple[float, int]]:
        """What was spent, and when at the latest."""
        now_s = self._clock()
        try:
            ledger = read_json(self._path, WRITE_BUDGET_FILE_BYTES_MAX, Ledger)
        except Unreadable as error:
            if error.is_missing:
                return []
            require_damaged(error)
            log.warning("what was written to NVMe is not known: nothing is for a day: %s", error)
            put_aside(self._path)
            return [(now_s, bytes_per_day)]
        is_same_boot = ledger.boot_id == self._boot != ""
        ahead_s = ledger.wall_ahead_s if is_same_boot else self._wall_clock() - now_s
        spent = [(min(now_s, at_s - ahead_s), size_bytes) for at_s, size_bytes in ledger.spent]
        return [*spent, (now_s, ledger.ahead_bytes)]
