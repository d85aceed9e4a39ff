"""What one connection may hold, and how long a call of many leases lasts: less is granted, nothing is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client import Client, Namespace
from kvstore.client.connection import Asked, Connection
from kvstore.protocol.frames import Answer
from tests.door.conftest import RECORD_BYTES, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon

TIMEOUT_S = 20.0
SLOW_S = 15.0  # one answer of a daemon that is just fast enough


def allow(daemon: Daemon, lease_bytes_max: int) -> None:
    daemon.door.api.limits = daemon.door.api.limits._replace(lease_bytes_max=lease_bytes_max)


@pytest.fixture
def stored(client: Client) -> tuple[Namespace, list[bytes]]:
    """Twelve blocks of 1 MiB in an arena of 16 MiB, of which one connection may hold 8 MiB."""
    space, hashes = space_of(client, record_bytes=MIB), hashes_of(12)
    assert client.put(space, hashes, b"", records_of(12, MIB)) == 12
    return space, hashes


def test_acquire_beyond_the_budget(client: Client, stored: Any) -> None:
    """What the connection may hold is granted, the rest is pending, and comes once the lease was released."""
    space, hashes = stored
    with client.acquire(space, hashes) as lease:
        assert len(lease.leading()) == 8
        assert lease.slots[8:] == [None] * 4
        assert lease.pending
        with client.acquire(space, hashes[8:]) as none_left:
            assert (none_left.slots, none_left.pending) == ([None] * 4, True)
    with client.acquire(space, hashes[8:]) as lease:
        assert len(lease.leading()) == 4
        assert not lease.pending


def test_small_records_count_as_the_slots_that_they_take(daemon: Daemon, client: Client) -> None:
    """Half of the arena is half of its slots, of 16 KiB at least, for records of 64 bytes as well."""
    space, hashes = space_of(client, record_bytes=64), hashes_of(1000)
    leases = [client.reserve(space, hashes[:500]), client.reserve(space, hashes[500:], hashes[499])]
    assert sum(len(lease.slots) for lease in leases) == 512 and leases[1].full
    assert daemon.call(daemon.arena.stats).used_bytes == daemon.arena.capacity_bytes // 2
    for lease in leases:
        lease.abort()
    assert client.put(space, hashes, b"", records_of(1000, 64)) == 1000


def test_nothing_is_pending_behind_a_miss(client: Client, stored: Any) -> None:
    """Where a granted block is a miss, nobody is told to ask again for those that were cut off."""
    space, hashes = stored
    with client.acquire(space, [*hashes[:3], b"?" * 32, *hashes[3:]]) as lease:
        assert len(lease.leading()) == 3
        assert not lease.pending


def test_one_block_is_always_granted(daemon: Daemon, client: Client, stored: Any) -> None:
    """A record larger than the whole budget can be read, by a connection that holds nothing else."""
    space, hashes = stored
    allow(daemon, MIB // 2)
    with client.acquire(space, hashes) as lease:
        assert len(lease.leading()) == 1
        assert lease.pending
        assert client.acquire(space, hashes[1:]).leading() == []
        assert client.reserve(space, hashes_of(2, "new")).full
    assert client.get(space, hashes, [bytearray(MIB) for _ in hashes]) == 12


def test_get_goes_on_after_a_partial_answer(daemon: Daemon, client: Client) -> None:
    """A get of more than the budget copies everything, in as many leases as it takes."""
    space, hashes, records = space_of(client), hashes_of(40), records_of(40)
    client.put(space, hashes, b"", records)
    allow(daemon, 3 * RECORD_BYTES)
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    assert client.get(space, hashes, into) == 40
    assert [bytes(buffer) for buffer in into] == records
    missing = [*hashes[:20], b"?" * 32, *hashes[20:39]]
    start = time.monotonic()
    assert client.get(space, missing, into, wait_s=5) == 20
    assert time.monotonic() - start < 4.5  # and not the 5 s that it would wait


def test_get_waits_for_leases_of_other_threads(client: Client, stored: Any) -> None:
    """Where other leases of the connection leave no room, get waits for them as long as it was told to."""
    space, hashes = stored
    into = [bytearray(MIB)]
    lease = client.acquire(space, hashes)
    assert client.get(space, hashes[9:10], into) == 0
    release = threading.Timer(0.1, lease.release)
    release.start()
    assert client.get(space, hashes[9:10], into, wait_s=5) == 1
    release.join()


class Clock:
    """A clock that runs as always, and jumps when the daemon is said to be slow."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    sleep = staticmethod(time.sleep)


@pytest.fixture
def clock(stored: Any, monkeypatch: Any) -> Clock:
    """For a daemon that answers each request just within its deadline."""
    clock = Clock()

    answer = Connection.answer

    def slowly(self: Connection, asked: Asked, deadline: float) -> Answer:
        clock.ahead_s += SLOW_S
        return answer(self, asked, deadline)

    monkeypatch.setattr(Connection, "answer", slowly)  # nobody waits for a release
    for module in ("kvstore.client", "kvstore.client.calls"):
        monkeypatch.setattr(f"{module}.time", clock)
    return clock


@pytest.fixture
def slow(daemon: Daemon, clock: Clock) -> Iterator[Client]:
    with Client(daemon.socket_path, timeout_s=TIMEOUT_S, label="patient") as client:
        client.ping()
        yield client


def test_a_slow_daemon_ends_put_and_get_early(slow: Client, clock: Clock, stored: Any) -> None:
    """A call of several leases takes no more than its bound, and answers the blocks it got through: one call of the
    daemon a lease is in time, two are not."""
    space, hashes = stored
    into = [bytearray(MIB) for _ in hashes]
    start = clock.monotonic()
    assert slow.get(space, hashes, into) == 12  # 4 blocks a lease
    assert clock.monotonic() - start < 5 * TIMEOUT_S
    start = clock.monotonic()
    stored_now = slow.put(space, hashes_of(12, "new"), b"", records_of(12, MIB))
    assert stored_now == 10  # 2 blocks a lease, and the sixth would begin too late
    assert clock.monotonic() - start < (6 + 4) * TIMEOUT_S
