"""Groups: whoever fails first, and whenever somebody cancels the whole, all have ended, in full, and a cancellation is heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replication.virtual_loop import run
from tiers.together import Group, meanwhile, together

HOWS = ("together", "group", "meanwhile")


@dataclass
class Part:
    """A task, or the block. It works so long, fails then or not, and takes a while to end where it is cancelled before."""

    name: int
    work_s: float
    fails: bool
    ending_s: float
    ended_s: float = -1.0

    async def live(self) -> None:
        time = asyncio.get_running_loop().time
        try:
            await asyncio.sleep(self.work_s)
            if self.fails:
                raise ValueError(self.name)
        except asyncio.CancelledError:
            await asyncio.sleep(self.ending_s)  # a second cancellation would end this
            raise
        finally:
            self.ended_s = time()


@st.composite
def parts(draw: st.DrawFn) -> list[Part]:
    """No two things happen at the same time."""
    count = draw(st.integers(2, 5))
    moments = draw(st.permutations([float(number) for number in range(1, count + 1)]))
    return [
        Part(name, at_s, draw(st.booleans()), draw(st.integers(0, 3)) + 0.25)
        for name, at_s in enumerate(moments)
    ]


def expected(how: str, given_parts: list[Part], cancel_s: float | None) -> tuple[str | int, float]:
    """What is raised, by name, and when it is over. The first part is the block's, where there is one."""
    failing = [part for part in given_parts if part.fails]
    if how == "meanwhile":  # the block's end ends the other
        failing = [part for part in failing if part.work_s <= given_parts[0].work_s]
    first = min(failing, key=lambda part: part.work_s, default=None)
    ends = [part.work_s for part in given_parts]
    turn_s = min(ends[0] if how == "meanwhile" else max(ends), first.work_s if first else max(ends))
    cut_s = turn_s if cancel_s is None else min(turn_s, cancel_s)
    over_s = max([cut_s, *(cut_s + part.ending_s for part in given_parts if part.work_s > cut_s)])
    if cancel_s is not None and cancel_s < max(turn_s, over_s):
        return "cancelled", over_s
    return (first.name if first else "done"), over_s


def whole(how: str, given_parts: list[Part]) -> Coroutine[Any, Any, object]:
    async def in_group() -> None:
        async with Group() as group:
            for part in given_parts[1:]:
                group.begin(part.live())
            await given_parts[0].live()

    async def beside() -> None:
        async with meanwhile(given_parts[1].live()):
            await given_parts[0].live()

    if how == "together":
        return together([part.live() for part in given_parts])
    return in_group() if how == "group" else beside()


@pytest.mark.parametrize("how", HOWS)
@given(given_parts=parts(), cancel_at=st.none() | st.integers(0, 8))
def test_all_end_and_a_cancellation_is_heard(
    how: str, given_parts: list[Part], cancel_at: int | None
) -> None:
    """The first failure is raised, itself, unless somebody cancels the whole before all have ended; none is cut short while it ends, and
    the task is as cancelled behind it as it was told to be."""
    given_parts = given_parts[:2] if how == "meanwhile" else given_parts
    given_parts[0].ending_s *= how == "together"  # a block's end comes before that of the tasks
    cancel_s = None if cancel_at is None else cancel_at + 0.5
    said, over_s = expected(how, given_parts, cancel_s)

    async def main() -> None:
        heard: list[object] = []
        loop = asyncio.get_running_loop()

        async def living() -> None:
            try:
                await whole(how, given_parts)
                heard.append("done")
            except asyncio.CancelledError:
                heard.append("cancelled")
            except ValueError as error:
                heard.append(error.args[0])
            task = asyncio.current_task()
            assert task is not None
            heard.extend([loop.time(), task.cancelling()])
            await asyncio.sleep(1.0)  # no cancellation is left over

        task = loop.create_task(living())
        if cancel_s is not None:
            loop.call_later(cancel_s, lambda: heard or task.cancel())
        await task
        assert heard == [said, over_s, int(said == "cancelled")]
        assert all(0 <= part.ended_s <= over_s for part in given_parts)

    run(main())


async def fails(after_s: float) -> None:
    await asyncio.sleep(after_s)
    raise ValueError("first")


async def takes_its_cancellation_for_its_own_end() -> None:
    async with Group() as group:
        group.begin(fails(1.0))
        try:
            await asyncio.sleep(10.0)
        except asyncio.CancelledError:
            return


async def ends_before_it_hears() -> None:
    async with Group() as group:
        failing = group.begin(fails(1.0))
        while not failing.done():
            await asyncio.sleep(0.125)


@pytest.mark.parametrize("block", [takes_its_cancellation_for_its_own_end, ends_before_it_hears])
def test_a_block_that_goes_its_own_way_hears_the_failure(
    block: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    """It was cancelled only because another one failed: nothing of that is left over."""

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(ValueError, match="first"):
            await block()
        assert not task.cancelling()
        await asyncio.sleep(1.0)

    run(main())


def test_a_task_that_comes_too_late_is_cancelled() -> None:
    """Nothing begins to go on in a group that ends."""
    begun: list[asyncio.Task[None]] = []

    async def adds(group: Group) -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            begun.append(group.begin(asyncio.sleep(10_000.0)))

    async def late() -> None:
        async with Group() as group:
            group.begin(adds(group))
            group.begin(fails(1.0))

    async def main() -> None:
        with pytest.raises(ValueError, match="first"):
            await late()
        assert begun[0].cancelled() and asyncio.get_running_loop().time() == 1.0

    run(main())
