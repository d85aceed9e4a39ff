"""Waits that make no tasks: loops wake thousands of times an hour."""

from __future__ import annotations

import asyncio


async def within(limit_s: float | None, event: asyncio.Event) -> None:
    """Wait for something, so long at most; None: for ever."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass
