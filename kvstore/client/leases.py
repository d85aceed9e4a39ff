"""Leases as a client holds them: slots of the arena to write into or to read from.

    write   reserve ─▶ WriteLease: fill slots ─▶ commit   (leaving without commit aborts)
    read    acquire ─▶ ReadLease: copy out ─▶ valid()? ─▶ release

A lease belongs to the connection it was made on. When that connection is lost the daemon
takes the slots back: a commit then raises Unavailable, and `valid()` tells a reader whether
the bytes it copied were still the right ones. A write lease must always be closed (commit,
abort or the end of its `with`): until then the daemon does not hand its slots out again. One
that is dropped instead keeps its slots until the connection ends, because somebody may still
hold their views; a dropped read lease is given back with the client's next call.

A lease is used by one thread at a time, and by the process that made it. What several
processes of a node fill or read, an engine's ranks, is leased by one of them, which needs no
arena for it; it hands the others a Grant:

    one       reserve_slots ─▶ SlotLease ──────────── all are done ─▶ commit
    others                       └─ grant ─▶ open_grant ─▶ GrantedSlots: fill a column each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from kvstore.errors import Refused

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from typing import Protocol

    from kvstore.client.arena_view import ArenaView, OwnerLock
    from kvstore.client.connection import Connection
    from kvstore.protocol.frames import Extents

    class Home(Protocol):
        """What a lease needs of its client."""

        def commit_lease(self, connection: Connection, lease: int, checksums: Mapping[int, bytes]) -> int: ...

        def release_lease(self, connection: Connection, lease: int) -> None: ...

        def hash_views(self, views: Sequence[memoryview]) -> list[bytes]: ...


class WriteSlot:
    """Room for one record. index: its position in the hashes of the reserve. view: exactly record_bytes,
    writable. offset: of view in the arena, in bytes."""

    __slots__ = ("index", "offset", "view")

    def __init__(self, index: int, view: memoryview, offset: int) -> None:
        self.index = index
        self.view = view
        self.offset = offset


class ReadSlot:
    """One record in the arena. view: exactly record_bytes, read-only. offset: of view in the arena, in bytes.
    tier: where it was when asked for (residency_bits.IN_DRAM or IN_NVME)."""

    __slots__ = ("offset", "tier", "view")

    def __init__(self, view: memoryview, offset: int, tier: int) -> None:
        self.view = view
        self.offset = offset
        self.tier = tier


class Grant:
    """Slots that a SlotLease holds, as its process passes them on; may be pickled. life: of the daemon
    in whose arena they are (see frames.Welcome)."""

    __slots__ = ("extents", "life")

    def __init__(self, life: int, extents: Extents) -> None:
        self.life = life
        self.extents = extents


class SlotLease:
    """Slots for other processes to fill or to read. grant: what they open. positions: of the hashes that have a
    slot, ascending. tiers: where each block to be read was when asked for. partial: no room for the rest of the
    blocks to be written; or, of those to be read, some are on their way (see ReadLease)."""

    __slots__ = ("_client", "_connection", "_number", "grant", "partial", "positions", "tiers")

    def __init__(
        self, client: Home, connection: Connection, number: int, tiers: bytes, extents: Extents, partial: bool
    ) -> None:
        self._client = client
        self._connection: Connection | None = connection if number else None  # None once closed
        self._number = number
        self.grant = Grant(connection.life, extents)
        self.positions = [position for position, tier in enumerate(tiers) if tier]
        self.tiers = tiers
        self.partial = partial

    def leading(self) -> int:
        """How many slots there are before the first position that has none."""
        return next((n for n, position in enumerate(self.positions) if position != n), len(self.positions))

    def commit(self, checksums: Sequence[bytes]) -> int:
        """Make the records in the first slots visible, one for each checksum, and give up the others; returns how
        many the daemon took. Raises Unavailable (nothing is stored), Refused."""
        connection, self._connection = self._connection, None
        if connection is None:
            return 0
        stored = dict(zip(self.positions, checksums, strict=False))
        return self._client.commit_lease(connection, self._number, stored)

    def release(self) -> None:
        """Give the slots back, without waiting for the daemon. Idempotent; never raises a ClientError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.release_lease(connection, self._number)


