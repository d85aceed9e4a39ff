"""One client, several threads: whoever finds the wire busy loses its turn, never its lease."""

from __future__ import annotations

import fcntl
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.client import Client, Unavailable
from kvstore.protocol import frames
from tests.door.conftest import hashes_of, records_of, space_of
from tests.door.daemon import Daemon

TIMEOUT_S = 1.0


@contextmanager
def busy_wire(client: Client) -> Iterator[None]:
    """Another thread's call is on the wire all the while, as far as the others can see."""
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with client._guard:
            held.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        yield
    finally:
        leave.set()
        thread.join()


def leases_held(daemon: Daemon) -> int:
    return daemon.call(lambda: sum(len(session.leases) for session in daemon.engine.sessions))


@pytest.fixture
def hasty(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket_path, timeout_s=TIMEOUT_S, label="hasty") as client:
        yield client


def test_a_commit_that_found_no_turn(daemon: Daemon, hasty: Client) -> None:
    """A commit that times out behind another thread stores nothing, and the next call gives its slots back."""
    space, hashes = space_of(hasty), hashes_of(2)
    lease = hasty.reserve(space, hashes)
    with busy_wire(hasty):
        start = time.monotonic()
        with pytest.raises(Unavailable):
            lease.commit()
        assert time.monotonic() - start < 3 * TIMEOUT_S
    assert hasty.connected
    assert hasty.put(space, hashes, b"", records_of(2)) == 2
    assert leases_held(daemon) == 0
    assert len(daemon.door.connections) == 1


@pytest.mark.parametrize("close", ["abort", "release"])
def test_a_close_that_found_no_turn(daemon: Daemon, hasty: Client, close: str) -> None:
    """An abort or release that times out behind another thread is made good by the next call."""
    space, hashes = space_of(hasty), hashes_of(2)
    if close == "release":
        hasty.put(space, hashes, b"", records_of(2))
    lease: Any = hasty.reserve(space, hashes) if close == "abort" else hasty.acquire(space, hashes)
    with busy_wire(hasty):
        getattr(lease, close)()
    assert leases_held(daemon) == 1
    hasty.ping()
    assert leases_held(daemon) == 0


def test_a_close_behind_a_waiting_acquire(daemon: Daemon, hasty: Client, monkeypatch: Any) -> None:
    """The same on the wire: while one thread's request waits in the daemon, another's release times out."""
    space, hashes = space_of(hasty), hashes_of(2)
    hasty.put(space, hashes, b"", records_of(2))
    lease = hasty.acquire(space, hashes)
    answer = _hold_back_acquires(daemon, monkeypatch)
    waiting = threading.Thread(target=lambda: hasty.acquire(space, hashes, wait_s=5).release())
    waiting.start()
    time.sleep(0.05)
    lease.release()
    assert leases_held(daemon) == 1
    daemon.call(answer)
    waiting.join()
    hasty.ping()  # releases are not waited for
    assert leases_held(daemon) == 0
    assert hasty.connected


def _hold_back_acquires(daemon: Daemon, monkeypatch: Any) -> Callable[[], None]:
    """From now on acquires wait in the daemon until what this answers is called there."""
    held: list[Callable[[], object]] = []
    acquire = daemon.engine.acquire

    class Later:
        def expire(self) -> None:
            pass

    def later(*arguments: Any, **named: Any) -> Any:
        held.append(lambda: acquire(*arguments, **named))
        return Later()

    monkeypatch.setattr(daemon.engine, "acquire", later)

    def answer() -> None:
        held.pop()()

    return answer


def test_a_release_waits_for_nothing(daemon: Daemon, hasty: Client) -> None:
    """Releases are sent at once while the daemon does not answer; one that is refused is known with the next call."""
    space, hashes = space_of(hasty), hashes_of(1)
    hasty.put(space, hashes, b"", records_of(1))
    leases = [hasty.acquire(space, hashes) for _ in range(3)]
    go_on = threading.Event()
    daemon.loop.call_soon_threadsafe(go_on.wait, 10)
    for lease in leases:
        lease.release()
    assert hasty.connected
    assert not go_on.is_set()
    go_on.set()
    hasty.ping()
    assert leases_held(daemon) == 0


def test_many_dropped_leases(daemon: Daemon, hasty: Client) -> None:
    """Read leases that nobody closed come back with the next call, however many they are."""
    space, hashes = space_of(hasty), hashes_of(1)
    hasty.put(space, hashes, b"", records_of(1))
    leases = [hasty.acquire(space, hashes) for _ in range(90)]
    assert leases_held(daemon) == 90
    del leases
    gc.collect()
    hasty.ping()
    hasty.ping()  # the rest was sent behind the first one
    assert leases_held(daemon) == 0


def test_a_dropped_lease_of_a_lost_connection(daemon: Daemon, hasty: Client) -> None:
    """What is owed to a connection that is gone is not asked of the next one."""
    space, hashes = space_of(hasty), hashes_of(1)
    hasty.put(space, hashes, b"", records_of(1))
    lease = hasty.acquire(space, hashes)
    for connection in list(daemon.door.connections):
        daemon.call(connection.abort)
    with pytest.raises(Unavailable):
        hasty.ping()
    del lease
    time.sleep(0.06)  # the back-off
    hasty.ping()
    assert daemon.door.counters["refused"] == {}


@pytest.mark.parametrize("read_only", [False, True])
def test_a_reader_gets_nothing_to_write_through(daemon: Daemon, hasty: Client, read_only: bool) -> None:
    """The slabs come writable unless Hello said that it only reads, the table never; both are what Welcome says."""
    hello = frames.Hello(frames.PROTOCOL_VERSION, "raw", read_only=read_only)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.socket_path))
        peer.sendall(frames.encode_frame(hello))
        data, fds, _, _ = socket.recv_fds(peer, 4096, 2)
        welcome = frames.welcome_decoder.decode(data[frames.HEADER_BYTES :])
        assert isinstance(welcome, frames.Welcome)
        modes = [fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE for fd in fds]
        assert modes == [os.O_RDONLY if read_only else os.O_RDWR, os.O_RDONLY]
        slabs, table = (os.fstat(fd).st_size for fd in fds)
        assert slabs == welcome.arena_bytes and table > welcome.generations_bytes > 0
        for fd in fds:
            os.close(fd)
