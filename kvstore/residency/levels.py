"""Levels: the places on the ladder that this daemon owns, and the members they are made of.

    DRAM   one arena
    NVMe   device 0 │ device 1 │ …     each with its own threads, breakers, speed and policies

A block in an owned level is an entry of the index, which knows its slot. A member hands out
slots on the engine's thread and never blocks there; it moves bytes in threads of its own. So
one device that hangs takes nothing of the others with it: neither their slots, nor their
threads, nor their health.

Slots of dropped blocks are cleared before they are used again: a block that is dropped for good
(its time is over, it is corrupt, it was erased) must not be found again after a restart. A
block that is evicted needs no such write: its slot is simply used again.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.constants import STALL_S
from kvstore.health.breaker import Breaker
from kvstore.health.speed import TierSpeed
from kvstore.index.block import DEVICES_MAX, Namespace
from kvstore.io_pool import Io
from kvstore.policies.base import Policy
from tiers.base import SizeClass, TierStats
from tiers.nvme.device import Device
from tiers.slots import SLAB_SLOTS_MAX


class Drive(NamedTuple):
    """A device and its own I/O threads. jobs_max: of its loads, and of its writes, how many may be under way; stall_s: how
    long one may take. directory: for people."""

    device: Device
    io: Io
    jobs_max: int = 4
    stall_s: float = STALL_S
    directory: str = ""


class Member:
    """One device, and what concerns it alone."""

    def __init__(
        self, number: int, name: str, drive: Drive, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        """`changed` is called when a breaker changes its state."""
        assert number < DEVICES_MAX, "more devices than the index can name"
        self.number = number
        self.name = name
        self.device, self.io, self.jobs_max, self.stall_s, self.directory = drive
        chance = random.Random()
        self.loads = Breaker(f"{name} loads", self.stall_s, clock, changed, chance, directory=self.directory)
        self.stores = Breaker(
            f"{name} stores", self.stall_s, clock, changed, chance, directory=self.directory
        )
        self.speed = TierSpeed(clock)
        self.policies: dict[int, Policy] = {}  # by slot size
        self.store_jobs = 0  # writes under way
        self.ready = False  # its rows are in the index: slots may be taken
        self.left_alone = ""  # why, where it could not be opened or read
        self._clearing: Sequence[int] | None = None  # by the job under way
        self._to_clear = array("Q")
        self._given_early: list[int] = []

    @property
    def writable(self) -> bool:
        """Whether blocks may be written to it: its slots are known, and neither breaker is open."""
        return self.ready and self.loads.closed and self.stores.closed

    @property
    def dropped(self) -> int:
        """Slots that wait to be cleared."""
        return len(self._to_clear) + len(self._clearing or ())

    def has_room(self, size_bytes: int) -> bool:
        """Whether a record of this size finds a free slot."""
        return self.device.pool.has_room(self.device.slot_bytes(size_bytes))

    def take(self, size_bytes: int) -> int | None:
        """A free slot for a record of this size."""
        return self.device.pool.take(self.device.slot_bytes(size_bytes))

    def reclaim(self, size_bytes: int) -> list[int]:
        """Slots to free so that a slab can be cut for this size, as of SlotPool."""
        return self.device.pool.reclaim(self.device.slot_bytes(size_bytes))

    def drain(self, slot: int, size_bytes: int) -> None:
        """The slab of this slot hands out no more; when nothing is in it, it is for records of that size."""
        self.device.pool.drain(slot // SLAB_SLOTS_MAX, self.device.slot_bytes(size_bytes))

    def stop_draining(self, slot: int) -> bool:
        """The slab of this slot stays what it is; False where it was emptied."""
        return self.device.pool.stop_draining(slot // SLAB_SLOTS_MAX)

    def give(self, slot: int) -> None:
        """Nothing is in this slot any more. While rows are still read, it is given back when they all are."""
        if self.ready:
            self.device.pool.give(slot)
        else:
            self._given_early.append(slot)

    def became_ready(self) -> None:
        """All rows are in the index."""
        self.ready = True
        for slot in self._given_early:
            self.device.pool.give(slot)
        self._given_early.clear()

    def drop(self, slot: int) -> None:
        """The block in this slot is dropped for good: the slot is free once its row is cleared."""
        self._to_clear.append(slot)

    def tend(self, count: int) -> None:
        """In the background, one job at a time: clear up to so many dropped slots, make room for more."""
        has_work = self._to_clear or self.device.has_growth_due
        if self._clearing is not None or not self.writable or not has_work:
            return
        slots = self._clearing = list(self._to_clear[-count:])
        del self._to_clear[-count:]

        def work() -> bool:
            self.device.grow()
            return self.device.clear(slots)

        self.io.submit(work, lambda cleared: self._cleared(slots, cleared), failed=False)

    def _cleared(self, slots: Sequence[int], cleared: bool) -> None:
        self._clearing = None
        if not cleared:
            self._to_clear.extend(slots)
            return
        for slot in slots:
            self.give(slot)


class Nvme:
    """The NVMe level: its members, in the order of their numbers. Empty where none is configured."""

    def __init__(self, members: Sequence[Member] = ()) -> None:
        self.members = list(members)
        self.slot_bytes_min = max((m.device.slot_bytes_min for m in members), default=0)

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def writable(self) -> bool:
        return any(member.writable for member in self.members)

    def slot_bytes(self, namespace: Namespace) -> int:
        return max(namespace.slot_bytes, self.slot_bytes_min)

    def stats(self) -> TierStats:
        """Of all members together."""
        stats = [member.device.stats() for member in self.members]
        totals: dict[int, int] = {}
        used: dict[int, int] = {}
        for size_class in (c for s in stats for c in s.classes):
            totals[size_class.slot_bytes] = totals.get(size_class.slot_bytes, 0) + size_class.total
            used[size_class.slot_bytes] = used.get(size_class.slot_bytes, 0) + size_class.used
        return TierStats(
            "nvme",
            sum(s.capacity_bytes for s in stats),
            sum(s.used_bytes for s in stats),
            sum(s.records for s in stats),
            tuple(SizeClass(size, totals[size], used[size]) for size in sorted(totals)),
        )
