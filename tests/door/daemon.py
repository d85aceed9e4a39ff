"""A small daemon for the tests of the door: the real engine and arena, no NVMe.

As a program (`python -m tests.door.daemon SOCKET ARENA CAPACITY_BYTES`) it is a process to
kill and to stop; it prints "ready" when it serves. As `Daemon` it runs in a thread of the
test, so that the test can look inside.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from kvstore.constants import DOOR_LEASE_SHARE_MAX
from kvstore.daemon.config.config import DOOR_LEASES_MAX, Config
from kvstore.daemon.config.config_sources import Loaded
from kvstore.daemon.config.settings import Settings
from kvstore.door.api import Api
from kvstore.door.holders import Limits
from kvstore.door.turns import Turns
from kvstore.door.unix import Door
from kvstore.engine.engine import Engine
from kvstore.engine.live import live_steps
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.residency.levels import Drive
from kvstore.steps import Steps
from tests.engine.fakes import FaultyDevice, SteppedIo
from tiers.dram.arena import Arena, open_arena

MIB = 1 << 20
T = TypeVar("T")


def make_engine(arena: Arena, nvme: FaultyDevice | None, io: SteppedIo) -> Engine:
    return Engine(arena, [Drive(nvme, io)] if nvme is not None else [], NamespaceRegistry(), io)


class Node:
    """It reports the engine's status with the door's counters, as the service does."""

    def __init__(self, engine: Engine) -> None:
        self.door: Door
        self.totals_steps = engine.report_steps
        self.settings = Settings(Loaded(Config(), {}, None))
        self._engine = engine

    def report(self) -> dict[str, Any]:
        return {**self._engine.status(), "door": self.door.counters}

    def live_steps(self, minutes_since_s: float) -> Steps[dict[str, Any]]:
        return live_steps(self._engine, minutes_since_s, time.time())


def make_door(
    engine: Engine, arena: Arena, socket_path: Path, leases_max: int = DOOR_LEASES_MAX, **limits: Any
) -> Door:
    loop, node = asyncio.get_running_loop(), Node(engine)
    turns = Turns(loop.call_soon, time.monotonic)
    engine.background.serve(turns.run)
    may = Limits.of(arena.capacity_bytes, leases_max, DOOR_LEASE_SHARE_MAX)
    node.door = Door(
        Api(engine, node, may, turns, loop.call_later), arena, socket_path, instance="test", **limits
    )
    return node.door


class Daemon:
    """A door served by an event loop in a thread; `call` runs something on that thread."""

    def __init__(
        self,
        socket_path: Path,
        arena_path: Path,
        capacity_bytes: int,
        nvme: FaultyDevice | None = None,
        **limits: Any,
    ) -> None:
        self.socket_path = socket_path
        self.io = SteppedIo()
        self.arena = open_arena(arena_path, capacity_bytes, slab_bytes=2 * MIB)
        self.engine = make_engine(self.arena, nvme, self.io)
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.door: Door

        async def open_door() -> None:
            self.door = make_door(self.engine, self.arena, socket_path, **limits)
            await self.door.start()

        try:
            asyncio.run_coroutine_threadsafe(open_door(), self.loop).result(5)
        except BaseException:
            self.close()
            raise

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.door.stop(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.arena.close(unlink=True)


async def serve(socket_path: Path, arena_path: Path, capacity_bytes: int) -> None:
    arena = open_arena(arena_path, capacity_bytes, slab_bytes=2 * MIB)
    io = SteppedIo()
    engine = make_engine(arena, None, io)
    engine.adopt()
    door = make_door(engine, arena, socket_path)
    await door.start()
    print("ready", flush=True)
    while True:
        await asyncio.sleep(0.02)
        engine.tick()
        io.run()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
