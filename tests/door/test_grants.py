"""Slots that one client leases and others fill: what the ranks of an engine do with columns of one record."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from kvstore.client import Client, FillsRefused, Grant, Namespace, Refused, SlotLease, Unavailable
from tests.door.conftest import RECORD_BYTES, DaemonProcess, check, hashes_of, space_of
from tests.door.daemon import MIB, Daemon
from tiers.checksum import digest

T = TypeVar("T")
RANKS = 4
COLUMN_BYTES = RECORD_BYTES // RANKS


@pytest.fixture
def scheduler(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket_path, timeout_s=20, label="scheduler", attach=False) as connected:
        yield connected


def columns_of(client: Client) -> Namespace:
    return space_of(client, columns=[COLUMN_BYTES] * RANKS)


def passed_on(lease: SlotLease) -> Grant:
    """The grant as it comes out at another process."""
    grant = pickle.loads(pickle.dumps(lease.grant))
    assert isinstance(grant, Grant)
    return grant


def fill(rank: Client, grant: Grant, column: int) -> int:
    """Write a column, and say so; returns how many blocks that committed."""
    with rank.open_grant(grant, column * COLUMN_BYTES, COLUMN_BYTES, writing=True) as slots:
        slots.touch(len(slots.views))
        for number, view in enumerate(slots.views):
            view[:] = bytes([16 * column + number + 1]) * COLUMN_BYTES
        digests = [digest(view) for view in slots.views]
    (committed,) = rank.fill([(grant, column, digests)])
    return committed


def record(number: int) -> bytes:
    return b"".join(bytes([16 * column + number + 1]) * COLUMN_BYTES for column in range(RANKS))


def until_connected(call: Callable[[], T]) -> T:
    """Again until the client has noticed that its daemon was replaced."""
    give_up_s = time.monotonic() + 30
    while True:
        try:
            return call()
        except Unavailable:
            assert time.monotonic() < give_up_s
            time.sleep(0.02)


def store(scheduler: Client, rank: Client, space: Namespace, count: int) -> list[bytes]:
    hashes = hashes_of(count)
    lease = scheduler.reserve_slots(space, hashes)
    assert lease.positions == list(range(count)) and not lease.partial
    for column in reversed(range(RANKS)):
        assert scheduler.lookup([space], hashes) == 0
        assert fill(rank, passed_on(lease), column) == (0 if column else count)
    return hashes


def test_ranks_fill_and_read_columns_of_one_record(daemon: Daemon, scheduler: Client, client: Client) -> None:
    """Nothing is found before the commit; then each rank reads its own column, and a whole get all of them."""
    space = columns_of(scheduler)
    hashes = store(scheduler, client, space, 5)
    assert scheduler.lookup([space], hashes) == 5
    lease = scheduler.acquire_slots(space, hashes)
    assert lease.leading() == 5 and not lease.partial
    for column in range(RANKS):
        with client.open_grant(passed_on(lease), column * COLUMN_BYTES, COLUMN_BYTES) as slots:
            assert [bytes(view[:1]) for view in slots.views] == [
                bytes([16 * column + n + 1]) for n in range(5)
            ]
            assert all(view.readonly for view in slots.views) and slots.valid_count() == 5
    lease.release()
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    assert client.get(space, hashes, into) == 5
    assert [bytes(buffer) for buffer in into] == [record(number) for number in range(5)]
    assert all(
        daemon.call(
            lambda: [daemon.arena.verify(b.slot) for b in daemon.engine.namespaces.get(0).blocks.walk()]
        )
    )
    assert check(daemon.socket_path) == []


def test_what_is_missing_has_no_slot(scheduler: Client, client: Client) -> None:
    """Only the blocks before the first miss can be read; blocks that are held get no slot to write."""
    space = columns_of(scheduler)
    held = store(scheduler, client, space, 2)
    wanted = [*held, *hashes_of(2, "missing")]
    lease = scheduler.acquire_slots(space, [wanted[0], wanted[2], wanted[1]])
    assert (lease.positions, lease.leading()) == ([0, 2], 1)
    lease.release()
    lease = scheduler.reserve_slots(space, wanted)
    assert lease.positions == [2, 3]
    lease.release()
    lease.release()
    assert fill_nothing(client, lease.grant) == 0


def fill_nothing(rank: Client, grant: Grant) -> int:
    (committed,) = rank.fill([(grant, 0, [bytes(16)])])
    return committed


def test_a_column_that_does_not_come_gives_the_lease_up(
    daemon: Daemon, scheduler: Client, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank cannot copy: the blocks are nobody's any more, other ranks' columns are of no use, and the next one may
    store them."""
    space = columns_of(scheduler)
    lease = scheduler.reserve_slots(space, hashes_of(3))
    assert fill(client, passed_on(lease), 0) == 0
    assert client.fill([(lease.grant, 1, None), (lease.grant, 2, [bytes(16)] * 3)]) == [0, 0]
    with pytest.raises(Refused, match="taken back"):
        fill(client, passed_on(lease), 3)
    assert daemon.call(lambda: daemon.engine.sessions[-1].leases) == {}
    assert store(scheduler, client, space, 3) == hashes_of(3)
    assert check(daemon.socket_path) == []


