"""Get and Put: records out of the arena and into it, a piece at a time.

    Get    thread: acquire ─▶ copy a window into messages, another, … ─▶ release │ loop: write, write, …     the next window meanwhile
    Put    loop: read a window of messages, another, … │ thread: copy one into slots, sum ─▶ all there, sums agree ─▶ commit

A window is WINDOW_BYTES of records, or a part of one that is larger. Two are in memory: one on its way to or from the client, one
being copied. A lease covers some windows, and is given back when its client did not take one within LEASE_HELD_S: whoever reads
slowly holds its place, two windows and no slot, until its deadline or the age of its connection: gRPC has no other end for a
message that is on its way. Whoever writes slowly holds slots until PAUSE_S, until its bytes had BYTES_PER_S_MIN for so
long, or until its deadline, and all that one who asks writes holds a quarter of the arena at most. There are `streams_max` of them at a time, each with a connection to the daemon of its own, because an
acquire waits for slower tiers; the arena is mapped once for all. Who asks has three quarters of them at most, so that one who has
many leaves room for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstore.client import Client, Namespace, ReadLease, Slot, WriteLease, copying
from kvstore.constants import MIB
from kvstore.errors import BadRequest, LimitExceeded, Unavailable
from kvstore.ledger.explain import Space
from kvstore.protocol.frames import CHECKSUM_BYTES, LEASE_HASHES_MAX
from kvstore.remote import pieces
from kvstore.remote.pieces import Piece, Sums
from kvstore.tools.rpc.calls import PAUSE_S, Call, within
from kvstore.tools.rpc.spaces import column_sizes
from kvstore.v1.cache_pb2 import PutResponse

WINDOW_BYTES = 4 * MIB  # two of them are the most that a stream holds
PIECE_BYTES = 1 * MIB  # of a record, in one message
LEASE_BYTES = 32 * MIB  # of one lease of a Get …
LEASE_SHARE = 32  # … and at most one in so many bytes of the arena, but one window
LEASE_HELD_S = 0.1  # while its client takes nothing
AHEAD_BYTES = 64 * MIB  # of records that slower tiers are asked for before they are acquired
PUT_BYTES_MAX = 512 * MIB  # of the arena, that one Put holds …
PUT_SHARE = 8  # … and at most one in so many of its bytes; …
PUTS_SHARE = 4  # … all of one who asks: one in so many
WINDOW_PIECES_MAX = 64  # of a Put: small ones take more memory than their bytes
BYTES_PER_S_MIN = MIB  # of a Put beyond PAUSE_S: it holds slots that others could have
START_BYTES_MAX = 64 * 1024  # of the first message of a Put: 512 hashes have 32 KiB
PIECE_PUT_BYTES_MAX = 4 * MIB
ACQUIRE_S = 0.25  # of one wait for slower tiers: so soon an end of the call is seen
AGAIN_S = 0.1  # between two tries to reach a daemon that is away
CLIENT_S = 5.0  # of one request

log = logging.getLogger("kvstore.grpc")

T = TypeVar("T")


class Run(NamedTuple):
    """Consecutive blocks of a prompt. parent: the hash before the first."""

    space: Space
    hashes: Sequence[bytes]
    parent: bytes


class Streams:
    """Those of one server. For one event loop."""

    def __init__(self, socket_path: Path, streams_max: int) -> None:
        self._path, self._max = socket_path, streams_max
        self._idle: list[Client] = []
        self._underway: Counter[str] = Counter()  # by who asks
        self._threads = ThreadPoolExecutor(2 * streams_max, "kvstore-grpc-stream")
        self._handles: dict[Client, tuple[object, Namespace]] = {}
        self._guard = threading.Lock()  # of these:
        self._put_bytes: Counter[str] = Counter()  # of the arena, that Puts hold, by who asks

    @contextlib.asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[Client]:
        """A place among those under way. Raises LimitExceeded."""
        who, of_one_max = str(call.principal), max(1, self._max * 3 // 4)
        if self._underway.total() >= self._max or self._underway[who] >= of_one_max:
            raise LimitExceeded(
                f"as many streams of records are under way as may be: {of_one_max} of one who asks, {self._max} of all "
                "(grpc.streams_max): try again"
            )
        self._underway[who] += 1
        try:
            client = self._idle.pop() if self._idle else Client(self._path, CLIENT_S, label="kvstore grpc")
            try:
                yield client
            finally:
                self._idle.append(client)
        finally:
            self._underway[who] -= 1
            if not self._underway[who]:
                del self._underway[who]

    def handle(self, client: Client, space: Space) -> Namespace:
        """The namespace, for a client. It has the one that it used last, and no other: the daemon counts those of all together."""
        sizes = space["record_bytes"], space["hash_bytes"], space["block_tokens"]
        shape = space["digest"], *sizes, space["column_runs"]  # one that has ended may come again with others
        if (known := self._handles.get(client)) is None or known[0] != shape:
            columns = column_sizes(space) if space["column_runs"] else ()
            known = shape, Namespace(bytes.fromhex(space["digest"]), *sizes, space["fields"], columns)
            self._handles[client] = known
        return known[1]

    def take(self, who: str, size_bytes: int, record_bytes: int, arena_bytes: int) -> int:
        """As many records of a Put as who asks may hold besides. They are given back by `give`."""
        with self._guard:
            held = self._put_bytes[who]
            allowed = max(0, arena_bytes // PUTS_SHARE - held) // record_bytes
            count = min(size_bytes // record_bytes, allowed if held else max(1, allowed))
            self._put_bytes[who] += count * record_bytes
            return count

    def give(self, who: str, size_bytes: int) -> None:
        with self._guard:
            self._put_bytes -= Counter({who: size_bytes})

    def begin(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Do this in a thread. It goes on to its end, whatever becomes of the call: see `over`."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._idle:
            client.close()


async def over(work: asyncio.Future[T]) -> None:
    """Wait until a thread is done with it: what it holds is given back, and nothing is written any more."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
    if not work.cancelled():
        work.exception()


