"""Tasks that go on by themselves: whatever one of them raises is a problem that is told, and costs no other one.

    kept_going   work that should never end: begun again when it ends, after a pause that grows, until it is cancelled
    Tasks        work that is begun now and then: the end of each is looked at, and none outlives `close`

A library may raise what is no `Exception` (a panic of Rust): that ends a task like anything else. What asks a process or a task to
end does end it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from replication.constants import PROBLEM_LASTS_S
from replication.problems import Problems

TASK_PAUSE_S_MIN: Final = 1.0  # before a task that ended is begun again; doubles
TASK_PAUSE_S_MAX: Final = 300.0
TASK_SETTLED_S: Final = 60.0  # a task that goes on for so long is right again

log = logging.getLogger("replication.tasks")

TO_END = (KeyboardInterrupt, SystemExit, GeneratorExit)


def reason_of(error: BaseException) -> str:
    """For people: the log has the rest."""
    return f"{type(error).__name__}: {error}"


async def kept_going(
    name: str, work: Callable[[], Coroutine[Any, Any, None]], problems: Problems, may_end: bool = False
) -> None:
    """Until it is cancelled. Raises nothing. A problem is over when the work has gone on for TASK_SETTLED_S. may_end: it is done
    when it ends without a failure."""
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        begun_s, settled = loop.time(), loop.call_later(TASK_SETTLED_S, problems.over, name, "task")
        try:
            await work()
            if may_end:
                problems.over(name, "task")
                return
            reason = "it ended"
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            reason = reason_of(error)  # somebody inside was cancelled, and said so to the wrong one
        except TO_END:
            raise
        except BaseException as error:
            log.error("%s: %s failed", problems.where, name, exc_info=error)
            reason = reason_of(error)
        finally:
            settled.cancel()
        failures = failures + 1 if loop.time() - begun_s < TASK_SETTLED_S else 1
        problems.note(name, f"{reason}; begun again", "task", "the log has more; please report it")
        await asyncio.sleep(min(TASK_PAUSE_S_MIN * 2.0 ** min(failures - 1, 32), TASK_PAUSE_S_MAX))


class Tasks:
    """Those of one owner."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def all(self) -> list[asyncio.Task[None]]:
        """Those that have not ended."""
        return list(self._tasks)

    def begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s: %s failed", self._problems.where, task.get_name(), exc_info=error)
            self._problems.note(
                task.get_name(),
                reason_of(error),
                "task",
                "the log has more; please report it",
                lasts_s=PROBLEM_LASTS_S,
            )

    async def close(self) -> None:
        """Cancel what goes on, and wait for its end."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # what they call when they end


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
