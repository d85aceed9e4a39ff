"""The NVMe tier: records in one or more directories, each on a disk of its own.

              ┌─ /nvme0/kvstore   rows · slabs
    tier ─────┼─ /nvme1/kvstore   rows · slabs        a record lies in exactly one
              └─ /nvme2/kvstore   rows · slabs

Each directory is complete in itself: one that is lost or taken out takes only its own
records with it. A new record goes where most room is, ties by its key; a held key stays
where it is. There is no map of keys: whoever is asked for one asks its directories, which
costs a row lookup (2 to 8 µs) each.

Threads belong to the caller. Put and get may be called from many at once, with a few
records each; bytes move without any lock, straight between disk and the given views.

Rejected: striping a record over directories (one lost disk would lose everything), and
placing by key alone (a directory added later would stay empty until others are full).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tiers.base import Get, Put, Record, SizeClass, Tier, TierStats
from tiers.constants import NVME_ROW_BYTES_EST, NVME_SCAN_ROWS, SLAB_BYTES, SLOT_BYTES_MIN
from tiers.direct import Direct, DiskIO
from tiers.errors import OpenError, RecordSizeError, TierError
from tiers.nvme_directory import NvmeCounters, NvmeDirectory, slab_count_for
from tiers.nvme_home import Home, read_marker
from tiers.rows import HEAD, PARENT_AT, Rows, rebuild
from tiers.slots import SLAB_SLOTS_MAX, SLOT_ALIGN_BYTES

__all__ = ["NvmeTier", "Repaired", "capacity_for", "repair"]


class NvmeTier(Tier):
    """Records on NVMe. Outlives its process; what kill -9 interrupts is a miss, nothing else.

    capacity_bytes is per directory and covers slabs and their rows (NVME_ROW_BYTES_EST for
    each smallest slot); `stats().capacity_bytes` is that of the slabs alone. Another
    NVME_HEADROOM_BYTES of the file system are never taken for slabs.
    """

    name = "nvme"

    def __init__(
        self,
        directories: Sequence[Path],
        capacity_bytes: int,
        slab_bytes: int = SLAB_BYTES,
        direct: Direct = "auto",
        *,
        slot_bytes_min: int = SLOT_BYTES_MIN,
        io: DiskIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open every directory. Raises an OpenError; then none is left open."""
        _check_settings(directories, capacity_bytes, slab_bytes, slot_bytes_min)
        self.slot_bytes_min = slot_bytes_min
        self.directories: list[NvmeDirectory] = []
        self._lock = threading.Lock()
        self._placed: dict[bytes, tuple[NvmeDirectory, int]] = {}  # being put: directory, puts under way
        try:
            for path in directories:
                disk = io or DiskIO()
                opened = NvmeDirectory(path, capacity_bytes, slab_bytes, slot_bytes_min, disk, clock, direct)
                self.directories.append(opened)
        except BaseException:
            self.close()
            raise

    def scan_rows(self) -> Iterator[tuple[bytes, bytes, int]]:
        """(key, parent, size_bytes) of every record held: `scan` without the objects.

        Like `scan`, the first full one finds the free slots in the same pass. Raises
        OpenError where rows are so damaged that the rest cannot be read; `repair` salvages.
        """
        for directory in self.directories:
            for chunk in directory.sound_rows():
                for key, raw, size_bytes in chunk:
                    yield key, raw[PARENT_AT:], size_bytes

    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        if keys is not None:
            for directory in self.directories:
                for key, row in directory.rows_of(keys):
                    yield Record(key, row.parent, row.size_bytes, row.checksum)
            return
        for directory in self.directories:
            for chunk in directory.sound_rows():
                for key, raw, size_bytes in chunk:
                    yield Record(key, raw[PARENT_AT:], size_bytes, raw[HEAD.size : PARENT_AT])

    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        answers = [Put.NO_ROOM] * len(items)
        groups: dict[int, list[tuple[int, tuple[Record, memoryview, int]]]] = {}
        for record, _view in items:
            if not 0 < record.size_bytes <= self.directories[0].slab_bytes:
                largest = self.directories[0].slab_bytes
                raise RecordSizeError(
                    f"record of {record.size_bytes} bytes: allowed are 1 to {largest} (slab_bytes)"
                )
        placed = []
        try:
            for index, (record, view) in enumerate(items):
                number = self._place(record)
                placed.append(record.key)
                slot = self.directories[number].reserve(record.key, record.size_bytes)
                if isinstance(slot, Put):
                    answers[index] = slot
                else:
                    groups.setdefault(number, []).append((index, (record, view, slot)))
            for number, group in groups.items():
                stored = self.directories[number].store([item for _index, item in group])
                for (index, _item), answer in zip(group, stored, strict=True):
                    answers[index] = answer
        finally:
            self._unplace(placed)
        return answers

    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        if len(self.directories) == 1:
            return self.directories[0].load(items)
        answers = [(Get.MISS, b"")] * len(items)
        groups: dict[int, list[int]] = {}
        for index, (key, _view) in enumerate(items):
            groups.setdefault(self._holder(key) or 0, []).append(index)
        for number, indexes in groups.items():
            loaded = self.directories[number].load([items[index] for index in indexes])
            for index, answer in zip(indexes, loaded, strict=True):
                answers[index] = answer
        return answers

    def delete(self, keys: Sequence[bytes]) -> int:
        held = 0
        refused: TierError | None = None
        for directory in self.directories:  # one that refuses does not keep the others from forgetting
            try:
                held += directory.delete(keys)
            except TierError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return held

    def reclaim(self, size_bytes: int) -> list[bytes]:
        proposals = [directory.propose(size_bytes) for directory in self.directories]
        if any(proposal is None or proposal[0] for proposal in proposals):
            return []  # there is room, or it is not known just now
        return min((proposal[1] for proposal in proposals if proposal and proposal[1]), key=len, default=[])

    def stats(self) -> TierStats:
        records = used_bytes = 0
        totals: Counter[int] = Counter()
        used: Counter[int] = Counter()
        for directory in self.directories:
            count, used_here, classes = directory.stats()
            records += count
            used_bytes += used_here
            for found in classes:
                totals[found.slot_bytes] += found.total
                used[found.slot_bytes] += found.used
        merged = tuple(SizeClass(size, totals[size], used[size]) for size in sorted(totals))
        capacity_bytes = sum(directory.capacity_bytes for directory in self.directories)
        return TierStats(self.name, capacity_bytes, used_bytes, records, merged)

    def counters(self) -> NvmeCounters:
        """What went wrong since the start, over all directories."""
        return NvmeCounters(
            *(
                sum(getattr(d.counters, field.name) for d in self.directories)
                for field in fields(NvmeCounters)
            )
        )

    def check(self) -> list[str]:
        return [line for directory in self.directories for line in directory.check()]

    def close(self) -> None:
        for directory in self.directories:
            directory.close()

    def _place(self, record: Record) -> int:
        """The directory for a record: where it is held or being put, else where most room is."""
        with self._lock:
            directory, puts = self._placed.get(record.key, (None, 0))
            number = self.directories.index(directory) if directory is not None else self._choose(record)
            self._placed[record.key] = (self.directories[number], puts + 1)
            return number

    def _choose(self, record: Record) -> int:
        count = len(self.directories)
        if count == 1:
            return 0
        holder = self._holder(record.key)
        if holder is not None:
            return holder
        first = hash(record.key) % count
        room = [directory.free_for(record.size_bytes) for directory in self.directories]
        return max(((first + n) % count for n in range(count)), key=lambda number: room[number])

    def _holder(self, key: bytes) -> int | None:
        for number, directory in enumerate(self.directories):
            if directory.holds(key):
                return number
        return None

    def _unplace(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                directory, puts = self._placed.pop(key)
                if puts > 1:
                    self._placed[key] = (directory, puts - 1)


@dataclass(slots=True, frozen=True)
class Repaired:
    """What `repair` did. kept_at: where the damaged rows went, None when they were sound."""

    rows: int
    kept_at: Path | None


def capacity_for(slabs: int, slab_bytes: int, slot_bytes_min: int = SLOT_BYTES_MIN) -> int:
    """The least capacity_bytes that gives a directory so many slabs."""
    return slabs * (slab_bytes + slab_bytes // slot_bytes_min * NVME_ROW_BYTES_EST)


def repair(directory: Path) -> Repaired:
    """Make the rows of one closed directory readable again; what cannot be read is a miss.

    Sound rows are left alone. Damaged ones are moved aside whole, and what can be salvaged
    goes into new ones; the daemon verifies every record by its checksum, so a wrongly
    salvaged row costs a miss. Raises an OpenError: not ours, busy, or no space to work in.
    """
    marker = read_marker(directory)
    home = Home(directory, marker.slab_bytes, marker.slot_bytes_min)
    try:
        try:
            rows = Rows(directory / "rows")
            try:
                return Repaired(_count(rows), None)
            finally:
                rows.close()
        except OpenError:
            aside = next(p for n in range(1, 1000) if not (p := directory / f"rows.damaged-{n}").exists())
            return Repaired(rebuild(directory / "rows", aside), aside)
    except OSError as error:
        raise OpenError(f"nvme directory {directory}: repair: {error.strerror or error}") from error
    finally:
        home.release()


def _count(rows: Rows) -> int:
    """Rows held. Raises OpenError at a damaged block."""
    total = 0
    after: bytes | None = None
    while chunk := rows.chunk(after, NVME_SCAN_ROWS):
        total += len(chunk)
        after = chunk[-1][0]
    return total


def _check_settings(
    directories: Sequence[Path], capacity_bytes: int, slab_bytes: int, slot_bytes_min: int
) -> None:
    if not directories or len({path.resolve() for path in directories}) != len(directories):
        raise OpenError(
            f"nvme directories {[str(p) for p in directories]}: allowed are one or more different ones"
        )
    if slot_bytes_min % SLOT_ALIGN_BYTES or not 0 < slot_bytes_min <= slab_bytes:
        raise OpenError(
            f"nvme slot_bytes_min {slot_bytes_min}: allowed are multiples of {SLOT_ALIGN_BYTES} up to slab_bytes"
        )
    if slab_bytes % SLOT_ALIGN_BYTES or slab_bytes > SLAB_SLOTS_MAX * SLOT_ALIGN_BYTES:
        raise OpenError(
            f"nvme slab_bytes {slab_bytes}: allowed are multiples of {SLOT_ALIGN_BYTES}, at most {SLAB_SLOTS_MAX} slots"
        )
    if not slab_count_for(capacity_bytes, slab_bytes, slot_bytes_min):
        least = capacity_for(1, slab_bytes, slot_bytes_min)
        raise OpenError(
            f"nvme capacity_bytes {capacity_bytes}: at least {least} per directory for one slab of {slab_bytes}"
        )
