"""A daemon in this thread, with slots of a real arena that are handed out again at once.

Each record is bytes that follow from its hash, so that a wrong byte cannot hide. Connections
are lost at any time: then readers' slots are overwritten and get a new generation, and a
writer's commit fails. The arena may be replaced by a new, empty one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import xxhash

from kvstore.client import Namespace, Unavailable
from kvstore.client.arena_view import ArenaView
from tests.device.arenas import arena

PADDING = 1000  # slots lie anywhere, also across pinned pieces


def truth(name: bytes, size_bytes: int) -> bytes:
    """The record that belongs to this hash."""
    return hashlib.shake_128(name).digest(size_bytes)


@dataclass(eq=False)
class _Lease:
    store: SlotStore
    arena: ArenaView
    slots: list[Any]
    names: list[bytes]
    full: bool = False
    pending: bool = False
    closed: bool = False
    lost_from: int | None = None  # readers: position of the first slot that was taken away

    def touch(self, position: int) -> None:
        pass

    def leading(self) -> list[Any]:
        return self.slots

    def valid_count(self) -> int:
        return len(self.slots) if self.lost_from is None else self.lost_from

    def lose(self) -> None:
        """The connection is lost, unless the lease was given back before."""
        if not self.closed and self.slots:
            self.lost_from = self.store.draw.randrange(len(self.slots))
            for slot in self.slots[self.lost_from :]:
                self.store.overwrite(self.arena, slot.number)

    def commit(self, checksums: dict[int, bytes]) -> int:
        if self.store.fails():
            raise Unavailable("planted: lost before the commit")
        for slot in self.slots:
            self.store.records[self.names[slot.index]] = (slot.number, checksums[slot.index])
            self.store.free.discard(slot.number)
        return len(self.slots)

    def __enter__(self) -> _Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self.store.writing -= {slot.number for slot in self.slots}


@dataclass(eq=False)
class SlotStore:
    """A store and its client in one. soon: has something done while copies are under way."""

    record_bytes: int
    slot_count: int
    draw: random.Random
    soon: Callable[[Callable[[], None]], None]
    failures: float = 0.0
    records: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.replace_arena()

    def replace_arena(self) -> None:
        self.arena = arena(PADDING + self.slot_count * self.record_bytes)
        self.records.clear()
        self.free = set(range(self.slot_count))

    def fails(self) -> bool:
        return self.draw.random() < self.failures

    def bytes_of(self, number: int, where: ArenaView | None = None) -> memoryview:
        return (where or self.arena).view(PADDING + number * self.record_bytes, self.record_bytes)

    def overwrite(self, where: ArenaView, number: int) -> None:
        """The slot is given to another client, who stores something of its own there."""
        name = self.draw.randbytes(8)
        self.bytes_of(number, where)[:] = truth(name, self.record_bytes)
        if where is self.arena:
            self.records = {key: value for key, value in self.records.items() if value[0] != number}
            self.records[name] = (number, xxhash.xxh3_128_digest(self.bytes_of(number)))

    def check(self) -> None:
        """Every record is what its hash names, and has the digest that was committed."""
        for name, (number, digest) in self.records.items():
            assert self.bytes_of(number) == truth(name, self.record_bytes), "a wrong record in the arena"
            assert xxhash.xxh3_128_digest(self.bytes_of(number)) == digest, "a wrong digest was committed"

    # ---- the client ----

    def namespace(self, digest: bytes, *_: Any) -> Namespace:
        return Namespace(digest, self.record_bytes, 8, 16, {})

    def ping(self) -> None:
        if self.fails():
            raise Unavailable("planted")

    def settle(self, *_: Any) -> None:
        self.ping()

    def reserve(self, space: Namespace, hashes: Sequence[bytes], parent: bytes, ticket: int) -> _Lease:
        self.ping()
        wanted = [index for index, name in enumerate(hashes) if name not in self.records]
        for name in self.draw.sample(sorted(self.records), min(len(wanted), len(self.records))):
            self.free.add(self.records.pop(name)[0])  # evicted
        usable = sorted(self.free - self.writing)
        self.draw.shuffle(usable)
        numbers = usable[: self.draw.randint(0, len(wanted)) if self.fails() else len(wanted)]
        self.writing.update(numbers)
        slots = [
            SimpleNamespace(index=index, number=number, view=self.bytes_of(number))
            for index, number in zip(wanted, numbers, strict=False)
        ]
        return _Lease(self, self.arena, slots, list(hashes), full=len(slots) < len(wanted))

    def acquire(self, space: Namespace, hashes: Sequence[bytes], wait_s: float, ticket: int) -> _Lease:
        self.ping()
        slots = []
        for name in hashes:
            if name not in self.records:
                break
            number = self.records[name][0]
            slots.append(SimpleNamespace(number=number, view=self.bytes_of(number).toreadonly()))
        lease = _Lease(self, self.arena, slots, list(hashes))
        if self.fails():
            self.soon(lease.lose)
        return lease
