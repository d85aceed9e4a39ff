"""What is erased, on this node's disk: a start that finds the bucket away hands out nothing of it.

    told of a tombstone ─▶ put down here ─▶ erased        start ─▶ all that is here is erased, before anybody is served

A kill may come before all of it was dropped, or given back; a disk may be away meanwhile. What is here is in force, whatever a clock
says; one whose time is over by the clock of its store leaves when the next one comes. One that was taken back leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from replication.errors import Damaged
from replication.formats.sealed import seal, unseal
from replication.formats.tombstones import Tombstone
from tiers.files import replace_file
from tiers.reading import Unreadable, read_bytes

ERASED_BYTES_MAX: Final = 256 << 20
_MAGIC: Final = b"KVERASE1"

log = logging.getLogger("kvstore.commands.erased_file")


class ErasedFile:
    """Of one data dir. known: by id. Blocks on the disk; one thread at a time."""

    def __init__(self, path: Path) -> None:
        """What an earlier life was told is known."""
        self.known: dict[str, Tombstone] = {}
        self._path = path
        try:
            content = read_bytes(path, ERASED_BYTES_MAX)
            told = unseal(_MAGIC, content, list[Tombstone], str(path), ERASED_BYTES_MAX)
            self.known = {tombstone.id: tombstone for tombstone in told}
        except (Damaged, Unreadable) as error:
            if not (isinstance(error, Unreadable) and error.is_missing):
                log.warning("what was erased is known again when the bucket is read: %s", error)

    def add(self, tombstones: Sequence[Tombstone], now_s: float) -> None:
        """now_s: unix seconds by the clock of the store; 0: not known. Never raises."""
        kept = {name: one for name, one in self.known.items() if now_s < one.watched_until_s}
        kept |= {one.id: one for one in tombstones}
        kept = {name: one for name, one in kept.items() if not one.is_taken_back}
        try:
            replace_file(self._path, seal(_MAGIC, list(kept.values())))
            self.known = kept
        except OSError as error:
            log.warning("what is erased is not saved: %s: %s", self._path, error)
