"""One connection of the local door: bytes in, requests to the engine, answers out.

    socket ─▶ shared receive buffer ─▶ whole frame? ──▶ serve ─▶ answer
                                   └─▶ part of one: `_frame`, filled in place until it is whole
              while a request waits (or answers lie unread): what comes meanwhile is `_ahead`

A frame that arrives in one piece is decoded where it landed. One buffer serves all
connections, because the event loop asks for it, fills it and hands it over in one go.

The peer is not believed. A frame's memory grows with the bytes that came and not with what
it claims. `_ahead`, unread answers, half frames, leases and their bytes are all bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from kvstore import constants, wire
from kvstore.accounts import Asking
from kvstore.errors import (
    BadFrame,
    BadRequest,
    ConnectionRefusal,
    FrameTooLarge,
    InternalError,
    LimitExceeded,
    NotAttached,
    RequestError,
    TooSlow,
    UnknownNamespace,
)
from kvstore.leases import Acquired, ReadLease, Session
from kvstore.namespaces import NamespaceSpec
from kvstore.rules import Rule
from tiers.errors import TierError

if TYPE_CHECKING:
    from kvstore.door import Door

log = logging.getLogger("kvstore.door")

_DONE = wire.Done()


class DoorLimits(NamedTuple):
    """What one connection may do. stalled_s_max: for a half frame, and for answers left unread.
    lease_bytes_max: of the arena, over all its leases."""

    stalled_s_max: float
    leases_max: int
    lease_bytes_max: int


class DoorConnection(asyncio.BufferedProtocol):
    """Serves one peer that said Hello. `session` is None for one that did not attach."""

    def __init__(self, door: Door, session: Session | None, name: str) -> None:
        self._door = door
        self._engine = door.engine
        self._session = session
        self._name = name
        self._transport: asyncio.Transport | None = None
        self._namespaces: dict[int, NamespaceSpec] = {}
        self._lease_bytes: dict[int, int] = {}
        self._frame: bytearray | None = None  # a frame that came in part, header included
        self._frame_bytes = 0  # how long it will be, as far as we know
        self._have = 0
        self._ahead = bytearray()
        self._waiting: ReadLease | None = None  # an acquire that is not answered yet
        self._answered = True
        self._is_saving = False  # a rule is on its way to the disk; it is answered from there
        self._wait_timer: asyncio.TimerHandle | None = None
        self._acquire_bytes = 0  # of a record
        self._acquire_beyond = 0  # hashes of it that the limit cut off
        self._unread = False
        self._reading = True
        self._closing = False
        self._stalled_since: float | None = None
        self._complained = False
        self._loop = asyncio.get_running_loop()

    @property
    def attached(self) -> bool:
        return self._session is not None

    # -- what the event loop calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=constants.DOOR_UNREAD_BYTES_MAX)
        self._door.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_session()
        self._door.connections.discard(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is None:
            return self._door.receive_buffer
        return memoryview(self._frame)[self._have :]

    def buffer_updated(self, count: int) -> None:
        if self._closing:
            return
        if self._frame is not None:
            self._have += count
            self._continue_frame()
        elif self._is_busy():
            self._keep_ahead(self._door.receive_buffer[:count])
        else:
            self._consume(self._door.receive_buffer[:count])

    def pause_writing(self) -> None:
        self._unread = True
        self._stalled_since = self._loop.time()

    def resume_writing(self) -> None:
        self._unread = False
        self._stalled_since = None
        self._go_on()

    # -- what the door calls --

    def abort(self) -> None:
        """Give everything back and hang up at once. Idempotent."""
        self._closing = True
        self._end_session()
        if self._transport is not None:
            self._transport.abort()

    def drop_if_stalled(self, now_s: float) -> None:
        """Hang up on a peer that left a frame half sent, or answers unread, for too long."""
        patience_s = self._door.limits.stalled_s_max
        if self._stalled_since is None or now_s - self._stalled_since <= patience_s:
            return
        if self._closing:
            self.abort()
        elif self._unread:  # one more Error frame would not be read either
            self._refusal(TooSlow(f"answers lay unread for {patience_s:g} s"))
            self.abort()
        else:
            self._hang_up(TooSlow(f"a frame was half sent for {patience_s:g} s"))

    # -- frames --

    def _is_busy(self) -> bool:
        return self._waiting is not None or self._unread or self._is_saving

    def _consume(self, data: memoryview) -> None:
        """Serve every whole frame in `data`, keep the rest."""
        position, end = 0, len(data)
        while position < end and not self._closing:
            if self._is_busy():
                self._keep_ahead(data[position:])
                return
            body = position + wire.HEADER_BYTES
            if body > end:
                self._begin_frame(data[position:], wire.HEADER_BYTES)
                return
            size: int = wire.HEADER.unpack_from(data, position)[0]
            if size > wire.FRAME_BYTES_MAX:
                self._refuse_size(size)
                return
            if body + size > end:
                self._begin_frame(data[position:], wire.HEADER_BYTES + size)
                return
            self._serve(data[body : body + size])
            position = body + size

    def _begin_frame(self, part: memoryview, frame_bytes: int) -> None:
        self._frame = bytearray(min(frame_bytes, max(2 * len(part), constants.DOOR_FRAME_START_BYTES)))
        self._frame[: len(part)] = part
        self._frame_bytes = frame_bytes
        self._have = len(part)
        self._stalled_since = self._loop.time()

    def _continue_frame(self) -> None:
        frame = self._frame
        if frame is None or self._have < len(frame):
            return
        if self._frame_bytes == wire.HEADER_BYTES:
            size: int = wire.HEADER.unpack_from(frame)[0]
            if size > wire.FRAME_BYTES_MAX:
                self._refuse_size(size)
                return
            self._frame_bytes += size
        if self._have < self._frame_bytes:
            # A new one: the event loop may still hold a view of the old one.
            wanted = max(2 * len(frame), constants.DOOR_FRAME_START_BYTES)
            self._frame = bytearray(min(self._frame_bytes, wanted))
            self._frame[: self._have] = frame
            return
        self._frame = None
        self._stalled_since = None
        self._serve(memoryview(frame)[wire.HEADER_BYTES :])

    def _keep_ahead(self, data: memoryview) -> None:
        self._ahead += data
        if (
            self._reading
            and len(self._ahead) > constants.DOOR_AHEAD_BYTES_MAX
            and self._transport is not None
        ):
            self._reading = False
            self._transport.pause_reading()

    def _go_on(self) -> None:
        """After an answer that took its time, or when unread answers were read at last."""
        if self._closing or self._is_busy():
            return
        ahead, self._ahead = self._ahead, bytearray()
        if ahead:
            self._consume(memoryview(ahead))
        if not self._reading and not self._closing and not self._is_busy() and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def _refuse_size(self, size: int) -> None:
        self._hang_up(FrameTooLarge(f"frame of {size} bytes: at most {wire.FRAME_BYTES_MAX} are allowed"))

    # -- requests --

    def _serve(self, payload: memoryview) -> None:
        try:
            request = wire.request_decoder.decode(payload)
            self._door.frames[type(request).__name__] += 1
            answer = _SERVE[type(request)](self, request)
            if answer is not None:
                self._send(answer)
        except msgspec.ValidationError as error:
            self._send(self._refusal(BadRequest(str(error))))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            self._hang_up(BadFrame(f"not a request: {error}"))
        except RequestError as error:
            self._is_saving = False
            self._send(self._refusal(error))
        except TierError as error:
            self._send(self._refusal(BadRequest(str(error))))
        except Exception as error:  # the one place where our bug becomes an answer: it is counted and logged
            log.exception("serving %s failed", self._name)
            self._is_saving = False
            self._complained = True
            self._send(self._refusal(InternalError(f"{type(error).__name__}; the daemon's log has more")))

    def _register(self, request: wire.Register) -> wire.Answer:
        if len(self._namespaces) >= constants.DOOR_NAMESPACES_MAX:
            raise LimitExceeded(f"{constants.DOOR_NAMESPACES_MAX} namespaces on one connection are allowed")
        spec = NamespaceSpec(
            request.digest, request.record_bytes, request.hash_bytes, request.block_tokens, request.fields
        )
        number = self._engine.register(spec)
        self._namespaces[number] = spec
        return wire.Registered(number)

    def _lookup(self, request: wire.Lookup) -> None:
        """Answered first and booked then: the engine need not wait for the books."""
        for namespace in request.namespaces:
            if request.hashes or not request.tokens:  # a prompt without a whole block is only counted
                self._count(namespace, request.hashes, wire.HASHES_MAX)
            elif namespace not in self._namespaces:
                raise UnknownNamespace(f"namespace {namespace} was not registered on this connection")
        asking = Asking(
            request.ticket,
            request.more,
            request.tokens,
            request.local_tokens,
            rate if (rate := request.prefill_tokens_per_s) >= constants.PREFILL_TOKENS_PER_S_MIN else 0.0,
        )
        found = self._engine.find(request.namespaces, request.hashes, asking)
        self._send(wire.Count(found.usable))
        try:
            self._engine.book(request.namespaces, request.hashes, found, asking)
        except Exception:  # a bug of ours; the answer is out already
            log.exception("booking a lookup of %s failed", self._name)

    def _settle(self, request: wire.Settle) -> wire.Answer:
        if request.hash:
            self._count(request.namespace, request.hash, 1)
        self._engine.settle(request.ticket, request.tokens, request.namespace, request.hash)
        return _DONE

    def _explain(self, request: wire.Explain) -> wire.Answer:
        """By digest, and for anybody of this uid: who asks has no namespaces of its own."""
        numbers = []
        count_max = min(wire.HASHES_MAX, wire.FRAME_BYTES_MAX // (len(request.digests) + 2))  # one byte each
        for digest in request.digests:
            namespace = self._engine.namespaces.of_key(digest)
            if namespace is None:
                raise UnknownNamespace(
                    f"namespace {digest.hex()}: not known here; `kvstore status` lists them"
                )
            count = len(request.hashes) // namespace.hash_bytes
            if count > count_max:
                raise LimitExceeded(
                    f"{count} hashes for {len(request.digests)} namespaces: at most {count_max} are allowed"
                )
            numbers.append(namespace.id)
        places, outcomes = self._engine.explain(numbers, request.hashes)
        return wire.Explained(places, bytes(outcomes))

    def _report(self, request: wire.Report) -> wire.Answer:
        return wire.StatusReport(self._door.totals(request.since_s, request.skip))

    def _list(self, request: wire.Namespaces) -> wire.Answer:
        return wire.StatusReport(self._engine.list_namespaces(request.skip))

    def _pin(self, request: wire.SetPin) -> None:
        self._is_saving = True
        self._engine.retention.pin(request.namespace, request.hash, request.pinned, self._saved)

    def _ttl(self, request: wire.SetTtl) -> None:
        rule = (request.namespace, request.hash, request.tenant, request.ttl_s, request.is_set)
        self._is_saving = True
        self._engine.retention.ttl(*rule, self._saved)

    def _quota(self, request: wire.SetQuota) -> None:
        quota = (request.namespace, request.tenant, request.dram_bytes, request.nvme_bytes)
        self._is_saving = True
        self._engine.retention.quota(*quota, self._saved)

    def _saved(self, error: RequestError | None, rules: Sequence[Rule]) -> None:
        """Rules are on disk, or refused. It may be at once, within the request's own call."""
        self._is_saving = False
        if self._transport is None or self._transport.is_closing():
            return
        digests = [rule.namespace for rule in rules if rule.namespace]
        answer = wire.StatusReport({"namespaces": digests}) if error is None else self._refusal(error)
        self._send(answer)
        self._loop.call_soon(self._go_on)

    def _retention(self, _: wire.Retention) -> wire.Answer:
        return wire.StatusReport(self._engine.retention.report())

    def _residency(self, request: wire.Residency) -> wire.Answer:
        self._count(request.namespace, request.hashes, wire.HASHES_MAX)
        return wire.Places(self._engine.residency(request.namespace, request.hashes))

    def _prefetch(self, request: wire.Prefetch) -> wire.Answer:
        self._count(request.namespace, request.hashes, wire.HASHES_MAX)
        return wire.Count(self._engine.prefetch(request.namespace, request.hashes))

    def _reserve(self, request: wire.Reserve) -> wire.Answer:
        session = self._session_for_lease()
        count = self._count(request.namespace, request.hashes, wire.LEASE_HASHES_MAX)
        spec = self._namespaces[request.namespace]
        allowed = min(
            count, self._free_lease_bytes() // spec.record_bytes
        )  # beyond it: as if there were no room
        hashes = request.hashes[: allowed * spec.hash_bytes]
        reserved = self._engine.reserve(session, request.namespace, hashes, request.parent)
        if reserved.slots:
            self._lease_bytes[reserved.lease] = len(reserved.slots) * spec.record_bytes
        slots = cast("list[tuple[int, int, int, int]]", reserved.slots)
        return wire.Reserved(reserved.lease, slots, reserved.full or allowed < count)

    def _commit(self, request: wire.Commit) -> wire.Answer:
        session = self._session_for_lease(new=False)
        committed = self._engine.commit(session, request.lease, request.indexes, request.checksums)
        self._lease_bytes.pop(request.lease, None)
        return wire.Count(committed)

    def _acquire(self, request: wire.Acquire) -> wire.Answer | None:
        session = self._session_for_lease()
        count = self._count(request.namespace, request.hashes, wire.LEASE_HASHES_MAX)
        spec = self._namespaces[request.namespace]
        allowed = min(count, self._free_lease_bytes() // spec.record_bytes)
        if not self._lease_bytes:
            allowed = max(1, allowed)  # or a record larger than the limit could never be read
        if not allowed:
            return wire.Acquired(0, [None] * count, True)
        self._acquire_bytes = spec.record_bytes
        self._acquire_beyond = count - allowed
        self._answered = False
        hashes = request.hashes[: allowed * spec.hash_bytes]
        lease = self._engine.acquire(session, request.namespace, hashes, self._acquired)
        if not self._answered and request.wait_ms == 0:
            lease.expire()
        if not self._answered:
            self._waiting = lease
            self._wait_timer = self._loop.call_later(request.wait_ms / 1000, lease.expire)
        return None

    def _acquired(self, acquired: Acquired) -> None:
        """The engine's answer; it may come at once or much later."""
        self._answered = True
        late, self._waiting = self._waiting is not None, None
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        if acquired.lease:
            held = sum(slot is not None for slot in acquired.slots)
            self._lease_bytes[acquired.lease] = held * self._acquire_bytes
        slots = cast("list[tuple[int, int, int, int] | None]", acquired.slots)
        # What no limit allowed is worth asking for again, unless a miss before it makes it useless.
        pending = acquired.pending or (self._acquire_beyond > 0 and None not in slots)
        self._send(wire.Acquired(acquired.lease, slots + [None] * self._acquire_beyond, pending))
        if late:
            self._go_on()

    def _release(self, request: wire.Release) -> wire.Answer:
        self._engine.release(self._session_for_lease(new=False), request.lease)
        self._lease_bytes.pop(request.lease, None)
        return _DONE

    def _status(self, _: wire.Status) -> wire.Answer:
        return wire.StatusReport(self._door.report())

    def _check(self, _: wire.Check) -> wire.Answer:
        """Nothing else is served meanwhile (a second per 500 000 blocks or so): tools may ask, engines not."""
        if self._session is not None:
            raise BadRequest("check: only for a connection without the arena, as that of `kvstore fsck`")
        begun = self._loop.time()
        lines = self._engine.check()
        took_s = self._loop.time() - begun
        log.info("%s: checked the books in %.3f s: %d problems", self._name, took_s, len(lines))
        if len(lines) > constants.DOOR_PROBLEMS_MAX:
            more = len(lines) - constants.DOOR_PROBLEMS_MAX
            lines = [*lines[: constants.DOOR_PROBLEMS_MAX], f"and {more} more"]
        return wire.Problems(lines)

    def _ping(self, _: wire.Ping) -> wire.Answer:
        return _DONE

    # -- limits --

    def _count(self, namespace: int, hashes: bytes, count_max: int) -> int:
        """How many hashes these are. Raises UnknownNamespace, BadRequest, LimitExceeded."""
        spec = self._namespaces.get(namespace)
        if spec is None:
            raise UnknownNamespace(f"namespace {namespace} was not registered on this connection")
        count, rest = divmod(len(hashes), spec.hash_bytes)
        if rest or not count:
            raise BadRequest(f"{len(hashes)} bytes of hashes: a multiple of {spec.hash_bytes} is required")
        if count > count_max:
            raise LimitExceeded(f"{count} hashes in one request: at most {count_max} are allowed")
        return count

    def _session_for_lease(self, new: bool = True) -> Session:
        if self._session is None:
            raise NotAttached("this connection did not attach to the arena")
        if new and len(self._lease_bytes) >= self._door.limits.leases_max:
            raise LimitExceeded(f"{self._door.limits.leases_max} open leases on one connection are allowed")
        return self._session

    def _free_lease_bytes(self) -> int:
        return max(0, self._door.limits.lease_bytes_max - sum(self._lease_bytes.values()))

    # -- answers and ends --

    def _send(self, answer: wire.Answer) -> None:
        if self._transport is None or self._closing:
            return
        frame = wire.encode_frame(answer)
        if len(frame) > wire.HEADER_BYTES + wire.FRAME_BYTES_MAX:
            raise InternalError(f"answer of {len(frame)} bytes: at most {wire.FRAME_BYTES_MAX} are allowed")
        self._transport.write(frame)

    def _refusal(self, error: RequestError) -> wire.Error:
        self._door.count_refusal(error.code)
        if not self._complained:
            self._complained = True
            log.warning("%s: request refused: %s: %s", self._name, error.code, error)
        return wire.Error(error.code, str(error))

    def _hang_up(self, refusal: ConnectionRefusal) -> None:
        """Say why, give everything back, and close once that was read (or the sweep loses patience)."""
        self._send(self._refusal(refusal))
        self._closing = True
        self._frame = None
        self._end_session()
        self._stalled_since = self._loop.time()
        if self._transport is not None:
            self._transport.close()

    def _end_session(self) -> None:
        if self._wait_timer is not None:
            self._wait_timer.cancel()
            self._wait_timer = None
        self._waiting = None
        session, self._session = self._session, None
        self._lease_bytes.clear()
        if session is not None:
            self._engine.close_session(session)


_SERVE: dict[type[Any], Callable[[DoorConnection, Any], wire.Answer | None]] = {
    wire.Register: DoorConnection._register,
    wire.Lookup: DoorConnection._lookup,
    wire.Residency: DoorConnection._residency,
    wire.Reserve: DoorConnection._reserve,
    wire.Commit: DoorConnection._commit,
    wire.Acquire: DoorConnection._acquire,
    wire.Release: DoorConnection._release,
    wire.Prefetch: DoorConnection._prefetch,
    wire.Status: DoorConnection._status,
    wire.Check: DoorConnection._check,
    wire.Ping: DoorConnection._ping,
    wire.Settle: DoorConnection._settle,
    wire.Explain: DoorConnection._explain,
    wire.Report: DoorConnection._report,
    wire.Namespaces: DoorConnection._list,
    wire.SetPin: DoorConnection._pin,
    wire.SetTtl: DoorConnection._ttl,
    wire.SetQuota: DoorConnection._quota,
    wire.Retention: DoorConnection._retention,
}
