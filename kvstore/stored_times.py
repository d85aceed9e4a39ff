"""Stored times: when blocks under a TTL were stored, so that a restart does not make them young.

    expiry ── changes ──▶ I/O thread ──▶ stored_times.sqlite (namespace, hash ─▶ unix seconds)

Only namespaces with a TTL have rows. They are written every few seconds; `saved_s` says until
when everything is in the file. A block that the file does not know was stored after that: a
kill makes it older by those seconds, never younger. A file that cannot be read is put aside.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.constants import EXPIRY_ROWS_PER_SAVE, TOTALS_BUSY_TIMEOUT_S

log = logging.getLogger("kvstore.stored_times")

Row = tuple[bytes, bytes, int | None]  # namespace digest, block hash, unix seconds (None: not held any more)


class Changes(NamedTuple):
    """What one write does. forgotten: namespaces without a TTL by now. saved_s: what is known until then is in.
    anew: namespaces that some rows are of because all of theirs are written."""

    rows: list[Row]
    forgotten: list[bytes]
    saved_s: int | None
    anew: Sequence[bytes] = ()


class StoredTimes:
    """The file. `path` None keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def read(self) -> tuple[dict[bytes, dict[bytes, int]], int]:
        """Times by namespace, each in the order of storing; and until when they are complete (0: never)."""
        times: dict[bytes, dict[bytes, int]] = {}
        if self._path is None or not self._path.exists():
            return times, 0
        try:
            with closing(_open(self._path)) as base:
                for digest, block_hash, stored_s in base.execute("SELECT * FROM times ORDER BY stored_s"):
                    times.setdefault(bytes(digest), {})[bytes(block_hash)] = int(stored_s)
                kept = base.execute("SELECT saved_s FROM saved").fetchone()
            return times, int(kept[0]) if kept else 0
        except (sqlite3.Error, OSError, TypeError, ValueError) as error:
            log.warning(
                "times of storing are lost, blocks under a TTL count as new: %s: %s", self._path, error
            )
            with suppress(OSError):
                self._path.replace(self._path.with_suffix(".unreadable"))
            return {}, 0

    def write(self, changes: Changes) -> bool:
        """Put changes on disk; blocks, so from an I/O thread. False when they are not there."""
        if self._path is None:
            return True
        try:
            with closing(_open(self._path)) as base, base:
                base.executemany("DELETE FROM times WHERE digest = ?", [(d,) for d in changes.forgotten])
                base.executemany(
                    "DELETE FROM times WHERE digest = ? AND block_hash = ?",
                    [row[:2] for row in changes.rows if row[2] is None],
                )
                base.executemany(
                    "REPLACE INTO times VALUES (?, ?, ?)", [row for row in changes.rows if row[2] is not None]
                )
                if changes.saved_s is not None:
                    base.execute("DELETE FROM saved")
                    base.execute("INSERT INTO saved VALUES (?)", (changes.saved_s,))
            return True
        except (sqlite3.Error, OSError) as error:
            log.warning("times of storing are not saved: %s: %s", self._path, error)
            return False

    def page(self, digest: bytes, after: bytes) -> list[bytes] | None:
        """The next block hashes of a namespace behind this one, EXPIRY_ROWS_PER_SAVE of them or all that are
        left; blocks. None when the file cannot be read."""
        if self._path is None:
            return []
        try:
            with closing(_open(self._path)) as base:
                rows = base.execute(
                    "SELECT block_hash FROM times WHERE digest = ? AND block_hash > ? ORDER BY block_hash LIMIT ?",
                    (digest, after, EXPIRY_ROWS_PER_SAVE),
                )
                return [bytes(block_hash) for (block_hash,) in rows]
        except (sqlite3.Error, OSError) as error:
            log.warning("times of storing cannot be compared: %s: %s", self._path, error)
            return None


def _open(path: Path) -> sqlite3.Connection:
    base = sqlite3.connect(path, timeout=TOTALS_BUSY_TIMEOUT_S)
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")
    base.execute(
        "CREATE TABLE IF NOT EXISTS times (digest BLOB, block_hash BLOB, stored_s INTEGER, "
        "PRIMARY KEY (digest, block_hash)) WITHOUT ROWID"
    )
    base.execute("CREATE TABLE IF NOT EXISTS saved (saved_s INTEGER)")
    return base
