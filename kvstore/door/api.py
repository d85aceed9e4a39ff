"""What may be asked of the daemon, by whom and how much of it: the same for every transport.

    transport ── request ─▶ Caller.serve ─▶ handler ─▶ an answer            most requests
                    ▲                               ├▶ Steps: pieces of work, then an answer
              reply │ resume                        ├▶ Later: the answer comes by itself
                    └───────────────────────────────┴▶ a RequestError: a typed refusal

A *caller* is one client. It has one request at a time; the next one is served when `is_free` says so. Requests and answers are
the messages of `kvstore.protocol.frames`; how they travel, and when a piece of work is done, is the transport's business.

What a caller may ask goes by its principal: each kind of request in `KINDS` needs an access class, and `serve` is where
that is looked at.

The caller is not believed: sizes are checked before the engine is asked, leases and their
bytes are bounded for a connection and for a process, and a lease has a time limit. A failure
of ours becomes an answer here, and only here; it is logged and counted.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from kvstore.constants import DOOR_PIECE_US, NAMESPACES_MAX
from kvstore.door.auditing import Auditing
from kvstore.door.clients import Clients, Slow, SlowRequests, blocks_of, why_waited
from kvstore.door.holders import Holder, Holders, Limits
from kvstore.door.later import Later, Timer
from kvstore.door.models import (
    attach_model,
    commit_model,
    drop_model,
    list_models,
    model_loaded,
    reserve_model,
)
from kvstore.door.node import Node
from kvstore.door.rules import clear, list_rules, set_pin, set_quota, set_ttl
from kvstore.door.turns import Turns
from kvstore.door.windows import asking_of, find_windows
from kvstore.engine.engine import Engine
from kvstore.engine.prefix_warming import PrefixWarming, chain_steps, known_steps
from kvstore.engine.sessions import Peer, ReadLease, Session
from kvstore.errors import (
    BadRequest,
    ConnectionRefused,
    Internal,
    LeaseExpired,
    LimitExceeded,
    RequestError,
    UnknownLease,
    UnknownNamespace,
)
from kvstore.index.block import Namespace
from kvstore.ledger.latencies import Histogram
from kvstore.ledger.recording import Recording
from kvstore.ledger.tracing import Tracing
from kvstore.protocol import answers, frames
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.security.principals import Access, Principal
from kvstore.steps import Steps
from tiers.checksum import pack_columns
from tiers.constants import OWNER_ANY
from tiers.errors import TierError
from tiers.namespace_spec import NamespaceSpec

DOOR_PROBLEMS_MAX = 1000  # lines of one check's answer
RECORDINGS_MAX = 8  # under way at a time

log = logging.getLogger("kvstore.door")

_DONE = frames.Done()
_ON_DISK = (frames.SetPin, frames.SetTtl, frames.SetQuota)  # answered when the rule is there


class Api:
    """What all callers share, whatever door they came in by: the engine, the limits, and who is here.

    times: from the first piece of a request to its answer, by kind. call_later: calls a function after so many
    seconds. turns: of the loop that everything here runs on.
    """

    def __init__(
        self,
        engine: Engine,
        node: Node,
        limits: Limits,
        turns: Turns,
        call_later: Callable[[float, Callable[[], object]], Timer],
        tracing: Tracing | None = None,
    ) -> None:
        self.engine = engine
        self.node = node
        self.limits = limits
        self.turns = turns
        self.clock = turns.clock
        self.call_later = call_later
        self.tracing = tracing
        self.requests: Counter[str] = Counter()
        self.times = {kind: Histogram() for kind in KINDS}
        self.refused: Counter[str] = Counter()
        self.life = int.from_bytes(os.urandom(6), "little")  # named in every Welcome
        self.lenders: dict[int, Caller] = {}  # lease -> who leases its slots for others to fill
        self.recordings: list[Recording] = []
        self.clients = Clients()
        self.slow = SlowRequests()
        self._holders = Holders()
        self._check: Later | None = None

    def enter(self, principal: Principal) -> Holder:
        """A principal connects. Raises TooManyConnections."""
        return self._holders.enter(principal, self.limits.process_connections_max)

    def leave(self, holder: Holder) -> None:
        """One of its connections is gone, after its caller's `end`."""
        self._holders.leave(holder, self.clock())

    def check(self) -> Later:
        """The audit (kvstore.engine.audit). One at a time: a caller that asks meanwhile gets the same answer."""
        if self._check is None:
            self._check = Later()
            self.turns.run(self._checking(self._check))
        return self._check

    def times_by_name(self) -> dict[str, answers.Histogram]:
        """How long requests took, of those kinds that came since the start."""
        return {kind.__name__.lower(): t.as_dict() for kind, t in self.times.items() if t.count}

    def _checking(self, later: Later) -> Steps[None]:
        begun_s = self.clock()
        lines: list[str] = []
        try:
            lines = yield from self.engine.check_steps()
        except Exception as error:  # a bug of ours; all who wait get an answer
            log.exception("the audit failed")
            lines = [f"the check itself failed: {type(error).__name__}; the daemon's log has more"]
        log.info("audit done in %.3f s: %d problems", self.clock() - begun_s, len(lines))
        if len(lines) > DOOR_PROBLEMS_MAX:
            more = len(lines) - DOOR_PROBLEMS_MAX
            lines = [*lines[:DOOR_PROBLEMS_MAX], f"and {more} more"]
        self._check = None
        later.set(frames.Problems(lines))


