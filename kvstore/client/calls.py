"""Calls of the local door: a frame each, on one connection that is made anew when it was lost.

    caller ─▶ turn on the wire ─▶ connected? ─▶ namespaces registered? ─▶ frame ─▶ answer ─▶ what is owed

What holds for all of them is at the head of `kvstore.client`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvstore.client.arena_view import ArenaView
from kvstore.client.leases import Grant, GrantedSlots, ReadLease, SlotLease, WriteLease
from kvstore.client.looking import Looking
from kvstore.client.namespace import Namespace
from kvstore.client.refusing import WRONG, refused, refusing, require, require_hashes, require_number, wrong
from kvstore.errors import ClientError, FillsRefused, Refused, Unavailable
from kvstore.protocol.places import default_socket

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from typing import Any, Self, TypeVar

    from kvstore.client.connection import Asked, Connection
    from kvstore.protocol import answers, frames

    T = TypeVar("T")
    Make = Callable[[Any, list[int]], frames.Request]  # of the module of frames, and numbers of namespaces

TIMEOUT_S = 1.0
BACKOFF_S_MIN = 0.05  # after the first failure; doubles with each
BACKOFF_S_MAX = 2.0
TIMEOUT_S_MAX = 1e6
WAIT_S_MAX = 60.0  # as in kvstore.protocol.frames, which is not imported here
HASHES_MAX, LEASE_HASHES_MAX = 65536, 512  # likewise


class Leading(int):
    """How many leading blocks there are. writing: behind those, blocks that are being written right now, or that are held
    behind such ones; a later lookup finds them, unless their writer gives up. At most 4,096 are counted."""

    writing: int = 0  # of the class: nearly always, so that an answer costs no more than its number


@refusing
class Calls(Looking):
    """One process's connection to the daemon: what a client does, copies aside."""

    @refused
    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
        label: str = "",
        attach: bool = True,
        writable: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does not connect: the first call does.

        socket_path: by default where the daemon of this user listens. timeout_s: deadline of every
        call, connecting included. label: who we are, in the daemon's status. attach: False where no bytes are copied (reserve,
        acquire, put, get are refused). writable: False maps the arena read-only (reserve and put are refused).
        clock: seconds, measures the backoff. Raises Refused.
        """
        require_number("timeout_s", timeout_s, TIMEOUT_S_MAX)
        require(isinstance(clock(), (int, float)), "clock: a function that returns seconds is required")
        label.encode()
        self._path = os.fspath(socket_path or default_socket())
        self._timeout_s = timeout_s
        self._label = label
        self._attach = bool(attach)
        self._writable = bool(writable)
        self._clock = clock
        self._guard = threading.Lock()
        self._connection: Connection | None = None
        self._view: ArenaView | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._reason = ""
        self._closed = False
        _clients.add(self)

    # -- the connection --

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as the last call knows. Makes no call."""
        return self._connection is not None

    @property
    def instance(self) -> str:
        """The name of the daemon that answered last, "" before. Makes no call."""
        connection = self._connection
        return connection.instance if connection is not None else ""

    @property
    def arena(self) -> ArenaView:
        """The arena mapped into this process; connects if need be.

        Valid (mapped) as long as it is referenced; current as long as it is the same object.
        """
        deadline = self._deadline()
        with self._locked(deadline):
            return self._connect(deadline).arena()

    def close(self) -> None:
        """Disconnect; every later call raises Unavailable. Idempotent. Open leases are void."""
        with self._guard:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls --

    namespace = Namespace  # a handle; makes no call: it is registered when first used

    def unregister(self, namespace: Namespace, end: bool = False) -> None:
        """This client does not use the namespace any more; used again, it is registered again.

        end: no client ever will: it is unknown to all at once, and its blocks are dropped soon.
        For an epoch that is over.
        """

        def call(w: Any, ids: list[int]) -> frames.Request:
            return w.Unregister(ids[0], end)  # type: ignore[no-any-return]  # w: the module of frames

        _require_call((namespace,), call)  # it may not be sent
        deadline = self._deadline()
        with self._locked(deadline):
            connection = self._connect(deadline)
            if end or namespace in connection.namespace_ids:
                self._ask(connection, (namespace,), call, deadline)
            connection.registered.discard(connection.namespace_ids.pop(namespace, 0))

    def lookup(
        self,
        namespaces: Sequence[Namespace],
        hashes: Sequence[bytes],
        *,
        ticket: int = 0,
        more: bool = False,
        tokens: int = 0,
        local_tokens: int = 0,
        prefill_tokens_per_s: float = 0.0,
        again: bool = False,
        trace: str = "",
        lasting: bool = True,
    ) -> Leading:
        """How many leading blocks are present in *all* the namespaces, with an unbroken prefix, and are
        sooner loaded than computed; its `writing`: how many more are being written right now.

        What the daemon's accounts want to know of the request: ticket: a number of its own; asked
        again with the same one, it counts once. more: what further namespaces of the same request
        hold. tokens: of the whole prompt. local_tokens: in the engine's own cache. again: the request was asked
        for before with another ticket. trace: its W3C traceparent, for a daemon that exports traces; goes
        with a ticket. lasting: whether it may be worth keeping in a region's bucket. At most 65536 hashes.
        """
        _require_spaces(namespaces)
        if len(hashes) > HASHES_MAX:
            raise wrong(f"lookup: {len(hashes)} hashes: at most {HASHES_MAX} are allowed")
        if not namespaces or (not hashes and not tokens):
            return Leading(0)
        joined = namespaces[0].joined(hashes)
        asking = ticket, more, tokens, local_tokens, prefill_tokens_per_s, again

        def call(w: Any, ids: list[int]) -> frames.Request:
            return w.Lookup(ids, joined, *asking, trace[: w.TRACEPARENT_CHARS], lasting)  # type: ignore[no-any-return]

        return _leading(self._call(namespaces, call))

    def windows(
        self,
        groups: Sequence[tuple[Namespace, int]],
        hashes: Sequence[bytes],
        *,
        hash_tokens: int,
        align_tokens: int,
        held_tokens: int,
        reach_tokens: int,
        ticket: int = 0,
        local_tokens: int = 0,
        prefill_tokens_per_s: float = 0.0,
        lasting: bool = True,
    ) -> Leading:
        """Up to how many tokens a hit may go where KV groups need only the end of a prefix: sliding windows and states;
        its `writing`: how many more when what is being written is there.

        groups: namespaces, and how many tokens before the next one each needs. hashes: of the whole prompt, one every
        hash_tokens. held_tokens, reach_tokens: what `lookup` found in the other groups, without and with what is being
        written; the answer is a multiple of align_tokens. The rest as in `lookup`. At most 64 groups and 65536 hashes.
        """
        spaces = [space for space, _ in groups]
        _require_spaces(spaces)
        if not groups or not hashes:
            return Leading(0)
        joined, tokens = _joined(spaces[0], hashes, HASHES_MAX), [tokens for _, tokens in groups]
        asked = hash_tokens, align_tokens, held_tokens, reach_tokens
        asking = ticket, local_tokens, prefill_tokens_per_s, lasting

        def call(w: Any, ids: list[int]) -> frames.Request:
            return w.Windows(list(zip(ids, tokens, strict=True)), joined, *asked, *asking)  # type: ignore[no-any-return]

        return _leading(self._call(spaces, call))

    def settle(
        self, ticket: int, tokens: int, namespace: Namespace | None = None, missing: bytes = b""
    ) -> None:
        """Report that only the first `tokens` of what a ticket's lookups found could be used.

        missing: the first block, of this namespace, that did not come; without it the engine
        could not use what there was.
        """
        spaces = (namespace,) if namespace is not None else ()
        self._call(spaces, lambda w, ids: w.Settle(ticket, tokens, ids[0] if ids else 0, missing))

    def explain(self, digests: Sequence[bytes], hashes: bytes) -> tuple[list[bytes], bytes]:
        """What would become of these blocks (hashes joined) in the namespaces with these digests.

        Answers, for each namespace, where each block is (as `residency`), and for each block the
        number of its outcome (`kvstore.protocol.outcomes`).
        """
        answer = self._call((), lambda w, _: w.Explain(list(digests), hashes))
        return answer.residency, answer.outcomes

    def residency(self, namespace: Namespace, hashes: Sequence[bytes]) -> bytes:
        """Where each block is, one byte a hash: 0 absent, residency_bits.WRITING, else IN_DRAM,
        IN_NVME, BROKEN_PREFIX.

        At most 65536 hashes.
        """
        joined = _joined(namespace, hashes, HASHES_MAX)
        if not joined:
            return b""
        answer = self._call((namespace,), lambda w, ids: w.Residency(ids[0], joined))
        return answer.residency  # type: ignore[no-any-return]

    def reserve(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"", ticket: int = 0
    ) -> WriteLease:
        """Room in the arena for those of these consecutive blocks that are not held yet.

        parent: the block hash before hashes[0], b"" at the root. ticket: of the lookup that named the
        whole prompt, which the daemon's policy wants to know. 1 to 512 hashes. A full
        arena answers at once, with fewer slots (a leading run) and `full`.
        """
        return self._reserve_soon(namespace, hashes, parent, ticket)(None)

    def acquire(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        wait_s: float = 0.0,
        ticket: int = 0,
        parent: bytes = b"",
        sums: bool = False,
    ) -> ReadLease:
        """Hold blocks in DRAM for reading, promoting them from slower tiers. ticket, parent: as in `reserve`;
        without its parent a block within a prompt is not found in a region's bucket. sums: the lease has checksums.

        Answers when all are ready or known to be misses, at the latest after wait_s (at most
        60 s): then `pending` says that some are on their way. It is true as well where the
        connection may not hold all of them at once (half of the arena): the leading ones are
        held, the rest is None. At least one block is granted where no other lease is open; with
        others open it may be none, at once. 1 to 512 hashes.
        """
        self._require_arena()
        make = _acquiring(namespace, hashes, wait_s, ticket, parent, sums)
        deadline = self._begin((namespace,), make, wait_s)
        with self._locked(deadline):
            connection, lease = self._acquired(namespace, make, deadline)
            return ReadLease(lease, self._opened(connection, lease.grant, 0, namespace.record_bytes))

    def reserve_slots(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"", ticket: int = 0
    ) -> SlotLease:
        """As `reserve`, for other processes that fill the slots; for a client without the arena."""
        if self._attach:
            raise Refused("bad_request", "slots for others to fill are leased by a client with attach=False")
        make = _reserving(namespace, hashes, parent, ticket)
        deadline = self._begin((namespace,), make)
        with self._locked(deadline):
            connection = self._connect(deadline)
            r = self._ask(connection, (namespace,), make, deadline)
            return SlotLease(self, connection, r.lease, r.granted, r.extents, r.full)

    def acquire_slots(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        wait_s: float = 0.0,
        ticket: int = 0,
        parent: bytes = b"",
    ) -> SlotLease:
        """As `acquire`, for other processes that read the slots; needs no arena."""
        make = _acquiring(namespace, hashes, wait_s, ticket, parent)
        deadline = self._begin((namespace,), make, wait_s)
        with self._locked(deadline):
            return self._acquired(namespace, make, deadline)[1]

    def open_grant(
        self, grant: Grant, start_bytes: int, size_bytes: int, writing: bool = False
    ) -> GrantedSlots:
        """These bytes of each slot that another process leased. Makes no call where it is connected to the daemon
        that the grant is of. Raises Unavailable, Refused."""
        self._require_arena(writing)
        _require_grant(grant)
        deadline = self._deadline()
        with self._locked(deadline):
            connection = self._connect(deadline)
            if connection.life != grant.life:  # one of them is gone: asking shows whether it is ours
                self._ask(connection, (), lambda w, _: w.Ping(), deadline)
                raise Unavailable("the slots of this grant are in the arena of another daemon")
            return self._slots(connection, grant, start_bytes, size_bytes, writing)

    def fill(self, fills: Sequence[tuple[Grant, int, Sequence[bytes] | None]]) -> list[int]:
        """Report that columns of slots leased by another process are written; returns how many blocks each of them
        has committed, because no other column is missing.

        fills: (grant, number of the column, xxh3_128 digest of the column in each slot; None: it will
        not be written, and the lease is given up), at most 64. Raises Unavailable, Refused; FillsRefused where the
        daemon refused some of them, or they are of another daemon, and the others are done.
        """
        for grant, _, _ in fills:
            _require_grant(grant)
        packed = [(grant.lease, column, b"".join(digests or ())) for grant, column, digests in fills]

        def call(places: Sequence[int], life: int) -> Make:
            return lambda w, _: w.Fill([packed[at] for at in places], life)

        deadline = self._begin((), call(range(len(packed)), 0))
        elsewhere = "the slots of this grant are in the arena of another daemon"
        with self._locked(deadline):
            connection = self._connect(deadline)
            here = [at for at, (grant, _, _) in enumerate(fills) if grant.life == connection.life]
            if fills and not here:
                raise Unavailable(elsewhere)
            filled = self._ask(connection, (), call(here, connection.life), deadline)
        committed = dict(zip(here, filled.committed, strict=True))
        why = {at: Refused("unknown_lease", elsewhere) for at in range(len(fills)) if at not in committed}
        why |= {here[place]: Refused(code, message) for place, code, message in filled.refused}
        stored = [committed.get(at, 0) for at in range(len(fills))]
        if why:
            raise FillsRefused(why, stored)
        return stored

    def prefetch(self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"") -> int:
        """Start bringing blocks into DRAM, from NVMe and from buckets; answers how many are on their way. parent: the hash of
        the block before them. At most 65536 hashes."""
        joined = _joined(namespace, hashes, HASHES_MAX)
        if not joined:
            return 0
        return _count(self._call((namespace,), lambda w, ids: w.Prefetch(ids[0], joined, parent)))

    # -- retention --

    def pin(self, block_hash: bytes, namespace: str = "", pinned: bool = True) -> list[str]:
        """Keep the prefix that ends with this block from being evicted, held or not; or let it go.

        namespace: a unique beginning of the digest in hex; "": all that hold the block, or the only
        one. Answers the digests in hex. On disk when this returns. Raises Unavailable, Refused
        (`limit_exceeded`: pins hold what they may; `not_found`).
        """
        return _digests(self._call((), lambda w, _: w.SetPin(namespace, block_hash, pinned)))

    def set_ttl(
        self,
        ttl_s: float | None,
        *,
        block_hash: bytes = b"",
        namespace: str = "",
        tenant: str | None = None,
        is_set: bool = True,
    ) -> list[str]:
        """Have blocks dropped `ttl_s` seconds after they were stored (None: never); not is_set: remove the rule.

        Of a prefix and everything below it (block_hash, as in `pin`), of a namespace, or of a
        tenant. Answers the digests in hex. On disk when this returns.
        """
        return _digests(self._call((), lambda w, _: w.SetTtl(namespace, block_hash, tenant, ttl_s, is_set)))

    def set_quota(
        self,
        dram_bytes: int | None,
        nvme_bytes: int | None,
        *,
        namespace: str = "",
        tenant: str | None = None,
    ) -> list[str]:
        """Bytes that a namespace or a tenant may hold in each tier; None: no limit there, -1: as it is.

        Answers the digests in hex. On disk when this returns.
        """
        return _digests(self._call((), lambda w, _: w.SetQuota(namespace, tenant, dram_bytes, nvme_bytes)))

    def retention(self) -> answers.Retention:
        """All pins, TTLs and quotas; docs/cli.md names the fields."""
        return self._call((), lambda w, _: w.Retention()).report  # type: ignore[no-any-return]

    def clear(
        self,
        *,
        block_hash: bytes = b"",
        namespace: str = "",
        tenant: str | None = None,
        everything: bool = False,
        dry: bool = False,
    ) -> dict[str, Any]:
        """Have the daemon drop what its tiers hold of one of these; dry: drops nothing. docs/cli.md names the fields.

        Takes as long as it takes: give the client a timeout_s that fits. The region's bucket is not touched.
        """
        answer = self._call((), lambda w, _: w.Clear(namespace, block_hash, tenant, everything, dry))
        return answer.report  # type: ignore[no-any-return]

    def find_prefixes(self, beginning: str, namespace: str = "") -> list[str]:
        """Block hashes in hex that begin with these digits: none, the one, or a few of several.

        A whole hash is its own answer, known or not. namespace: as in `pin`.
        """
        return self._call((), lambda w, _: w.FindPrefixes(namespace, beginning)).report["hashes"]  # type: ignore[no-any-return]

    def chains(self, block_hash: bytes, namespace: str = "") -> list[tuple[bytes, bytes]]:
        """Of the prefix that ends with this block: the digest of each namespace that knows it, and its hashes, joined."""
        report = self._call((), lambda w, _: w.Chain(namespace, block_hash)).report
        return [(digest, hashes) for digest, hashes in report["chains"]]

    def warm_prefix(self, block_hash: bytes, namespace: str = "") -> dict[str, Any]:
        """Bring the prefix that ends with this block into DRAM: begins, and, asked again by this client, goes on, until
        `is_over`. namespace: a beginning of a digest in hex; docs/cli.md names the fields. Raises Unavailable, Refused."""
        return self._call((), lambda w, _: w.WarmPrefix(namespace, block_hash)).report  # type: ignore[no-any-return]

    # -- what put and leases call --

    def _reserve_soon(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes, ticket: int = 0
    ) -> Callable[[float | None], WriteLease]:
        """`reserve` that waits for no answer: what this returns does, until a deadline (None: that of this call),
        and is to be called."""
        self._require_arena(writable=True)
        make = _reserving(namespace, hashes, parent, ticket)
        deadline = self._begin((namespace,), make)

        def lease(r: Any) -> WriteLease:
            slots = SlotLease(self, connection, r.lease, r.granted, r.extents, r.full)
            opened = self._opened(connection, slots.grant, 0, namespace.record_bytes, writing=True)
            try:
                return WriteLease(slots, opened, namespace.columns)
            except Refused as error:  # it took the slots back at once, or they are not ours
                raise self._nonsense(connection, error) from error

        with self._locked(deadline):
            connection = self._connect(deadline)
            return self._ask_soon(connection, (namespace,), make, lease, deadline)

    def commit_lease(
        self, connection: Connection, lease: int, checksums: Mapping[int, bytes]
    ) -> Callable[[float | None], int]:
        """Close a write lease: commit these indexes, abort the others. Waits for no answer: what this returns does.
        Where it raises Refused, the lease is as it was."""
        indexes, joined = list(checksums), b"".join(checksums.values())

        def call(w: Any, _: object) -> frames.Request:
            return w.Commit(lease, indexes, joined)  # type: ignore[no-any-return]

        try:
            deadline = self._begin((), call)
            with self._locked(deadline):
                if connection.lost:
                    raise Unavailable("the connection that this lease belongs to was lost")
                return self._ask_soon(connection, (), call, _count, deadline)
        except Refused:
            raise
        except BaseException:
            connection.owe(lease)
            raise

    def release_lease(self, connection: Connection, lease: int) -> None:
        """Give a lease back (uncommitted, if it is one for writing). Waits for no answer, and never raises.

        While another thread's call is on the wire, that thread sends it.
        """
        require(type(lease) is int and 0 <= lease < 1 << 64, "lease: the number of one is required")
        connection.owe(lease)
        self._give_back()

    # -- inside --

    def _begin(self, spaces: Sequence[Namespace], make: Make, wait_s: float = 0.0) -> float:
        """The deadline of a call that starts now. Raises Unavailable while backing off, and Refused before that where the
        call makes no sense; with a connection, that is found as it is sent."""
        if self._connection is None:
            _require_call(spaces, make)
        else:
            _require_spaces(spaces)
        return self._deadline(wait_s)

    def _deadline(self, extra_s: float = 0.0) -> float:
        """When a call that starts now must be over. Raises Unavailable while backing off: no system call."""
        if self._connection is None:
            self._raise_if_backing_off()
        return time.monotonic() + self._timeout_s + max(0.0, extra_s)

    def _raise_if_backing_off(self) -> None:
        if self._closed:
            raise Unavailable("this client is closed")
        if self._clock() < self._retry_at:
            raise Unavailable(f"waiting before the next attempt to connect: {self._reason}")

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """A turn on the wire, waited for no longer than the deadline. Raises Unavailable."""
        guard = self._guard
        if not guard.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise Unavailable("deadline passed while another thread's call was on the wire")
        try:
            yield
        finally:
            guard.release()
            self._give_back()

    def _call(self, namespaces: Sequence[Namespace], make: Make) -> Any:
        deadline = self._begin(namespaces, make)
        with self._locked(deadline):
            return self._ask(self._connect(deadline), namespaces, make, deadline)

    def _give_back(self) -> None:
        """Send what is owed, unless a call is on the wire: `_locked` does it at the end of that."""
        while (connection := self._connection) is not None and connection.owes:
            if not self._guard.acquire(blocking=False):
                return
            try:
                connection.give_back(time.monotonic() + self._timeout_s)
            except Unavailable as error:
                self._lose(connection, error)
            finally:
                self._guard.release()

    def _lose(self, connection: Connection, error: BaseException) -> None:
        """The connection cannot be used any more. Called with the lock held."""
        connection.close()
        if self._connection is connection:
            self._connection = None
            self._back_off(error)

    def _connect(self, deadline: float) -> Connection:
        """The connection; a new one if there is none. Called with the lock held."""
        if self._connection is not None:
            return self._connection
        self._raise_if_backing_off()
        from kvstore.client.connection import Connection

        try:
            connection = Connection(self._path, self._label, self._attach, self._writable, deadline)
        except ClientError as error:
            self._back_off(error)
            raise
        self._connection = connection
        self._failures = 0
        if self._attach:
            self._view = connection.arena()
        return connection

    def _ask(self, connection: Connection, spaces: Sequence[Namespace], make: Make, deadline: float) -> Any:
        """Exchange, registering namespaces first where this connection does not know them."""
        asked = self._send(connection, spaces, make, deadline)
        return self._answer(connection, asked, spaces, make, deadline)

    def _ask_soon(
        self,
        connection: Connection,
        spaces: Sequence[Namespace],
        make: Make,
        took: Callable[[Any], T],
        deadline: float,
    ) -> Callable[[float | None], T]:
        """The same in two halves: what this returns waits for the answer, and returns what `took` makes of it."""
        asked = self._send(connection, spaces, make, deadline)

        def answered(until: float | None) -> T:
            until = until or deadline
            try:
                with self._locked(until):
                    return took(self._answer(connection, asked, spaces, make, until))
            except Refused:
                raise
            except BaseException:  # an interrupt, too
                connection.forget(asked)
                self._give_back()
                raise

        return answered

    def _send(
        self, connection: Connection, spaces: Sequence[Namespace], make: Make, deadline: float
    ) -> Asked:
        from kvstore.protocol import frames

        try:
            connection.give_back(deadline)
            ids = [self._namespace_id(connection, space, deadline) for space in spaces]
            return connection.send(make(frames, ids), deadline)
        except (Refused, *WRONG):  # it makes no sense, and was not sent
            raise
        except BaseException as error:
            self._lose(connection, error)
            raise

    def _answer(
        self, connection: Connection, asked: Asked, spaces: Sequence[Namespace], make: Make, deadline: float
    ) -> Any:
        try:
            return connection.answer(asked, deadline)
        except Refused as refused:
            if refused.code != "unknown_namespace" or not spaces:
                raise
        except BaseException as error:
            self._lose(connection, error)
            raise
        for space in spaces:  # the daemon forgot one of them: register, and ask once more
            connection.namespace_ids.pop(space, None)
        return self._answer(connection, self._send(connection, spaces, make, deadline), (), make, deadline)

    def _namespace_id(self, connection: Connection, namespace: Namespace, deadline: float) -> int:
        number = connection.namespace_ids.get(namespace)
        if number is None:
            from kvstore.protocol import frames

            for dropped in connection.take_dropped():
                with contextlib.suppress(Refused):  # it has ended meanwhile
                    connection.exchange(frames.Unregister(dropped, False), deadline)
            answer: Any = connection.exchange(namespace.register(frames), deadline)
            number = connection.namespace_ids[namespace] = int(answer.namespace)
            connection.registered.add(number)
        return number

    def _back_off(self, error: BaseException) -> None:
        self._reason = str(error)
        self._retry_at = self._clock() + min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(self._failures, 16))
        self._failures += 1

    def _require_arena(self, writable: bool = False) -> None:
        if not self._attach:
            raise Refused("not_attached", "this client was made with attach=False")
        if writable and not self._writable:
            raise Refused("read_only", "this client was made with writable=False")

    def _acquired(self, space: Namespace, make: Make, deadline: float) -> tuple[Connection, SlotLease]:
        connection = self._connect(deadline)
        a = self._ask(connection, (space,), make, deadline)
        return connection, SlotLease(self, connection, a.lease, a.tiers, a.extents, a.pending, a.checksums)

    def _opened(
        self, connection: Connection, grant: Grant, start_bytes: int, size_bytes: int, writing: bool = False
    ) -> GrantedSlots:
        """The slots that the daemon has just named. Called with the lock held."""
        try:
            return self._slots(connection, grant, start_bytes, size_bytes, writing)
        except Refused as error:
            raise self._nonsense(connection, error) from error

    def _slots(
        self, connection: Connection, grant: Grant, start_bytes: int, size_bytes: int, writing: bool
    ) -> GrantedSlots:
        """The slots of a grant in the arena of this connection. Called with the lock held."""
        lock = connection.lock_for_writing() if writing else None
        return GrantedSlots(connection.arena(), lock, grant.extents, start_bytes, size_bytes)

    def _nonsense(self, connection: Connection, error: Exception) -> Unavailable:
        """The daemon named offsets outside of the arena, or slots that are not ours: nothing it says can be believed."""
        self._lose(connection, error)
        return Unavailable(f"kvstore daemon: {error}")

    def _forget_in_child(self) -> None:
        self._guard = threading.Lock()
        if self._connection is not None:
            self._connection.forget_in_child()
        self._connection = None
        self._view = None
        self._failures, self._retry_at = 0, 0.0


