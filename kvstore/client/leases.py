"""Leases as a client holds them: slots of the arena to write into or to read from.

    write   reserve ─▶ WriteLease: fill slots ─▶ commit   (leaving without commit aborts)
    read    acquire ─▶ ReadLease: copy out ─▶ valid()? ─▶ release

A lease belongs to the connection it was made on. When that connection is lost the daemon
takes the slots back: a commit then raises Unavailable, and `valid()` shows a reader whether
the bytes it copied were still the right ones. A write lease must always be closed (commit,
abort or the end of its `with`): until then the daemon does not hand its slots out again. One
that is dropped instead keeps its slots until the connection ends, because its views may still
be in use; a dropped read lease is given back with the client's next call.

A lease is used by one thread at a time, and by the process that made it. What several
processes of a node fill or read, an engine's ranks, is leased by one of them, which needs no
arena for it; it hands the others a Grant:

    one       reserve_slots ─▶ SlotLease
    others                       └─ grant ─▶ open_grant ─▶ GrantedSlots: a column each ─▶ fill

The last column that is filled commits the records.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.client.refusing import refusing, require, wrong
from kvstore.errors import Refused
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from tiers import copying

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from kvstore.client.arena_view import ArenaView, OwnerLock
    from kvstore.client.connection import Connection
    from kvstore.protocol.frames import Extents

    class Home(Protocol):
        """What a lease needs of its client."""

        def commit_lease(
            self, connection: Connection, lease: int, checksums: Mapping[int, bytes]
        ) -> Callable[[float | None], int]: ...

        def release_lease(self, connection: Connection, lease: int) -> None: ...


CHECKSUM_BYTES = 16  # as in kvstore.protocol.frames, which is not imported here


class Slot:
    """One record in the arena. index: its position in the hashes that were asked for. view: exactly record_bytes,
    writable in a write lease. offset: of view in the arena, in bytes. tier: of a record to be read: where it was
    when asked for (residency_bits.IN_DRAM or IN_NVME)."""

    __slots__ = ("index", "offset", "tier", "view")

    def __init__(self, index: int, view: memoryview, offset: int, tier: int) -> None:
        self.index = index
        self.view = view
        self.offset = offset
        self.tier = tier


class Grant:
    """Slots that a SlotLease holds, as its process passes them on; may be pickled. life: of the daemon
    in whose arena they are (see frames.Welcome). lease: its number there."""

    __slots__ = ("extents", "lease", "life")

    def __init__(self, life: int, lease: int, extents: Extents) -> None:
        self.life = life
        self.lease = lease
        self.extents = extents


@refusing
class SlotLease:
    """Slots for other processes to fill or to read. grant: what they open. positions: of the hashes that have a
    slot, ascending. tiers: where each block to be read was when asked for. partial: no room for the rest of the
    blocks to be written; or, of those to be read, some are on their way (see ReadLease). checksums: as in ReadLease."""

    __slots__ = ("_client", "_connection", "_number", "checksums", "grant", "partial", "positions", "tiers")

    def __init__(
        self,
        client: Home,
        connection: Connection,
        number: int,
        tiers: bytes,
        extents: Extents,
        partial: bool,
        checksums: bytes = b"",
    ) -> None:
        self.checksums = checksums
        self._client = client
        self._connection: Connection | None = connection if number else None  # None once closed
        self._number = number
        self.grant = Grant(connection.life, number, extents)
        self.positions = [position for position, tier in enumerate(tiers) if tier]
        self.tiers = tiers
        self.partial = partial

    def leading(self) -> int:
        """How many slots there are before the first position that has none."""
        return next((n for n, position in enumerate(self.positions) if position != n), len(self.positions))

    def in_dram(self) -> int:
        """How many of the leading slots were in DRAM when asked for."""
        return self.tiers[: self.leading()].count(IN_DRAM)

    def on_disk(self) -> int:
        """How many of the leading slots were on NVMe when asked for."""
        return self.tiers[: self.leading()].count(IN_NVME)

    def commit_soon(self, checksums: Mapping[int, bytes]) -> Callable[[float | None], int]:
        """Make the records at these positions visible, and give up the others. Waits for no answer: what this
        returns does, until a deadline (None: that of the call), and returns how many the daemon took. Both raise
        Unavailable (some of it may be stored nevertheless), Refused; where this does, the lease is as it was."""
        connection = self._connection
        if connection is None:
            return lambda _: 0
        if checksums.keys() - set(self.positions):
            raise Refused(
                "index_not_reserved", f"of {len(self.positions)} slots of this lease, others are named"
            )
        require(
            set(map(len, checksums.values())) <= {CHECKSUM_BYTES}, f"a checksum has {CHECKSUM_BYTES} bytes"
        )
        try:
            answered = self._client.commit_lease(connection, self._number, checksums)
        except Refused:  # nothing was sent: the lease is as it was
            raise
        except BaseException:
            self._connection = None
            raise
        self._connection = None
        return answered

    def release(self) -> None:
        """Give the slots back, without waiting for the daemon. Idempotent; never raises a ClientError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.release_lease(connection, self._number)

    def drop(self) -> None:
        """Have the slots given back with the client's next call. Takes no lock: for destructors."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.owe(self._number)


@refusing
class GrantedSlots:
    """The same bytes of each slot of a grant, to copy to (writing) or from. Context manager: what is written
    outside of it may hit another lease's slot."""

    __slots__ = ("_extents", "_lock", "_size_bytes", "_start_bytes", "arena", "views")

    def __init__(
        self, arena: ArenaView, lock: OwnerLock | None, extents: Extents, start_bytes: int, size_bytes: int
    ) -> None:
        """lock: to write. Raises Refused for a grant that is not of this arena, or bytes outside of its slots."""
        is_inside = 0 <= start_bytes < start_bytes + size_bytes <= extents.slot_bytes
        if extents.runs and not is_inside:
            raise wrong(
                f"{size_bytes} bytes at {start_bytes} of slots of {extents.slot_bytes}: outside of them"
            )
        self.arena = arena
        self._lock = lock
        self._extents = extents
        self._start_bytes, self._size_bytes = start_bytes, size_bytes
        views = arena.views([offset + start_bytes for offset in extents.offsets()], size_bytes)
        self.views = views if lock is not None else [view.toreadonly() for view in views]

    def touch(self, count: int) -> None:
        """Map the pages of the first slots before copying; see ArenaView.touch."""
        require(0 <= count <= len(self.views), f"{count} of {len(self.views)} slots")
        for offset, _ in zip(self._extents.offsets(), range(count), strict=False):
            self.arena.touch(offset + self._start_bytes, self._size_bytes)

    def valid_count(self) -> int:
        """How many of the first slots have been the lease's from the grant until now. Costs no call."""
        return self.arena.intact(self._extents)

    def __enter__(self) -> GrantedSlots:
        """Raises Refused where the slots to write are not the lease's any more, or another process has the lock."""
        if self._lock is not None:
            try:
                self._lock.enter()
            except OSError as error:
                raise Refused("lock_lost", f"the lock of this client is not ours: {error}") from error
            if self.valid_count() < len(self.views):
                self._lock.leave()
                raise Refused("unknown_lease", "the slots of this grant were taken back")
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.leave()


