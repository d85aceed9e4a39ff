"""The stream: changes become numbered batches; the latest ones are kept for those who missed some.

    changes ─▶ batches of up to EVENTS_BATCH_BLOCKS ─▶ sequence n, n+1, … ─▶ PUB socket
                                                              ╰─▶ kept, up to `replay_bytes`

Invariants: the numbers of two batches in a row differ by one, except where changes between them were
lost: there a number is left out. The first number of a daemon's life is the time in microseconds, so
that no life goes on where an earlier one ended: who followed that one sees a gap.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvstore.constants import require
from kvstore.events.journal import EVENTS_WAITING_MAX, Change, Taken
from kvstore.events.wire import (
    LOCALITY,
    MEDIUMS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    Frames,
    HashForm,
    hash_values,
    owner_name,
    sequence_bytes,
)

EVENTS_BATCH_BLOCKS = 1024  # of one message, which is closed then: about 10 KB, or 36 KB of whole hashes
EVENTS_MESSAGE_BYTES = 128  # of memory for each batch that is kept, besides its own
require(EVENTS_BATCH_BLOCKS <= EVENTS_WAITING_MAX, "a full batch may wait")

Send = Callable[[Frames], None]


class Writer:
    """Writes batches."""

    def __init__(self, form: HashForm, wall_clock: Callable[[], float]) -> None:
        self._form = form
        self._wall_clock = wall_clock
        self._encoder = msgspec.msgpack.Encoder()

    def batches(self, changes: Iterable[Change]) -> Iterator[bytes]:
        """These changes in their order, neighbours that say the same of one tier in one event."""
        events: list[Event] = []
        blocks = 0
        for change in _joined(changes):
            events.append(self._event(change))
            blocks += len(change.hashes)
            if blocks >= EVENTS_BATCH_BLOCKS:
                yield self.batch(events)
                events, blocks = [], 0
        if events:
            yield self.batch(events)

    def batch(self, events: list[Event]) -> bytes:
        return self._encoder.encode(Batch(self._wall_clock(), events))

    def cleared(self) -> bytes:
        """What everything that is held begins with."""
        return self.batch([AllBlocksCleared()])

    def _event(self, change: Change) -> Event:
        spec, bit = change.namespace.spec, change.bit
        hashes = hash_values(change.hashes, self._form)
        group = spec.fields.get("group", "")
        group_idx = int(group) if group.isdecimal() and len(group) < 6 else None
        owner = owner_name(bit, spec.digest, spec.fields.get("model", ""))
        if change.is_stored:
            return BlockStored(
                hashes, None, [], spec.block_tokens, None, MEDIUMS[bit], None, group_idx, LOCALITY, owner
            )
        return BlockRemoved(hashes, MEDIUMS[bit], group_idx, LOCALITY, owner)


def _taken_out(changes: deque[Change]) -> Iterator[Change]:
    while changes:
        yield changes.popleft()


def _joined(changes: Iterable[Change]) -> Iterator[Change]:
    """Neighbours of one kind, tier and namespace together, up to EVENTS_BATCH_BLOCKS."""
    last: Change | None = None
    for change in changes:
        if (
            last is not None
            and last.bit == change.bit
            and last.is_stored == change.is_stored
            and last.namespace is change.namespace
            and len(last.hashes) < EVENTS_BATCH_BLOCKS
        ):
            last.hashes += change.hashes
            continue
        if last is not None:
            yield last
        last = Change(change.is_stored, change.bit, change.namespace, list(change.hashes))
    if last is not None:
        yield last


class Stream:
    """What is published. Used by one thread."""

    def __init__(self, writer: Writer, topic: str, kept_bytes_max: int, first: int, send: Send) -> None:
        """first: the number of the first batch; `send` never blocks."""
        self.writer = writer
        self.topic = topic.encode()
        self.next = first
        self.stored = self.removed = self.gaps = self.batches = 0
        self.kept_bytes = 0
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._kept_bytes_max = kept_bytes_max
        self._send = send

    def publish(self, taken: Taken) -> None:
        """In as many batches as it takes."""
        if taken.is_after_gap:
            self.next += 1
            self.gaps += 1
        blocks = sum(len(change.hashes) for change in taken.changes)
        stored = sum(len(change.hashes) for change in taken.changes if change.is_stored)
        for payload in self.writer.batches(_taken_out(taken.changes)):
            self._publish(payload)
        self.stored += stored
        self.removed += blocks - stored

    def beat(self) -> None:
        """A batch without events: who missed the one before sees it now."""
        self._publish(self.writer.batch([]))

    def kept_from(self, sequence: int) -> int:
        """The first number that is kept and not before this one; `next` if there is none."""
        first = next(iter(self._kept), self.next)
        at = max(sequence, first)
        while at < self.next and at not in self._kept:  # a number that was left out
            at += 1
        return min(at, self.next)

    def kept(self, sequence: int) -> Frames:
        """A batch that is kept, as it was published."""
        return self.frames(sequence, self._kept[sequence])

    def frames(self, sequence: int, payload: bytes) -> Frames:
        return [self.topic, sequence_bytes(sequence), payload]

    def _publish(self, payload: bytes) -> None:
        self._send(self.frames(self.next, payload))
        self._kept[self.next] = payload
        self.next += 1
        self.batches += 1
        self.kept_bytes += len(payload) + EVENTS_MESSAGE_BYTES
        while self.kept_bytes > self._kept_bytes_max:
            self.kept_bytes -= len(self._kept.popitem(last=False)[1]) + EVENTS_MESSAGE_BYTES