def _require_spaces(spaces: Sequence[Namespace]) -> None:
    for space in spaces:
        if not isinstance(space, Namespace):
            raise wrong(f"{space!r:.40}: a namespace of `Client.namespace` is required")


def _require_call(spaces: Sequence[Namespace], make: Make) -> None:
    """Raises Refused where the daemon would not understand this request of these namespaces, whatever their numbers."""
    _require_spaces(spaces)
    from kvstore.client.sendable import require_sendable
    from kvstore.protocol import frames

    require_sendable(make(frames, [0] * len(spaces)))


def _require_grant(grant: Grant) -> None:
    if not isinstance(grant, Grant):
        raise wrong(f"{grant!r:.40}: a grant of a SlotLease is required")


def _leading(answer: frames.Count) -> Leading:
    leading = Leading(answer.value)
    if answer.writing:
        leading.writing = answer.writing
    return leading


def _joined(space: Namespace, hashes: Sequence[bytes], most: int) -> bytes:
    """The hashes as they travel. Raises Refused."""
    _require_spaces((space,))
    if hashes:
        require_hashes(hashes, most)
    return space.joined(hashes)


def _reserving(space: Namespace, hashes: Sequence[bytes], parent: bytes, ticket: int) -> Make:
    """The request. Raises Refused."""
    require_hashes(hashes, LEASE_HASHES_MAX)
    joined = _joined(space, hashes, LEASE_HASHES_MAX)
    require_run(space, hashes, parent)

    def make(w: Any, ids: list[int]) -> frames.Request:
        return w.Reserve(ids[0], joined, parent, ticket)  # type: ignore[no-any-return]

    return make


