"""Several things at once: in the items' order, so many at a time, and no thread that outlives who waits for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tiers.together import each, in_thread


def test_each_item_is_worked_on_once_so_many_at_a_time() -> None:
    """Results come in the items' order; the first failure ends the others."""
    under_way, most = 0, 0

    async def double(item: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(10 - item):  # later ones are done earlier
            await asyncio.sleep(0)
        under_way -= 1
        if item == 7:
            raise ValueError("seven")
        return 2 * item

    async def main() -> None:
        assert await each(double, range(7), 3) == [0, 2, 4, 6, 8, 10, 12] and most == 3
        assert await each(double, range(3), 1) == [0, 2, 4]
        assert await each(double, (), 3) == []
        with pytest.raises(ValueError, match="seven"):
            await each(double, range(100), 3)

    asyncio.run(main())


def test_what_runs_in_a_thread_has_ended_when_who_waits_goes_on() -> None:
    """Also where that is cancelled: memory that the thread uses may be given back."""
    begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def work(name: str) -> str:
        begun.set()
        may_end.wait(60)
        has_ended.set()
        return name

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(in_thread(work, "a"))
            await asyncio.to_thread(begun.wait, 60)
            waiting.cancel()
            asyncio.get_running_loop().call_soon(may_end.set)
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert has_ended.is_set()
        assert await in_thread(work, "b") == "b"

    asyncio.run(main())
