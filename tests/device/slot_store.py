"""A daemon in this thread, with slots of a real arena that are handed out again at once; a rank's client in one.

Each record is bytes that follow from its hash, so that a wrong byte cannot hide. Connections
are lost at any time: then readers' slots are overwritten and get a new generation, and a
writer's commit fails. The arena may be replaced by a new, empty one.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import xxhash

from kvstore.client import Unavailable
from kvstore.client.arena_view import ArenaView
from tests.device.arenas import arena

PADDING = 1000  # slots lie anywhere, also across pinned pieces


def truth(name: bytes, size_bytes: int) -> bytes:
    """The record that belongs to this hash."""
    return hashlib.shake_128(name).digest(size_bytes)


@dataclass(eq=False)
class Lease:
    """Slots, by number, of some of these names; its own grant, and what a rank opens."""

    store: SlotStore
    arena: ArenaView
    numbers: list[int]
    names: list[bytes]
    closed: bool = False
    lost_from: int | None = None  # readers: position of the first slot that was taken away

    @property
    def views(self) -> list[memoryview]:
        return [self.store.bytes_of(number, self.arena) for number in self.numbers]

    def touch(self, count: int) -> None:
        assert count <= len(self.numbers)

    def valid_count(self) -> int:
        return len(self.numbers) if self.lost_from is None else self.lost_from

    def lose(self) -> None:
        """The connection is lost, unless the lease was given back before."""
        with self.store.guard:
            if not self.closed and self.numbers:
                self.lost_from = self.store.draw.randrange(len(self.numbers))
                for number in self.numbers[self.lost_from :]:
                    self.store.overwrite(self.arena, number)

    def commit(self, digests: list[bytes]) -> None:
        if not self.store.fails():
            for name, number, digest in zip(self.names, self.numbers, digests, strict=True):
                self.store.records[name] = (number, digest)
                self.store.free.discard(number)

    def release(self) -> None:
        with self.store.guard:
            self.closed = True
        self.store.writing -= set(self.numbers)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        pass


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
    guard: threading.Lock = field(default_factory=threading.Lock)  # connections may be lost on another thread

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

    def reserve(self, names: Sequence[bytes]) -> Lease:
        """Slots to write; for some of the names only, where it fails or they are held."""
        wanted = [name for name in names if name not in self.records]
        for name in self.draw.sample(sorted(self.records), min(len(wanted), len(self.records))):
            self.free.add(self.records.pop(name)[0])  # evicted
        usable = sorted(self.free - self.writing)
        self.draw.shuffle(usable)
        numbers = usable[: self.draw.randint(0, len(wanted)) if self.fails() else len(wanted)]
        self.writing.update(numbers)
        return Lease(self, self.arena, numbers, wanted[: len(numbers)])

    def acquire(self, names: Sequence[bytes]) -> Lease:
        """Slots to read of the leading names that are held."""
        held = list(takewhile(self.records.__contains__, names))
        lease = Lease(self, self.arena, [self.records[name][0] for name in held], held)
        if self.fails():
            self.soon(lease.lose)
        return lease

    # ---- a rank's client ----

    def ping(self) -> None:
        if self.fails():
            raise Unavailable("planted")

    def fill(self, fills: Sequence[tuple[Lease, int, list[bytes] | None]]) -> list[int]:
        self.ping()
        for lease, _, digests in fills:
            if digests is not None:
                lease.commit(digests)
        return [len(digests or ()) for _, _, digests in fills]

    def open_grant(self, grant: Lease, start_bytes: int, size_bytes: int, writing: bool = False) -> Lease:
        assert (start_bytes, size_bytes) == (0, self.record_bytes)
        self.ping()
        return grant
