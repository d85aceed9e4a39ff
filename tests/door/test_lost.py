"""What a client does when the daemon is slow, hung, dead, or back again."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Unavailable
from kvstore.client.arena_view import ArenaView, OwnerLock
from kvstore.errors import SocketBusy, SocketPathError
from tests.door.conftest import RECORD_BYTES, DaemonProcess, check, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon
from tests.engine.fakes import FaultyDevice
from tiers.locks import is_locked

TIMEOUT_S = 3.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def raises_within(limit_s: float, call: Any) -> None:
    """The call raises Unavailable, in time."""
    start = time.monotonic()
    with pytest.raises(Unavailable):
        call()
    assert time.monotonic() - start < limit_s


def test_nobody_there(tmp_path: Path) -> None:
    """Without a daemon every call raises Unavailable at once, and making a client does not."""
    client = Client(tmp_path / "s")
    raises_within(TIMEOUT_S, client.ping)
    assert not client.connected


def test_hung_daemon_and_backoff(process: DaemonProcess) -> None:
    """A stopped daemon costs one deadline; then calls fail at once until the backoff is over; then it heals."""
    clock = Clock()
    client = Client(process.socket_path, timeout_s=TIMEOUT_S, clock=clock)
    space, hashes = space_of(client), hashes_of(3)
    assert client.put(space, hashes, b"", records_of(3)) == 3
    arena = client.arena
    process.signal(signal.SIGSTOP)
    raises_within(2 * TIMEOUT_S, lambda: client.lookup([space], hashes))
    assert not client.connected
    process.signal(signal.SIGCONT)
    raises_within(
        TIMEOUT_S / 2, lambda: client.lookup([space], hashes)
    )  # the clock stands still: backing off
    clock.now_s += 10
    assert client.lookup([space], hashes) == 3
    assert client.arena is arena


def test_backing_off_makes_no_system_call(tmp_path: Path) -> None:
    """While backing off, a call does not touch the kernel."""
    script = (
        "from kvstore.client import *\nimport os, sys\nc = Client(sys.argv[1], clock=lambda: 0.0)\n"
        "for _ in range(3):\n try: c.ping()\n except Unavailable: pass\n"
        "os.write(1, b'begin')\nfor _ in range(3):\n try: c.ping()\n except Unavailable: pass\nos.write(1, b'end')"
    )
    command = ["strace", "-f", sys.executable, "-c", script, str(tmp_path / "s")]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    calls = done.stderr.splitlines()
    begin = next(n for n, line in enumerate(calls) if 'write(1, "begin"' in line)
    assert 'write(1, "end"' in calls[begin + 1]


def test_waiting_for_a_thread_has_the_same_deadline(process: DaemonProcess) -> None:
    """Calls of several threads to a hung daemon all end within one deadline of their start."""
    client = Client(process.socket_path, timeout_s=TIMEOUT_S)
    client.ping()
    process.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(raises_within, 2 * TIMEOUT_S, client.ping) for _ in range(6)]:
            future.result()
    process.signal(signal.SIGCONT)


def test_killed_daemon_same_arena(process: DaemonProcess) -> None:
    """After kill -9 and a restart the client reconnects by itself, to the same mapping, and it is warm."""
    client = Client(process.socket_path, timeout_s=TIMEOUT_S)
    space, hashes, records = space_of(client), hashes_of(5), records_of(5)
    client.put(space, hashes, b"", records)
    arena = client.arena
    process.kill()
    raises_within(TIMEOUT_S, lambda: client.lookup([space], hashes))
    process.start()
    into = [bytearray(RECORD_BYTES) for _ in hashes]
    assert until_available(lambda: client.lookup([space], hashes)) == 5
    assert client.get(space, hashes, into, wait_s=2) == 5
    assert [bytes(buffer) for buffer in into] == records
    assert client.arena is arena


def until_available(call: Any) -> Any:
    """The answer of a call, repeated until the backoff is over."""
    until = time.monotonic() + 5
    while True:
        try:
            return call()
        except Unavailable:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def test_new_arena(process: DaemonProcess) -> None:
    """A daemon that comes back with another arena gets a new mapping; old views stay mapped."""
    client = Client(process.socket_path, timeout_s=TIMEOUT_S)
    space, hashes, records = space_of(client), hashes_of(2), records_of(2)
    client.put(space, hashes, b"", records)
    lease = client.acquire(space, hashes)
    arena = client.arena
    process.kill()
    process.arena_path.unlink()
    process.start()
    raises_within(TIMEOUT_S, client.ping)
    until_available(client.ping)
    assert client.arena is not arena
    assert client.lookup([space], hashes) == 0
    assert [bytes(slot.view) for slot in lease.slots if slot is not None] == records
    assert lease.valid()
    lease.release()
    assert client.put(space, hashes, b"", records) == 2


def test_stale_write_lease_keeps_its_slots(daemon: Daemon) -> None:
    """A writer that lost its connection keeps its slots from being handed out until it closes its lease."""
    clock = Clock()
    client = Client(daemon.socket_path, clock=clock)
    space, hashes = space_of(client), hashes_of(3)
    lease = client.reserve(space, hashes)
    owner = daemon.call(lambda: daemon.engine.sessions[0].owner)
    (connection,) = daemon.door.connections
    daemon.call(connection.abort)
    with pytest.raises(Unavailable):
        client.ping()
    clock.now_s += 10
    client.ping()  # a new connection, with another owner
    assert daemon.call(daemon.arena.sweep) == 0
    assert daemon.arena.owners.quarantined() == 3
    for slot in lease.slots:
        slot.view[:] = bytes(RECORD_BYTES)
    with pytest.raises(Unavailable):
        lease.commit()
    assert not is_locked(daemon.arena.fd, daemon.arena.owners.writers_byte)
    assert daemon.call(daemon.arena.sweep) == 3
    assert client.put(space, hashes, b"", records_of(3)) == 3
    assert daemon.call(lambda: daemon.engine.sessions[0].owner) != owner
    client.close()


def test_slots_that_were_taken_back_are_not_written(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon gives the writer up after it answered, and before the writer holds its lock: somebody else
    has the slots then, and the writer notices."""
    clock = Clock()
    late = Client(daemon.socket_path, clock=clock, label="late")
    with late, Client(daemon.socket_path) as other:
        other.put(space_of(other), hashes_of(1), b"", records_of(1))
        enter = OwnerLock.enter

        def entered(lock: OwnerLock) -> None:
            monkeypatch.undo()
            (mine,) = (c for c in daemon.door.connections if "late" in c._caller.name)
            daemon.call(mine.abort)
            assert other.put(space_of(other), hashes_of(4), b"", records_of(4)) == 3
            enter(lock)

        monkeypatch.setattr(OwnerLock, "enter", entered)
        with pytest.raises(Unavailable, match="taken back"):
            late.reserve(space_of(late), hashes_of(3, "late"))
        clock.now_s += 10
        into = [bytearray(RECORD_BYTES) for _ in range(4)]
        assert other.get(space_of(other), hashes_of(4), into) == 4
        assert [bytes(data) for data in into] == records_of(4)
        assert late.put(space_of(late), hashes_of(3, "late"), b"", records_of(3)) == 3


