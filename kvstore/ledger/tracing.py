"""Tracing: spans of the requests that are traced, for OpenTelemetry.

    trace of the request (W3C traceparent, which came with its lookup)
      │ llm_request                            the engine's own span
      │   kvstore.lookup    ▐                  tokens by outcome, the reason of the first miss
      │   kvstore.load       ▐████▌            from acquire until every rank has copied
      │   └ kvstore.promote  ▐██▌              of that: until slower tiers had brought it into DRAM
      │   kvstore.save              ▐███▌      from reserve until the blocks are visible

A request is a ticket. Whether it is traced, the traceparent decides that its first lookup brought (its sampled flag);
of those without one `sample` of all get a trace of their own, which begins with their lookup. Any other request costs a
look at the ticket. Spans are made when they are over, handed to `take` as plain values, and looked at by another thread.

Invariant: what is remembered is bounded: requests by TRACES_REQUESTS_MAX, leases by the door's limits.
"""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.index.block import Namespace
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Lookup
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME, IN_SHARED

# Traced requests that are remembered: what an older one does is not traced any more.
TRACES_REQUESTS_MAX = 4096
TRACES_SAVES_MAX = 32  # spans for what one request stores: a long answer would have one for every block

Piece = tuple[int, int]  # tokens, outcome
Attributes = dict[str, str | int]  # of a span
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NO_MISS = (*outcomes.HITS, outcomes.ENGINE, outcomes.PARTIAL_BLOCK)
_SAMPLED = 1
_SPREAD, _ALL = 0x9E3779B97F4A7C15, (1 << 64) - 1  # neighbouring tickets become numbers far apart
_TIERS = ((IN_DRAM, "dram"), (IN_NVME, "nvme"), (IN_SHARED, "shared"))


