"""An event loop in a thread of its own, for what talks to buckets: the engine's thread never waits for it.

    engine's thread ── post(work, done, failed) ──▶ coroutine on this loop
                    ◀── reply(done(result)) ────────┘

Work that raises is answered with `failed`: whoever counts requests must hear of the end of each.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from replication.problems import Problems
from replication.tasks import kept_going

log = logging.getLogger("kvstore.durable.loop_thread")
T = TypeVar("T")


class LoopThread:
    """`reply` runs a call on the engine's thread: an event loop's call_soon_threadsafe."""

    def __init__(self, name: str, reply: Callable[[Callable[[], None]], object]) -> None:
        self._reply = reply
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], Awaitable[T]], done: Callable[[T], None], failed: T) -> None:
        """Run `work` here, then `done` with its result, or with `failed`, on the engine's thread."""

        def ended(task: asyncio.Task[T]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:  # a bug of ours: what is expected to fail says so in its result
                log.error("work on a bucket failed", exc_info=error)
            result = failed if task.cancelled() or error is not None else task.result()
            self._tell(lambda: done(result))

        def begin() -> None:
            self._begin(_awaited(work)).add_done_callback(ended)

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:  # closed: nobody waits for this any more
            pass

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]], problems: Problems) -> None:
        """Run something that goes on until this closes: begun again if it ends, which is a problem."""
        self._loop.call_soon_threadsafe(lambda: self._begin(kept_going(name, work, problems)))

    def close(self, within_s: float) -> bool:
        """Cancel what runs; False if something hangs. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._reply(call)
        except RuntimeError:  # the engine's loop is closed
            pass

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            # What these began, too: a fetch may be writing into the arena, and ends only when it does not any more.
            while tasks := asyncio.all_tasks(self._loop):
                for task in tasks:
                    task.cancel()
                self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()
