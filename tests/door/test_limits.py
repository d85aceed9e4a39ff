"""What one process may have of connections, leases and namespaces, and how they are given back."""

from __future__ import annotations

import asyncio
import gc
import logging
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Refused, Unavailable
from kvstore.daemon.config.config import Config
from kvstore.daemon.service import Service
from kvstore.door.holders import DOOR_NAMESPACES_MAX
from kvstore.index.namespaces import NAMESPACE_DROP_BLOCKS, NamespaceRegistry
from kvstore.protocol import frames
from kvstore.security.principals import local
from tests.door.conftest import HASH_BYTES, RECORD_BYTES, DaemonProcess, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon
from tests.door.peer import REGISTER, Peer
from tiers.namespace_spec import NamespaceSpec

AS_ANOTHER_PROCESS = """
import sys
from kvstore.client import Client
Client(sys.argv[1], timeout_s=30).ping()
"""

ACROSS_PID_NAMESPACES = """
import ctypes, os, sys, time
from pathlib import Path
if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID: for children
    sys.exit(3)
daemon = os.fork()
if not daemon:
    import uvloop
    from tests.door.daemon import serve
    uvloop.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), 16 << 20))
from kvstore.client import Client, Refused
def served(count, codes):
    clients = [Client(sys.argv[1], timeout_s=30) for _ in range(count)]
    for client in clients:
        try:
            client.ping()
        except Refused as error:
            codes.add(error.code)
    return clients, sum(client.connected for client in clients)
try:
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    codes = set()
    clients, count = served(140, codes)
    print(count, *codes, flush=True)
    if not os.fork():
        print(served(1, codes)[1], flush=True)
        os._exit(0)
    os.wait()
finally:
    os.kill(daemon, 9)
"""


def test_connections_of_one_process(daemon: Daemon) -> None:
    """A process that leaks connections is refused further ones; what it closes, it may open again."""
    daemon.door.api.limits = daemon.door.api.limits._replace(process_connections_max=3)
    peers = [Peer(daemon.socket_path) for _ in range(3)]
    refused = Peer(daemon.socket_path, hello=False)
    assert refused.error() == "too_many_connections"
    command = [sys.executable, "-c", AS_ANOTHER_PROCESS, str(daemon.socket_path)]
    subprocess.run(command, check=True, timeout=60)
    peers.pop().socket.close()
    until = time.monotonic() + 10
    while daemon.door.counters["connections"] > 2 and time.monotonic() < until:
        time.sleep(0.01)
    peers.append(Peer(daemon.socket_path))
    for peer in [*peers, refused]:
        peer.socket.close()


