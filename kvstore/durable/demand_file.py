"""Demand on disk: written now and then, and at a clean stop. What a kill loses is a few minutes of experience."""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.durable.demand import Demand
from kvstore.io_pool import Io
from tiers.files import replace_in_parts
from tiers.reading import Unreadable, read_bytes, require_damaged

DEMAND_SAVE_INTERVAL_S = 300.0  # what a kill may lose of the counts

log = logging.getLogger("kvstore.durable.demand_file")


class DemandFile:
    """Keeps one `Demand`."""

    def __init__(self, path: Path, demand: Demand) -> None:
        self._path = path
        self._demand = demand
        self._save_at_s = 0.0
        self._saving = False

    def open(self) -> None:
        """Go on from what an earlier daemon knew. Blocks on the disk. Raises OpenError."""
        try:
            if not self._demand.restore(read_bytes(self._path, self._demand.snapshot_bytes)):
                log.warning("demand begins anew: %s: not what this version writes", self._path)
        except Unreadable as error:
            require_damaged(error)
            if not error.is_missing:
                log.warning("demand begins anew: %s", error)

    def keep(self, io: Io, now_s: float) -> None:
        """Have it written when it is time."""
        if self._saving or now_s < self._save_at_s:
            return

        def saved(_: None) -> None:
            self._saving = False

        self._save_at_s, self._saving = now_s + DEMAND_SAVE_INTERVAL_S, True
        io.submit(self.save, saved, failed=None)

    def save(self) -> None:
        """One at a time. Blocks on the disk. Never raises."""
        try:
            replace_in_parts(self._path, self._demand.parts())
        except OSError as error:
            log.warning("demand is not saved: %s: %s", self._path, error)
