"""One connection of the local door: bytes in, requests to the api, answers out, in order.

    socket ─▶ inbox ─▶ whole frame? ─▶ turns ─▶ decode ─▶ caller ─▶ answer ─▶ socket
                 ▲                                           │ steps: turns again
                 └── is not filled further while a frame waits, or an answer lies unread

The peer is not believed. What it sends ahead is one read, a large frame takes its bytes from a
budget of all connections, an answer that is not read ends the serving, and half frames and unread
answers have a time limit.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import msgspec

from kvstore.constants import DOOR_PIECE_US, DOOR_RECEIVE_BYTES
from kvstore.door.api import Api, Caller, kind_of, price_us
from kvstore.door.holders import Holder
from kvstore.door.inbox import Inbox
from kvstore.door.memory import FrameMemory, UnreadAnswers
from kvstore.engine.sessions import Session
from kvstore.errors import BadFrame, BadRequest, ConnectionRefused, FrameTooLarge, Internal, TooSlow
from kvstore.protocol import frames

DOOR_STALLED_S_PRESSED = 1.0  # for half a frame, while others wait for its memory


class Shared(NamedTuple):
    """What all connections of one door have in common. stalled_s_max: for a half frame, and for answers
    left unread."""

    api: Api
    frame_memory: FrameMemory
    unread: UnreadAnswers
    connections: set[DoorConnection]
    receive_buffer: memoryview
    stalled_s_max: float


class DoorConnection(asyncio.BufferedProtocol):
    """Serves one peer that said Hello. `session` is None for one that did not attach."""

    def __init__(
        self, shared: Shared, holder: Holder, session: Session | None, label: str, door: str
    ) -> None:
        self.finish_us = 0.0  # belongs to `Turns`
        self._shared = shared
        self._holder = holder
        self._caller = Caller(shared.api, holder, session, label, self._send, self._look, door, self._hang_up)
        self._inbox = Inbox()
        self._transport: asyncio.Transport | None = None
        self._here_s = 0.0  # since when the frame that is served next is here
        self._next_bytes = 0  # of the frame that is served next, if it is here as a whole
        self._taken_bytes = 0  # of the memory for large frames
        self._is_collecting = False  # a large frame, which was not served yet
        self._is_queued = False  # in the turns
        self._is_working = False
        self._is_unread = False
        self._is_reading = True
        self._is_closing = False
        self._stalled_since: float | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def attached(self) -> bool:
        return self._caller.attached

    # -- what the event loop calls --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # whatever the kernel does not take is unread
        self._shared.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._end()
        self._shared.unread.remove(self.abort)
        self._shared.connections.discard(self)
        self._shared.api.leave(self._holder)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.receive_buffer

    def buffer_updated(self, count: int) -> None:
        if self._is_closing:
            return
        self._inbox.received(self._shared.receive_buffer[:count])
        if self._next_bytes or not self._caller.is_free or self._is_unread:
            self._read(False)  # one read ahead is enough
        else:
            self._look()

    def pause_writing(self) -> None:
        self._is_unread = True
        self._stalled_since = self._loop.time()
        if self._transport is not None:
            self._shared.unread.add(self.abort, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._is_unread = False
        self._stalled_since = None
        self._shared.unread.remove(self.abort)
        self._look()

    # -- what the door calls --

    def abort(self) -> None:
        """Give everything back and hang up at once. Idempotent."""
        if self._is_unread and not self._is_closing:
            self._caller.refusal(TooSlow("answers lay unread"))
        self._is_closing = True
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def drop_if_stalled(self, now_s: float) -> None:
        """Hang up on a peer that left a frame half sent, or answers unread, for too long."""
        self._caller.take_expired()
        patience_s = self._shared.stalled_s_max
        if self._shared.frame_memory.waiting and self._taken_bytes:
            patience_s = min(patience_s, DOOR_STALLED_S_PRESSED)
        if self._stalled_since is None or now_s - self._stalled_since <= patience_s:
            return
        if self._is_closing or self._is_unread:  # one more Error frame would not be read either
            self.abort()
        else:
            self._hang_up(TooSlow(f"a frame was half sent for {patience_s:g} s"))

    # -- frames --

    def work(self) -> None:
        """One piece of work in our turn: the next request, or the next step of one."""
        self._is_queued = False
        if self._is_closing:
            return
        self._is_working = True
        if self._caller.has_steps:
            self._caller.step()
        elif self._next_bytes:
            self._serve()
        self._is_working = False
        self._look()

    def _look(self) -> None:
        """Whatever changed: have the next piece of work done in our turn, or wait for what it needs."""
        if self._is_queued or self._is_working or self._is_closing:
            return
        if self._caller.has_steps:
            self._queue(DOOR_PIECE_US)
        elif self._caller.is_free and not self._is_unread:
            self._give_back()
            try:
                self._find_frame()
            except FrameTooLarge as refusal:
                self._hang_up(refusal)

    def _find_frame(self) -> None:
        size, have = self._inbox.frame_bytes(), len(self._inbox)
        if size and size <= have:
            self._stalled_since = None
            self._next_bytes = size
            self._here_s = self._shared.api.clock()
            self._queue(price_us(self._inbox.tag(), size))
            return
        if size > DOOR_RECEIVE_BYTES and not self._taken_bytes:
            if not self._shared.frame_memory.take(self._holder, size, self._look):
                self._stalled_since = None  # it is us who does not read
                self._read(False)
                return
            self._taken_bytes, self._is_collecting = size, True
        if not have:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._loop.time()
        self._read(True)

    def _queue(self, price: float) -> None:
        self._is_queued = True
        self._shared.api.turns.add(self, price)

    def _read(self, wanted: bool) -> None:
        """Have the event loop read from the socket, or leave what comes to the kernel."""
        if wanted == self._is_reading or self._transport is None:
            return
        self._is_reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _give_back(self) -> None:
        """The large frame is answered: others may have its memory."""
        if self._taken_bytes and not self._is_collecting:
            size, self._taken_bytes = self._taken_bytes, 0
            self._shared.frame_memory.give(self._holder, size)

    def _serve(self) -> None:
        size, self._next_bytes, self._is_collecting = self._next_bytes, 0, False
        tag, payload = self._inbox.tag(), self._inbox.take(size)
        try:
            request = frames.request_decoder.decode(payload)
        except msgspec.ValidationError as error:
            kind = kind_of(tag)
            why = frames.in_words(error, kind) if kind is not None else str(error)
            self._send(self._caller.refusal(BadRequest(why)))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            self._send(self._caller.refusal(BadFrame(f"not a request: {error}")))
        else:
            self._caller.serve(request, self._here_s)

    # -- answers and ends --

    def _send(self, answer: frames.Answer) -> None:
        if self._transport is None or self._is_closing:
            return
        frame = frames.encode_frame(answer)
        if len(frame) > frames.HEADER_BYTES + frames.FRAME_BYTES_MAX:
            error = Internal(f"answer of {len(frame)} bytes: at most {frames.FRAME_BYTES_MAX} are allowed")
            frame = frames.encode_frame(self._caller.refusal(error))
        self._transport.write(frame)

    def _hang_up(self, refusal: ConnectionRefused) -> None:
        """Say why, give everything back, and close once that was read (or the sweep loses patience)."""
        self._send(self._caller.refusal(refusal))
        self._is_closing = True
        self._end()
        self._stalled_since = self._loop.time()
        if self._transport is not None:
            self._transport.close()

    def _end(self) -> None:
        self._inbox.clear()
        self._next_bytes, self._is_collecting = 0, False
        self._shared.frame_memory.forget(self._look)
        self._give_back()
        self._caller.end()
