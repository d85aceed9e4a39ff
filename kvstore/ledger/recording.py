"""Recording: keeps the requests of engines until `kvstore record` fetches them.

    lookup ──▶ asked ──▶ waiting ──▶ take ──▶ kvstore record ──▶ a file without names
    reserve ─▶ stored: how far prompt and output have come ──▶╯

A request is one ticket, however often and for however many namespaces it is looked up. A request's hashes are
kept as they came, and not copied. `kvstore.tools.replay.recorder` removes what they say about prompts before it
writes a file.

Invariant: what waits is bounded, in requests and in bytes; what does not fit is lost and counted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.constants import KIB, MIB, NAMESPACES_MAX, TICKETS_OPEN_MAX, require
from kvstore.index.block import Namespace
from kvstore.protocol.frames import FRAME_BYTES_MAX, Asked, Lookup, Recorded, Reserve

RECORD_WAITING_MAX = 16_384  # requests that were not fetched yet; freeing as many takes 3 ms
RECORD_WAITING_BYTES_MAX = 16 * MIB  # of the hashes of those requests; freeing them takes as long
RECORD_ANSWER_BYTES = 512 * KIB  # of one answer, about a millisecond; more only for a single request
RECORD_REQUEST_BYTES = 100  # of an answer, besides its hashes
require(RECORD_ANSWER_BYTES <= RECORD_WAITING_BYTES_MAX, "an answer can be filled")


@dataclass(slots=True)
class _Open:
    """A request whose output may still come. last: hash of the last block that is known of it, b"" without one."""

    number: int
    space: int
    last: bytes
    blocks: int
    hash_bytes: int
    block_tokens: int


class Recording:
    """What one client records. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lost = 0
        self._clock = clock
        self._numbers = 0
        self._waiting: deque[Asked] = deque()
        self._waiting_bytes = 0
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._sizes: dict[
            int, dict[int, int]
        ] = {}  # of a block in each namespace, by the first one of a request
        self._stored: dict[int, int] = {}  # number -> tokens of prompt and output

    def asked(self, request: Lookup, spaces: Sequence[Namespace]) -> None:
        """A lookup in these namespaces was answered."""
        if request.more and (known := self._open.get(request.ticket)) is not None:
            self._learn(known.space, known.block_tokens, spaces)
        if request.more or request.again or request.ticket in self._open:
            return
        first, hashes = spaces[0], request.hashes
        size, block_tokens = first.hash_bytes, first.spec.block_tokens
        self._learn(first.id, block_tokens, spaces)
        number, self._numbers = self._numbers, self._numbers + 1
        if request.ticket:
            blocks = len(hashes) // size
            self._open[request.ticket] = _Open(number, first.id, hashes[-size:], blocks, size, block_tokens)
            if len(self._open) > TICKETS_OPEN_MAX:
                self._open.popitem(last=False)
        cost = len(hashes) + RECORD_REQUEST_BYTES
        if (
            len(self._waiting) >= RECORD_WAITING_MAX
            or self._waiting_bytes + cost > RECORD_WAITING_BYTES_MAX
            or cost > FRAME_BYTES_MAX - RECORD_REQUEST_BYTES
        ):
            self.lost += 1
            return
        tokens = max(request.tokens, len(hashes) // size * block_tokens)
        block_bytes = sum(self._sizes[first.id].values())
        is_open, at_s = request.ticket != 0, self._clock()
        self._waiting.append(
            Asked(number, is_open, at_s, tokens, first.digest, size, block_tokens, block_bytes, hashes)
        )
        self._waiting_bytes += cost

    def _learn(self, first: int, block_tokens: int, spaces: Sequence[Namespace]) -> None:
        """What a block of requests that begin with this namespace takes in these. Groups with blocks of another size are asked for
        only where the others hit: once one was, they count."""
        if len(self._sizes) >= NAMESPACES_MAX:
            self._sizes.clear()
        sizes = self._sizes.setdefault(first, {})
        for space in spaces:
            share = block_tokens / space.spec.block_tokens if block_tokens and space.spec.block_tokens else 1
            sizes[space.id] = round(space.slot_bytes * share)

    def stored(self, request: Reserve) -> None:
        """Blocks of a request were offered for storing. Of output only what follows the prompt without a gap counts."""
        known = self._open.get(request.ticket)
        if known is None or known.space != request.namespace:
            return
        new = _behind(known.last, request.parent, request.hashes)
        if not new:
            return
        known.last = new[-known.hash_bytes :]
        known.blocks += len(new) // known.hash_bytes
        if known.number in self._stored or len(self._stored) < RECORD_WAITING_MAX:
            self._stored[known.number] = known.blocks * known.block_tokens

    def take(self) -> Recorded:
        """What came since the last time, or as much of it as fits an answer."""
        taken: list[Asked] = []
        size_bytes = 0
        while self._waiting:
            cost = len(self._waiting[0].hashes) + RECORD_REQUEST_BYTES
            if taken and size_bytes + cost > RECORD_ANSWER_BYTES:
                break
            taken.append(self._waiting.popleft())
            size_bytes += cost
        self._waiting_bytes -= size_bytes
        stored, self._stored = self._stored, {}
        return Recorded(self._clock(), taken, len(self._waiting), list(stored.items()), self.lost)


def _behind(last: bytes, parent: bytes, hashes: bytes) -> bytes:
    """The part of a run of blocks that goes on behind the block `last` (b"": the root)."""
    if parent == last:
        return hashes
    at = hashes.find(last) if last else -1
    while at > 0 and at % len(last):
        at = hashes.find(last, at + 1)
    return hashes[at + len(last) :] if at >= 0 else b""
