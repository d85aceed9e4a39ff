"""A store in this process with the surface of `kvstore.client.Client`, and with switches for what can go wrong.

`FakeStore.open` takes the place of `connectors.transfer.link.open_client`; every connection it
makes sees the same records, as connections to one daemon do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kvstore.client import Leading, Namespace
from kvstore.errors import Refused, Unavailable
from tiers.checksum import column_sizes, joined
from tiers.checksum import digest as digest_of

IN_DRAM, IN_NVME = 1, 2
Key = tuple[bytes, bytes]


@dataclass
class FakeStore:
    """records: (namespace digest, block hash) -> bytes. The rest are switches.

    away: every call fails. forbidden: what names one of these blocks is refused, as a namespace is. no_prefetch: hints fail. unreadable: blocks that a lookup finds and an acquire does not.
    torn: blocks whose slot changes while they are read. slow: blocks that are on NVMe; far: those of them that are in a bucket only. room:
    how many records fit. budget: blocks of one lease; those beyond it are pending, or not reserved. delay_s: what each reserve, and each copy of a rank, takes. spoil: changes the
    bytes that are handed out. may_fill: while it is not set, no rank gets further than to its copy.
    """

    records: dict[Key, bytes] = field(default_factory=dict)
    spaces: dict[bytes, Namespace] = field(default_factory=dict)
    parents: dict[Key, bytes] = field(default_factory=dict)
    away: bool = False
    forbidden: set[bytes] = field(default_factory=set)
    no_prefetch: bool = False
    unreadable: set[bytes] = field(default_factory=set)
    torn: set[bytes] = field(default_factory=set)
    slow: set[bytes] = field(default_factory=set)
    far: set[bytes] = field(default_factory=set)
    room: int = 1 << 30
    budget: int = 1 << 30
    leases: list[FakeLease | None] = field(default_factory=list)  # None: given back
    given_up: set[int] = field(default_factory=set)  # leases, by a rank that did not copy
    delay_s: float = 0.0
    spoil: Callable[[Key, bytes], bytes] | None = None
    may_fill: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)
    acquired: list[tuple[bytes, list[bytes]]] = field(default_factory=list)  # parent, hashes
    timeouts_s: dict[str, float] = field(default_factory=dict)  # of clients, by label
    asked: list[dict[str, Any]] = field(default_factory=list)
    settled: list[tuple[int, int, bytes]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.may_fill.set()

    def open(self, socket_path: str, timeout_s: float, label: str, **_: Any) -> FakeClient:
        self.timeouts_s[label] = timeout_s
        return FakeClient(self)

    def count(self, name: str) -> int:
        return self.calls.count(name)

    def writing(self) -> set[Key]:
        """The blocks that are reserved and not committed."""
        return {key for lease in self.leases if lease is not None for key in lease.writing()}

    def kill_writers(self) -> None:
        """What a daemon does when the connections of those who write are gone."""
        with self.lock:
            for lease in [lease for lease in self.leases if lease is not None and lease.writing()]:
                lease.release()

    @property
    def open_leases(self) -> int:
        return sum(lease is not None for lease in self.leases)


@dataclass(frozen=True)
class FakeGrant:
    """Travels between processes, as a Grant does: it only names what the store keeps."""

    number: int


@dataclass
class FakeSlots:
    """What a rank opens. valid: how many of the first slots keep their bytes."""

    views: list[memoryview]
    valid: int

    def touch(self, count: int) -> None:
        assert count <= len(self.views)

    def valid_count(self) -> int:
        return self.valid

    def __enter__(self) -> FakeSlots:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class FakeLease:
    """As `kvstore.client.SlotLease`. slots: position -> the bytes of a record."""

    def __init__(
        self,
        store: FakeStore,
        space: Namespace,
        hashes: Sequence[bytes],
        slots: dict[int, bytearray | bytes],
        partial: bool,
    ) -> None:
        self.positions, self.partial = list(slots), partial
        self.tiers = bytes(
            (IN_NVME if digest in store.slow else IN_DRAM) if position in slots else 0
            for position, digest in enumerate(hashes)
        )
        self.hashes, self.slots = hashes, slots
        self.filled: dict[int, list[bytes]] = {}
        self._store, self._space = store, space
        with store.lock:
            self.grant = FakeGrant(len(store.leases))
            store.leases.append(self if slots else None)

    def writing(self) -> set[Key]:
        """The blocks that are reserved and not committed."""
        reserved = (
            self.hashes[position] for position, slot in self.slots.items() if isinstance(slot, bytearray)
        )
        return {(self._space.digest, digest) for digest in reserved}

    def leading(self) -> int:
        return next((n for n, position in enumerate(self.positions) if position != n), len(self.positions))

    def in_dram(self) -> int:
        return self.tiers[: self.leading()].count(IN_DRAM)

    def on_disk(self) -> int:
        return self.tiers[: self.leading()].count(IN_NVME)

    def fill(self, column: int, digests: list[bytes] | None) -> int:
        """As the daemon does it for one column; returns how many blocks are committed."""
        if self._store.leases[self.grant.number] is None:
            return 0
        if digests is None:
            self._store.given_up.add(self.grant.number)
            self.release()
            return 0
        assert column not in self.filled and len(digests) == len(self.slots)
        self.filled[column] = digests
        if len(self.filled) < len(column_sizes(self._space.columns, self._space.record_bytes)):
            return 0
        self._store.calls.append("commit")
        self.release()
        for position, slot in self.slots.items():
            record, digests = bytes(slot), [self.filled[column].pop(0) for column in sorted(self.filled)]
            assert joined(digests) == digest_of(record, self._space.columns), "a wrong digest was committed"
            self._store.records[self._space.digest, self.hashes[position]] = record
        return len(self.slots)

    def release(self) -> None:
        self._store.leases[self.grant.number] = None


class FakeClient:
    """One connection; see `kvstore.client.Client` for what the methods promise."""

    arena = None
    instance = "fake"

    def __init__(self, store: FakeStore) -> None:
        self.store = store

    @property
    def connected(self) -> bool:
        return not self.store.away

    def close(self) -> None:
        pass

    def ping(self) -> None:
        pass

    def namespace(
        self,
        digest: bytes,
        record_bytes: int,
        hash_bytes: int,
        block_tokens: int,
        fields: dict[str, str],
        columns: Sequence[int],
    ) -> Namespace:
        space = Namespace(digest, record_bytes, hash_bytes, block_tokens, fields, columns)
        return self.store.spaces.setdefault(digest, space)

    def lookup(self, namespaces: Sequence[Namespace], hashes: Sequence[bytes], **asking: Any) -> Leading:
        self._called("lookup", hashes)
        self.store.asked.append(asking)
        with self.store.lock:
            held, coming = self.store.records.keys(), self.store.writing()
            leading = Leading(_count(hashes, namespaces, held))
            leading.writing = _count(hashes, namespaces, held | coming) - leading
        return leading

    def settle(
        self, ticket: int, tokens: int, namespace: Namespace | None = None, missing: bytes = b""
    ) -> None:
        self._called("settle", [missing])
        self.store.settled.append((ticket, tokens, missing))

    def windows(
        self,
        groups: Sequence[tuple[Namespace, int]],
        hashes: Sequence[bytes],
        *,
        hash_tokens: int,
        align_tokens: int,
        held_tokens: int,
        reach_tokens: int,
        **asking: Any,
    ) -> Leading:
        """By looking at every block of each window, from the longest hit down."""
        self._called("windows")
        self.store.asked.append(asking)

        def longest(tokens: int, there: Set[Key]) -> int:
            tokens = min(tokens, len(hashes) * hash_tokens) // align_tokens * align_tokens
            while tokens:
                needed = [
                    (space.digest, hashes[(at + 1) * space.block_tokens // hash_tokens - 1])
                    for space, window in groups
                    for at in range(
                        max(0, tokens - window) // space.block_tokens, tokens // space.block_tokens
                    )
                ]
                if there >= set(needed):
                    return tokens
                tokens -= align_tokens
            return 0

        with self.store.lock:
            held, coming = self.store.records.keys(), self.store.writing()
            leading = Leading(longest(held_tokens, held))
            leading.writing = max(0, longest(reach_tokens, held | coming) - leading)
        return leading

    def prefetch(self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"") -> int:
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

    def reserve_slots(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"", ticket: int = 0
    ) -> FakeLease:
        self._called("reserve", hashes, wait=True)
        slots: dict[int, bytearray | bytes] = {}
        partial = False
        with self.store.lock:
            writing = self.store.writing()
            for index, digest in enumerate(hashes):
                self.store.parents[namespace.digest, digest] = hashes[index - 1] if index else parent
                if {(namespace.digest, digest)} & (self.store.records.keys() | writing):
                    continue
                room = min(self.store.budget, self.store.room - len(self.store.records) - len(writing))
                partial = len(slots) >= room
                if partial:
                    break
                slots[index] = bytearray(namespace.record_bytes)
        return FakeLease(self.store, namespace, hashes, slots, partial)

    def residency(self, namespace: Namespace, hashes: Sequence[bytes]) -> bytes:
        self._called("residency")
        held = [(namespace.digest, one) in self.store.records and one not in self.store.far for one in hashes]
        tiers = [IN_NVME if one in self.store.slow else IN_DRAM for one in hashes]
        return bytes(tier * is_held for tier, is_held in zip(tiers, held, strict=True))

    def acquire_slots(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        wait_s: float,
        ticket: int = 0,
        parent: bytes = b"",
    ) -> FakeLease:
        self._called("acquire")
        self.store.acquired.append((parent, list(hashes)))
        slots: dict[int, bytearray | bytes] = {}
        partial = False
        for index, digest in enumerate(hashes):
            record = self.store.records.get((namespace.digest, digest))
            if record is None or digest in self.store.unreadable:
                continue
            if len(slots) >= self.store.budget or (digest in self.store.slow and not wait_s):
                partial = True
                continue
            if self.store.spoil is not None:
                record = self.store.spoil((namespace.digest, digest), record)
            slots[index] = record
        return FakeLease(self.store, namespace, hashes, slots, partial)

    def open_grant(
        self, grant: FakeGrant, start_bytes: int, size_bytes: int, writing: bool = False
    ) -> FakeSlots:
        """Makes no call: it works while the daemon is away."""
        if self.store.delay_s:
            time.sleep(self.store.delay_s)
        lease = self.store.leases[grant.number]
        if grant.number in self.store.given_up:
            raise Refused("unknown_lease", "the slots of this grant were taken back")
        assert lease is not None, "a rank copies what its scheduler has given back"
        views = [
            memoryview(record)[start_bytes : start_bytes + size_bytes] for record in lease.slots.values()
        ]
        torn = [
            at for at, position in enumerate(lease.positions) if lease.hashes[position] in self.store.torn
        ]
        return FakeSlots(views, len(views) if writing else min(torn, default=len(views)))

    def fill(self, fills: Sequence[tuple[FakeGrant, int, list[bytes] | None]]) -> list[int]:
        assert self.store.may_fill.wait(60), "the test went on without its writers"
        self._called("fill")
        with self.store.lock:
            leases = [(self.store.leases[grant.number], column, digests) for grant, column, digests in fills]
            return [
                lease.fill(column, digests) if lease is not None else 0 for lease, column, digests in leases
            ]

    def _called(self, name: str, hashes: Sequence[bytes] = (), wait: bool = False) -> None:
        self.store.calls.append(name)
        if wait and self.store.delay_s:
            time.sleep(self.store.delay_s)
        if self.store.away:
            raise Unavailable("switched off by the test")
        if not self.store.forbidden.isdisjoint(hashes):
            raise Refused("limit_exceeded", "switched off by the test")


def _count(hashes: Sequence[bytes], namespaces: Sequence[Namespace], there: Set[Key]) -> int:
    """The leading ones that are there in all namespaces."""
    return next(
        (
            n
            for n, digest in enumerate(hashes)
            if any((space.digest, digest) not in there for space in namespaces)
        ),
        len(hashes),
    )
