"""One client, several threads: whoever finds the wire busy loses its turn, never its lease."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvstore.client import Client, Unavailable
from tests.door.conftest import hashes_of, records_of, space_of
from tests.door.daemon import Daemon

TIMEOUT_S = 0.2


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
        assert time.monotonic() - start < TIMEOUT_S + 0.2
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
    assert leases_held(daemon) == 0
    assert hasty.connected


def _hold_back_acquires(daemon: Daemon, monkeypatch: Any) -> Callable[[], None]:
    """From now on acquires wait in the daemon until what this answers is called there."""
    held: list[Callable[[], object]] = []
    acquire = daemon.engine.acquire

    class Later:
        def expire(self) -> None:
            pass

    def later(session: Any, number: int, hashes: bytes, on_ready: Any) -> Any:
        held.append(lambda: acquire(session, number, hashes, on_ready))
        return Later()

    monkeypatch.setattr(daemon.engine, "acquire", later)

    def answer() -> None:
        held.pop()()

    return answer


def test_many_dropped_leases(daemon: Daemon, hasty: Client) -> None:
    """Read leases that nobody closed come back with the following calls, a bounded number at a time."""
    space, hashes = space_of(hasty), hashes_of(1)
    hasty.put(space, hashes, b"", records_of(1))
    leases = [hasty.acquire(space, hashes) for _ in range(90)]
    assert leases_held(daemon) == 90
    del leases
    gc.collect()
    hasty.ping()
    assert leases_held(daemon) == 90 - 64
    hasty.ping()
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