class Caller:
    """One client. reply: takes each answer; resume: called when `is_free` became true by itself. door: which one it is, if it is one."""

    def __init__(
        self,
        api: Api,
        holder: Holder,
        session: Session | None,
        label: str,
        reply: Callable[[frames.Answer], None],
        resume: Callable[[], None],
        door: str = "",
        hang_up: Callable[[ConnectionRefused], None] = lambda _: None,
    ) -> None:
        principal = holder.principal
        self.name = f"{label or 'unnamed'} ({principal})"
        self.peer = session.peer if session is not None else Peer()
        self.peer.label, self.peer.pid, self.peer.uid = label, principal.process, principal.uid
        self.peer.since_s = api.clock()
        self._api = api
        self._engine = api.engine
        self._holder = holder
        self.attached = session is not None
        self._session = session  # None: did not attach, and never had a lease
        self._reply = reply
        self._resume = resume
        self._hang_up = hang_up
        self._audit = Auditing(holder.principal, door)
        self._namespaces = self.peer.namespaces
        self._leases: dict[int, tuple[int, float]] = {}  # number -> bytes, since when; oldest first
        self._is_expiring = False
        self._lease_bytes = 0
        self._steps: Steps[frames.Answer | None] | None = None
        self._later: Later | None = None
        self._asked: frames.Request | None = None  # the request that is being served …
        self._here_s = 0.0  # … since when all of it is here, …
        self._begun_s = 0.0
        self._pieces = 0  # … how many pieces of its steps are done
        self._waits: ReadLease | None = None  # … and what it waits for
        self._was_starved = False
        self._times = Histogram()  # of its kind
        self._timer: Timer | None = None
        self._recording: Recording | None = None
        self._warming: tuple[tuple[str, bytes], PrefixWarming] | None = None
        self._has_complained = False
        self._has_ended = False
        api.clients.enter(self)

    @property
    def has_steps(self) -> bool:
        """Whether `step` is to be called."""
        return self._steps is not None

    @property
    def is_free(self) -> bool:
        """Whether the next request may be served."""
        return self._steps is None and self._later is None

    def serve(self, request: frames.Request, here_s: float = 0.0) -> None:
        """Begin a request. Its answer goes to `reply`: now, in a `step`, or by itself. Never raises. here_s: since when all of
        it is here."""
        api, holder, name = self._api, self._holder, type(request).__name__
        kind = KINDS[type(request)]
        api.requests[name] += 1
        self.peer.requests += 1
        self._times, self._begun_s = api.times[type(request)], api.clock()
        self._asked, self._here_s = request, here_s or self._begun_s
        if getattr(request, "ticket", 0):  # two programs may count their requests from 1
            request.ticket ^= holder.salt  # type: ignore[union-attr]
        self._audit.asked(request, kind.access)
        try:
            holder.principal.require(kind.access, name)
            outcome = kind.handler(self, request)
        except Exception as error:  # noqa: BLE001 - `refusal` logs what is not a refusal
            self._answer(self.refusal(error))
            return
        if isinstance(outcome, Later):
            self._later = outcome
            outcome.then(self._answer_later)
        elif isinstance(outcome, Generator):
            self._steps = outcome
            self.step()
        elif outcome is not None:
            self._answer(outcome)

    def _answer(self, answer: frames.Answer) -> None:
        """Here it is, and so long it took."""
        now_s = self._api.clock()
        self._times.add(now_s - self._begun_s)
        if now_s - self._here_s >= self._api.limits.slow_s:
            self._note_slow(now_s)
        self._asked, self._waits, self._pieces = None, None, 0
        self._audit.answered(answer)
        self._reply(answer)

    def _note_slow(self, now_s: float) -> None:
        """It took long; see `kvstore.door.clients` for the reasons."""
        took_s, waited_s = now_s - self._here_s, self._begun_s - self._here_s
        if self._pieces:  # between them others had their turns
            waited_s += max(0.0, now_s - self._begun_s - self._pieces * DOOR_PIECE_US / 1e6)
        why = "turn"
        if waited_s < took_s / 2:
            why = "disk" if isinstance(self._asked, _ON_DISK) else "work"
            if self._waits is not None:
                starved = self._was_starved or self._engine.loader.starved > 0
                why = why_waited(self._waits.tiers, starved)
        space = next(iter(self._namespaces.values()), None)
        blocks = blocks_of(self._asked, space.hash_bytes if space is not None else frames.DIGEST_BYTES)
        who = self.peer.as_dict(now_s, len(self._leases))
        name = type(self._asked).__name__.lower()
        self._api.slow.note(Slow(now_s, took_s, waited_s, name, blocks, why, who))

    def step(self) -> None:
        """Do the next piece of the request that has steps. Never raises."""
        if self._steps is None:
            return
        self._pieces += 1
        try:
            next(self._steps)
            return
        except StopIteration as end:
            answer: frames.Answer | None = end.value
        except Exception as error:  # noqa: BLE001 - `refusal` logs what is not a refusal
            answer = self.refusal(error)
        self._steps = None
        if answer is not None:
            self._answer(answer)

    def _answer_later(self, answer: frames.Answer) -> None:
        """What was to be answered later. It may be at once, within `serve`."""
        if self._has_ended:
            return
        self._later = None
        if isinstance(answer, frames.Error):
            self._complain(answer.code, answer.message)
        self._answer(answer)
        self._resume()

    def refusal(self, error: Exception) -> frames.Error:
        """The answer to a request that failed. The first one of a connection is logged."""
        if isinstance(error, TierError):
            error = BadRequest(str(error))
        if not isinstance(error, RequestError):  # our bug; the one place where it becomes an answer
            log.error("serving %s failed", self.name, exc_info=error)
            self._has_complained = True
            error = Internal(f"{type(error).__name__}; the daemon's log has more")
        self._complain(error.code, str(error))
        return frames.Error(error.code, str(error))

    def _complain(self, code: str, message: str) -> None:
        self._api.refused[code] += 1
        if not self._has_complained:
            self._has_complained = True
            log.warning("%s: request refused: %s: %s", self.name, code, message)

    def take_expired(self) -> None:
        """Take the leases back that are held for too long, one after the other; others of this client stay."""
        if not self._is_expiring and self._expired() is not None:
            self._is_expiring = True
            self._api.turns.run(self._taking_expired())

    def _expired(self) -> int | None:
        """The oldest lease, if it is held for too long."""
        for lease, (_, since_s) in self._leases.items():
            return lease if self._api.clock() - since_s > self._api.limits.lease_s_max else None
        return None

    def _taking_expired(self) -> Steps[None]:
        while (lease := self._expired()) is not None and self._session is not None:
            limit_s = self._api.limits.lease_s_max
            self.refusal(LeaseExpired(f"a lease was held for more than {limit_s:g} s, and taken back"))
            self._engine.expire(self._session, lease)
            self._closed(lease)
            yield
        self._is_expiring = False

    def end(self) -> None:
        """The client is gone: everything it holds goes back. Idempotent."""
        if self._has_ended:
            return
        self._has_ended, self._steps, self._later, self._waits = True, None, None, None
        self._reply, self._resume = lambda _: None, lambda: None  # no circle: old garbage is not collected
        self._hang_up = lambda _: None
        self._api.clients.leave(self)
        self._holder.requests += self.peer.requests
        self._cancel_timer()
        self._audit.answered(None)
        if self._recording is not None:
            self._api.recordings.remove(self._recording)
        for namespace in list(self._namespaces.values()):
            self._let_go(namespace)
        self._holder.lease_bytes -= self._lease_bytes
        for lease in self._leases:
            self._api.lenders.pop(lease, None)
            if self._api.tracing is not None:
                self._api.tracing.closed(lease)
        self._leases.clear()
        session, self._session = self._session, None
        if session is not None:
            self._engine.close_session(session)

    def listed(self, now_s: float) -> answers.Client:
        """As `kvstore clients` lists it."""
        peer = self.peer.as_dict(now_s, len(self._leases))
        return {**peer, "attached": self.attached, "lease_bytes": self._lease_bytes}

    def cut_off(self, refusal: ConnectionRefused) -> None:
        """Say why, and hang up: everything goes back."""
        self._hang_up(refusal)

    # -- namespaces --

    def _register(self, request: frames.Register) -> frames.Answer:
        for namespace in [n for n in self._namespaces.values() if n.is_ended]:
            self._let_go(namespace)
        r = request
        try:
            columns = pack_columns(r.columns, r.record_bytes)
        except ValueError as error:
            raise BadRequest(f"namespace {r.digest.hex()}: {error}") from error
        size_bytes = frames.fields_bytes(r.fields)
        if size_bytes > frames.FIELDS_BYTES_MAX:
            raise LimitExceeded(
                f"fields of {size_bytes} bytes: at most {frames.FIELDS_BYTES_MAX} are allowed"
            )
        self._holder.require_room(r.digest, size_bytes)
        spec = NamespaceSpec(r.digest, r.record_bytes, r.hash_bytes, r.block_tokens, r.fields, columns)
        number = self._engine.register(spec)
        if number not in self._namespaces:
            namespace = self._namespaces[number] = self._engine.namespaces.get(number)
            self._engine.namespaces.used(namespace)
            self._holder.hold(spec, size_bytes, self.name, self._api.clock())
        return frames.Registered(number)

    def _unregister(self, request: frames.Unregister) -> frames.Answer:
        self._let_go(self._known(request.namespace))
        if request.end:
            self._engine.end_namespace(request.namespace)
        return _DONE

    def _let_go(self, namespace: Namespace) -> None:
        del self._namespaces[namespace.id]
        self._engine.namespaces.let_go(namespace)
        self._holder.let_go(namespace.digest)

    def _list(self, r: frames.Namespaces) -> frames.Answer:
        return frames.StatusReport(self._engine.list_namespaces(min(r.skip, NAMESPACES_MAX)))

    # -- reading --

    def _lookup(self, request: frames.Lookup) -> Steps[None]:
        """Answered first and booked then: the engine need not wait for the accounts. Most are over with the first
        piece; of a long prompt that DRAM has not, all blocks are looked at."""
        for namespace in request.namespaces:
            if request.hashes or not request.tokens:  # a prompt without a whole block is only counted
                self._count(namespace, request)
            else:
                self._known(namespace)
        asking = asking_of(request)
        found = yield from self._engine.find_steps(request.namespaces, request.hashes, asking)
        space = self._known(request.namespaces[0])
        asked = len(request.hashes) // space.hash_bytes
        for whose in (space, self.peer):
            whose.asked_blocks += asked
            whose.hit_blocks += found.usable
        self._answer(frames.Count(found.usable, found.writing))
        try:
            self._engine.book(request.namespaces, request.hashes, found, asking)
            for recording in self._api.recordings:
                recording.asked(request, [self._namespaces[number] for number in request.namespaces])
            if self._api.tracing is not None:
                pieces, space = (
                    self._engine.accounts.pieces(request.ticket),
                    self._known(request.namespaces[0]),
                )
                self._api.tracing.looked_up(request, space, pieces, self._begun_s, self._api.clock())
        except UnknownNamespace:  # it was ended meanwhile
            pass
        except Exception:  # a bug of ours; the answer is out already
            log.exception("booking a lookup of %s failed", self.name)

    def _settle(self, request: frames.Settle) -> frames.Answer:
        if request.hash and len(request.hash) != self._known(request.namespace).hash_bytes:
            raise BadRequest(f"hash of {len(request.hash)} bytes: one block hash is required")
        self._engine.settle(request.ticket, request.tokens, request.namespace, request.hash)
        if self._api.tracing is not None:
            pieces = self._engine.accounts.pieces(request.ticket)
            self._api.tracing.settled(request.ticket, pieces, self._begun_s)
        return _DONE

    def _residency(self, request: frames.Residency) -> Steps[frames.Answer]:
        self._count(request.namespace, request)
        return frames.Places((yield from self._engine.residency_steps(request.namespace, request.hashes)))

    def _prefetch(self, request: frames.Prefetch) -> Steps[frames.Answer]:
        self._count(request.namespace, request)
        return frames.Count(
            (yield from self._engine.prefetch_steps(request.namespace, request.hashes, request.parent))
        )

    def _explain(self, request: frames.Explain) -> Steps[frames.Answer]:
        """By digest: the caller need not have registered the namespaces."""
        numbers = []
        count_max = min(
            KINDS[frames.Explain].hashes_max,
            frames.FRAME_BYTES_MAX // (len(request.digests) + 2),  # one byte each
        )
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
        found = yield from self._engine.explain_steps(numbers, request.hashes, request.leading)
        places, outcomes, load_s = found
        return frames.Explained(places, bytes(outcomes), load_s)

    # -- leases --

    def _reserve(self, request: frames.Reserve) -> frames.Answer:
        session = self._session_for_lease()
        count = self._count(request.namespace, request)
        namespace = self._namespaces[request.namespace]
        slot_bytes = self._engine.blocks.slot_bytes(namespace, IN_DRAM)
        allowed = min(count, self._free_bytes() // slot_bytes)  # beyond it: as without room
        hashes = request.hashes[: allowed * namespace.hash_bytes]
        reserved: frames.Reserved = self._engine.reserve(
            session, request.namespace, hashes, request.parent, request.ticket
        )
        if reserved.lease:
            self._opened(reserved.lease, sum(reserved.granted) * slot_bytes)
            if not self.attached:
                self._api.lenders[reserved.lease] = self
        reserved.full |= allowed < count
        for recording in self._api.recordings:
            recording.stored(request)
        if self._api.tracing is not None:
            granted = sum(reserved.granted)
            self._api.tracing.reserved(request.ticket, reserved.lease, namespace, granted, self._begun_s)
        return reserved

    def _commit(self, request: frames.Commit) -> frames.Answer:
        session = self._session_for_lease(new=False)
        committed = self._engine.commit(session, request.lease, request.indexes, request.checksums)
        self._closed(request.lease, committed)
        return frames.Count(committed)

    def _fill(self, request: frames.Fill) -> Steps[frames.Answer]:
        """Each by itself: one that makes no sense is refused, and the others are done."""
        if request.life not in (0, self._api.life):
            raise UnknownLease("fill: these leases are of another daemon, or of an earlier life of this one")
        committed, refused = [], []
        for position, (lease, column, checksums) in enumerate(request.fills):
            lender, stored = self._api.lenders.get(lease), 0
            try:
                stored = lender._filled(lease, column, checksums) if lender is not None else 0
            except Exception as error:  # noqa: BLE001 - `refusal` logs what is not a refusal
                refusal = self.refusal(error)
                refused.append((position, refusal.code, refusal.message))
            committed.append(stored)
            if stored:
                yield
        return frames.Filled(committed, refused)

    def _filled(self, lease: int, column: int, checksums: bytes) -> int:
        """Another client has filled a column of a lease of ours."""
        session = self._session_for_lease(new=False)
        stored = self._engine.fill(session, lease, column, checksums)
        if lease not in session.leases:
            self._closed(lease, stored)
        return stored

    def _acquire(self, request: frames.Acquire) -> frames.Answer | Later | None:
        session = self._session_for_lease()
        count = self._count(request.namespace, request)
        namespace = self._namespaces[request.namespace]
        slot_bytes = self._engine.blocks.slot_bytes(namespace, IN_DRAM)
        allowed = min(count, self._free_bytes() // slot_bytes)
        if not self._holder.lease_bytes:
            allowed = max(1, allowed)  # or a record larger than the limit could never be read
        if not allowed:
            return frames.Acquired(0, bytes(count), frames.Extents(0, [], b""), True)
        later, beyond = Later(), count - allowed
        has_begun = False

        def ready(acquired: frames.Acquired) -> None:
            self._cancel_timer()
            missed = acquired.tiers.count(0)
            if acquired.lease:
                self._opened(acquired.lease, (allowed - missed) * slot_bytes)
            if self._api.tracing is not None:
                tiers = bytes(acquired.tiers)
                self._api.tracing.acquired(request.ticket, acquired.lease, namespace, tiers, self._begun_s)
            # What no limit allowed is worth asking for again, unless a miss before it makes it useless.
            acquired.pending |= beyond > 0 and not missed
            acquired.tiers += bytes(beyond)
            later.set(acquired)
            if not has_begun:
                self._answer(acquired)

        hashes = request.hashes[: allowed * namespace.hash_bytes]
        patience_s = (
            request.wait_ms / 1000 if request.wait_ms else math.inf
        )  # the latter: what is begun now goes on
        try:
            lease = self._engine.acquire(
                session,
                request.namespace,
                hashes,
                ready,
                request.parent,
                request.ticket,
                patience_s,
                request.sums,
            )
        except Exception:
            if later.answer is None:
                raise
            log.exception("booking what %s acquired failed", self.name)  # a bug of ours; the answer is out
        if later.answer is not None:
            return None
        has_begun = True
        if request.wait_ms == 0:
            lease.expire()
        if later.answer is None:
            self._waits, self._was_starved = lease, self._engine.loader.starved > 0
            self._timer = self._api.call_later(request.wait_ms / 1000, lease.expire)
        return later.answer or later

    def _release(self, request: frames.Release) -> frames.Answer:
        self._engine.release(self._session_for_lease(new=False), request.lease)
        self._closed(request.lease)
        return _DONE

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _opened(self, lease: int, size_bytes: int) -> None:
        self._leases[lease] = size_bytes, self._api.clock()
        self._lease_bytes += size_bytes
        self._holder.lease_bytes += size_bytes

    def _closed(self, lease: int, stored: int = 0) -> None:
        self._api.lenders.pop(lease, None)
        if self._api.tracing is not None:
            self._api.tracing.closed(lease, stored)
        size_bytes, _ = self._leases.pop(lease, (0, 0.0))
        self._lease_bytes -= size_bytes
        self._holder.lease_bytes -= size_bytes

    # -- the index --

    def _warm(self, r: frames.WarmPrefix) -> Steps[frames.Answer]:
        """Once for each prefix; asked again it goes on where it was."""
        asked = r.namespace.lower(), r.hash
        if self._warming is None or self._warming[0] != asked:
            self._warming = asked, PrefixWarming(self._engine, *asked, self._api.clock)
        return frames.StatusReport((yield from self._warming[1].go_on()))

    def _chain(self, r: frames.Chain) -> Steps[frames.Answer]:
        chains: list[tuple[bytes, bytes]] = []
        left = frames.FRAME_BYTES_MAX // 2
        found, _ = yield from known_steps(list(self._engine.namespaces), r.namespace.lower(), r.hash)
        for block in found:
            chain = yield from chain_steps(block)
            joined = b"".join(one.hash for one in chain)
            left -= len(joined)
            if left < 0:
                break
            if joined:
                chains.append((block.namespace.digest, joined))
            yield
        return frames.StatusReport({"chains": chains})

    def _find_prefixes(self, r: frames.FindPrefixes) -> Steps[frames.Answer]:
        return frames.StatusReport(
            {"hashes": (yield from self._engine.prefixes_steps(r.namespace, r.beginning))}
        )

    # -- the daemon --

    def _live(self, request: frames.Live) -> Steps[frames.Answer]:
        return frames.StatusReport((yield from self._api.node.live_steps(request.minutes_since_s)))

    def _report(self, r: frames.Report) -> Steps[frames.Answer]:
        return frames.StatusReport((yield from self._api.node.totals_steps(r.since_s, r.skip, r.until_s)))

    def _get(self, r: frames.GetSettings) -> frames.Answer:
        return frames.StatusReport({"settings": self._api.node.settings.shown(r.name)})

    def _set(self, r: frames.SetSetting) -> frames.Answer:
        if self.attached:
            raise BadRequest("set: only for a connection without the arena, as that of `kvstore config set`")
        return frames.StatusReport(self._api.node.settings.change(r.key, r.text))

    def _clients(self, r: frames.Clients) -> frames.Answer:
        return frames.StatusReport(self._api.clients.page(self._api.clock(), r.skip))

    def _kill(self, r: frames.KillClient) -> frames.Answer:
        client = self._api.clients.cut_off(r.number, self.name, self._api.clock())
        log.warning("%s (pid %s) was cut off by %s", client["label"] or "unnamed", client["pid"], self.name)
        return frames.StatusReport(client)

    def _slow(self, _: frames.SlowRequests) -> frames.Answer:
        return frames.StatusReport(self._api.slow.report(self._api.clock(), self._api.limits.slow_s))

    def _disk(self, r: frames.SetDisk) -> Later:
        later = Later()
        self._api.node.disks.change(
            r.directory,
            r.accept,
            lambda no, disk: later.set(frames.Error(no.code, f"{no}") if no else frames.StatusReport(disk)),
        )
        return later

    def _record(self, _: frames.Record) -> frames.Answer:
        if self._recording is None:
            if len(self._api.recordings) >= RECORDINGS_MAX:
                raise LimitExceeded(f"{RECORDINGS_MAX} recordings at a time are allowed")
            self._recording = Recording(self._api.clock)
            self._api.recordings.append(self._recording)
        return self._recording.take()

    def _check(self, _: frames.Check) -> Later:
        if self.attached:
            raise BadRequest("check: only for a connection without the arena, as that of `kvstore fsck`")
        return self._api.check()

    # -- limits --

    def _known(self, number: int) -> Namespace:
        namespace = self._namespaces.get(number)
        if namespace is None:
            raise UnknownNamespace(f"namespace {number} was not registered on this connection")
        return namespace

    def _count(self, namespace: int, request: Any) -> int:
        """How many hashes it has. Raises UnknownNamespace, BadRequest, LimitExceeded."""
        size, count_max = self._known(namespace).hash_bytes, KINDS[type(request)].hashes_max
        count, rest = divmod(len(request.hashes), size)
        if rest or not count:
            raise BadRequest(f"{len(request.hashes)} bytes of hashes: a multiple of {size} is required")
        if count > count_max:
            raise LimitExceeded(f"{count} hashes in one request: at most {count_max} are allowed")
        return count

    def _session_for_lease(self, new: bool = True) -> Session:
        if self._session is None:
            self._session = self._engine.open_session(OWNER_ANY, self.name, self.peer)
        if new and len(self._leases) >= self._api.limits.leases_max:
            raise LimitExceeded(f"{self._api.limits.leases_max} open leases on one connection are allowed")
        return self._session

    def _free_bytes(self) -> int:
        """Of the arena, that further leases may hold."""
        limits = self._api.limits
        own = limits.lease_bytes_max - self._lease_bytes
        return max(0, min(own, limits.process_lease_bytes_max - self._holder.lease_bytes))


class Kind(NamedTuple):
    """How one kind of request is served. access: what who asks must be allowed. price_us: what it takes, or its first piece; byte_us: for each of
    its bytes, besides; hashes_max: how many block hashes it may have. handler: returns None, at once or at the
    end of its steps, where it called `reply` itself."""

    handler: Callable[[Caller, Any], frames.Answer | Later | Steps[Any] | None]
    access: Access
    price_us: float
    byte_us: float = 0.0
    hashes_max: int = 0


KINDS: dict[type[Any], Kind] = {
    frames.Ping: Kind(lambda _c, _: _DONE, "read", 5),
    frames.Register: Kind(Caller._register, "read", 30),
    frames.Unregister: Kind(Caller._unregister, "write", 30),
    frames.Lookup: Kind(Caller._lookup, "read", 60, 0.02, frames.HASHES_MAX),
    frames.Windows: Kind(
        lambda c, r: find_windows(c._engine, r, c._count), "read", 60, 0.02, frames.HASHES_MAX
    ),
    frames.Settle: Kind(Caller._settle, "read", 10),
    frames.Residency: Kind(Caller._residency, "read", 10, 0.01, frames.HASHES_MAX),
    frames.Prefetch: Kind(Caller._prefetch, "read", 10, 0.3, frames.HASHES_MAX),
    frames.Reserve: Kind(Caller._reserve, "write", 30, 0.25, frames.LEASE_HASHES_MAX),
    frames.Commit: Kind(Caller._commit, "write", 30, 0.35),
    frames.Fill: Kind(Caller._fill, "write", 30, 0.35),
    frames.Acquire: Kind(Caller._acquire, "read", 30, 0.1, frames.LEASE_HASHES_MAX),
    frames.Release: Kind(Caller._release, "read", 60),
    frames.Status: Kind(lambda c, _: frames.StatusReport(c._api.node.report()), "view", 1000),
    frames.Namespaces: Kind(Caller._list, "view", 1000),
    frames.Report: Kind(Caller._report, "view", 2000),
    frames.Explain: Kind(Caller._explain, "view", 100, 0.05, frames.HASHES_MAX),
    frames.Check: Kind(Caller._check, "admin", 100),
    frames.SetPin: Kind(lambda c, r: set_pin(c._engine, r), "admin", 200),
    frames.SetTtl: Kind(lambda c, r: set_ttl(c._engine, r), "admin", 200),
    frames.SetQuota: Kind(lambda c, r: set_quota(c._engine, r), "admin", 200),
    frames.Retention: Kind(lambda c, _: list_rules(c._engine), "view", 1000),
    frames.Clear: Kind(lambda c, r: clear(c._engine, r), "admin", 3000),
    frames.FindPrefixes: Kind(Caller._find_prefixes, "view", 1000),
    frames.Live: Kind(Caller._live, "view", 1000),
    frames.Clients: Kind(Caller._clients, "view", 2000),
    frames.KillClient: Kind(Caller._kill, "admin", 200),
    frames.SlowRequests: Kind(Caller._slow, "view", 1000),
    frames.Record: Kind(Caller._record, "admin", 1000),
    frames.Chain: Kind(Caller._chain, "view", 1000),
    frames.WarmPrefix: Kind(Caller._warm, "admin", 1000),
    frames.GetSettings: Kind(Caller._get, "view", 1000),
    frames.SetSetting: Kind(Caller._set, "admin", 2000),
    frames.SetDisk: Kind(Caller._disk, "admin", 1000),
    frames.ReserveModel: Kind(lambda c, r: reserve_model(c._engine, c._session, r), "write", 2000),
    frames.CommitModel: Kind(lambda c, r: commit_model(c._engine, c._session, r), "write", 200),
    frames.AttachModel: Kind(lambda c, r: attach_model(c._engine, c._session, r), "read", 1000),
    frames.DropModel: Kind(lambda c, r: drop_model(c._engine, r), "admin", 3000),
    frames.ListModels: Kind(lambda c, _: list_models(c._engine), "view", 200),
    frames.ModelLoaded: Kind(lambda c, r: model_loaded(c._engine, r), "read", 20),
}
_BY_TAG = {kind.__struct_config__.tag: kind for kind in KINDS}


def kind_of(tag: int) -> type[Any] | None:
    """The request with this tag; None without one."""
    return _BY_TAG.get(tag)


def price_us(tag: int, size_bytes: int) -> float:
    """What a request with this tag and size is expected to take, or its first piece."""
    if tag not in _BY_TAG:
        return 5.0  # it will be refused
    kind = KINDS[_BY_TAG[tag]]
    return min(kind.price_us + size_bytes * kind.byte_us, max(kind.price_us, DOOR_PIECE_US))
