"""Answers to those who missed something: batches that are kept, or everything that is held.

    asked from n   ─▶ n, n+1, … as they were published, as far as they are kept ─▶ END
    asked from END ─▶ AllBlocksCleared, stored, stored, …  all with the number s ─▶ END

Everything that is held is read in slices between requests, while blocks come and go. It is exact all the
same: s is the last number that was published before the first slice was read, so a subscriber that goes on
with s + 1 sees every change that a slice may have seen or missed. A change that comes twice changes nothing.

An answer is pulled, frame by frame, as its peer takes it: a slow one holds no memory of ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from kvstore.constants import EVENTS_SLICE_PAUSE_S
from kvstore.events.journal import Change
from kvstore.events.stream import Stream
from kvstore.events.wire import END, Frames

Slices = Iterator[list[Change]]
Ask = Callable[[Callable[[], None]], object]  # runs something on the engine's thread, soon

LAST: Frames = [b"", END, b""]


class Answer(ABC):
    """What one peer asked for. Used by the publisher's thread."""

    def __init__(self, peer: bytes, now_s: float) -> None:
        self.peer = peer
        self.moved_s = now_s  # since then its peer has taken nothing
        self.is_done = False

    @abstractmethod
    def front(self, now_s: float) -> Frames | None:
        """What is to be sent next; None while it is not there yet."""

    @abstractmethod
    def sent(self) -> None:
        """The peer took what is in front."""


class Replay(Answer):
    """Batches that are kept, from one number on to what was the last one when it was asked for."""

    def __init__(self, peer: bytes, now_s: float, stream: Stream, first: int) -> None:
        super().__init__(peer, now_s)
        self._stream = stream
        self._end = stream.next
        self._at = first

    def front(self, now_s: float) -> Frames | None:
        self._at = self._stream.kept_from(self._at)
        return self._stream.kept(self._at) if self._at < self._end else LAST

    def sent(self) -> None:
        self.is_done = self._at >= self._end
        self._at += 1


class FullState(Answer):
    """Everything that is held."""

    def __init__(
        self,
        peer: bytes,
        now_s: float,
        stream: Stream,
        slices: Callable[[], Slices],
        ask: Ask,
        wake: Callable[[], None],
    ) -> None:
        """slices: called, and advanced, on the engine's thread only. `wake` is called when a slice is there."""
        super().__init__(peer, now_s)
        self._stream = stream
        self._make = slices
        self._slices: Slices | None = None
        self._ask, self._wake = ask, wake
        self._read: deque[list[Change] | None] = deque()  # None: that was all
        self._is_reading = False
        self._read_s = 0.0
        self._ready: deque[Frames] = deque()
        self._sequence = -1  # as long as nothing was read

    def front(self, now_s: float) -> Frames | None:
        while not self._ready:
            if not self._read:
                self._read_next(now_s)
                break
            self._is_reading = False
            self.moved_s = self._read_s = now_s
            self._write(self._read.popleft())
        return self._ready[0] if self._ready else None

    def sent(self) -> None:
        self.is_done = self._ready.popleft() is LAST

    def _read_next(self, now_s: float) -> None:
        if self._is_reading or now_s - self._read_s < EVENTS_SLICE_PAUSE_S:
            return
        if self._sequence < 0:
            self._sequence = self._stream.next - 1
            self._ready.append(self._stream.frames(self._sequence, self._stream.writer.cleared()))
        self._is_reading = True
        self._ask(self._read_slice)

    def _read_slice(self) -> None:
        """On the engine's thread."""
        if self._slices is None:
            self._slices = self._make()
        self._read.append(next(self._slices, None))
        self._wake()

    def _write(self, changes: list[Change] | None) -> None:
        if changes is None:
            self._ready.append(LAST)
            return
        for payload in self._stream.writer.batches(changes):
            self._ready.append(self._stream.frames(self._sequence, payload))