def test_a_process_is_one_wherever_the_daemon_sees_it_from(tmp_path: Path, arena_path: Path) -> None:
    """In a pid namespace of its own the daemon sees no pids: a process has its limit all the same, and the next process
    one of its own."""
    command = [sys.executable, "-c", ACROSS_PID_NAMESPACES, str(tmp_path / "s"), str(arena_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 3:
        pytest.skip("needs the right to make a pid namespace")
    assert set(done.stdout.splitlines()) == {"ready", "128 too_many_connections", "1"}, done.stderr


def test_peers_that_nothing_tells_apart_share_a_limit(daemon: Daemon, monkeypatch: Any) -> None:
    """Without pids and pidfds all peers count as one process."""
    enter = daemon.door.api.enter
    assert enter(local(0, 0)) is enter(local(0, 0))
    for process in (7, -7):
        assert enter(local(0, process)) is not enter(local(0, 0))


SILENT = """
import resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
sockets = []
for number in range(int(sys.argv[2])):
    sockets.append(socket.socket(socket.AF_UNIX))
    sockets[-1].connect(sys.argv[1])
    if number == 200:
        print("many", flush=True)
print("all", flush=True)
sys.stdin.read()
"""


def test_silent_connections_of_one_process_hold_nobody_up(process: DaemonProcess) -> None:
    """While one process connects thousands of times and says nothing, another one is let in with its first try, and
    the log has a line a second at most."""
    command = [sys.executable, "-c", SILENT, str(process.socket_path), "900"]
    silent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert silent.stdin is not None and silent.stdout is not None
    assert silent.stdout.readline() == b"many\n"
    while silent.poll() is None:
        with Client(process.socket_path, timeout_s=30) as newcomer:
            newcomer.ping()
        if select.select([silent.stdout], [], [], 0)[0]:
            break
    with Client(process.socket_path, timeout_s=30) as newcomer:
        assert newcomer.status()["door"]["connections"] == 1
    silent.stdin.close()
    silent.wait()
    silent.stdout.close()


def test_a_queue_at_the_door_is_waited_in(tmp_path: Path) -> None:
    """A client whose connection does not fit into the daemon's queue tries again until its deadline."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(0)
    waiting = socket.socket(socket.AF_UNIX)
    waiting.connect(str(tmp_path / "s"))
    with pytest.raises(Unavailable, match="no answer in time"):
        Client(tmp_path / "s", timeout_s=0.1).ping()
    waiting.close()
    listener.close()


def test_leases_of_one_process(daemon: Daemon) -> None:
    """Two connections of one process that reserve and sit leave a quarter of the arena to others."""
    peers = [Peer(daemon.socket_path) for _ in range(3)]
    slots = 0
    for number, peer in enumerate(peers):
        space = peer.register()
        answer = peer.ask(frames.Reserve(space, b"".join(hashes_of(300, f"peer {number}")), b""))
        slots += sum(answer.granted)
    assert slots == 12 * MIB // RECORD_BYTES
    peers[0].socket.close()
    until = time.monotonic() + 10
    while len(daemon.door.connections) > 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert peers[2].ask(frames.Reserve(peers[2].register(), hashes_of(1, "more")[0], b"")).lease
    for peer in peers:
        peer.socket.close()


def test_namespaces_are_given_back(daemon: Daemon, monkeypatch: Any) -> None:
    """A process may have so many namespaces at a time, and any number one after another."""
    monkeypatch.setattr("kvstore.door.holders.DOOR_NAMESPACES_MAX", 2)
    with Client(daemon.socket_path, timeout_s=10) as client:
        spaces = [space_of(client, f"epoch {number}") for number in range(6)]
        for space in spaces[:2]:
            assert client.lookup([space], hashes_of(1)) == 0
        with pytest.raises(Refused, match="limit_exceeded"):
            client.lookup([spaces[2]], hashes_of(1))
        for before, space in zip(spaces, spaces[2:], strict=False):
            client.unregister(before)
            assert client.lookup([space], hashes_of(1)) == 0
        assert client.lookup([spaces[-1]], hashes_of(1)) == 0
        with (
            Client(daemon.socket_path, timeout_s=10) as other,
            pytest.raises(Refused, match="limit_exceeded"),
        ):
            other.lookup([spaces[0]], hashes_of(1))


def test_a_namespace_of_a_process_counts_once(daemon: Daemon, monkeypatch: Any) -> None:
    """However many connections have it, and however often each registers it, also where there is no room for another."""
    monkeypatch.setattr("kvstore.door.holders.DOOR_NAMESPACES_MAX", 2)
    peers = [Peer(daemon.socket_path) for _ in range(3)]
    given = 4096, HASH_BYTES, 16, {"model": "tiny"}
    numbers = [
        peer.ask(frames.Register(name * 16, *given)).namespace
        for name in (b"a", b"b", b"a")
        for peer in peers
    ]
    assert len(set(numbers)) == 2
    assert peers[0].code_of(frames.Register(b"c" * 16, *given)) == "limit_exceeded"
    for peer in peers:
        assert peers[0].code_of(frames.Register(b"c" * 16, *given)) == "limit_exceeded"
        assert peer.ask(frames.Unregister(numbers[0], False)) == frames.Done()
    assert peers[0].ask(frames.Register(b"c" * 16, *given)).namespace not in numbers
    for peer in peers:
        peer.socket.close()


def test_namespaces_that_nobody_has_a_handle_of(daemon: Daemon, monkeypatch: Any) -> None:
    """A client whose handle is gone gives the namespace back with its next registration, whatever became of it."""
    monkeypatch.setattr("kvstore.door.holders.DOOR_NAMESPACES_MAX", 3)
    with Client(daemon.socket_path, timeout_s=10) as client:
        kept = space_of(client, "kept")
        hashes = hashes_of(2)
        assert client.put(kept, hashes, b"", records_of(2, kept.record_bytes)) == 2
        for number in (0, 1, 2, 0, 3, 4):
            space = space_of(client, f"epoch {number}")
            again = space_of(client, f"epoch {number}")
            assert client.lookup([space], hashes_of(1)) == client.lookup([again], hashes_of(1)) == 0
            del space
            assert client.lookup([again, kept], hashes_of(1)) == 0, "the other handle still holds it"
            if number == 3:
                with Client(daemon.socket_path, timeout_s=10) as other:
                    other.unregister(space_of(other, "epoch 3"), end=True)
        assert client.lookup([kept], hashes) == 2


def test_a_namespace_that_is_ended(daemon: Daemon) -> None:
    """Nobody finds its blocks from that moment on; they are dropped in slices, those in use later."""
    count = NAMESPACE_DROP_BLOCKS + 40
    with (
        Client(daemon.socket_path, timeout_s=10) as client,
        Client(daemon.socket_path, timeout_s=10) as other,
    ):
        space = space_of(client, record_bytes=4096)
        hashes = hashes_of(count)
        assert client.put(space, hashes, b"", records_of(count, 4096)) == count
        assert other.lookup([space], hashes) == count
        lease = other.acquire(space, hashes[-1:])
        client.unregister(space, end=True)
        with pytest.raises(Refused, match="was ended"):
            other.lookup([space], hashes)
        engine = daemon.engine
        assert not daemon.call(engine.drop_ended), "the last block is a leaf, and in use"
        lease.release()
        other.ping()
        assert daemon.call(engine.drop_ended)
        assert daemon.call(engine.drop_ended)
        assert not daemon.call(engine.drop_ended)
        assert daemon.call(engine.check) == []
        assert daemon.call(lambda: engine.arena.stats().records) == 0
        assert other.lookup([space], hashes) == 0, "the client registered it again, by itself"
        assert client.lookup([space], hashes) == 0


def test_what_is_written_while_its_namespace_ends(daemon: Daemon) -> None:
    """A commit of a lease from before is taken, seen by nobody, and dropped as well."""
    peer, other = Peer(daemon.socket_path), Peer(daemon.socket_path)
    space = peer.register()
    assert other.register() == space
    lease = peer.ask(frames.Reserve(space, hashes_of(1)[0], b"")).lease
    assert other.ask(frames.Unregister(space, True)) == frames.Done()
    assert other.code_of(frames.Lookup([space], hashes_of(1)[0])) == "unknown_namespace"
    assert peer.ask(frames.Commit(lease, [0], bytes(16))) == frames.Count(1)
    assert peer.code_of(frames.Lookup([space], hashes_of(1)[0])) == "unknown_namespace"
    assert daemon.call(daemon.engine.drop_ended)
    assert not daemon.call(daemon.engine.drop_ended)
    assert daemon.call(lambda: len(daemon.engine.namespaces)) == 0
    assert peer.register() != space
    for connection in (peer, other):
        connection.socket.close()


LONG = "\U0001f9ca" * 60  # four bytes each


def test_what_a_client_registers_breaks_no_answer(daemon: Daemon) -> None:
    """However many namespaces with however long fields one process registers, and stores and asks for: what is too much
    is refused, every question of others is answered, in pages where it is long, and what was not used goes."""
    questions: dict[str, Callable[[Client], object]] = {
        "status": lambda c: c.status(),
        "live": lambda c: c.live(),
        "report": lambda c: c.report(0.0),
        "retention": lambda c: c.retention(),
        "settings": lambda c: c.settings(),
        "find": lambda c: c.find_prefixes(hashes_of(1)[0].hex()[:8]),
        "chains": lambda c: c.chains(hashes_of(1)[0]),
        "explain": lambda c: c.explain([b"0".zfill(16)], hashes_of(1)[0]),
        "check": lambda c: c.check(),
    }
    with (
        Client(daemon.socket_path, timeout_s=60, attach=False) as tool,
        Client(daemon.socket_path, timeout_s=60) as client,
    ):
        spaces, refused = [], 0
        for number in range(DOOR_NAMESPACES_MAX + 8):
            fields = {f"{number} {key} {LONG}"[:900]: LONG for key in range(32)}
            fields["tenant"] = f"{number}" + LONG
            spaces.append(client.namespace(f"{number}".zfill(16).encode(), 4096, HASH_BYTES, 16, fields))
            try:
                assert client.lookup(spaces[-1:], hashes_of(1), ticket=number + 1, tokens=16) == 0
                client.put(spaces[-1], hashes_of(1), b"", [bytes(4096)])
            except Refused:
                refused += 1
        assert refused > 8 and set(daemon.door.counters["refused"]) == {"limit_exceeded"}
        for name, ask in questions.items():
            assert ask(tool) is not None, name
        listed = tool.list_namespaces()
        assert len({space["digest"] for space in listed}) == len(spaces) - refused
        assert len(tool.status()["namespaces"]) < len(listed) == tool.status()["namespaces_total"]


def test_fields_are_bounded(daemon: Daemon) -> None:
    """The daemon itself refuses fields that are too large for one namespace; the connection goes on."""
    peer = Peer(daemon.socket_path)
    fields = {f"{number}": "x" * 1024 for number in range(16)}
    assert peer.code_of(frames.Register(b"f" * 16, 4096, HASH_BYTES, 16, fields)) == "limit_exceeded"
    del fields["0"]
    assert isinstance(peer.ask(frames.Register(b"f" * 16, 4096, HASH_BYTES, 16, fields)), frames.Registered)
    peer.socket.close()


def test_a_digest_of_another_size_shuts_nobody_out(daemon: Daemon) -> None:
    """Registered with a wrong record size by somebody who left: the engine registers and stores."""
    peer = Peer(daemon.socket_path)
    peer.ask(frames.Register(b"model".ljust(16, b"."), 4096, HASH_BYTES, 16, {}))
    with Client(daemon.socket_path, timeout_s=10) as engine:
        space = space_of(engine)
        with pytest.raises(Refused, match="namespace_conflict"):
            engine.lookup([space], hashes_of(1))
        peer.socket.close()
        until = time.monotonic() + 10
        while len(daemon.door.connections) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.put(space, hashes_of(2), b"", records_of(2)) == 2


def test_a_namespace_in_use_is_not_pushed_out(daemon: Daemon, monkeypatch: Any) -> None:
    """Namespaces without blocks make room for others, but not those that a connection has registered."""
    monkeypatch.setattr("kvstore.index.namespaces.NAMESPACES_MAX", 3)
    keeper, passer = Peer(daemon.socket_path), Peer(daemon.socket_path)
    space = keeper.register()
    for number in range(10):
        answer = passer.ask(frames.Register(f"{number:016d}".encode(), 4096, HASH_BYTES, 16, {}))
        assert passer.ask(frames.Unregister(answer.namespace)) == frames.Done()
    assert keeper.ask(frames.Lookup([space], hashes_of(1)[0])) == frames.Count(0)
    for connection in (keeper, passer):
        connection.socket.close()


def test_ended_namespaces_are_not_kept(tmp_path: Path) -> None:
    """Of what was ended the file of names has the digest and no name, whether or not its blocks are gone."""
    registry = NamespaceRegistry(tmp_path / "names")
    namespace = registry.register(NamespaceSpec(b"e" * 16, 4096, HASH_BYTES, 16, {"tenant": "acme"}))
    registry.end(namespace.id)
    content = registry.snapshot()
    assert content is not None
    registry.save(content)
    assert b"acme" not in (tmp_path / "names").read_bytes()
    assert len(NamespaceRegistry(tmp_path / "names")) == 0
    assert registry.ended() is None
    assert len(registry) == 0


@pytest.mark.parametrize("skip", [0, 1, 1 << 62, (1 << 63) - 1])
def test_pages_beyond_the_last(daemon: Daemon, skip: int, caplog: Any) -> None:
    """Any `skip` is answered, with nothing where there is nothing, and nothing is logged."""
    peer = Peer(daemon.socket_path)
    peer.register()
    listed = peer.ask(frames.Namespaces(skip)).report["namespaces"]
    assert [space["digest"] for space in listed] == [REGISTER.digest.hex()][skip:]
    assert isinstance(peer.ask(frames.Report(0.0, skip)), frames.StatusReport)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    peer.socket.close()


def test_a_part_of_the_daemon_that_fails_ends_it() -> None:
    """An exception in a background part stops the daemon, which says why; no half of one goes on serving."""

    async def broken() -> None:
        raise ZeroDivisionError("planted")

    async def run() -> Service:
        service = Service(Config(), None)  # type: ignore[arg-type]  # nothing of the storage is used
        service._in_background(broken())
        await asyncio.wait_for(service._stop.wait(), 10)
        return service

    failure = asyncio.run(run()).failure
    assert failure is not None
    assert "ZeroDivisionError: planted" in failure


def test_a_connection_that_ended_is_no_garbage(daemon: Daemon) -> None:
    """What a connection was made of goes with it: a daemon never looks through all of its objects for circles."""
    gc.disable()
    try:
        with Client(daemon.socket_path, timeout_s=10) as client:
            space = space_of(client)
            client.put(space, hashes_of(2), b"", records_of(2))
            client.acquire(space, hashes_of(2)).release()
            ended = daemon.call(lambda: [weakref.ref(each) for each in daemon.door.connections])
        until = time.monotonic() + 10
        while any(each() is not None for each in ended) and time.monotonic() < until:
            time.sleep(0.02)
        assert len(ended) == 1 and ended[0]() is None
    finally:
        gc.enable()