@pytest.mark.parametrize(("column", "digests"), [(RANKS, 3), (0, 2), (0, 4), (1, 3)])
def test_a_column_that_makes_no_sense(
    daemon: Daemon, scheduler: Client, client: Client, column: int, digests: int
) -> None:
    """A column that a record does not have, that came already, or that is of other slots is refused by name."""
    lease = scheduler.reserve_slots(columns_of(scheduler), hashes_of(3))
    fill(client, lease.grant, 1)
    with pytest.raises(Refused, match=f"bad_request: fill: column {column} with {16 * digests} bytes"):
        client.fill([(lease.grant, column, [bytes(16)] * digests)])
    with pytest.raises(Refused, match="bad_request"):
        client.fill([(lease.grant, 0, [bytes(16)])] * 65)


def test_only_slots_leased_for_others_are_filled_by_others(daemon: Daemon, client: Client) -> None:
    """The lease of a client that copies itself is its own business."""
    space = columns_of(client)
    with (
        Client(daemon.socket_path, timeout_s=20, label="other") as other,
        client.reserve(space, hashes_of(1)) as lease,
    ):
        grant = lease._lease.grant
        assert other.fill([(grant, 0, None)]) == [0]
        assert lease.commit() == 1


def test_slots_that_were_given_up_are_not_written(daemon: Daemon, scheduler: Client, client: Client) -> None:
    """A rank that comes late is refused; one that is in the middle of its copy is waited for."""
    space, hashes = columns_of(scheduler), hashes_of(3)
    lease = scheduler.reserve_slots(space, hashes)
    with client.open_grant(passed_on(lease), 0, COLUMN_BYTES, writing=True):
        lease.release()
        assert scheduler.lookup([space], hashes) == 0
        assert daemon.call(daemon.arena.owners.quarantined) == 3
        assert daemon.call(daemon.arena.sweep) == 0
        with pytest.raises(Refused, match="taken back"), client.open_grant(lease.grant, 0, 8, writing=True):
            pass
    assert daemon.call(daemon.arena.sweep) == 3
    assert check(daemon.socket_path) == []


def test_a_rank_that_dies_in_its_copy_is_not_waited_for(
    daemon: Daemon, scheduler: Client, client: Client
) -> None:
    """kill -9 of a rank while it writes: its lock is gone, and the slots are free again."""
    space = columns_of(scheduler)
    lease = scheduler.reserve_slots(space, hashes_of(3))
    ready, told = os.pipe()
    rank = os.fork()
    if rank == 0:
        with client.open_grant(lease.grant, 0, COLUMN_BYTES, writing=True):
            os.write(told, b"x")
            signal.pause()
    assert os.read(ready, 1) == b"x"
    lease.release()
    assert scheduler.lookup([space], hashes_of(1)) == 0
    assert daemon.call(daemon.arena.owners.quarantined) == 3
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    assert daemon.call(daemon.arena.sweep) == 3
    os.close(ready)
    os.close(told)


def test_a_scheduler_that_is_lost_leaves_nothing(daemon: Daemon, scheduler: Client, client: Client) -> None:
    """Its leases end with its connection, and no rank writes or trusts what it read."""
    space = columns_of(scheduler)
    hashes = store(scheduler, client, space, 2)
    reading, writing = (
        scheduler.acquire_slots(space, hashes),
        scheduler.reserve_slots(space, hashes_of(2, "new")),
    )
    scheduler.close()
    assert check(daemon.socket_path) == []
    with pytest.raises(Refused, match="taken back"), client.open_grant(writing.grant, 0, 8, writing=True):
        pass
    with client.open_grant(reading.grant, 0, COLUMN_BYTES) as slots:
        assert slots.valid_count() == 2  # nothing was evicted yet: still the right bytes


def test_a_grant_of_another_daemon_is_refused(process: DaemonProcess, tmp_path: Path) -> None:
    """After a restart neither side takes the other's slots: not the rank that was left behind, nor the one ahead."""
    with (
        Client(tmp_path / "s", timeout_s=5, attach=False) as scheduler,
        Client(tmp_path / "s", timeout_s=5) as rank,
    ):
        space = columns_of(scheduler)
        old = scheduler.reserve_slots(space, hashes_of(1))
        assert len(rank.open_grant(old.grant, 0, 8).views) == 1
        process.kill()
        process.start()
        with pytest.raises(Unavailable):
            scheduler.ping()
        new = until_connected(lambda: scheduler.reserve_slots(space, hashes_of(1)))
        assert len(until_connected(lambda: rank.open_grant(new.grant, 0, 8)).views) == 1
        with pytest.raises(Unavailable, match="another daemon"):
            rank.open_grant(old.grant, 0, 8, writing=True)
        with pytest.raises(FillsRefused, match="another daemon") as refused:
            rank.fill([(new.grant, 0, None), (old.grant, 0, None)])
        assert list(refused.value.refused) == [1], "the others of its call are done"


def test_grants_need_the_arena(scheduler: Client, daemon: Daemon) -> None:
    """Who has no arena opens no grant, and who only reads writes none; offsets outside of it are not believed."""
    lease = scheduler.reserve_slots(columns_of(scheduler), hashes_of(1))
    with pytest.raises(Refused, match="not_attached"):
        scheduler.open_grant(lease.grant, 0, 8)
    with Client(daemon.socket_path, timeout_s=20, writable=False) as reader:
        with pytest.raises(Refused, match="read_only"):
            reader.open_grant(lease.grant, 0, 8, writing=True)
        with pytest.raises(Refused, match="outside"):
            reader.open_grant(lease.grant, 0, 32 * MIB)
        assert reader.connected