class Stream:
    """What both kinds have in common. Its work in threads goes on to its end, which comes soon once `is_over`."""

    def __init__(self, streams: Streams, client: Client, run: Run) -> None:
        self._streams, self._client, self._run = streams, client, run
        self._handle = streams.handle(client, run.space)
        self._sizes = column_sizes(run.space)
        self._is_over = False

    def _reached(self, ask: Callable[[], T], until: float) -> T:
        """The daemon's answer; one that is away is asked again until then. Raises Refused, Unavailable."""
        while True:
            try:
                return ask()
            except Unavailable:
                if self._is_over or time.monotonic() + AGAIN_S >= until:
                    raise
            time.sleep(AGAIN_S)


# -- Get --


class Window(NamedTuple):
    """messages: of whole records, or of a part of one. record, offset: where the next one begins. is_last: there is none."""

    messages: list[bytes]
    record: int
    offset: int
    is_last: bool


class Get(Stream):
    """One stream of records to a client."""

    def __init__(self, streams: Streams, client: Client, run: Run, wait_s: float, is_slow: bool) -> None:
        """wait_s: for slower tiers, at a time. is_slow: some are not in DRAM."""
        super().__init__(streams, client, run)
        self._wait_s = wait_s
        self._ahead = 0 if is_slow else len(run.hashes)  # up to here they were asked for
        self._guard = threading.Lock()  # of the lease: held where it is used
        self._lease: ReadLease | None = None
        self._lease_start = 0

    async def send(self, call: Call) -> None:
        """All of it, window by window."""
        loop, begin = asyncio.get_running_loop(), self._streams.begin
        coming = begin(self._window, 0, 0)
        try:
            while True:
                window = await coming
                if not window.is_last:
                    coming = begin(self._window, window.record, window.offset)
                patience = loop.call_later(LEASE_HELD_S, begin, self._let_go)
                for message in window.messages:
                    await call.write(message)
                patience.cancel()
                if window.is_last:
                    return
        finally:
            self._is_over = True
            await over(coming)
            self._let_go()

    # -- in a thread --

    def _window(self, index: int, offset: int) -> Window:
        record_bytes = self._handle.record_bytes
        end = min(record_bytes, offset + WINDOW_BYTES)
        with self._guard:
            lease = self._lease
            if lease is None or index >= self._lease_start + len(lease.leading()):
                self._lease, self._lease_start = None, index
                if lease is not None:
                    lease.release()
                self._lease = lease = self._acquired(index)
            leading, first = lease.leading(), index - self._lease_start
            slots = leading[first : first + max(1, WINDOW_BYTES // record_bytes)]
            records = [self._record(lease, slot, index - first, offset, end) for slot in slots]
            intact = max(0, min(len(slots), lease.valid_count() - first))
        true = next((n for n, record in enumerate(records[:intact]) if not record), intact)
        messages = [message for record in records[:true] for message in record]
        if true and end < record_bytes:
            return Window(messages, index, end, False)
        following = index + true
        # Behind the leading ones of a lease there may be more, unless one of those is missing.
        is_missing = following - self._lease_start == len(leading) < len(lease.slots) and not lease.pending
        is_last = not true or true < len(slots) or is_missing or following == len(self._run.hashes)
        return Window(messages, following, 0, is_last)

    def _let_go(self) -> None:
        """Of the lease; another one is taken when it is needed."""
        with self._guard:
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.release()

    def _acquired(self, index: int) -> ReadLease:
        """With the first one, if it comes in time."""
        arena_bytes = self._reached(lambda: self._client.arena, time.monotonic() + self._wait_s).size_bytes
        lease_bytes = max(WINDOW_BYTES, min(LEASE_BYTES, arena_bytes // LEASE_SHARE))
        count = max(1, min(LEASE_HASHES_MAX, lease_bytes // self._handle.record_bytes))
        hashes = self._run.hashes[index : index + count]
        parent = self._run.hashes[index - 1] if index else self._run.parent
        until = time.monotonic() + self._wait_s
        self._ask_ahead(index, until)
        while True:
            wait_s = min(ACQUIRE_S, max(0.0, until - time.monotonic()))
            acquire = partial(self._client.acquire, self._handle, hashes, wait_s, parent=parent, sums=True)
            lease = self._reached(acquire, until)
            if lease.leading() or not lease.pending or self._is_over or time.monotonic() >= until:
                return lease
            lease.release()

    def _ask_ahead(self, index: int, until: float) -> None:
        """Have slower tiers bring what comes behind, so that they work on many at once."""
        ahead = max(1, AHEAD_BYTES // self._handle.record_bytes)
        if self._ahead < len(self._run.hashes) and index + ahead // 2 >= self._ahead:
            start = max(index, self._ahead)
            self._ahead = index + ahead
            if wanted := self._run.hashes[start : self._ahead]:
                parent = self._run.hashes[start - 1] if start else self._run.parent
                self._reached(partial(self._client.prefetch, self._handle, wanted, parent), until)

    def _record(self, lease: ReadLease, slot: Slot, start: int, offset: int, end: int) -> list[bytes]:
        """The messages of a record, or of a part of it; none where its bytes are not those that were stored. start: of the lease."""
        lease.touch(slot.index)
        index = start + slot.index
        checksums = lease.checksums[slot.index] if not offset else b""
        if checksums and len(self._sizes) > 1:  # the daemon has that of their digests
            sums = Sums(self._sizes)
            sums.add(slot.view)
            if sums.record != checksums:
                log.error("namespace %s: a record is not what was stored", self._run.space["digest"])
                return []
            checksums = b"".join(sums.digests)
        return [
            pieces.written(index, at, b"" if at else checksums, slot.view[at : min(end, at + PIECE_BYTES)])
            for at in range(offset, end, PIECE_BYTES)
        ]


# -- Put --


def read_piece(message: bytes) -> Piece:
    """A PutRequest. Raises BadRequest."""
    try:
        return pieces.read(message)
    except ValueError as error:
        raise BadRequest(f"PutRequest: {error}") from error


class Filling:
    """A record that comes: where it goes, and what came of it."""

    def __init__(self, position: int, slot: Slot, sizes: Sequence[int]) -> None:
        self.position, self.slot = position, slot
        self.sums = Sums(sizes)
        self.came = 0
        self.checksums = b""

    @property
    def is_true(self) -> bool:
        """Whether it is whole, and is what its checksums say."""
        return self.came == len(self.slot.view) and b"".join(self.sums.digests) == self.checksums


class Put(Stream):
    """One stream of records from a client. What breaks off leaves nothing."""

    def __init__(self, streams: Streams, client: Client, run: Run) -> None:
        super().__init__(streams, client, run)
        self._lease: WriteLease | None = None
        self._held_bytes = 0
        self._filling: dict[int, Filling] = {}

    async def receive(self, call: Call) -> None:
        """All of it. What does not come is not stored."""
        who = str(call.principal)
        work: asyncio.Future[Any] = self._streams.begin(self._reserve, who, call.until)
        try:
            is_full = await asyncio.shield(work)
            wanted = list(self._filling)
            await call.write(PutResponse(wanted=PutResponse.Wanted(indexes=wanted, full=is_full)))
            all_s = PAUSE_S + len(wanted) * self._handle.record_bytes / BYTES_PER_S_MIN
            async with within(all_s, "not all came"):
                while window := await self._window(call):
                    await asyncio.shield(work)  # the window before
                    work = self._streams.begin(self._fill, window)
                await asyncio.shield(work)
            work = self._streams.begin(self._commit)
            stored, refused = await asyncio.shield(work)
            await call.write(PutResponse(stored=PutResponse.Stored(blocks=stored, refused=refused)))
        finally:
            self._is_over = True
            await over(work)
            if self._lease is not None:
                self._lease.abort()
            self._streams.give(who, self._held_bytes)

    async def _window(self, call: Call) -> list[tuple[Filling, Piece]]:
        """The next pieces, and where they go; none: there are no more. Raises BadRequest, TimeoutError."""
        found: list[tuple[Filling, Piece]] = []
        size = 0
        while size < WINDOW_BYTES and len(found) < WINDOW_PIECES_MAX:
            if (message := await call.next()) is None:
                break
            piece = read_piece(message)
            found.append((self._place(piece), piece))
            size += len(message)
        return found

    def _place(self, piece: Piece) -> Filling:
        """Where it goes. Raises BadRequest."""
        if piece.start:
            raise BadRequest("start: of the first message, and of no other")
        filling = self._filling.get(piece.record)
        if filling is None:
            raise BadRequest(f"index {piece.record}: not one of those that are wanted")
        left = len(filling.slot.view) - filling.came
        if piece.offset != filling.came or not 0 < len(piece.data) <= min(left, PIECE_PUT_BYTES_MAX):
            raise BadRequest(
                f"record {piece.record}: {len(piece.data)} bytes at {piece.offset}; expected are those from {filling.came} "
                f"on, and at most {min(left, PIECE_PUT_BYTES_MAX)}"
            )
        if not filling.came:
            filling.checksums = piece.checksums
            if len(piece.checksums) != CHECKSUM_BYTES * len(self._sizes):
                raise BadRequest(
                    f"record {piece.record}: {len(piece.checksums)} bytes of checksums with its first piece; "
                    f"{CHECKSUM_BYTES} for each of {len(self._sizes)} columns are required"
                )
        filling.came += len(piece.data)
        return filling

    # -- in a thread --

    def _reserve(self, who: str, until: float) -> bool:
        """Have slots for the first that are not held; whether there is no room for some."""
        hashes, arena_bytes = self._run.hashes, self._reached(lambda: self._client.arena, until).size_bytes
        record_bytes = self._handle.record_bytes
        most_bytes = max(record_bytes, min(PUT_BYTES_MAX, arena_bytes // PUT_SHARE))
        asked_bytes = min(most_bytes, len(hashes) * record_bytes)
        most = self._streams.take(who, asked_bytes, record_bytes, arena_bytes)
        self._held_bytes = most * record_bytes
        if not most:
            return True
        for start in range(0, len(hashes), most):
            parent = hashes[start - 1] if start else self._run.parent
            reserve = partial(self._client.reserve, self._handle, hashes[start : start + most], parent)
            self._lease = lease = self._reached(reserve, until)
            if lease.slots or lease.full:  # else all of these are held
                break
        granted_bytes = len(lease.slots) * record_bytes
        self._streams.give(who, self._held_bytes - granted_bytes)
        self._held_bytes = granted_bytes
        self._filling = {
            start + slot.index: Filling(n, slot, self._sizes) for n, slot in enumerate(lease.slots)
        }
        return lease.full or start + most < len(hashes)

    def _fill(self, window: Sequence[tuple[Filling, Piece]]) -> None:
        for filling, piece in window:
            if self._lease is None:
                return
            if not piece.offset:
                self._lease.touch(filling.position)
            there = filling.slot.view[piece.offset : piece.offset + len(piece.data)]
            copying.copy([(there, piece.data)])
            filling.sums.add(there)

    def _commit(self) -> tuple[int, list[int]]:
        """How many are stored, and which of those wanted are not."""
        true = {
            filling.slot.index: filling.sums.record for filling in self._filling.values() if filling.is_true
        }
        stored = self._lease.commit(true) if self._lease is not None else 0
        return stored, [index for index, filling in self._filling.items() if filling.slot.index not in true]
