"""Waits that make no tasks: loops wake thousands of times an hour. And how long something took, a machine's sleep included."""

from __future__ import annotations

import asyncio
import time


async def within(limit_s: float | None, event: asyncio.Event) -> None:
    """Wait for something, so long at most; None: for ever."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        pass


def passed_s(loop: asyncio.AbstractEventLoop | None = None) -> float:
    """The loop's time, which goes on while the machine sleeps, too. loop: the running one if none is given."""
    asleep_s = round(boot_s() - time.clock_gettime(time.CLOCK_MONOTONIC))  # the two are not read at once
    return (loop or asyncio.get_running_loop()).time() + asleep_s


def boot_s() -> float:
    """Seconds that go on while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
