"""A put asks for its next lease ahead, and waits for its commits at the end: nothing of that is left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore import client as client_module
from kvstore.client import Client, Refused, Unavailable
from kvstore.engine.sessions import WriteLease
from tests.door.conftest import RECORD_BYTES, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon
from tiers import copying


@pytest.fixture(autouse=True)
def _short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PUT_BLOCKS_MAX", 2)


def leases(daemon: Daemon) -> list[WriteLease]:
    return daemon.call(
        lambda: [
            lease
            for session in daemon.engine.sessions
            for lease in session.leases.values()
            if isinstance(lease, WriteLease)
        ]
    )


def test_threads_that_put_and_look_up_in_turn(daemon: Daemon) -> None:
    """Answers that come while another thread is on the wire reach the thread that asked."""
    client = Client(daemon.socket_path, timeout_s=30.0)
    space = space_of(client)
    failures: list[str] = []

    def work(name: str) -> None:
        for turn in range(5):
            hashes, into = hashes_of(7, f"{name} {turn}"), [bytearray(RECORD_BYTES) for _ in range(7)]
            records = [os.urandom(RECORD_BYTES) for _ in range(7)]
            stored = client.put(space, hashes, b"", records), client.lookup([space], hashes)
            client.get(space, hashes, into)
            if stored != (7, 7) or [bytes(each) for each in into] != records:
                failures.append(f"{name} {turn}: {stored}")

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    client.close()


def test_a_copy_that_fails_leaves_no_lease(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was copied before is stored; the lease under way and the one that was asked for ahead are given back."""
    space, hashes = space_of(client), hashes_of(8)
    copied, calls = copying.copy_and_digest, itertools.count(1)

    def copy_and_digest(*arguments: Any) -> list[bytes]:
        if next(calls) == 2:
            raise BufferError("gone")
        return copied(*arguments)

    monkeypatch.setattr(copying, "copy_and_digest", copy_and_digest)
    with pytest.raises(Refused, match="put: gone"):
        client.put(space, hashes, b"", records_of(8))
    assert client.lookup([space], hashes) == 2
    client.ping()
    assert leases(daemon) == []


def test_a_lease_that_nobody_waits_for_is_given_back(daemon: Daemon, client: Client) -> None:
    """Another thread is on the wire for too long: the answer is read by somebody else, later."""
    space = space_of(client)
    coming = client._reserve_soon(space, hashes_of(2), b"")
    with client._guard, pytest.raises(Unavailable, match="another thread"):
        coming(time.monotonic() + 0.05)
    assert client.put(space, hashes_of(4, "other"), b"", records_of(4)) == 4
    client.ping()
    assert leases(daemon) == []


def test_an_interrupt_leaves_no_lease(daemon: Daemon, client: Client) -> None:
    """Control-C while another thread is on the wire, and has read our answer: given back without a further call."""
    coming = client._reserve_soon(space_of(client), hashes_of(2), b"")
    guard = client._guard

    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            client._guard = guard
            client.ping()
            raise KeyboardInterrupt

    client._guard = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        coming(None)
    assert leases(daemon) == []


def test_a_connection_lost_by_another_thread_is_unavailable(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that was asked for ahead came before: its slots are not written into."""
    space, hashes = space_of(client), hashes_of(8)
    copied = copying.copy_and_digest

    def copy_and_digest(*arguments: Any) -> list[bytes]:
        client.ping()  # reads the answer
        connection = client._connection
        assert connection is not None
        client._lose(connection, TimeoutError())
        client._retry_at = 0.0
        monkeypatch.undo()
        return copied(*arguments)

    monkeypatch.setattr(copying, "copy_and_digest", copy_and_digest)
    with pytest.raises(Unavailable, match="was lost"):
        client.put(space, hashes, b"", records_of(8))


def test_large_records_are_put_one_at_a_time(tmp_path: Path, arena_path: Path) -> None:
    """Two leases of them are more than one connection may hold."""
    daemon = Daemon(tmp_path / "s", arena_path, 6 * MIB)
    with contextlib.closing(daemon), Client(daemon.socket_path, timeout_s=20) as client:
        space = space_of(client, record_bytes=2 * MIB)
        assert client.put(space, hashes_of(3), b"", records_of(3, 2 * MIB)) == 3


def test_runs_that_follow_one_another_are_one_prompt(daemon: Daemon, client: Client) -> None:
    """The policy must not take the leases of one put for several requests."""
    space, hashes = space_of(client), hashes_of(4)
    with client.reserve(space, hashes[:2]), client.reserve(space, hashes[2:], hashes[1]):
        first, second = leases(daemon)
        assert first.prompt is second.prompt and first.prompt.blocks == 4
    with client.reserve(space, hashes[:2]), client.reserve(space, hashes_of(2, "other")):
        first, second = leases(daemon)
        assert first.prompt is not second.prompt
