"""What disks still have of what was cleared: in slots that are free, and on disks that are away.

    clear ─▶ each disk that is known ─┬─ works: its table is looked through, rows without a block are cleared ─▶ done
                                      └─ away, dead, slow: written down ─▶ back: what is named is not adopted ─▶ as above

The row of a block that was evicted stays until its slot is used again, so that a restart would find it. And of a disk that is
away nobody knows which of its blocks hang on a prefix, or on a pin: all goes that it has of the namespaces.

`uncleared.json` in the data directory is there for what an answer promises, and a disk has not done. It is bounded: a disk that
is to clear very many namespaces clears everything. One that is damaged is put aside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvstore.constants import MIB
from kvstore.io_pool import Io
from kvstore.protocol.residency_bits import IN_NVME
from kvstore.residency.levels import Member
from kvstore.residency.residency import Residency
from tiers.files import put_aside, replace_file
from tiers.nvme.device_table import Row
from tiers.reading import Unreadable, read_json, require_damaged

EVERYTHING: Final = b""  # in place of a namespace
UNCLEARED_NAMESPACES_MAX: Final = 1024  # of a disk
UNCLEARED_DISKS_MAX: Final = 256
UNCLEARED_FILE_BYTES_MAX: Final = 16 * MIB
SWEEP_RETRY_S: Final = 10.0  # after a disk refused to be read, or to be cleared

log = logging.getLogger("kvstore.commands.uncleared")


class _File(msgspec.Struct):
    """disks: by id, the digests of namespaces in hex."""

    disks: dict[str, list[str]]
    format: Literal[1] = 1


class Uncleared:
    """By disk, the namespaces that it has still to clear. Called from the engine's thread only. `path` None keeps nothing."""

    def __init__(self, path: Path | None = None, known: Callable[[], Iterable[str]] = tuple) -> None:
        """known: the ids of all disks that may come back. Blocks on the disk. Raises OpenError."""
        self._path = path
        self._known = known
        self._left = _read(path) if path is not None else {}
        self._on_disk = dict(self._left)
        self._saving = self._has_failed = False
        self._problem = ""  # of the last try to write it

    def add(self, disks: Iterable[str], digests: Collection[bytes]) -> None:
        """These disks, and all that are known, have these namespaces to clear."""
        for disk in {*disks, *self._known()} - {""}:
            wanted = self._left.pop(disk, frozenset()).union(digests)
            if EVERYTHING in wanted or len(wanted) > UNCLEARED_NAMESPACES_MAX:
                wanted = frozenset({EVERYTHING})
            self._left[disk] = wanted  # another object than before: a sweep that is under way does not count
        while len(self._left) > UNCLEARED_DISKS_MAX:
            del self._left[next(iter(self._left))]

    def of(self, disk: str) -> frozenset[bytes]:
        return self._left.get(disk, frozenset())

    def names(self, disk: str, digest: bytes) -> bool:
        """Whether the disk has this namespace still to clear."""
        return not self.of(disk).isdisjoint((digest, EVERYTHING))

    def done(self, disk: str) -> None:
        """Nothing is left on it."""
        self._left.pop(disk, None)

    def is_kept(self, io: Io) -> bool:
        """Whether a restart knows what is known now, or could not be told; if not, it is being written."""
        if self._path is None or self._left == self._on_disk or self._has_failed:
            self._has_failed = False
            return True
        if not self._saving:
            self._saving, left, path = True, dict(self._left), self._path
            io.submit(lambda: _write(path, left), lambda why: self._saved(left, why), failed="not written")
        return False

    def _saved(self, left: dict[str, frozenset[bytes]], why: str) -> None:
        self._saving, self._has_failed = False, bool(why)
        if not why:
            self._on_disk = left
        elif why != self._problem:
            log.error("what was cleared may be found on a disk that was away: %s: %s", self._path, why)
        self._problem = why


class Sweeps:
    """Clears rows of devices that no block of the index has: one sweep of each device at a time."""

    def __init__(self, residency: Residency, uncleared: Uncleared, clock: Callable[[], float]) -> None:
        self._residency = residency
        self.uncleared = uncleared
        self._clock = clock
        self._retry_at_s: dict[int, float] = {}  # by device, after a failure
        self._under_way: dict[int, frozenset[bytes]] = {}  # by device, what is looked for
        self._swept: dict[int, frozenset[bytes]] = {}

    def step(self) -> bool:
        """Go on where a device works and has something to clear; whether one is at it. Only while no block is to be dropped any more."""
        is_busy = False
        for member in self._residency.nvme.members:
            wanted = self.uncleared.of(member.device.disk)
            if not (wanted and member.writable) or self._clock() < self._retry_at_s.get(member.number, 0.0):
                continue
            is_busy = True
            if self._swept.get(member.number) is wanted and not member.dropped:
                self.uncleared.done(member.device.disk)
            elif member.number not in self._under_way and self._swept.get(member.number) is not wanted:
                self._begin(member, wanted)
        return is_busy

    def _begin(self, member: Member, wanted: frozenset[bytes]) -> None:
        self._under_way[member.number] = wanted
        is_all = EVERYTHING in wanted
        self._next(member, member.device.rows_of(lambda digest: is_all or digest in wanted), [])

    def _next(self, member: Member, rows: Iterator[list[Row]], stale: list[Row]) -> None:
        """Clear these, and look for more."""

        def work() -> list[Row] | bool:
            """Whether the table is through; or some rows of it."""
            if stale and not member.device.clear_rows(stale):
                return False
            try:
                return next(rows, True)
            except OSError:
                return False

        def found(found: list[Row] | bool) -> None:
            if isinstance(found, bool):
                wanted = self._under_way.pop(member.number)
                if found:
                    self._swept[member.number] = wanted
                else:
                    self._retry_at_s[member.number] = self._clock() + SWEEP_RETRY_S
                return
            self._next(member, rows, [row for row in found if not self._is_held(member, row)])

        failed: list[Row] | bool = False
        member.io.submit(work, found, failed)

    def _is_held(self, member: Member, row: Row) -> bool:
        """Whether its block is there, or in use: it may be on its way there."""
        block = self._residency.block_of(row.key)
        if block is None:
            return False
        return block.pins > 0 or bool(block.where & IN_NVME and block.place == (member.number, row.slot))


def _write(path: Path, left: dict[str, frozenset[bytes]]) -> str:
    """In an I/O thread: what went wrong."""
    disks = {disk: sorted(digest.hex() for digest in digests) for disk, digests in left.items()}
    try:
        replace_file(path, msgspec.json.encode(_File(disks)))
    except OSError as error:
        return error.strerror or f"{error}"
    return ""


def _read(path: Path) -> dict[str, frozenset[bytes]]:
    try:
        found = read_json(path, UNCLEARED_FILE_BYTES_MAX, _File)
        return {disk: frozenset(map(bytes.fromhex, digests)) for disk, digests in found.disks.items()}
    except (Unreadable, ValueError) as error:
        if isinstance(error, Unreadable):
            if error.is_missing:
                return {}
            require_damaged(error)
        kept = put_aside(path)
        log.warning("%s: put aside as %s; what was cleared may be found on disks that were away", error, kept)
    return {}
