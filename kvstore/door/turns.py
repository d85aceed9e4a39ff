"""Turns: decides whose work is next, so that a burst of one connection does not shut out the others.

    loop turn │ work work work … until TURN_S │ sockets are read │ work work …

Work is done in pieces of about a millisecond at most. Each connection has one piece in the
queue at a time, with a price: the microseconds that it is expected to take. Pieces are served
in the order in which they would end if all connections shared the processor equally (fair
queueing), so a ping overtakes a thousand expensive requests of others, and a thousand pings
of one connection wait for the one request of another.

Invariants: a loop turn takes no longer than TURN_S and one piece; a piece that is queued is
served after finitely many others, because every piece moves its owner further back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Protocol

from kvstore.constants import DOOR_PIECE_US, require

DOOR_TURN_S = 0.001  # of work between two looks at the sockets
require(DOOR_TURN_S + DOOR_PIECE_US / 1e6 < 0.005, "the loop is never held for longer than 5 ms")


class Worker(Protocol):
    """A connection, or anything else with work to do. `finish_us` belongs to `Turns`; 0 at the start."""

    finish_us: float

    def work(self) -> None:
        """Do one piece, about a millisecond at most. A worker that has more adds itself again."""


class Turns:
    """The queue of one event loop. call_soon: calls a function in the loop's next turn. clock: seconds, monotonic."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float]) -> None:
        self._call_soon = call_soon
        self.clock = clock
        self._queue: list[tuple[float, int, float, Worker]] = []  # finish, number, start, whose
        self._number = 0
        self._now_us = 0.0  # of the processor that all share equally: the latest start of a piece
        self._is_scheduled = False

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, worker: Worker, price_us: float) -> None:
        """Have `worker.work` called once. Not for one that is in the queue already."""
        start_us = max(self._now_us, worker.finish_us)
        worker.finish_us = start_us + price_us
        self._number += 1
        heappush(self._queue, (worker.finish_us, self._number, start_us, worker))
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        until_s = self.clock() + DOOR_TURN_S
        try:
            while self._queue:
                _, _, start_us, worker = heappop(self._queue)
                self._now_us = max(self._now_us, start_us)
                worker.work()
                if self.clock() >= until_s:
                    break
        finally:  # whatever one of them raises, the others are served
            if self._queue:
                self._schedule()

    def run(self, steps: Generator[None, None, None]) -> None:
        """Do work that belongs to no connection, a piece of it in each of its turns."""
        self.add(_Steps(self, steps), DOOR_PIECE_US)


class _Steps:
    """A generator as a worker."""

    def __init__(self, turns: Turns, steps: Generator[None, None, None]) -> None:
        self.finish_us = 0.0
        self._turns = turns
        self._steps = steps

    def work(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            return
        self._turns.add(self, DOOR_PIECE_US)
