"""Doubles for the engine's tests: I/O that the test runs when it likes, a device with faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import count
from typing import Any, NamedTuple

from kvstore.protocol.frames import Acquired, Reserved
from tiers.base import NAMESPACE_BYTES, Get, Put, Record, SizeClass, TierStats
from tiers.checksum import digest
from tiers.errors import TierError
from tiers.nvme.device_table import Piece, Row
from tiers.slots import SlotPool

SLAB_BYTES = 2 << 20  # of one place
_numbers = count()


class Slot(NamedTuple):
    """One slot of an answer. position: of its hash in the request."""

    position: int
    offset: int
    tier: int


def held(answer: Acquired) -> list[Slot | None]:
    """A slot for each hash of an acquire, or None."""
    offsets = answer.extents.offsets()
    return [Slot(n, next(offsets), tier) if tier else None for n, tier in enumerate(answer.tiers)]


def granted(answer: Reserved) -> list[Slot]:
    """The slots of a reserve."""
    positions = [position for position, is_granted in enumerate(answer.granted) if is_granted]
    return [Slot(*pair, 0) for pair in zip(positions, answer.extents.offsets(), strict=True)]


class Hanging(Exception):
    """The tier does not come back; the job is done again when it is stepped again."""


class SteppedIo:
    """Runs submitted work only when told to, in an order the test chooses."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any] | None, Callable[[Any], None], Any]] = []

    def submit(
        self, work: Callable[[], Any], done: Callable[[Any], None], failed: Any, urgent: bool = False
    ) -> None:
        self.waiting.append((work, done, failed))

    def lengths(self) -> tuple[int, int]:
        return len(self.waiting), 0

    def step(self, position: int = 0) -> bool:
        """Both halves of one job, at once; False if it hangs."""
        if not self.half_step(position):
            return False
        if self.waiting and self.waiting[-1][0] is None:
            _, done, result = self.waiting.pop()
            done(result)
        return True

    def half_step(self, position: int = 0) -> bool:
        """Do the work of a job, whose end is told later; or tell the end of one. False if it hangs."""
        work, done, failed = self.waiting.pop(position)
        if work is None:
            done(failed)
            return True
        try:
            result = work()
        except Hanging:
            self.waiting.append((work, done, failed))
            return False
        except (ValueError, TierError):
            result = failed
        self.waiting.append((None, done, result))
        return True

    def run(self) -> None:
        """Everything, but for what hangs."""
        hung = 0  # jobs in a row
        for _ in range(10_000):
            if hung >= len(self.waiting):
                return
            hung = 0 if self.step() else hung + 1
        raise AssertionError("there is always more work")


class FaultyDevice:
    """A device with `slots` places for records of any size; failures are drawn from a seed. It outlives engines:
    what is in `table` is found again by a scan, evicted records that nobody wrote over included."""

    slot_bytes_min = 1
    aside = 0
    has_growth_due = False

    def __init__(self, slots: int, seed: int = 0, fault_rate: float = 0.0, slot_bytes: int = 1) -> None:
        self.slots = slots
        self.disk = f"disk {next(_numbers)}"
        self.fault_rate = fault_rate
        self.table: dict[int, tuple[Row, bytes]] = {}
        self.ready = False
        self.raises = False  # writes raise, as a device with a bug would
        self.hangs = False  # reads and writes do not come back
        self._sized = slot_bytes  # what stats say of each place
        self._random = random.Random(seed)
        self.pool = SlotPool(slots, SLAB_BYTES)

    @property
    def records(self) -> dict[bytes, tuple[Row, bytes]]:
        """Records by key."""
        return {row.key: (row, data) for row, data in self.table.values()}

    def _fails(self) -> bool:
        return self._random.random() < self.fault_rate

    def slot_bytes(self, size_bytes: int) -> int:
        return SLAB_BYTES

    def set_aside(self, slot: int) -> None:
        self.pool.give(slot)

    def open(self) -> None:
        self.ready = False
        self.pool = SlotPool(self.slots, SLAB_BYTES)

    def scan(self) -> Iterator[Piece]:
        for slot in list(self.table):
            self.pool.mark(slot, SLAB_BYTES)
            yield Piece(*([field] for field in self.table[slot][0]))
        self.pool.settle()
        self.ready = True

    def write(self, items: Sequence[tuple[int, Record, memoryview]]) -> list[Put]:
        assert self.ready, "written to before its free slots are known"
        if self.hangs:
            raise Hanging
        if self.raises:
            raise ValueError("fake: a write that raises")
        answers = []
        for slot, record, view in items:
            if self._fails():
                answers.append(Put.FAILED)
            else:
                self.table[slot] = Row(slot, *astuple(record)), bytes(view)
                answers.append(Put.STORED)
        return answers

    def read(self, items: Sequence[tuple[int, bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        return [(answer, row.checksum if row is not None else b"") for answer, row in self.read_rows(items)]

    def read_rows(self, items: Sequence[tuple[int, bytes, memoryview]]) -> list[tuple[Get, Row | None]]:
        if self.hangs:
            raise Hanging
        return [self._read(slot, key, view) for slot, key, view in items]

    def _read(self, slot: int, key: bytes, view: memoryview) -> tuple[Get, Row | None]:
        if self._fails():
            return Get.FAILED, None
        row, data = self.table.get(slot, (None, b""))
        if row is None or row.key != key:
            return Get.MISS, None
        view[:] = data
        if digest(view, row.columns) != row.checksum:
            del self.table[slot]
            return Get.CORRUPT, None
        return Get.HIT, row

    def rows(self, slots: Sequence[int]) -> list[Row | None]:
        return [self.table[slot][0] if slot in self.table else None for slot in slots]

    def clear(self, slots: Sequence[int]) -> bool:
        if self._fails():
            return False
        for slot in slots:
            self.table.pop(slot, None)
        return True

    def rows_of(self, is_meant: Callable[[bytes], bool]) -> Iterator[list[Row]]:
        for row, _ in list(self.table.values()):
            yield [row] if is_meant(row.key[:NAMESPACE_BYTES]) else []

    def restamp(self, keys: Mapping[int, bytes], stored_s: int) -> None:
        for slot, key in keys.items():
            row, data = self.table.get(slot, (None, b""))
            if row is not None and row.key == key:
                self.table[slot] = row._replace(stored_s=stored_s), data

    def clear_rows(self, rows: Sequence[Row]) -> bool:
        return self.clear([row.slot for row in rows if self.rows([row.slot]) == [row]])

    def grow(self) -> None:
        """It has all its slots."""

    def flip(self, key: bytes) -> None:
        """Damage one stored record."""
        row, data = self.records[key]
        self.table[row.slot] = row, bytes([data[0] ^ 1]) + data[1:]

    def stats(self) -> TierStats:
        used = sum(c.used for c in self.pool.classes())
        size = SizeClass(self._sized, self.slots, used)
        return TierStats("nvme", self.slots * self._sized, used * self._sized, used, (size,))

    def check(self) -> list[str]:
        return []

    def close(self) -> None:
        """The table stays, as a disk does."""
