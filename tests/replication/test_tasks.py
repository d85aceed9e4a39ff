"""What goes on by itself in a region: whatever ends one part of it costs no other part, is told, and is begun again."""

from __future__ import annotations

import asyncio

import pytest

from replication.formats.mirror_state import read_mirrors
from replication.mirror.copying import Copying
from replication.mirror.jobs import Job
from replication.mirror.pull import Pull
from replication.problems import Problems
from replication.tasks import Tasks, kept_going
from tests.replication.mirrored import SOON_S, World, in_memory, pack, simulate
from tests.replication.virtual_loop import run
from tiers.together import together

catalogues_in_memory = in_memory  # a fixture of every test here, too


class Panic(BaseException):
    """As libraries of Rust raise them: no `Exception`."""


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), MemoryError(), Panic("a panic")], ids=repr)
def test_a_bug_costs_its_pack_only(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody expects to fail, a panic of a library too, is told in the mirror's state; other packs are copied."""
    inner = Copying._bring

    async def broken(self: Copying, job: Job) -> None:
        if job.pack_id == pack("bad")[0].pack.id:
            self._copied.clear()
            raise error
        await inner(self, job)

    monkeypatch.setattr(Copying, "_bring", broken)

    async def main(world: World) -> None:
        await world.na.make(pack("bad"))
        await world.mirror()
        await world.na.make(pack("good"))
        await asyncio.sleep(SOON_S)
        [state] = await read_mirrors(world.eu.objects)
        assert (state.failed, state.problem) == (1, "")
        assert type(error).__name__ in state.failures[0].reason
        assert world.eu.has(pack("good")) and not world.eu.has(pack("bad"))

    simulate(main)


@pytest.mark.parametrize("error", [OverflowError("a number"), Panic("a panic")], ids=repr)
@pytest.mark.parametrize("part", ["run", "_sweep_now_and_then", "_take_orders"])
def test_a_part_that_ends_is_begun_again(
    part: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part of a mirror ends for whatever reason, it is begun again, and all is copied."""
    inner, left = getattr(Pull, part), [2]

    async def broken(self: Pull) -> None:
        if left[0]:
            left[0] -= 1
            raise error
        await inner(self)

    monkeypatch.setattr(Pull, part, broken)

    async def main(world: World) -> None:
        await world.na.make(pack("a"))
        await world.mirror()
        await asyncio.sleep(60 + SOON_S)
        assert left == [0] and world.eu.has(pack("a"))
        assert not (await read_mirrors(world.eu.objects))[0].problem

    simulate(main)


@pytest.mark.parametrize(
    "error", [ValueError("a bug"), Panic("a panic"), asyncio.CancelledError("stray")], ids=repr
)
def test_what_ends_is_begun_again(error: BaseException) -> None:
    """Work that ends, or raises whatever it may, is a problem until it has gone on for a while; its sibling never notices."""

    async def main() -> None:
        problems, begun, ticks = Problems("here"), list[float](), list[float]()
        loop = asyncio.get_running_loop()

        async def fails() -> None:
            begun.append(loop.time())
            await asyncio.sleep(1.0)
            if len(begun) < 4:
                raise error
            await asyncio.sleep(10_000)

        async def sibling() -> None:
            while True:
                ticks.append(loop.time())
                await asyncio.sleep(1.0)

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(kept_going(work.__name__, work, problems)) for work in (fails, sibling)
            ]
            await asyncio.sleep(8.5)
            assert len(begun) == 3 and type(error).__name__ in problems.told()[0]
            await asyncio.sleep(200.0)
            assert len(begun) == 4 and not problems and len(ticks) == 209
            for task in tasks:
                task.cancel()

    run(main())


def test_none_goes_on_alone() -> None:
    """Where one of several fails, the others are cancelled, and the failure itself is raised; so is what an owner began, when it
    closes."""

    async def main() -> None:
        ended: list[str] = []

        async def goes_on() -> None:
            try:
                await asyncio.sleep(10_000)
            finally:
                ended.append("others")

        async def fails() -> None:
            await asyncio.sleep(1.0)
            raise Panic("a panic")

        with pytest.raises(Panic):
            await together([goes_on(), fails(), goes_on()])
        assert ended == ["others"] * 2
        problems = Problems("here")
        tasks = Tasks(problems)
        tasks.begin("going on", goes_on())
        tasks.begin("failing", fails())
        await asyncio.sleep(2.0)
        assert problems.told() == ["failing: Panic: a panic"] and len(tasks.all) == 1
        await tasks.close()
        assert ended == ["others"] * 3 and not tasks.all

    run(main())
