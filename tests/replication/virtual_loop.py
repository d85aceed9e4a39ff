"""An event loop whose time jumps to the next timer: hours of waiting in milliseconds, and the same order each time.

There are no sockets and no threads: what goes to an executor runs at once. A loop in which nobody can ever go on
again is an error, not a hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector:
    """Stands where a loop waits for sockets: it lets time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing can happen any more")
        self._loop.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """now_s: the time of this loop, from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._clock_resolution = 1e-9
        self._selector = _Selector(self)

    def time(self) -> float:
        return self.now_s

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
