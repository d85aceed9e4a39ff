"""The I/O pool: a few threads that move bytes, so that the engine's thread never waits.

    engine thread ── submit(work, done) ──▶ urgent ▷ ordinary ──▶ threads (GIL free in I/O)
                  ◀── post(done(result)) ───────────────────────────┘

Loads go before stores: what an engine waits for is `urgent`, what we do on the side is
not. `work` runs in a thread and returns a value; `done` gets it back on the engine's
thread, through the `post` that the owner supplies (an event loop's call_soon_threadsafe).
Work that raises is answered with the value its submitter gave for that case: whoever
counts jobs and pins blocks must hear of the end of each.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kvstore.constants import IO_CLOSE_S, IO_ORDINARY_MAX, IO_URGENT_MAX

log = logging.getLogger("kvstore.io_pool")
T = TypeVar("T")


class Io(Protocol):
    """What the engine needs of `IoPool`; tests run work in place."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: T, urgent: bool = False
    ) -> None:
        """Run `work` elsewhere, and `done` with its result, or with `failed`, on the engine's thread."""

    def lengths(self) -> tuple[int, int]:
        """Jobs that wait for a thread: urgent ones, others."""


class IoPool:
    """`threads` workers over two queues, each with its limit: work beyond it is answered as failed."""

    def __init__(self, threads: int, post: Callable[[Callable[[], None]], object]) -> None:
        self._post = post
        self._urgent: deque[tuple[Callable[[], Any], Callable[[Any], None], Any]] = deque()
        self._ordinary: deque[tuple[Callable[[], Any], Callable[[Any], None], Any]] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self.refused = 0  # jobs beyond the limit of their queue
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-io-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: T, urgent: bool = False
    ) -> None:
        """Run `work` in a thread, then `done(result)` on the engine's thread; `done(failed)` if it raises."""
        queue, limit = (self._urgent, IO_URGENT_MAX) if urgent else (self._ordinary, IO_ORDINARY_MAX)
        with self._wake:
            if len(queue) < limit:
                queue.append((work, done, failed))
                self._wake.notify()
                return
            self.refused += 1
        self._post(lambda: done(failed))

    def lengths(self) -> tuple[int, int]:
        """Jobs that wait for a thread: urgent ones, others."""
        return len(self._urgent), len(self._ordinary)

    def close(self, within_s: float = IO_CLOSE_S) -> bool:
        """Finish what runs, forget what waits; False if something hangs, and still has memory in its hands.

        Waits `within_s` at most. Idempotent.
        """
        with self._wake:
            self._closed = True
            self._urgent.clear()
            self._ordinary.clear()
            self._wake.notify_all()
        give_up_s = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._urgent or self._ordinary or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                work, done, failed = (self._urgent or self._ordinary).popleft()
            try:
                result = work()
            except Exception:  # a bug, or a record its tier cannot hold: tiers answer, they do not raise
                log.exception("I/O work failed")
                result = failed
            try:
                self._post(lambda done=done, result=result: done(result))  # type: ignore[misc]
            except RuntimeError:  # the loop is closed: nobody waits for this any more
                return
