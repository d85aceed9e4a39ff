"""A real daemon and its gRPC process."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import uvloop

from kvstore.daemon.listening import Listen
from kvstore.security.identity import Gate
from kvstore.tools.rpc.node import Node
from kvstore.tools.rpc.operations import Operations
from kvstore.tools.rpc.server import Door, Settings, servicers
from kvstore.tools.rpc.streams import Streams
from tests.running import TIMEOUT_S, Daemon, Place, daemons, environment


@dataclass
class Serving:
    """target: where it listens, as a channel wants it."""

    place: Place
    daemon: Daemon
    target: str

    def process(self) -> int:
        """The pid of the gRPC process."""
        return child_of(self.daemon)


@contextmanager
def serving(place: Place, *settings: str, nvme: bool = False) -> Iterator[Serving]:
    """settings: further ones, as `grpc.streams_max=2`."""
    words = [*(place.with_nvme() if nvme else place.arguments), "--set=grpc.listen=127.0.0.1:0"]
    with daemons(place.path) as start:
        daemon = start(place, *words, *[f"--set={setting}" for setting in settings])
        yield Serving(place, daemon, target_of(daemon))


@contextmanager
def door_of(socket: Path, *settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gRPC process that no daemon has started, and where it listens. settings: as arguments."""
    door = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "grpc", "--listen=127.0.0.1:0", f"--socket={socket}", *settings],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert door.stdout is not None
    try:
        yield door, door.stdout.readline().split()[1].removeprefix("grpc=")
    finally:
        door.terminate()
        assert door.wait(TIMEOUT_S) == 0
        door.stdout.close()


@contextmanager
def door_here(socket: Path, streams_max: int = 16) -> Iterator[str]:
    """A gRPC server in a thread of this process, whose limits a test may change, and where it listens."""
    loop, opened = uvloop.new_event_loop(), SimpleQueue[str]()

    async def live() -> None:
        node, streams = Node(socket), Streams(socket, streams_max)
        operations = Operations(node.settings)
        settings = Settings(Listen("127.0.0.1", 0), socket, 600.0, streams_max)
        door = Door(settings, Gate(None), servicers(node, streams, operations))
        opened.put(f"127.0.0.1:{await door.open(False, print)}")
        await ended.wait()
        await door.close()
        await operations.close()
        streams.close()
        node.close()

    ended = asyncio.Event()
    thread = Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        yield opened.get(timeout=TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(TIMEOUT_S)
        loop.close()


def target_of(daemon: Daemon, lives: int = 1) -> str:
    """Where it listens, once as many gRPC processes of this daemon have said so."""
    found: Sequence[str] = ()

    def has_said() -> bool:
        nonlocal found
        found = re.findall(r"serving gRPC at ([^\"\s]+)", daemon.log())
        return len(found) >= lives

    until(has_said, "the gRPC process listens")
    return found[-1]


def child_of(daemon: Daemon) -> int:
    """The pid of `kvstore grpc` below a daemon."""
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().split()
    (pid,) = [pid for pid in children if b"grpc\0--child" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(pid)


def resident_bytes(pid: int) -> int:
    """Of its own memory: what it shares (the arena) is left out."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def until(is_so: Callable[[], bool], what: str, within_s: float = TIMEOUT_S) -> None:
    """Wait for a fact."""
    give_up_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