class Span(NamedTuple):
    """One span. parent_id: 0 where the trace begins with it. begun_s, ended_s: by the daemon's monotonic clock."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    begun_s: float
    ended_s: float
    attributes: Attributes


@dataclass(slots=True)
class _Request:
    """One that is traced. latest: the outcome in its latest span of a lookup."""

    trace_id: int
    parent_id: int
    latest: Sequence[Piece] = ()
    saves: int = 0


@dataclass(slots=True)
class _Lease:
    """Of a traced request, not given back. tiers: one byte a block, as in Acquired; b"" of blocks to be stored."""

    request: _Request
    space: Namespace
    begun_s: float
    ready_s: float
    blocks: int
    tiers: bytes = b""


class Tracing:
    """All calls are of the daemon's thread. sample: of requests without a traceparent, the share that is traced."""

    def __init__(self, sample: float, clock: Callable[[], float], take: Callable[[Span], None]) -> None:
        self.sample, self._clock, self._take = sample, clock, take
        self._requests: OrderedDict[int, _Request] = OrderedDict()  # by ticket
        self._leases: dict[int, _Lease] = {}

    def looked_up(
        self, asked: Lookup, space: Namespace, pieces: Sequence[Piece], begun_s: float, ended_s: float
    ) -> None:
        """A lookup was answered, or its outcome changed since. pieces: the prompt's tokens, in its order. An
        outcome that was sent before is not sent again: an engine asks once a second while a request waits."""
        request = self._of(asked)
        if request is None or pieces == request.latest:
            return
        request.latest = pieces
        span_id = self._send(
            "kvstore.lookup", request, begun_s, ended_s, {**_names(space), **_outcome(pieces)}
        )
        request.parent_id = request.parent_id or span_id

    def settled(self, ticket: int, pieces: Sequence[Piece], begun_s: float) -> None:
        """Less of what was found could be used."""
        request = self._requests.get(ticket)
        if request is not None and pieces != request.latest:
            request.latest = pieces
            self._send("kvstore.settle", request, begun_s, self._clock(), _outcome(pieces))

    def acquired(self, ticket: int, lease: int, space: Namespace, tiers: bytes, begun_s: float) -> None:
        """These blocks are in DRAM now, and leased; tiers: where each was, 0 for one that did not come."""
        request = self._requests.get(ticket)
        if request is None:
            return
        now_s = self._clock()
        held = _Lease(request, space, begun_s, now_s, len(tiers), bytes(tiers))
        if lease:
            self._leases[lease] = held
        else:
            self._loaded(held, now_s)

    def reserved(self, ticket: int, lease: int, space: Namespace, blocks: int, begun_s: float) -> None:
        """So many blocks are being stored."""
        request = self._requests.get(ticket)
        if request is not None and lease and request.saves < TRACES_SAVES_MAX:
            request.saves += 1
            self._leases[lease] = _Lease(request, space, begun_s, begun_s, blocks)

    def closed(self, lease: int, stored: int = 0) -> None:
        """A lease was given back, or lost, and so many blocks of it were committed."""
        if (held := self._leases.pop(lease, None)) is None:
            return
        now_s = self._clock()
        if held.tiers:
            self._loaded(held, now_s)
            return
        attributes: Attributes = {
            **_names(held.space),
            "kvstore.blocks": held.blocks,
            "kvstore.blocks.stored": stored,
            "kvstore.bytes": stored * held.space.record_bytes,
        }
        self._send("kvstore.save", held.request, held.begun_s, now_s, attributes)

    def _loaded(self, held: _Lease, now_s: float) -> None:
        sizes = {name: held.tiers.count(tier) * held.space.record_bytes for tier, name in _TIERS}
        missed = held.tiers.count(0)
        attributes: Attributes = {
            **_names(held.space),
            "kvstore.blocks": held.blocks,
            "kvstore.blocks.missed": missed,
            "kvstore.bytes": (held.blocks - missed) * held.space.record_bytes,
        }
        attributes |= {f"kvstore.bytes.{name}": size for name, size in sizes.items() if size}
        span_id = self._send("kvstore.load", held.request, held.begun_s, now_s, attributes)
        slower = {f"kvstore.bytes.{name}": size for name, size in sizes.items() if size and name != "dram"}
        if slower or missed:
            of_load = _Request(held.request.trace_id, span_id)
            self._send("kvstore.promote", of_load, held.begun_s, held.ready_s, {**slower})

    def _of(self, asked: Lookup) -> _Request | None:
        """The request behind a lookup, if it is traced; decided once, at its first one."""
        ticket = asked.ticket
        if not ticket:
            return None
        request = self._requests.get(ticket)
        if request is None and (request := self._decide(ticket, asked.trace)) is not None:
            self._requests[ticket] = request
            if len(self._requests) > TRACES_REQUESTS_MAX:
                self._requests.popitem(last=False)
        return request

    def _decide(self, ticket: int, trace: str) -> _Request | None:
        found = _TRACEPARENT.fullmatch(trace) if trace else None
        if (
            found is None
        ):  # by the ticket: the same whenever it is asked again, and nothing needs to be remembered
            is_chosen = (ticket * _SPREAD & _ALL) < self.sample * _ALL
            return _Request(random.getrandbits(128) or 1, 0) if is_chosen else None
        trace_id, parent_id, flags = (int(part, 16) for part in found.groups())
        return _Request(trace_id, parent_id) if trace_id and parent_id and flags & _SAMPLED else None

    def _send(
        self, name: str, request: _Request, begun_s: float, ended_s: float, attributes: Attributes
    ) -> int:
        span_id = random.getrandbits(64) or 1
        span = Span(name, request.trace_id, span_id, request.parent_id, begun_s, ended_s, attributes)
        self._take(span)
        return span_id


def _names(space: Namespace) -> Attributes:
    fields = space.spec.fields
    return {f"kvstore.{name}": fields[name] for name in ("model", "tenant") if fields.get(name)}


def _outcome(pieces: Sequence[Piece]) -> Attributes:
    """What became of a prompt's tokens, and why the first one that no tier gave is missed."""
    found: Attributes = {"kvstore.tokens": sum(tokens for tokens, _ in pieces)}
    at = 0
    for tokens, outcome in pieces:
        name = f"kvstore.tokens.{outcomes.NAMES[outcome]}"
        found[name] = int(found.get(name, 0)) + tokens
        if outcome not in _NO_MISS and "kvstore.first_miss.reason" not in found:
            found["kvstore.first_miss.reason"] = outcomes.NAMES[outcome]
            found["kvstore.first_miss.token"] = at
        at += tokens
    return found
