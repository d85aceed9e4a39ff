"""A store in this process with the surface of `kvstore.client.Client`, and with switches for what can go wrong.

`FakeStore.open` takes the place of `connectors.transfer.link.open_client`; every connection it
makes sees the same records, as connections to one daemon do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.client import Namespace
from kvstore.errors import Unavailable

IN_DRAM, IN_NVME = 1, 2
Key = tuple[bytes, bytes]


@dataclass
class FakeStore:
    """records: (namespace digest, block hash) -> bytes. The rest are switches.

    away: every call fails. no_prefetch: hints fail. unreadable: blocks that a lookup finds and an acquire does not.
    torn: blocks whose slot changes while they are read. slow: blocks that are on NVMe. room:
    how many records fit. budget: blocks of one lease; those beyond it are pending, or not reserved. delay_s: what each acquire and reserve takes. spoil: changes the
    bytes that are handed out.
    """

    records: dict[Key, bytes] = field(default_factory=dict)
    spaces: dict[bytes, Namespace] = field(default_factory=dict)
    parents: dict[Key, bytes] = field(default_factory=dict)
    away: bool = False
    no_prefetch: bool = False
    unreadable: set[bytes] = field(default_factory=set)
    torn: set[bytes] = field(default_factory=set)
    slow: set[bytes] = field(default_factory=set)
    room: int = 1 << 30
    budget: int = 1 << 30
    open_leases: int = 0
    delay_s: float = 0.0
    spoil: Callable[[Key, bytes], bytes] | None = None
    calls: list[str] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    settled: list[tuple[int, int, bytes]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def open(self, socket_path: str, timeout_s: float, label: str, **_: Any) -> FakeClient:
        return FakeClient(self)

    def count(self, name: str) -> int:
        return self.calls.count(name)


@dataclass
class FakeSlot:
    index: int
    view: memoryview
    offset: int = 0
    tier: int = IN_DRAM


class FakeWriteLease:
    def __init__(
        self, store: FakeStore, space: Namespace, hashes: Sequence[bytes], slots: list[FakeSlot], full: bool
    ) -> None:
        self.slots, self.full = slots, full
        self._store, self._space, self._hashes = store, space, hashes
        with store.lock:
            store.open_leases += 1

    def commit(self, checksums: Any = None) -> int:
        with self._store.lock:
            self._store.calls.append("commit")
            for slot in self.slots:
                self._store.records[self._space.digest, self._hashes[slot.index]] = bytes(slot.view)
        return len(self.slots)

    def touch(self, position: int) -> None:
        pass

    def __enter__(self) -> FakeWriteLease:
        return self

    def __exit__(self, *_: object) -> None:
        with self._store.lock:
            self._store.open_leases -= 1


class FakeReadLease:
    def __init__(self, store: FakeStore, slots: list[FakeSlot | None], torn_at: int, pending: bool) -> None:
        self.slots, self.pending, self._torn_at = slots, pending, torn_at
        self._store = store
        with store.lock:
            store.open_leases += 1

    def leading(self) -> list[FakeSlot]:
        run = []
        for slot in self.slots:
            if slot is None:
                break
            run.append(slot)
        return run

    def valid_count(self) -> int:
        return self._torn_at

    def touch(self, position: int) -> None:
        pass

    def __enter__(self) -> FakeReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        with self._store.lock:
            self._store.open_leases -= 1


class FakeClient:
    """One connection; see `kvstore.client.Client` for what the methods promise."""

    arena = None

    def __init__(self, store: FakeStore) -> None:
        self.store = store

    def close(self) -> None:
        pass

    def ping(self) -> None:
        pass

    def namespace(
        self, digest: bytes, record_bytes: int, hash_bytes: int, block_tokens: int, fields: dict[str, str]
    ) -> Namespace:
        space = Namespace(digest, record_bytes, hash_bytes, block_tokens, fields)
        return self.store.spaces.setdefault(digest, space)

    def lookup(self, namespaces: Sequence[Namespace], hashes: Sequence[bytes], **asking: Any) -> int:
        self._called("lookup")
        self.store.asked.append(asking)
        for count, digest in enumerate(hashes):
            if any((space.digest, digest) not in self.store.records for space in namespaces):
                return count
        return len(hashes)

    def settle(
        self, ticket: int, tokens: int, namespace: Namespace | None = None, missing: bytes = b""
    ) -> None:
        self._called("settle")
        self.store.settled.append((ticket, tokens, missing))

    def residency(self, namespace: Namespace, hashes: Sequence[bytes]) -> bytes:
        self._called("residency")
        held = [(namespace.digest, digest) in self.store.records for digest in hashes]
        places = [IN_NVME if digest in self.store.slow else IN_DRAM for digest in hashes]
        return bytes(place if there else 0 for place, there in zip(places, held, strict=True))

    def prefetch(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        self._called("prefetch")
        if self.store.no_prefetch:
            raise Unavailable("no hints today")
        return sum(digest in self.store.slow for digest in hashes)

    def unregister(self, namespace: Namespace, end: bool = False) -> None:
        self._called("unregister")
        assert end
        self.store.spaces.pop(namespace.digest, None)
        for key in [key for key in self.store.records if key[0] == namespace.digest]:
            del self.store.records[key]

    def reserve(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"", ticket: int = 0
    ) -> FakeWriteLease:
        self._called("reserve", wait=True)
        slots: list[FakeSlot] = []
        full = False
        with self.store.lock:
            for index, digest in enumerate(hashes):
                self.store.parents[namespace.digest, digest] = hashes[index - 1] if index else parent
                if (namespace.digest, digest) in self.store.records:
                    continue
                room = min(self.store.budget, self.store.room - len(self.store.records))
                full = len(slots) >= room
                if full:
                    break
                slots.append(FakeSlot(index, memoryview(bytearray(namespace.record_bytes))))
        return FakeWriteLease(self.store, namespace, hashes, slots, full)

    def acquire(
        self, namespace: Namespace, hashes: Sequence[bytes], wait_s: float, ticket: int = 0
    ) -> FakeReadLease:
        self._called("acquire", wait=True)
        slots: list[FakeSlot | None] = []
        for index, digest in enumerate(hashes):
            record = self.store.records.get((namespace.digest, digest))
            if record is None or digest in self.store.unreadable:
                slots.append(None)
                continue
            if self.store.spoil is not None:
                record = self.store.spoil((namespace.digest, digest), record)
            slots.append(FakeSlot(index, memoryview(record)))
        torn = [index for index, digest in enumerate(hashes) if digest in self.store.torn]
        slots[self.store.budget :] = [None] * len(slots[self.store.budget :])
        pending = len(slots) > self.store.budget
        return FakeReadLease(self.store, slots, min(torn, default=len(hashes)), pending)

    def _called(self, name: str, wait: bool = False) -> None:
        self.store.calls.append(name)
        if wait and self.store.delay_s:
            time.sleep(self.store.delay_s)
        if self.store.away:
            raise Unavailable("switched off by the test")