@refusing
class WriteLease:
    """Slots for the blocks that were not held yet, open in this process. Context manager.

    slots: ascending by index; blocks that are held already (or being written by another
    client) are not in it. full: the daemon had no room for the rest.
    """

    __slots__ = ("_columns", "_is_open", "_lease", "_opened", "full", "slots")

    def __init__(self, lease: SlotLease, opened: GrantedSlots, columns: bytes) -> None:
        """opened: whole records, to write. Raises Refused, OSError where they may not be written."""
        self._lease, self._opened, self._columns = lease, opened, columns
        self.slots = _slots(lease, opened)
        self.full = lease.partial
        self._is_open = bool(self.slots)
        if self._is_open:
            opened.__enter__()

    def commit(self, checksums: Mapping[int, bytes] | None = None) -> int:
        """Make records visible and close the lease; answers how many the daemon took.

        checksums: index -> checksum of the record (tiers/checksum.py); indexes left out are
        aborted. None: all slots, hashed here, which reads every byte once. Raises Unavailable
        (some of it may be stored nevertheless), Refused.
        """
        if checksums is None:
            digests = copying.digest_all([slot.view for slot in self.slots], self._columns)
            checksums = {slot.index: digest for slot, digest in zip(self.slots, digests, strict=True)}
        return self.commit_soon(checksums)(None)

    def commit_soon(self, checksums: Mapping[int, bytes]) -> Callable[[float | None], int]:
        """`commit` that waits for no answer; see SlotLease."""
        if self.slots and not self._is_open:
            raise Refused("unknown_lease", "this write lease is closed already")
        try:
            answered = self._lease.commit_soon(checksums)
        except Refused:  # it makes no sense: the lease is as it was
            raise
        except BaseException:
            self.abort()
            raise
        self.abort()
        return answered

    def abort(self) -> None:
        """Give all slots back unwritten and close the lease. Idempotent; never raises a ClientError."""
        if self._is_open:
            self._is_open = False
            try:
                self._lease.release()
            finally:
                self._opened.__exit__()

    def touch(self, position: int) -> None:
        """Map the pages of slots[position] before copying to it; see ArenaView.touch."""
        self._touch(position)

    def _touch(self, position: int) -> None:
        """For `put`, which names those that there are."""
        slot = self.slots[position]
        self._opened.arena._touch(slot.offset, len(slot.view))

    def __enter__(self) -> WriteLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


