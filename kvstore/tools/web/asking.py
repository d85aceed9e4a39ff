"""Asking the daemon how it is: one connection, one question at a time, answers shared.

    ten scrapers, a page, a probe ──▶ Asking ──▶ one Live in half a second ──▶ daemon
                                         │
                                         ╰─▶ the same answer for all who ask meanwhile

A daemon that does not answer in time, or is not there, is an answer too: without a report, with a reason.
The next question connects anew. Nothing here raises.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvstore.client.connection import Connection
from kvstore.constants import WEB_SAMPLE_S, require
from kvstore.errors import KvstoreError, Refused, Unavailable
from kvstore.protocol import answers, frames

WEB_ANSWER_S = 2.0  # a daemon that takes longer for a Live answer is not well
WEB_SHARED_S = 0.5  # an answer this old is good for others who ask
require(WEB_SHARED_S < WEB_SAMPLE_S and WEB_ANSWER_S < WEB_SAMPLE_S, "each sample has an answer of its own")


@dataclass(frozen=True, slots=True)
class Answer:
    """report: of frames.Live, None where the daemon did not answer; problem: why. at_s: monotonic."""

    report: answers.Live | None
    problem: str
    at_s: float
    took_s: float


class Asking:
    """Of one daemon. For one event loop; the socket is used in a thread."""

    def __init__(self, socket_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._path = str(socket_path)
        self._connection: Connection | None = None
        self._thread = ThreadPoolExecutor(1, "kvstore-web-asking")
        self._newest: Answer | None = None
        self._underway: asyncio.Task[Answer] | None = None

    async def newest(self) -> Answer:
        """An answer that is not older than WEB_SHARED_S, without minutes."""
        if self._newest is not None and self.clock() - self._newest.at_s < WEB_SHARED_S:
            return self._newest
        if self._underway is None or self._underway.done():
            self._underway = asyncio.get_running_loop().create_task(self.since(frames.NO_MINUTES))
        return await asyncio.shield(self._underway)  # who asked first may go away

    async def since(self, minutes_since_s: float) -> Answer:
        """A new answer, with the minutes from then on."""
        loop = asyncio.get_running_loop()
        self._newest = await loop.run_in_executor(self._thread, self._ask, minutes_since_s)
        return self._newest

    def close(self) -> None:
        """Waits for an answer that is under way."""
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()

    # -- in the thread --

    def _ask(self, minutes_since_s: float) -> Answer:
        begun_s = self.clock()
        report, problem = None, ""
        try:
            report = self._asked(minutes_since_s)
        except KvstoreError as error:
            problem = str(error)
        now_s = self.clock()
        return Answer(report, problem, now_s, now_s - begun_s)

    def _asked(self, minutes_since_s: float) -> answers.Live:
        """Raises KvstoreError."""
        deadline = time.monotonic() + WEB_ANSWER_S
        request = frames.Live(minutes_since_s)
        if self._connection is not None and not self._connection.lost:
            try:
                return _report(self._connection.exchange(request, deadline))
            except Unavailable:  # of a daemon that was started anew since, maybe
                if time.monotonic() >= deadline:
                    raise
        self._connection = Connection(self._path, "kvstore web", False, False, deadline)
        return _report(self._connection.exchange(request, deadline))


def _report(answer: frames.Answer) -> answers.Live:
    if not isinstance(answer, frames.StatusReport):
        raise Refused("internal", f"the daemon answers {type(answer).__name__}")
    return cast(answers.Live, answer.report)
