"""The scheduler's side of saves: slots are leased once for all ranks of an engine.

    add ─▶ send ─▶ reserve ─▶ Save ─▶ every rank copies and fills its column ─▶ reported: through
                   at once, or in the save thread

The daemon stores a block when the last rank has filled its column; nothing here waits for that. Blocks of a prompt are
reserved at once, in the step that computes them. What a step of decoding fills is reserved by a thread, and saved with a
later step. What does not fit into the queue, what the daemon has no room for, and what one rank could not copy is not stored.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connectors.transfer.link import Count, Line, Note
from connectors.transfer.orders import Part, Save


@dataclass(slots=True)
class Store:
    """A save under way. decoding: its blocks were filled by decoding, a few at a time. places: (group, position, block id) of
    blocks that only the request keeps alive. held: blocks that we keep alive. draining: the request is finished, and waits
    for it. ended: everything of it was ordered; open: what some rank is not through with."""

    number: int
    request_id: str
    parts: list[Part]
    ticket: int
    decoding: bool
    places: list[tuple[int, int, int]]
    held: list[Any]
    begun_s: float = field(default_factory=time.monotonic)
    draining: bool = False
    cancelled: bool = False
    ended: bool = False
    open: set[int] = field(default_factory=set)

    @property
    def blocks(self) -> int:
        return sum(len(part.block_ids) for part in self.parts)

    @property
    def column_bytes(self) -> int:
        """What each rank copies, on average."""
        sizes = ((len(part.block_ids), part.group) for part in self.parts)
        return sum(count * group.space.record_bytes // len(group.of_shard) for count, group in sizes)


@dataclass(slots=True)
class _Leased:
    """One save order: blocks of a part in the slots of a lease. shards: how many are not through with it. reported: the
    daemon knows what became of all columns."""

    store: Store
    part: Part
    block_ids: list[int]
    lease: Any
    shards: int
    committed: int = 0
    reported: bool = True


class Storing:
    """Called by the scheduler's thread. lines: of that thread, and of the save thread. through: called when no rank
    reads the blocks of a store any more."""

    def __init__(
        self,
        lines: tuple[Line, Line],
        queue_bytes_max: int,
        count: Count,
        note: Note,
        through: Callable[[Store], None],
    ) -> None:
        self.stores: dict[int, Store] = {}
        self._line, self._thread_line = lines
        self._queue_bytes_max = queue_bytes_max
        self._count, self._note, self._on_through = count, note, through
        self._queue: queue.SimpleQueue[Store | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._made: deque[_Leased | Store] = deque()  # a Store of which all was leased, behind that
        self._numbers = itertools.count()
        self._open: dict[int, _Leased] = {}

    def add(self, store: Store) -> None:
        """From now on its blocks are kept, until it is through; `send` or `drop` it."""
        self.stores[store.number] = store
        self._queued_bytes += store.column_bytes

    def send(self, store: Store, at_once: bool) -> None:
        """Have slots leased for it. at_once: before this returns."""
        if self._queued_bytes > max(self._queue_bytes_max, store.column_bytes):
            self._count("skipped_queue_full", store.blocks)
            self.drop(store)
        elif at_once:
            self._reserve(self._line, store)
        else:
            self._queue.put(store)

    def drop(self, store: Store) -> None:
        """Nothing of it was sent, nor will be."""
        store.ended = True
        self._close_if_done(store)

    def cancel(self, store: Store) -> list[int]:
        """Its blocks are about to be overwritten. Returns the orders that the ranks must give up at once."""
        store.cancelled = True
        return sorted(store.open)

    def take_orders(self) -> list[Save]:
        """What has its slots now."""
        saves: list[Save] = []
        while self._made:
            made = self._made.popleft()
            if isinstance(made, Store):
                made.ended = True
                self._close_if_done(made)
            elif made.store.cancelled:
                made.lease.release()
                self._count("skipped_overwritten", len(made.block_ids))
            else:
                number = next(self._numbers)
                self._open[number] = made
                made.store.open.add(number)
                group = made.part.group
                saves.append(Save(number, group.index, made.block_ids, made.lease.grant, group.adapter))
        return saves

    def reported(self, number: int, shards: int, committed: int, reached: bool) -> None:
        """So many more shards are through with a save, and have committed so many blocks."""
        made = self._open.get(number)
        if made is None:
            return
        made.shards -= shards
        made.committed += committed
        made.reported &= reached
        if made.shards > 0:
            return
        del self._open[number]
        made.store.open.discard(number)
        if not made.reported:
            made.lease.release()
        self._count("saved_blocks", made.committed)
        self._count("saved_bytes", made.committed * made.part.group.space.record_bytes)
        why = "skipped_overwritten" if made.store.cancelled else "skipped_unavailable"
        self._count(why, len(made.block_ids) - made.committed)
        self._close_if_done(made.store)

    def _close_if_done(self, store: Store) -> None:
        if store.ended and not store.open:
            del self.stores[store.number]
            self._queued_bytes -= store.column_bytes
            self._count("saves", 1)
            self._count("save_seconds", time.monotonic() - store.begun_s)
            self._on_through(store)

    # ---- on the save thread, or at once ----

    def serve(self) -> None:
        """Reserve until `stop`: the body of a thread."""
        while (store := self._queue.get()) is not None:
            self._reserve(self._thread_line, store)

    def stop(self) -> None:
        """Ends the thread that serves."""
        self._queue.put(None)

    def _reserve(self, line: Line, store: Store) -> None:
        """Never raises; all that will ever be ordered of it is made afterwards."""
        left = store.blocks
        try:
            for part in store.parts:
                left -= self._reserve_part(line, store, part)
            self._count("skipped_overwritten" if store.cancelled else "held_blocks", left)
        except Exception as error:  # noqa: BLE001 - a save that fails is a save that was not made
            self._note("save", error)
            self._count("skipped_unavailable", left)
        self._made.append(store)

    def _reserve_part(self, line: Line, store: Store, part: Part) -> int:
        """Returns how many blocks have slots now."""
        parent, start, reserved = part.parent, 0, 0
        while start < len(part.hashes) and not store.cancelled:
            hashes = part.hashes[start : start + part.group.lease_blocks]
            lease = line.client.reserve_slots(part.group.space, hashes, parent, store.ticket)
            positions = lease.positions
            if lease.partial:  # what a connection may hold at once, or no room: go on behind what was granted
                hashes = hashes[: positions[-1] + 1] if positions else []
            if positions:
                block_ids = [part.block_ids[start + position] for position in positions]
                self._made.append(_Leased(store, part, block_ids, lease, len(part.group.of_shard)))
                reserved += len(positions)
            if not hashes:
                break
            parent = hashes[-1]
            start += len(hashes)
        return reserved