def lock_everything(fd: int) -> None:
    """As a client that means harm, with the descriptor that it was given."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def test_nobody_locks_others_out(daemon: Daemon, client: Client) -> None:
    """One client locks every byte of the arena: those who are there store and load, newcomers too, and what a lost one
    was writing is free as soon as it stops."""
    space, hashes = space_of(client), hashes_of(3)
    attacker = os.open(daemon.arena.path, os.O_RDWR)
    lock_everything(attacker)
    try:
        assert client.put(space, hashes, b"", records_of(3)) == 3
        with Client(daemon.socket_path) as newcomer, Client(daemon.socket_path, writable=False) as reader:
            into = [bytearray(RECORD_BYTES) for _ in hashes]
            assert reader.get(space, hashes, into) == newcomer.get(space, hashes, into) == 3
            lease = newcomer.reserve(space, hashes_of(3, "lost"))
            (mine,) = (c for c in daemon.door.connections if len(c._caller._leases) == 1)
            daemon.call(mine.abort)
            lease.abort()
        with Client(daemon.socket_path, attach=False) as scheduler:
            given_up = scheduler.reserve_slots(space, hashes_of(2, "given up"))
            given_up.release()
            assert scheduler.lookup([space], hashes) == 3
        daemon.call(daemon.arena.sweep)
        assert daemon.arena.owners.quarantined() == 0
    finally:
        os.close(attacker)


def test_killed_writer(process: DaemonProcess, arena_path: Path) -> None:
    """The slots of a writer that was killed are free again, without anybody's help."""
    script = (
        "import os, signal, sys\nfrom kvstore.client import Client\n"
        "c = Client(sys.argv[1], timeout_s=30)\ns = c.namespace(b'k' * 16, 1 << 20, 32, 16, {})\n"
        "lease = c.reserve(s, [bytes([n]) * 32 for n in range(8)])\nassert len(lease.slots) == 8\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(process.socket_path)])
    assert done.returncode == -signal.SIGKILL
    client = Client(process.socket_path, timeout_s=30)
    until = time.monotonic() + 5
    while client.status()["tiers"][0]["used_bytes"] and time.monotonic() < until:
        time.sleep(0.02)
    assert client.status()["tiers"][0]["used_bytes"] == 0
    assert check(process.socket_path) == []


def test_fork(daemon: Daemon, client: Client) -> None:
    """A forked child connects anew and does not hold its parent's lock; the parent's connection goes on."""
    space, hashes = space_of(client), hashes_of(4)
    client.put(space, hashes, b"", records_of(4))
    ready, ready_in = os.pipe()
    leave, leave_in = os.pipe()
    child = os.fork()
    if not child:
        good = False
        try:
            into = [bytearray(RECORD_BYTES) for _ in hashes]
            good = client.get(space, hashes, into) == 4 and [bytes(b) for b in into] == records_of(4)
        finally:
            os.write(ready_in, bytes([good]))
            os.read(leave, 1)
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"\x01"
        assert client.lookup([space], hashes) == 4
        assert daemon.call(lambda: len(daemon.engine.sessions)) == 2
        client.close()  # the child lives on, and must not keep our lock
        assert not is_locked(daemon.arena.fd, daemon.arena.owners.writers_byte)
    finally:
        os.write(leave_in, b"x")
        os.waitpid(child, 0)
        for fd in (ready, ready_in, leave, leave_in):
            os.close(fd)


def test_nothing_leaks_over_reconnects(process: DaemonProcess) -> None:
    """A hundred reconnects leave as many descriptors and mappings as one."""
    clock = Clock()
    client = Client(process.socket_path, clock=clock)

    def reconnect() -> tuple[int, int]:
        client.ping()
        client._connection._socket.shutdown(2)  # type: ignore[union-attr]
        with pytest.raises(Unavailable):
            client.ping()
        clock.now_s += 10
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(str(process.arena_path))

    first = reconnect()
    for _ in range(100):
        last = reconnect()
    assert last == first


# Slow tiers ---------------------------------------------------------------------------


@pytest.fixture
def with_nvme(tmp_path: Path, arena_path: Path) -> Iterator[Daemon]:
    """A daemon with a second tier whose I/O waits until the test lets it run."""
    running = Daemon(tmp_path / "s", arena_path, 4 * MIB, nvme=FaultyDevice(100))
    running.call(running.engine.adopt)
    running.call(running.io.run)
    yield running
    running.call(running.io.run)
    problems = running.call(running.engine.check)
    running.close()
    assert problems == []


def demoted(daemon: Daemon, client: Client) -> tuple[Any, list[bytes]]:
    """Three blocks: the first in DRAM, two only on the slower tier."""
    space, hashes = space_of(client), hashes_of(3)
    assert client.put(space, hashes, b"", records_of(3)) == 3

    def evict() -> None:
        daemon.io.run()
        for block_hash in hashes[1:][::-1]:
            daemon.engine.blocks.left_dram(daemon.engine.namespaces.get(0).blocks[block_hash])

    daemon.call(evict)
    assert [place & 3 for place in client.residency(space, hashes)] == [3, 2, 2]
    return space, hashes


def test_acquire_answers_pending_in_time(with_nvme: Daemon) -> None:
    """What is not promoted within the wait is None and `pending`; what is ready is leased; later all are."""
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        space, hashes = demoted(with_nvme, client)
        start = time.monotonic()
        with client.acquire(space, hashes, wait_s=0.1) as lease:
            assert 0.1 <= time.monotonic() - start < 5
            assert lease.pending
            assert [slot is not None for slot in lease.slots] == [True, False, False]
        with client.acquire(space, hashes) as lease:
            assert lease.pending
        for _ in range(len(hashes)):  # a disk that was never read is measured by one record first
            with_nvme.call(with_nvme.io.run)
            client.acquire(space, hashes).release()
        with client.acquire(space, hashes) as lease:
            assert not lease.pending
            views = [bytes(slot.view) for slot in lease.slots if slot is not None]
            assert views == records_of(3)
        assert with_nvme.call(lambda: with_nvme.engine.sessions[0].leases) == {}


def test_acquire_answers_when_the_last_is_ready(with_nvme: Daemon) -> None:
    """A waiting acquire answers as soon as promotion is done, not at the end of its wait."""
    with Client(with_nvme.socket_path, timeout_s=10) as client:
        space, hashes = demoted(with_nvme, client)
        with_nvme.loop.call_soon_threadsafe(with_nvme.loop.call_later, 0.1, with_nvme.io.run)
        into = [bytearray(RECORD_BYTES) for _ in hashes]
        start = time.monotonic()
        assert client.get(space, hashes, into, wait_s=5) == 3
        assert time.monotonic() - start < 3
        assert [bytes(buffer) for buffer in into] == records_of(3)


def test_a_peer_that_dies_in_a_wait(with_nvme: Daemon) -> None:
    """A client that vanishes while its acquire waits takes nothing with it."""
    client = Client(with_nvme.socket_path, timeout_s=10)
    with Client(with_nvme.socket_path, timeout_s=10) as other:
        space, hashes = demoted(with_nvme, other)
    client.ping()
    raises_within(5, lambda: _acquire_and_hang_up(client, space, hashes))
    until = time.monotonic() + 5
    while with_nvme.call(lambda: with_nvme.engine.sessions) and time.monotonic() < until:
        time.sleep(0.01)
    assert with_nvme.call(lambda: with_nvme.engine.sessions) == []
    with_nvme.call(with_nvme.io.run)
    blocks = with_nvme.engine.namespaces.get(0).blocks
    assert [blocks[block_hash].pins for block_hash in hashes] == [0, 0, 0]


def _acquire_and_hang_up(client: Client, space: Any, hashes: list[bytes]) -> None:
    hang_up = threading.Timer(0.1, lambda: client._connection._socket.shutdown(2))  # type: ignore[union-attr]
    hang_up.start()
    try:
        client.acquire(space, hashes, wait_s=60)
    finally:
        hang_up.join()


# The socket file ----------------------------------------------------------------------


def test_socket_of_a_live_daemon_is_kept(daemon: Daemon, tmp_path: Path, arena_path: Path) -> None:
    """A second daemon refuses to start on the socket of a live one, which goes on serving."""
    with pytest.raises(SocketBusy):
        Daemon(daemon.socket_path, arena_path.with_name(f"{arena_path.stem}-2.arena"), 4 * MIB)
    Client(daemon.socket_path).ping()


def test_socket_of_a_dead_daemon_is_replaced(
    tmp_path: Path, process: DaemonProcess, arena_path: Path
) -> None:
    """What kill -9 left behind does not keep the next daemon from starting, and stop removes its own file."""
    process.kill()
    assert process.socket_path.exists()
    running = Daemon(process.socket_path, arena_path.with_name(f"{arena_path.stem}-2.arena"), 4 * MIB)
    Client(process.socket_path).ping()
    running.close()
    assert not process.socket_path.exists()


@pytest.mark.parametrize("name", ["x" * 200, "missing/s", "file"])
def test_impossible_socket_paths(tmp_path: Path, arena_path: Path, name: str) -> None:
    """A path that cannot be a socket is refused by name, and a file that is there is left alone."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SocketPathError, match=name[:20]):
        Daemon(tmp_path / name, arena_path, 4 * MIB)
    assert (tmp_path / "file").read_text() == "mine"


def test_arena_on_hugetlbfs() -> None:
    """An arena of explicit huge pages can be mapped, touched and copied to."""
    size = 4 * MIB
    fd = os.memfd_create("arena", os.MFD_HUGETLB | os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        try:
            mmap.mmap(fd, size).close()
        except OSError:
            pytest.skip("no huge pages are reserved here (vm.nr_hugepages)")
        view = ArenaView(fd, size, fd, size, True)
        view.touch(0, size)
        view.view(2 * MIB - 1, 2)[:] = b"ab"
        assert ctypes.string_at(view.address + 2 * MIB - 1, 2) == b"ab"
        with pytest.raises(ValueError, match="outside"):
            view.view(size - 1, 2)
    finally:
        os.close(fd)
