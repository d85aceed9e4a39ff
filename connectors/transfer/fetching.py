"""The scheduler's side of loads: slots are leased once for all ranks of an engine.

    begin ─▶ acquire ─▶ Load ─▶ every rank copies its column ─▶ reported ─▶ release
               │ some are not in DRAM, or the daemon hands out no more at once
               ▼
             fetch threads: acquire, with patience ─▶ Load ─▶ … ─▶ LoadEnd

What is in DRAM goes out with the orders of the step that asks, the rest with those of later steps. A
load larger than a connection may hold goes on when the ranks have copied the first of it.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors import constants as limits
from connectors.transfer.link import Count, Line, Note
from connectors.transfer.orders import Load, LoadEnd, Part
from kvstore.client import IN_DRAM, IN_NVME

LOAD_RETRY_S = 0.005  # before asking again for a block that is on its way, and was not there in time
ACQUIRE_AT_ONCE_S = 0.005  # for which the scheduler leases slots of a load itself; threads go on then


@dataclass(slots=True)
class Fetch:
    """The load of one request. at, done: the part it has come to, and how many blocks of that. in_dram,
    on_disk: how many blocks were there when it began, as far as is known. lost: blocks that were acquired and not ordered. open: loads that
    some rank is not through with. dropped: what was not ordered yet fails."""

    request_id: str
    parts: Sequence[Part]
    ticket: int
    sync: bool
    begun_s: float
    give_up_s: float
    at: int = 0
    done: int = 0
    in_dram: int = 0
    on_disk: int = 0
    lost: list[int] = field(default_factory=list)
    open: int = 0
    ended: bool = False
    dropped: bool = False

    def missing(self) -> list[int]:
        """The blocks that will not come, once the fetch is over."""
        return self.lost + [block for part in self.parts[self.at :] for block in part.block_ids][self.done :]


@dataclass(slots=True)
class _Leased:
    """One load: the blocks of a part from `start` on that one lease holds. ranks: how many are not through with
    it. valid: how many leading blocks came, on those that are."""

    fetch: Fetch
    part: Part
    start: int
    lease: Any
    block_ids: list[int]
    ranks: int
    valid: int


class Fetching:
    """Called by the scheduler's thread. line: of that thread. ranks: how many report each load."""

    def __init__(self, line: Line, ranks: int, count: Count, note: Note) -> None:
        self.fetches: dict[str, Fetch] = {}
        self._line, self._ranks, self._count, self._note = line, ranks, count, note
        self._queue: queue.SimpleQueue[Fetch | Sequence[Part] | None] = queue.SimpleQueue()
        self._made: deque[_Leased | Fetch] = deque()  # a Fetch that is over, behind all its leases
        self._numbers = itertools.count()
        self._open: dict[int, _Leased] = {}

    def begin(self, request_id: str, parts: Sequence[Part], ticket: int, sync: bool, wait_s: float) -> Fetch:
        """Acquire what is in DRAM (sync: all of it, for at most wait_s); threads go on with the rest. Never raises."""
        now_s = time.monotonic()
        fetch = self.fetches[request_id] = Fetch(request_id, parts, ticket, sync, now_s, now_s + wait_s)
        if not self._acquire_all(self._line, fetch, patient=sync):
            self._look(fetch)
            self._queue.put(fetch)
        return fetch

    def _look(self, fetch: Fetch) -> None:
        """Where the blocks are that were not acquired at once; those on NVMe may be in DRAM as well by now. Only for people."""
        try:
            for at, part in enumerate(fetch.parts[fetch.at :]):
                hashes = part.hashes[0 if at else fetch.done :]
                places = self._line.client.residency(part.group.space, hashes)
                fetch.on_disk += sum(place & IN_NVME > 0 for place in places)
                fetch.in_dram += sum(place & (IN_DRAM | IN_NVME) == IN_DRAM for place in places)
        except Exception as error:  # noqa: BLE001 - then nobody knows
            self._note("residency", error)

    def promote(self, parts: Sequence[Part]) -> None:
        """Have these blocks brought into DRAM in the background, for a load that may be asked for soon. Only a hint."""
        self._queue.put(parts)

    def fail(self, request_id: str, block_ids: Iterable[int], sync: bool) -> None:
        """A load was promised to the engine and cannot be made: order one that brings nothing."""
        fetch = self.fetches.get(request_id)
        if fetch is None:
            now_s = time.monotonic()
            fetch = Fetch(request_id, (), 0, sync, now_s, now_s, lost=list(block_ids))
            self.fetches[request_id] = fetch
            self._made.append(fetch)
        fetch.dropped = True

    def drop_all(self) -> None:
        """What was not ordered until now fails: it is of older weights."""
        for fetch in self.fetches.values():
            fetch.dropped = True

    def take_orders(self) -> tuple[list[Load], list[LoadEnd]]:
        """What is ready, each load before the end of its request's loads."""
        loads: list[Load] = []
        ends: list[LoadEnd] = []
        while self._made:
            made = self._made.popleft()
            if isinstance(made, Fetch):
                made.ended = True
                ends.append(LoadEnd(made.request_id, made.sync, made.missing()))
                self._count("failed_blocks", len(ends[-1].missing))
                self._close_if_done(made)
            elif made.fetch.dropped:
                made.lease.release()
                made.fetch.lost += made.block_ids
            else:
                number = next(self._numbers)
                self._open[number] = made
                made.fetch.open += 1
                group, fetch = made.part.group, made.fetch
                order = number, group.index, made.block_ids, made.lease.grant, group.adapter
                loads.append(Load(*order, fetch.request_id, fetch.sync))
        return loads, ends

    def reported(self, number: int, ranks: int, valid: int) -> None:
        """So many more ranks are through with a load; at least `valid` leading blocks are there and true on each."""
        made = self._open.get(number)
        if made is None:
            return
        made.ranks -= ranks
        made.valid = min(made.valid, valid)
        if made.ranks > 0:
            return
        del self._open[number]
        made.lease.release()
        self._count("loaded_blocks", made.valid)
        self._count("loaded_bytes", made.valid * made.part.group.space.record_bytes)
        self._count("failed_blocks", len(made.block_ids) - made.valid)
        if made.valid < len(made.block_ids):
            self._settle(self._line, made.fetch, made.part, made.start + made.valid)
        made.fetch.open -= 1
        self._close_if_done(made.fetch)

    def _close_if_done(self, fetch: Fetch) -> None:
        if fetch.ended and not fetch.open:
            self.fetches.pop(fetch.request_id, None)
            self._count("loads", 1)
            self._count("load_seconds", time.monotonic() - fetch.begun_s)

    # ---- on the fetch threads, and inside `begin` ----

    def serve(self, line: Line) -> None:
        """Go on with fetches until `stop`: the body of a thread."""
        while (job := self._queue.get()) is not None:
            if not isinstance(job, Fetch):
                self._prefetch(line, job)
                continue
            self._prefetch(line, job.parts[job.at :], job.done)
            self._acquire_all(line, job, patient=True)

    def stop(self) -> None:
        """Ends one thread that serves."""
        self._queue.put(None)

    def _acquire_all(self, line: Line, fetch: Fetch, patient: bool) -> bool:
        """Whether the fetch is over; without patience it is not where something is not there at once, or where there
        is much. Never raises."""
        barren = False
        try:
            while fetch.at < len(fetch.parts) and not fetch.dropped:
                now_s = time.monotonic()
                if not patient and now_s > fetch.begun_s + ACQUIRE_AT_ONCE_S:
                    return False
                left_s = fetch.give_up_s - now_s if patient else 0.0
                if left_s < 0:
                    break
                asked, got, more = self._acquire(
                    line, fetch, left_s, 1 if barren else limits.LEASE_BLOCKS_MAX
                )
                if got == asked:
                    continue
                if not more:
                    self._settle(line, fetch, fetch.parts[fetch.at], fetch.done)
                    break
                if not patient:
                    return False
                if barren and not got:  # the daemon may have had no reason to wait
                    time.sleep(min(LOAD_RETRY_S, left_s))
                barren = not got  # then the first block alone shows whether it is missing or on its way
        except Exception as error:  # noqa: BLE001 - what was not acquired is reported as missing
            self._note("load", error)
        self._made.append(fetch)
        return True

    def _acquire(self, line: Line, fetch: Fetch, wait_s: float, blocks_max: int) -> tuple[int, int, bool]:
        """Lease the next blocks. Returns how many were asked for, how many of them came, and whether more may come
        by asking again."""
        part, start = fetch.parts[fetch.at], fetch.done
        hashes = part.hashes[start : start + min(blocks_max, part.group.lease_blocks)]
        parent = part.hashes[start - 1] if start else part.parent
        lease = line.acquire(part.group.space, hashes, wait_s, fetch.ticket, parent)
        count = lease.leading()
        fetch.done += count
        if fetch.done == len(part.hashes):
            fetch.at, fetch.done = fetch.at + 1, 0
        if count:
            fetch.in_dram += lease.in_dram()
            fetch.on_disk += lease.on_disk()
            block_ids = part.block_ids[start : start + count]
            self._made.append(_Leased(fetch, part, start, lease, block_ids, self._ranks, count))
        else:
            lease.release()
        return len(hashes), count, bool(lease.partial)

    def _prefetch(self, line: Line, parts: Sequence[Part], done: int = 0) -> None:
        """All that is not in DRAM begins to come now: an acquire asks for one lease at a time. Only a hint. done: blocks
        of the first part that are not asked for."""
        try:
            for at, part in enumerate(parts):
                first = 0 if at else done
                parent = part.hashes[first - 1] if first else part.parent
                line.client.prefetch(part.group.space, part.hashes[first:], parent)
        except Exception as error:  # noqa: BLE001 - the load goes on without it
            self._note("prefetch", error)

    def _settle(self, line: Line, fetch: Fetch, part: Part, done: int) -> None:
        """Report to the daemon's accounts that a promised block did not come."""
        space = part.group.space
        try:
            line.owe(fetch.ticket, (part.first + done) * space.block_tokens, space, part.hashes[done])
            line.settle()
        except Exception as error:  # noqa: BLE001 - the load has failed already; settled before the next call
            self._note("settle", error)
