"""Several things at once, none of which goes on alone: where one fails the others are cancelled, and it is raised.

A cancellation is never lost: one that comes from outside while the others end, after a failure, is raised in the failure's place.
`asyncio.TaskGroup` raises the failure then (Python 3.11, 3.12), and a loop that takes failures in its stride goes on for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
X = TypeVar("X")


class Group:
    """Tasks that end before the block does. Where one of them fails, or the block, all are cancelled, and the first failure is
    raised, itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._is_open = False  # the block goes on
        self._is_over = False  # the tasks were cancelled
        self._has_cancelled = False  # the block was, by us

    async def __aenter__(self) -> Self:
        block = asyncio.current_task()
        assert block is not None, "only a task can be cancelled"
        self._block, self._cancellations = block, block.cancelling()
        self._is_open = True
        return self

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._is_over:
            task.cancel()
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error
            self.cancel()
            if self._is_open and not self._has_cancelled:
                self._has_cancelled = True
                self._block.cancel()

    def cancel(self) -> None:
        """All tasks, once: again would cut short what they do before they end."""
        if not self._is_over:
            self._is_over = True
            for task in self._tasks:
                task.cancel()

    async def __aexit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._is_open = False
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        if error is not None:
            self._failure = self._failure or (error if cancelled is None else None)
            self.cancel()
        if self._has_cancelled:
            cancelled = await self._by_another(cancelled)
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as again:
                cancelled = again
                self.cancel()
        if cancelled is not None:
            raise cancelled
        if self._failure is not None:
            raise self._failure

    async def _by_another(self, heard: asyncio.CancelledError | None) -> asyncio.CancelledError | None:
        """The block's cancellation, unless it is only ours."""
        self._block.uncancel()
        if heard is None:  # it waited for nothing since, or took it for something else
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        is_ours = self._block.cancelling() <= self._cancellations
        return None if is_ours else heard or asyncio.CancelledError()


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, in order. Of several failures the first one is raised. One alone makes no task."""
    waiting = list(work)
    if len(waiting) == 1:
        return [await waiting[0]]
    async with Group() as group:
        begun = [group.begin(_awaited(one)) for one in waiting]
    return [task.result() for task in begun]


async def each(work: Callable[[X], Awaitable[T]], items: Iterable[X], at_once: int) -> list[T]:
    """What it returns of each item, in order; at most so many at a time. Of several failures the first one is raised."""
    found: dict[int, T] = {}
    waiting = enumerate(items)

    async def stream() -> None:
        for number, item in waiting:
            found[number] = await work(item)

    await together(stream() for _ in range(at_once))
    return [found[number] for number in sorted(found)]


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """This goes on while the block does, and has ended when the block has. A failure of either ends both, and is raised."""
    async with Group() as group:
        group.begin(work)
        yield
        group.cancel()


async def ended(work: asyncio.Future[Any]) -> None:
    """Returns when it has ended, even if who waits is cancelled: a thread uses what is the caller's until then."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            pass  # cancelled again: it ends in milliseconds


async def in_full(work: asyncio.Future[T]) -> T:
    """Its result. Where who waits is cancelled it has ended all the same: a thread does not stop half-way."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await ended(work)
        raise


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """What it returns, in a thread; as `in_full`."""
    return await in_full(asyncio.get_running_loop().run_in_executor(None, lambda: work(*arguments)))


async def _awaited(one: Awaitable[T]) -> T:
    return await one
