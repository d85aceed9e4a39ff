"""Waits that make no tasks: loops wake thousands of times an hour, and most of what is asked for together is one thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def within(limit_s: float | None, event: asyncio.Event) -> None:
    """Wait for something, so long at most; None: for ever."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    """What `asyncio.gather` returns. If one raises, the others go on."""
    waiting = list(work)
    return [await waiting[0]] if len(waiting) == 1 else await asyncio.gather(*waiting)
