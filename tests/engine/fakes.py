"""Doubles for the engine's tests: I/O that the test runs when it likes, a tier with faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiers.base import Get, Put, Record, Tier, TierStats
from tiers.checksum import digest
from tiers.errors import TierError


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


class FaultyTier(Tier):
    """Records in a dict of `slots` places; failures are drawn from a seed."""

    name = "nvme"

    def __init__(self, slots: int, seed: int = 0, fault_rate: float = 0.0) -> None:
        self.slots = slots
        self.fault_rate = fault_rate
        self.rows: dict[bytes, tuple[Record, bytes]] = {}
        self.scanning = False
        self.raises = False  # puts raise, as a tier with a bug would
        self.hangs = False  # gets and puts do not come back
        self._random = random.Random(seed)

    def _fails(self) -> bool:
        return self._random.random() < self.fault_rate

    def scan(self, keys: Sequence[bytes] | None = None) -> Iterator[Record]:
        if keys is not None:
            return iter([self.rows[key][0] for key in keys if key in self.rows])
        return self._scan_all()

    def _scan_all(self) -> Iterator[Record]:
        self.scanning = True
        for key in list(self.rows):
            if key in self.rows:
                yield self.rows[key][0]
        self.scanning = False

    def put(self, items: Sequence[tuple[Record, memoryview]]) -> list[Put]:
        assert not self.scanning, "written to before its free slots are known"
        if self.hangs:
            raise Hanging
        if self.raises:
            raise ValueError("fake: a put that raises")
        answers = []
        for record, view in items:
            if self._fails():
                answers.append(Put.FAILED)
            elif len(self.rows) >= self.slots and record.key not in self.rows:
                answers.append(Put.NO_ROOM)
            else:
                self.rows[record.key] = (record, bytes(view))
                answers.append(Put.STORED)
        return answers

    def get(self, items: Sequence[tuple[bytes, memoryview]]) -> list[tuple[Get, bytes]]:
        if self.hangs:
            raise Hanging
        answers = []
        for key, view in items:
            if self._fails():
                answers.append((Get.FAILED, b""))
            elif key not in self.rows:
                answers.append((Get.MISS, b""))
            else:
                record, data = self.rows[key]
                view[:] = data
                answers.append((Get.HIT, record.checksum))
                if digest(view) != record.checksum:
                    del self.rows[key]
                    answers[-1] = (Get.CORRUPT, b"")
        return answers

    def flip(self, key: bytes) -> None:
        """Damage one stored record."""
        record, data = self.rows[key]
        self.rows[key] = (record, bytes([data[0] ^ 1]) + data[1:])

    def delete(self, keys: Sequence[bytes]) -> int:
        if self._fails():
            raise TierError("fake: delete refused")
        return sum(self.rows.pop(key, None) is not None for key in keys)

    def reclaim(self, size_bytes: int) -> list[bytes]:
        return []

    def stats(self) -> TierStats:
        return TierStats(self.name, self.slots, len(self.rows), len(self.rows))

    def check(self) -> list[str]:
        return [] if len(self.rows) <= self.slots else ["fake: over capacity"]

    def close(self) -> None:
        self.rows.clear()