class GrantedSlots:
    """The same bytes of each slot of a grant, to copy to (writing) or from. Context manager: what is written
    outside of it may hit somebody else's slot."""

    __slots__ = ("_arena", "_extents", "_lock", "_size_bytes", "_start_bytes", "views")

    def __init__(
        self, arena: ArenaView, lock: OwnerLock | None, extents: Extents, start_bytes: int, size_bytes: int
    ) -> None:
        """lock: to write. Raises ValueError for a grant that is not of this arena."""
        self._arena = arena
        self._lock = lock
        self._extents = extents
        self._start_bytes, self._size_bytes = start_bytes, size_bytes
        views = [arena.view(offset + start_bytes, size_bytes) for offset in extents.offsets()]
        self.views = views if lock is not None else [view.toreadonly() for view in views]

    def touch(self, count: int) -> None:
        """Map the pages of the first slots before copying; see ArenaView.touch."""
        for offset, _ in zip(self._extents.offsets(), range(count), strict=False):
            self._arena.touch(offset + self._start_bytes, self._size_bytes)

    def valid_count(self) -> int:
        """How many of the first slots have been the lease's from the grant until now. Costs no call."""
        return self._arena.intact(self._extents)

    def __enter__(self) -> GrantedSlots:
        """Raises Refused where the slots to write are not the lease's any more."""
        if self._lock is not None:
            self._lock.enter()
            if self.valid_count() < len(self.views):
                self._lock.leave()
                raise Refused("unknown_lease", "the slots of this grant were taken back")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.leave()


class WriteLease:
    """Slots for the blocks that were not held yet. Context manager.

    slots: ascending by index; blocks that are held already (or being written by somebody
    else) are not in it. full: the daemon had no room for the rest.
    """

    __slots__ = ("_client", "_connection", "_number", "full", "slots")

    def __init__(
        self, client: Home, connection: Connection | None, number: int, slots: list[WriteSlot], full: bool
    ) -> None:
        self._client = client
        self._connection = connection  # None once closed
        self._number = number
        self.slots = slots
        self.full = full

    def commit(self, checksums: Mapping[int, bytes] | None = None) -> int:
        """Make records visible and close the lease; answers how many the daemon took.

        checksums: index -> xxh3_128 digest (16 bytes) of the record; indexes left out are
        aborted. None: all slots, hashed here, which reads every byte once. Raises Unavailable
        (nothing is stored), Refused.
        """
        connection = self._open_connection()
        if connection is None:
            return 0
        try:
            if checksums is None:
                digests = self._client.hash_views([slot.view for slot in self.slots])
                checksums = {slot.index: digest for slot, digest in zip(self.slots, digests, strict=True)}
            return self._client.commit_lease(connection, self._number, checksums)
        finally:
            self._close(connection)

    def abort(self) -> None:
        """Give all slots back unwritten and close the lease. Idempotent; never raises a ClientError."""
        connection = self._connection
        if connection is None:
            return
        try:
            self._client.release_lease(connection, self._number)
        finally:
            self._close(connection)

    def touch(self, position: int) -> None:
        """Map the pages of slots[position] before copying to it; see ArenaView.touch."""
        if self._connection is not None:
            slot = self.slots[position]
            self._connection.arena().touch(slot.offset, len(slot.view))

    def _open_connection(self) -> Connection | None:
        if self._connection is None and self.slots:
            raise Refused("unknown_lease", "this write lease is closed already")
        return self._connection

    def _close(self, connection: Connection) -> None:
        self._connection = None
        connection.lock_for_writing().leave()

    def __enter__(self) -> WriteLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class ReadLease:
    """Records held in DRAM until released. Context manager.

    slots: one per hash, None for a miss. pending: some are None only because they are still
    on their way from a slower tier, or because one connection may not hold as much at once:
    release, and ask again for those behind `leading`.
    """

    __slots__ = ("_arena", "_client", "_connection", "_extents", "_number", "pending", "slots")

    def __init__(
        self,
        client: Home,
        connection: Connection | None,
        number: int,
        slots: list[ReadSlot | None],
        pending: bool,
        extents: Extents | None,
    ) -> None:
        self._client = client
        self._connection = connection  # None once released
        self._arena = connection.arena() if connection is not None else None
        self._number = number
        self._extents = extents
        self.slots = slots
        self.pending = pending

    def valid(self) -> bool:
        """After copying: whether every slot held its record all the while. Costs no call.

        Only false when the daemon took the slots back because the connection was lost.
        """
        return self.valid_count() == len(self.slots)

    def valid_count(self) -> int:
        """Like `valid`, for a copy of leading slots: how many, counting misses as valid, held
        their record all the while."""
        if self._arena is None or self._extents is None:
            return len(self.slots)
        positions = [position for position, slot in enumerate(self.slots) if slot is not None]
        intact = self._arena.intact(self._extents)
        return positions[intact] if intact < len(positions) else len(self.slots)

    def touch(self, position: int) -> None:
        """Map the pages of slots[position] before copying out of it; see ArenaView.touch."""
        slot = self.slots[position]
        if self._arena is not None and slot is not None:
            self._arena.touch(slot.offset, len(slot.view))

    def leading(self) -> list[ReadSlot]:
        """The slots before the first miss."""
        run: list[ReadSlot] = []
        for slot in self.slots:
            if slot is None:
                break
            run.append(slot)
        return run

    def release(self) -> None:
        """Give the slots back, without waiting for the daemon. Idempotent; never raises a ClientError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.release_lease(connection, self._number)

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)  # it may be missing: __init__ may have failed
        if connection is not None:
            connection.owe(self._number)