@refusing
class ReadLease:
    """Records held in DRAM until released. Context manager.

    slots: one per hash, None for a miss. pending: some are None only because they are still
    on their way from a slower tier, or because one connection may not hold as much at once:
    release, and ask again for those behind `leading`. checksums: of those that are there, in order, where they were wanted.
    """

    __slots__ = ("_lease", "_opened", "checksums", "pending", "slots")

    def __init__(self, lease: SlotLease, opened: GrantedSlots) -> None:
        """opened: whole records, to read."""
        self._lease, self._opened = lease, opened
        self.slots: list[Slot | None] = [None] * len(lease.tiers)
        for slot in _slots(lease, opened):
            self.slots[slot.index] = slot
        self.pending = lease.partial
        size, joined = CHECKSUM_BYTES, lease.checksums
        self.checksums = [joined[at : at + size] for at in range(0, len(joined), size)]

    def valid(self) -> bool:
        """After copying: whether every slot held its record all the while. Costs no call.

        Only false when the daemon took the slots back because the connection was lost.
        """
        return self.valid_count() == len(self.slots)

    def valid_count(self) -> int:
        """Like `valid`, for a copy of leading slots: how many, counting misses as valid, held
        their record all the while."""
        intact, positions = self._opened.valid_count(), self._lease.positions
        return positions[intact] if intact < len(positions) else len(self.slots)

    def touch(self, position: int) -> None:
        """Map the pages of slots[position] before copying out of it; see ArenaView.touch."""
        self._touch(position)

    def _touch(self, position: int) -> None:
        """For `get`, which names those that there are."""
        slot = self.slots[position]
        if slot is not None:
            self._opened.arena._touch(slot.offset, len(slot.view))

    def leading(self) -> list[Slot]:
        """The slots before the first miss."""
        return [slot for slot in self.slots[: self._lease.leading()] if slot is not None]

    def release(self) -> None:
        """Give the slots back, without waiting for the daemon. Idempotent; never raises a ClientError."""
        self._lease.release()

    def __enter__(self) -> ReadLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_lease"):  # __init__ may have failed
            self._lease.drop()


def _slots(lease: SlotLease, opened: GrantedSlots) -> list[Slot]:
    offsets = lease.grant.extents.offsets()
    return [
        Slot(position, view, offset, lease.tiers[position])
        for position, view, offset in zip(lease.positions, opened.views, offsets, strict=True)
    ]
