"""An event loop whose time jumps to the next timer: hours of waiting in milliseconds, and the same order each time.

There are no sockets and no threads: what goes to an executor runs at once. A loop in which nobody can ever go on
again is an error, not a hang; so is a callback that raises.

Simulations make hundreds of thousands of turns, so a turn is little more than the call: what asyncio's own loop checks
at each of them (is it closed, is it slow, is this the right thread) nobody here needs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")


class _Turn:
    """A callback that waits for its turn. As asyncio's handles: it can be cancelled. when: of a timer."""

    __slots__ = ("args", "callback", "context", "when_s")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None, when_s: float
    ) -> None:
        self.callback: Callable[..., object] | None = callback
        self.args = args
        self.context = context or copy_context()
        self.when_s = when_s

    def cancel(self) -> None:
        self.callback, self.args = None, ()

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.when_s


class VirtualLoop(asyncio.BaseEventLoop):
    """now_s: the time of this loop, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._stopping: bool
        self._turns: deque[_Turn] = deque()
        self._timers: list[tuple[float, int, _Turn]] = []
        self._timers_made = 0

    def time(self) -> float:
        return self.now_s

    def call_soon(  # type: ignore[override]  # a turn is enough of a handle
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Turn:
        turn = _Turn(callback, args, context, -1.0)
        self._turns.append(turn)
        return turn

    def call_soon_threadsafe(  # type: ignore[override]  # as above; there is one thread
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Turn:
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Turn:
        turn = _Turn(callback, args, context, when)
        if when > self.now_s:
            self._timers_made += 1
            heappush(self._timers, (when, self._timers_made, turn))
        else:
            self._turns.append(turn)
        return turn

    def call_later(  # type: ignore[override]  # as above
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Turn:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """All turns until somebody stops the loop; time passes only when nothing is left to do."""
        turns = self._turns
        while not self._stopping:
            if not turns:
                self._let_time_pass()
            turn = turns.popleft()
            if turn.callback is not None:
                turn.context.run(turn.callback, *turn.args)

    def _let_time_pass(self) -> None:
        """Until the next timer: whatever is due then gets its turn, in the order in which it was asked for."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heappop(timers)
        if not timers:
            raise RuntimeError("everybody waits, and nothing can happen any more")
        self.now_s = timers[0][0]
        while timers and timers[0][0] <= self.now_s:
            self._turns.append(heappop(timers)[2])

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # a future is enough
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 handed to whoever waits for it
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run this to its end under a clock of its own; what it leaves running is cancelled."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