def require_run(space: Namespace, hashes: Sequence[bytes], parent: bytes) -> None:
    """Raises Refused unless these blocks can follow each other, and the one before them."""
    _require_parent(space, parent)
    require(len({parent, *hashes}) > len(hashes), "a block hash is repeated: a prompt has it once")


def _require_parent(space: Namespace, parent: bytes) -> None:
    if parent != b"" and len(parent) != space.hash_bytes:
        raise wrong(f"parent: 0 or {space.hash_bytes} bytes")


def _acquiring(
    space: Namespace, hashes: Sequence[bytes], wait_s: float, ticket: int, parent: bytes, sums: bool = False
) -> Make:
    """The request. Raises Refused."""
    require_hashes(hashes, LEASE_HASHES_MAX)
    require_number("wait_s", wait_s, WAIT_S_MAX)
    joined, wait_ms = _joined(space, hashes, LEASE_HASHES_MAX), int(wait_s * 1000)
    _require_parent(space, parent)

    def make(w: Any, ids: list[int]) -> frames.Request:
        return w.Acquire(ids[0], joined, wait_ms, ticket, parent, sums)  # type: ignore[no-any-return]

    return make


def _count(answer: Any) -> int:
    value: int = answer.value
    return value


def _digests(answer: Any) -> list[str]:
    digests: list[str] = answer.report["namespaces"]
    return digests


_clients: weakref.WeakSet[Calls] = weakref.WeakSet()


def _forget_all_in_child() -> None:
    """A forked child shares sockets and locks with its parent until it lets go of them."""
    for client in list(_clients):
        client._forget_in_child()


os.register_at_fork(after_in_child=_forget_all_in_child)
