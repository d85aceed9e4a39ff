"""A subscriber: follows one daemon's KV events, and always knows whether it knows all.

    subscriber = Subscriber("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    while True:
        if subscriber.step(timeout_s=0.1):
            in_dram = subscriber.held.get(("dram", namespace_digest), set())

For routers and tools: it needs msgspec and pyzmq, and nothing of a running daemon. One thread uses it, which
calls `step` again and again: nothing happens in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from examples.kv_events.mirror import Held, Mirror, Wants
from kvstore.constants import EVENTS_BEAT_S

ANSWER_TIMEOUT_S = 5.0  # without a message: it is asked again
RETRY_S = 0.5  # between two asks that brought nothing
SILENT_BEATS = 3.0
STEP_MESSAGES = 1000  # of each socket, taken in one step
RECEIVE_QUEUE_MESSAGES = 10_000
HANDSHAKE_MS = 5000  # with the peer that accepts a connection
ALIVE_IDLE_S, ALIVE_PROBES = 5, 3  # of TCP: a host that is gone without a word is connected to anew


class Subscriber:
    """Follows one daemon. Its endpoints are those of the section [events] of its configuration."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        topic: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises zmq.ZMQError for an endpoint that is none; one where nobody answers is tried again for ever."""
        self.mirror = Mirror()
        self.replays = self.full_states = 0  # asked for
        self._replay_endpoint = replay_endpoint
        self._clock = clock
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.IPV6, 1)
        self._sub.set_hwm(RECEIVE_QUEUE_MESSAGES)
        self._sub.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._sub.setsockopt(zmq.TCP_KEEPALIVE, 1)  # ZeroMQ's own heartbeats abort processes with full queues
        self._sub.setsockopt(zmq.TCP_KEEPALIVE_IDLE, ALIVE_IDLE_S)
        self._sub.setsockopt(zmq.TCP_KEEPALIVE_INTVL, ALIVE_IDLE_S)
        self._sub.setsockopt(zmq.TCP_KEEPALIVE_CNT, ALIVE_PROBES)
        self._dealer: zmq.Socket[bytes] | None = None
        self._give_up_s = self._ask_s = 0.0
        self._asked_from: int | None = None
        self._heard_s: float | None = None
        try:
            self._sub.connect(endpoint)
            self._sub.subscribe(topic)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def held(self) -> Held:
        """What the daemon holds, by (tier, namespace digest); to be believed while `is_whole`."""
        return self.mirror.held

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing, and the daemon was heard of lately."""
        heard_s = self._heard_s
        is_silent = heard_s is None or self._clock() - heard_s > SILENT_BEATS * EVENTS_BEAT_S
        return self.mirror.wants is Wants.NOTHING and not is_silent

    def step(self, timeout_s: float = 0.1) -> bool:
        """Take what has come, or what comes within this time; ask for what is missing. Returns `is_whole`.
        Raises ValueError when the endpoint is not that of a kvstore daemon."""
        self._ask()
        poller = zmq.Poller()
        poller.register(self._sub, zmq.POLLIN)
        if self._dealer is not None:
            poller.register(self._dealer, zmq.POLLIN)
        poller.poll(round(timeout_s * 1000))
        self._read_live()
        self._read_answer()
        self._ask()
        return self.is_whole

    def close(self) -> None:
        """Idempotent."""
        self._drop_answer()
        self._sub.close(linger=0)
        self._context.term()

    def _read_live(self) -> None:
        for _ in range(STEP_MESSAGES):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3:
                raise ValueError(f"a message of {len(frames)} frames: KV events have 3")
            self._heard_s = self._clock()
            self.mirror.live(int.from_bytes(frames[1], "big"), frames[2])

    def _read_answer(self) -> None:
        for _ in range(STEP_MESSAGES):
            if self._dealer is None:
                return
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 4:
                raise ValueError(f"an answer of {len(frames)} frames: replays of KV events have 4")
            self._heard_s = self._clock()
            self._give_up_s = self._heard_s + ANSWER_TIMEOUT_S
            wanted = self.mirror.wants
            is_last = self.mirror.answer(frames[2], frames[3])
            if is_last and self.mirror.next == self._asked_from and self.mirror.wants is wanted:
                self._ask_s = self._clock() + RETRY_S  # it brought nothing
            if is_last or self.mirror.wants is not wanted:
                self._drop_answer()

    def _ask(self) -> None:
        """One answer at a time, each on a socket of its own: nothing of an earlier one comes in between."""
        now_s = self._clock()
        if self._dealer is not None and now_s > self._give_up_s:
            self._drop_answer()
        if self.mirror.wants is Wants.NOTHING or self._dealer is not None or now_s < self._ask_s:
            return
        request, self._asked_from = self.mirror.request(), self.mirror.next
        if self._asked_from is None:
            self.full_states += 1
        else:
            self.replays += 1
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.IPV6, 1)
        self._dealer.connect(self._replay_endpoint)
        self._dealer.send_multipart([b"", request], zmq.NOBLOCK)
        self._give_up_s = now_s + ANSWER_TIMEOUT_S

    def _drop_answer(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
