"""What is erased, on this node's disk: a start that finds the bucket away hands out nothing of it.

    told of a tombstone ─▶ put down here ─▶ erased        start ─▶ all that is here is erased, before anything is adopted

A kill may come before all of it was dropped, or given back; a disk may be away meanwhile. What is here is in force, whatever a clock
says; one whose time is over by the clock of its store leaves when the next one comes. One that was taken back leaves.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from replication.errors import Damaged
from replication.formats.sealed import seal, unseal
from replication.formats.tombstones import Tombstone
from tiers.files import replace_file
from tiers.reading import Unreadable, read_bytes

ERASED_BYTES_MAX: Final = 256 << 20
_MAGIC: Final = b"KVERASE1"

log = logging.getLogger("kvstore.daemon.erased_file")


class ErasedFile:
    """Of one data dir. Blocks on the disk; one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Tombstone] = {}

    @property
    def known(self) -> list[Tombstone]:
        return list(self._known.values())

    def open(self) -> list[Tombstone]:
        """What an earlier life was told."""
        try:
            content = read_bytes(self._path, ERASED_BYTES_MAX)
            known = unseal(_MAGIC, content, list[Tombstone], str(self._path), ERASED_BYTES_MAX)
        except (Damaged, Unreadable) as error:
            known = []
            if not (isinstance(error, Unreadable) and error.is_missing):
                log.warning("what was erased is known again when the bucket is read: %s", error)
        self._known = {tombstone.id: tombstone for tombstone in known}
        return known

    def add(self, tombstone: Tombstone, now_s: float) -> None:
        """now_s: unix seconds by the clock of the store; 0: not known. Never raises."""
        kept = {one.id: one for one in self._known.values() if now_s < one.watched_until_s}
        kept[tombstone.id] = tombstone
        if tombstone.is_taken_back:
            del kept[tombstone.id]
        try:
            replace_file(self._path, seal(_MAGIC, list(kept.values())))
            self._known = kept
        except OSError as error:
            log.warning("what is erased is not saved: %s: %s", self._path, error)
