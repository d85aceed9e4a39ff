"""The publisher: one thread with the sockets, which never waits for a subscriber.

    engine's thread ── pass_on, a few times a second ─▶ inbox ─▶ stream ─▶ PUB
    ROUTER ─▶ requests ─▶ answers ─▶ ROUTER                   (an answer waits where its peer does)

A subscriber that does not read loses batches (its queue holds EVENTS_QUEUED_MAX) and sees a gap; a peer that
does not take its answer for EVENTS_STALLED_S loses the rest of it. While EVENTS_ANSWERS_MAX answers are under
way no further request is read. Nothing of that is noticed by the engine's thread, whose only work here is to
hand over the journal, and to read slices of what is held.

This is the only module of the daemon that imports ZeroMQ, and it is imported only where events are published.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvstore.constants import EVENTS_BEAT_S, EVENTS_SLICE_PAUSE_S, require
from kvstore.errors import StartError
from kvstore.events.answers import Answer, Ask, FullState, Replay, Slices
from kvstore.events.guests import GUESTS_LOOK_S, Guests
from kvstore.events.journal import Journal, Taken
from kvstore.events.stream import Stream, Writer
from kvstore.events.wire import END, SEQUENCE_BYTES, Frames, HashForm
from kvstore.protocol import answers

EVENTS_QUEUED_MAX = 1000  # messages that wait for one subscriber that does not read
EVENTS_ANSWERS_MAX = 64  # under way; further requests are not read before there is room
EVENTS_STALLED_S = 10.0  # in which a peer takes nothing of its answer: the rest of it is dropped
EVENTS_TURN_MESSAGES = 64  # of an answer, before others get their turn
EVENTS_REQUEST_BYTES_MAX = 1024  # of a request, or of a subscription
EVENTS_CLOSE_S = 2.0  # at a stop, for what is not sent yet
require(EVENTS_SLICE_PAUSE_S < EVENTS_BEAT_S < EVENTS_STALLED_S, "a slow answer is not a stalled one")

log = logging.getLogger("kvstore.events")


@dataclass(slots=True, frozen=True)
class Settings:
    """Of the section [events]; `replay_endpoint`: "" for none. connects: to a router, else it binds."""

    endpoint: str
    connects: bool
    replay_endpoint: str
    topic: str
    hash_form: HashForm
    replay_bytes: int


class Publisher:
    """Publishes what is in a journal, from `open` to `close`."""

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        slices: Callable[[], Slices],
        wall_clock: Callable[[], float],
    ) -> None:
        """`slices` begins to read what is held, on the engine's thread."""
        self.failure = ""
        self._settings = settings
        self._journal = journal
        self._slices = slices
        self._ask_engine: Ask
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER) if settings.replay_endpoint else None
        self._guests: list[Guests] = []
        writer = Writer(settings.hash_form, wall_clock)
        self._stream = Stream(
            writer, settings.topic, settings.replay_bytes, int(wall_clock() * 1e6), self._send
        )
        self._inbox: deque[Taken] = deque()
        self._handed = self._done = 0
        self._answers: deque[Answer] = deque()
        self._replays = self._full_states = self._answers_lost = 0
        self._stopping = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)

    # -- the engine's thread --

    def open(self, ask: Ask) -> None:
        """Begin. ask: runs something on the engine's thread. Raises StartError when an endpoint cannot be had."""
        self._ask_engine = ask
        self._pub.set_hwm(EVENTS_QUEUED_MAX)
        try:
            self._place(self._pub, "endpoint", self._settings.endpoint, self._settings.connects)
            if self._router is not None:
                self._router.set_hwm(EVENTS_QUEUED_MAX)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a loss
                self._place(self._router, "replay_endpoint", self._settings.replay_endpoint, False)
        except StartError:
            self._end()
            raise
        self._thread.start()

    def _place(self, socket: zmq.Socket[bytes], key: str, endpoint: str, connects: bool) -> None:
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.MAXMSGSIZE, EVENTS_REQUEST_BYTES_MAX)
        try:
            if connects:
                socket.connect(endpoint)
                return
            if endpoint.startswith("ipc://") and not _may_replace(endpoint.removeprefix("ipc://")):
                raise StartError(
                    f"events.{key} {endpoint}: something else lies there; remove it, or take another path"
                )
            if endpoint.startswith("tcp://"):
                self._guests.append(Guests(socket))
            socket.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            raise StartError(f"events.{key} {endpoint}: cannot be had: {error.strerror}") from error

    def pass_on(self) -> None:
        """Hand over what happened, if what was handed over before is published. After a failure nobody wants it."""
        if self.failure:
            self._journal.take()
        elif self._handed == self._done and (taken := self._journal.take()) is not None:
            self._handed += 1
            self._inbox.append(taken)
            self._wake()

    def close(self) -> None:
        """Publish what is left, and let go of the endpoints, within EVENTS_CLOSE_S."""
        if self._thread.ident is None:
            return
        if (taken := self._journal.take()) is not None:
            self._inbox.append(taken)
        self._stopping = True
        self._wake()
        self._thread.join(EVENTS_CLOSE_S)

    def status(self) -> answers.Events:
        """Documented in docs/cli.md."""
        stream = self._stream
        return {
            "endpoint": self._settings.endpoint,
            "problem": self.failure,
            "next_sequence": stream.next,
            "batches": stream.batches,
            "stored_blocks": stream.stored,
            "removed_blocks": stream.removed,
            "waiting_blocks": self._journal.waiting,
            "lost_blocks": self._journal.lost,
            "gaps": stream.gaps,
            "kept_bytes": stream.kept_bytes,
            "replays": self._replays,
            "full_states": self._full_states,
            "answers_lost": self._answers_lost,
        }

    # -- its own thread --

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # routers know less without us, and engines must not notice
            log.exception("KV events are no longer published")
            self.failure = f"{type(error).__name__}: {error}"
        self._end()

    def _serve(self) -> None:
        beat_s = 0.0
        while not self._stopping or self._inbox:
            before = self._stream.next
            while self._inbox:
                self._stream.publish(self._inbox.popleft())
                self._done += 1
            now_s = time.monotonic()
            if self._stream.next != before:
                beat_s = now_s + EVENTS_BEAT_S
            elif now_s >= beat_s:
                self._stream.beat()
                beat_s = now_s + EVENTS_BEAT_S
            goes_on = self._answer(now_s)
            rest_s = EVENTS_SLICE_PAUSE_S if self._answers else beat_s - now_s
            if [guests for guests in self._guests if guests.look()]:
                rest_s = min(rest_s, GUESTS_LOOK_S)
            self._wait(0.0 if goes_on else rest_s)

    def _wait(self, timeout_s: float) -> None:
        """Until something is to be done; read what was asked."""
        poller = zmq.Poller()
        for one in (self._wakeup, *(guests.news for guests in self._guests)):
            poller.register(one, zmq.POLLIN)
        if self._router is not None and len(self._answers) < EVENTS_ANSWERS_MAX:
            poller.register(self._router, zmq.POLLIN)
        found = dict(poller.poll(max(0, round(timeout_s * 1000))))
        if self._wakeup in found:
            os.eventfd_read(self._wakeup)
        if self._router is not None and self._router in found:
            self._begin(self._router.recv_multipart())

    def _begin(self, request: list[bytes]) -> None:
        if len(request) != 3 or request[1] or len(request[2]) != SEQUENCE_BYTES:
            return  # of no protocol that we know
        peer, _, first = request
        now_s = time.monotonic()
        if first == END:
            self._full_states += 1
            state = FullState(peer, now_s, self._stream, self._slices, self._ask, self._wake)
            self._answers.append(state)
        else:
            self._replays += 1
            self._answers.append(Replay(peer, now_s, self._stream, int.from_bytes(first, "big")))

    def _answer(self, now_s: float) -> bool:
        """Send what the peers take; whether there is more that they might. One at a time reads what is held."""
        goes_on, is_reading = False, False
        for answer in list(self._answers):
            if isinstance(answer, FullState):
                if is_reading:
                    answer.moved_s = now_s  # it waits for us
                    continue
                is_reading = True
            if self._advance(answer, now_s):
                goes_on = True
            elif not answer.is_done and now_s - answer.moved_s > EVENTS_STALLED_S:
                answer.is_done = True
                self._answers_lost += 1
            if answer.is_done:
                self._answers.remove(answer)
        return goes_on

    def _advance(self, answer: Answer, now_s: float) -> bool:
        """Send some messages of an answer; whether it may go on at once."""
        assert self._router is not None, "there are no requests without it"
        for _ in range(EVENTS_TURN_MESSAGES):
            frames = answer.front(now_s)
            if frames is None:
                return False
            try:
                self._router.send_multipart([answer.peer, b"", *frames], zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError:  # it is gone
                answer.is_done = True
                self._answers_lost += 1
                return False
            answer.moved_s = now_s
            answer.sent()
            if answer.is_done:
                return False
        return True

    def _ask(self, work: Callable[[], None]) -> None:
        try:
            self._ask_engine(work)
        except RuntimeError:  # its loop is closed: so are we, soon
            log.debug("asked of an engine that has stopped")

    def _send(self, frames: Frames) -> None:
        self._pub.send_multipart(frames, zmq.NOBLOCK)  # a PUB socket drops where a subscriber's queue is full

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _end(self) -> None:
        for guests in self._guests:
            guests.close()
        self._pub.close(linger=round(EVENTS_CLOSE_S * 500))
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()


def _may_replace(path: str) -> bool:
    """Whether ZeroMQ, which removes whatever lies where it binds, removes no more than a socket. Raises OSError."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
