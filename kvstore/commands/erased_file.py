"""What is erased, on this node's disk: a start that finds the bucket away hands out nothing of it.

    told of a tombstone ─▶ put down here ─▶ erased        start ─▶ all that is here is erased, before anybody is served

A kill may come before all of it was dropped, or given back; a disk may be away meanwhile. What is here is in force, whatever a clock
says; one whose time is over by the clock of its store leaves when the next one comes. One that was taken back leaves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore.io_pool import Io
from replication.errors import Damaged
from replication.formats.sealed import Sealed
from replication.formats.tombstones import Tombstone
from tiers.files import replace_file
from tiers.reading import Unreadable, read_bytes, require_damaged

ERASED_BYTES_MAX: Final = 256 << 20
ERASED_RETRY_S: Final = 10.0  # between two writes, while they fail
_FORMAT: Final = Sealed(b"KVERASE1", list[Tombstone], ERASED_BYTES_MAX)

log = logging.getLogger("kvstore.commands.erased_file")


class ErasedFile:
    """Of one data dir. known: by id. problem: why not all of that could be put down. Blocks on the disk."""

    def __init__(self, path: Path) -> None:
        """What an earlier life was told is known. Raises OpenError."""
        self.known: dict[str, Tombstone] = {}
        self.problem = ""
        self._path = path
        self._lock = threading.Lock()
        self._retry_at_s = 0.0
        try:
            content = read_bytes(path, ERASED_BYTES_MAX)
            told = _FORMAT.unseal(content, str(path))
            self.known = {tombstone.id: tombstone for tombstone in told}
        except (Damaged, Unreadable) as error:
            if isinstance(error, Unreadable):
                require_damaged(error)
            if not (isinstance(error, Unreadable) and error.is_missing):
                log.warning("what was erased is known again when the bucket is read: %s", error)

    def add(self, tombstones: Sequence[Tombstone], now_s: float) -> None:
        """now_s: unix seconds by the clock of the store; 0: not known. Never raises."""
        with self._lock:
            kept = {name: one for name, one in self.known.items() if now_s < one.watched_until_s}
            kept |= {one.id: one for one in tombstones}
            self.known = {name: one for name, one in kept.items() if not one.is_taken_back}
            try:
                replace_file(self._path, _FORMAT.seal(list(self.known.values())))
                self.problem = ""
            except OSError as error:
                log.warning("what is erased is not saved: %s: %s", self._path, error)
                self.problem = error.strerror or str(error)

    def keep(self, io: Io, now_s: float) -> None:
        """Have what could not be put down tried again, now and then. now_s: of any clock that does not jump."""
        if self.problem and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + ERASED_RETRY_S
            io.submit(lambda: self.add((), 0.0), lambda _: None, failed=None)
