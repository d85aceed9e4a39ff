"""Several things at once, none of which goes on alone: where one fails the others are cancelled, and it is raised."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")
X = TypeVar("X")


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """Their results, in order. Of several failures the first one is raised. One alone makes no task."""
    waiting = list(work)
    if len(waiting) == 1:
        return [await waiting[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(_awaited(one)) for one in waiting]
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None
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
    try:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(work)
            try:
                yield
            finally:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise first_failure(failures) from None


def first_failure(failures: BaseExceptionGroup) -> BaseException:
    """The first one of a group, and of its groups."""
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


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
