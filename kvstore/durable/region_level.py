"""A region's bucket as a level: what the engine asks of it, whether it is our own region or another one.

    held ──▶ catalogue's filter, in memory                             engine's thread
    fetch, probe ──▶ loop thread ──▶ `RegionReader` ──▶ bucket         one request, one answer
                          ▲
    joining: marker, catalogue, feed, tried again until it works; until then nothing is held

Nothing of the bucket, the catalogue's disk included, is touched on the engine's thread. A bucket that is away costs
lookups nothing: without it nothing is held.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvstore.constants import JOIN_PAUSE_S, TICK_INTERVAL_S
from kvstore.durable.loop_thread import LoopThread
from kvstore.index.block import Namespace
from kvstore.movement.shared import Chained, Done, Fetched, SharedLevel, SharedLimits, Wanted
from kvstore.steps import Steps, finish
from replication.constants import PROBLEMS_TOLD
from replication.errors import RegionError, ReplicationError
from replication.problems import Problem, Problems
from replication.region.region_reader import RegionReader
from replication.tasks import kept_going
from tiers.base import Get
from tiers.errors import ObjectRefused, TierError
from tiers.together import together

REGION_CLOSE_S = 2.0  # at a stop, for requests under way
NOT_JOINED = "not_joined"
NOT_JOINED_FIX = "credentials? network? its mount? kvstore region ls tries the same from a shell; it is tried again, and DRAM and NVMe serve"

log = logging.getLogger("kvstore.durable.region_level")

Reader = TypeVar("Reader", bound=RegionReader)
T = TypeVar("T")


class RegionLevel(SharedLevel, Generic[Reader]):
    """One region's bucket. Called from the engine's thread."""

    def __init__(
        self,
        name: str,
        reply: Callable[[Callable[[], None]], object],
        limits: SharedLimits,
        region: str = "",
        is_far: bool = False,
    ) -> None:
        """reply: runs a call on the engine's thread. region: which one, for people."""
        self.name = name
        self._region = region or name
        self.limits = limits
        self.is_far = is_far
        self.problems = Problems()  # with its bucket, and with what goes on beside it
        self.problem = ""  # why it is not open, for people
        self.refusal = ""  # … where waiting is no use: settings and bucket do not fit
        self.tried = threading.Event()  # the first try to join ended
        self._reply = reply
        self.clock: Callable[[], float] = time.time  # of the store, since it was joined; unix seconds
        self._reader: Reader | None = None
        self._status: dict[str, object] = {}
        self._wrong: list[Problem] = []  # as its reader said last
        self._thread = LoopThread(f"kvstore-{name}", reply)

    def start(
        self,
        join: Callable[[], Awaitable[Reader]],
        beside: Callable[[Reader], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Be a part of the region from now on, until this is closed. join: makes what reads it, on the loop of this level's
        thread. beside: what else goes on while it is joined."""
        self._thread.keep(f"region {self._region}", lambda: self._live(join, beside), self.problems)

    async def _live(
        self,
        join: Callable[[], Awaitable[Reader]],
        beside: Callable[[Reader], Coroutine[Any, Any, None]] | None,
    ) -> None:
        """Until it is cancelled, or something fails: then nothing of it goes on, and it is begun again."""
        reader = await self._joined(join)
        try:
            self._status = reader.status()
            self._reader, self.clock = reader, reader.clock
            work = [reader.run(), self._keep_status(reader)]
            if beside is not None:
                work.append(kept_going(f"{self.name}: warming", lambda: beside(reader), self.problems))
            await together(work)
        finally:
            self._reader = None
            self._wrong = []
            await reader.stop()
            reader.close()

    async def _joined(self, join: Callable[[], Awaitable[Reader]]) -> Reader:
        while True:
            try:
                reader = await join()
            except (RegionError, ObjectRefused) as error:
                self._failed(str(error), refusal=str(error))
            except (TierError, ReplicationError) as error:
                self._failed(str(error))
            else:
                self.problem = self.refusal = ""
                self.problems.over(self._region, NOT_JOINED)
                log.info("joined the region", extra={"bucket": reader.where, "region": reader.region})
                return reader
            finally:
                self.tried.set()
            await asyncio.sleep(JOIN_PAUSE_S)

    async def _keep_status(self, reader: Reader) -> None:
        while True:
            self._status, self._wrong = reader.status(), reader.wrong()
            await asyncio.sleep(TICK_INTERVAL_S)

    def _failed(self, problem: str, refusal: str = "") -> None:
        self.problem, self.refusal = problem, refusal
        self.problems.note(self._region, problem, NOT_JOINED, NOT_JOINED_FIX)

    def now_s(self) -> float:
        return self.clock()

    @property
    def is_open(self) -> bool:
        """Whether the region is joined."""
        return self._reader is not None

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        return finish(self.held_steps(namespace, hashes, start))

    def held_steps(self, namespace: Namespace, hashes: bytes, start: int) -> Steps[int]:
        reader = self._reader
        return start if reader is None else (yield from reader.held_steps(namespace.spec, hashes, start))

    def chains(self, namespaces: Sequence[bytes], block_hash: bytes, most: int, done: Chained) -> None:
        none: Mapping[bytes, Sequence[bytes]] = {}
        self._ask(lambda reader: reader.chains(namespaces, block_hash, most), done, none)

    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        failed: list[Fetched] = [(Get.FAILED, None)] * len(wanted)
        self._ask(lambda reader: reader.fetch(wanted), done, failed)

    def probe(self, done: Callable[[bool], None]) -> None:
        self._ask(lambda reader: reader.probe(), done, False)

    def _ask(self, work: Callable[[Reader], Awaitable[T]], done: Callable[[T], None], failed: T) -> None:
        """Run `work` on this level's thread, then `done` on the engine's: with `failed` if it fails, or nothing is joined."""
        reader = self._reader
        if reader is None:  # it was left meanwhile
            self._reply(lambda: done(failed))
        else:
            self._thread.post(lambda: work(reader), done, failed)

    def status(self) -> dict[str, object]:
        """Not older than a second; the fields are documented in docs/cli.md."""
        problem = self.problem or "; ".join(
            f"{one.subject}: {one.text}" for one in self.wrong()[:PROBLEMS_TOLD]
        )
        return {"open": self.is_open, "problem": problem, **self._status}

    def wrong(self) -> list[Problem]:
        """What is wrong with it now, whether it is joined or not."""
        return [*self.problems.all(), *self._wrong]

    def close(self) -> bool:
        """Let go of the bucket; False if something hangs."""
        return self._thread.close(REGION_CLOSE_S)
