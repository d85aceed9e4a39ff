"""Peers that are not believed: each case costs an Error frame or a connection, never the daemon."""

from __future__ import annotations

import logging
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.client import Client
from kvstore.protocol import frames
from tests.door.conftest import HASH_BYTES, LEASES_MAX, check, hashes_of, records_of, space_of
from tests.door.daemon import MIB, Daemon
from tests.door.peer import Peer


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    connected = Peer(daemon.socket_path)
    yield connected
    connected.socket.close()


@pytest.fixture(autouse=True)
def still_serving(daemon: Daemon) -> Iterator[None]:
    """After every case a well-behaved client is served, and nothing is held by those who left."""
    yield
    with Client(daemon.socket_path, timeout_s=20) as client:
        space = space_of(client, "after")
        assert client.put(space, hashes_of(2), b"", records_of(2)) == 2
        assert check(daemon.socket_path) == []
    wait_for(lambda: daemon.call(lambda: daemon.engine.sessions) == [], daemon)


def wait_for(condition: Callable[[], bool], daemon: Daemon, limit_s: float = 5) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        for connection in list(daemon.door.connections):
            daemon.call(connection.abort)
        assert time.monotonic() < until
        time.sleep(0.01)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "kvstore.door"]


@pytest.mark.parametrize(
    "garbage",
    [
        *(
            b"\xc1\xc1\xc1",
            b"",
            b"\x95\x03",
            b"GET / HTTP/1.1\r\n",
            b"\x91" * 5000,
            b"\x91\x63",
            b"\xdd\xff\xff\xff\xff",
        ),
        bytes(frames.encode_frame(frames.Hello(frames.PROTOCOL_VERSION, "again")))[frames.HEADER_BYTES :],
        bytes(frames.encode_frame(frames.Ping()))[frames.HEADER_BYTES :] * 2,
        bytes(frames.FRAME_BYTES_MAX),
    ],
)
def test_garbage_in_a_frame(daemon: Daemon, peer: Peer, garbage: bytes, caplog: Any) -> None:
    """A frame that is not msgpack, or no request, is answered by one Error, and one log line; where it ends is known, so
    that the connection, and what it leased, go on."""
    lease = peer.ask(frames.Reserve(peer.register(), hashes_of(1)[0], b"")).lease
    peer.socket.sendall(frames.HEADER.pack(len(garbage)) + garbage)
    assert peer.error() in ("bad_frame", "bad_request")
    assert len(lines(caplog)) == 1
    assert peer.ask(frames.Commit(lease, [0], bytes(16))) == frames.Count(1)


def test_garbage_instead_of_frames(daemon: Daemon, peer: Peer, caplog: Any) -> None:
    """Random bytes end the connection after one Error and one log line."""
    peer.socket.sendall(b"\xff" * 100_000)
    assert peer.error() == "frame_too_large"
    assert peer.is_hung_up()
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frames.HEADER.pack(2 << 30), "frame_too_large"),
        (frames.HEADER.pack(frames.HELLO_BYTES_MAX + 1), "bad_frame"),
        (frames.HEADER.pack(3) + b"\xc1\xc1\xc1", "bad_frame"),
        (bytes(frames.encode_frame(frames.Ping())), "bad_frame"),
        (bytes(frames.encode_frame(frames.Hello(999, "future"))), "wrong_protocol"),
        (b"", "too_slow"),
        (frames.HEADER.pack(50) + b"half", "too_slow"),
    ],
)
def test_bad_greeting(daemon: Daemon, sent: bytes, code: str, caplog: Any) -> None:
    """A peer that greets wrongly, or not at all, is told why and shown out."""
    peer = Peer(daemon.socket_path, hello=False)
    peer.socket.sendall(sent)
    assert peer.error() == code
    assert peer.is_hung_up()
    assert len(lines(caplog)) == 1
    assert daemon.door.counters["refused"] == {code: 1}


@pytest.mark.parametrize("size", [frames.FRAME_BYTES_MAX + 1, 2 << 30])
def test_a_frame_that_claims_too_much(daemon: Daemon, peer: Peer, size: int) -> None:
    """A claim above the limit ends the connection before any memory is spent on it: no client of ours sends one."""
    peer.socket.sendall(frames.HEADER.pack(size))
    assert peer.error() == "frame_too_large"
    assert peer.is_hung_up()
    assert daemon.door.shared.frame_memory.used_bytes == 0


def test_half_a_frame(daemon: Daemon, peer: Peer) -> None:
    """A peer that stops in the middle of a frame is dropped, and its leases go back."""
    space = peer.register()
    assert peer.ask(frames.Reserve(space, b"".join(hashes_of(3)), b"")).lease
    peer.socket.sendall(frames.HEADER.pack(1 << 20) + bytes(300_000))
    assert peer.error() == "too_slow"
    assert peer.is_hung_up()
    assert daemon.call(lambda: daemon.engine.sessions) == []


def test_a_frame_byte_by_byte(peer: Peer) -> None:
    """A slow but honest peer is served, however its frames are cut."""
    space = peer.register()
    frame = bytes(frames.encode_frame(frames.Lookup([space], b"".join(hashes_of(2)))))
    for byte in frame + frame:
        peer.socket.sendall(bytes([byte]))
    assert frames.answer_decoder.decode(peer.receive()) == frames.Count(0)
    assert frames.answer_decoder.decode(peer.receive()) == frames.Count(0)


@pytest.mark.parametrize("hash_bytes", [HASH_BYTES, frames.HASH_BYTES_MAX])
def test_the_largest_lookup(peer: Peer, hash_bytes: int) -> None:
    """A frame of 2 MiB, or of 4, which arrives in many pieces, is served; frames right behind it, too."""
    space = peer.register(hash_bytes)
    most = [space] * frames.LOOKUP_NAMESPACES_MAX if hash_bytes == frames.HASH_BYTES_MAX else [space]
    frame = frames.encode_frame(frames.Lookup(most, bytes(frames.HASHES_MAX * hash_bytes), trace="0" * 55))
    peer.socket.sendall(frame + frames.encode_frame(frames.Ping()))
    assert frames.answer_decoder.decode(peer.receive()) == frames.Count(0)
    assert frames.answer_decoder.decode(peer.receive()) == frames.Done()


def test_a_peer_that_never_reads(daemon: Daemon, peer: Peer) -> None:
    """Who sends requests and reads no answers is not served beyond a bound, and then dropped."""
    space = peer.register()
    assert peer.ask(frames.Reserve(space, b"".join(hashes_of(3)), b"")).lease
    many = bytes(frames.encode_frame(frames.Residency(space, bytes(60_000 * HASH_BYTES))))
    peer.socket.settimeout(2)
    with pytest.raises(OSError):  # reset, broken pipe or timed out: all say it is over
        peer.socket.sendall(many * 100)
    wait_until = time.monotonic() + 5
    while daemon.call(lambda: daemon.engine.sessions) and time.monotonic() < wait_until:
        time.sleep(0.02)
    assert daemon.call(lambda: daemon.engine.sessions) == []
    assert daemon.door.counters["refused"] == {"too_slow": 1}
    assert daemon.door.counters["frames"]["Residency"] < 30


BAD_REQUESTS: list[tuple[Callable[[int], msgspec.Struct], str]] = [
    (lambda _: frames.Lookup([77], bytes(32)), "unknown_namespace"),
    (lambda _: frames.Reserve(77, bytes(32), b""), "unknown_namespace"),
    (lambda n: frames.Lookup([n], bytes(33)), "bad_request"),
    (lambda n: frames.Lookup([n], b""), "bad_request"),
    (lambda _: frames.Lookup([], bytes(32)), "bad_request"),
    (lambda n: frames.Lookup([n], bytes(32), prefill_tokens_per_s=float("nan")), "bad_request"),
    (lambda _: frames.Report(float("nan")), "bad_request"),
    (lambda _: frames.Explain([b"d" * 16], bytes(32 * (frames.HASHES_MAX + 1))), "limit_exceeded"),
    (lambda _: frames.Explain([b"d" * 16] * 64, bytes(32 * frames.HASHES_MAX)), "limit_exceeded"),
    (lambda n: frames.Lookup([n] * (frames.LOOKUP_NAMESPACES_MAX + 1), bytes(32)), "bad_request"),
    (lambda n: frames.Lookup([n], bytes(32 * (frames.HASHES_MAX + 1))), "limit_exceeded"),
    (lambda n: frames.Windows([(n, 16), (77, 16)], bytes(32), 16, 16, 16, 16), "unknown_namespace"),
    (lambda n: frames.Windows([(n, 16)], bytes(32), 3, 16, 16, 16), "bad_request"),
    (lambda n: frames.Windows([(n, 16)], bytes(32), 16, 0, 16, 16), "bad_request"),
    (lambda n: frames.Windows([(n, 16)] * 65, bytes(32), 16, 16, 16, 16), "bad_request"),
    (
        lambda n: frames.Windows([(n, 16)], bytes(32 * (frames.HASHES_MAX + 1)), 16, 16, 16, 16),
        "limit_exceeded",
    ),
    (lambda n: frames.Reserve(n, bytes(32 * (frames.LEASE_HASHES_MAX + 1)), b""), "limit_exceeded"),
    (lambda n: frames.Reserve(n, bytes(64), b""), "bad_request"),  # the same hash twice
    (lambda n: frames.Reserve(n, bytes(32), b"short"), "bad_request"),
    (lambda n: frames.Acquire(n, bytes(32), frames.WAIT_MS_MAX + 1), "bad_request"),
    (lambda n: frames.Acquire(n, bytes(32), -1), "bad_request"),
    (lambda n: frames.Acquire(n, bytes(32), 0, 0, b"short"), "bad_request"),
    (lambda _: frames.Commit(12345, [], b""), "unknown_lease"),
    (lambda _: frames.Release(12345), "unknown_lease"),
    (lambda _: frames.Release(-1), "bad_request"),
    (lambda _: frames.Register(b"short", 1, 32, 16, {}), "bad_request"),
    (lambda _: frames.Register(b"x" * 16, 0, 32, 16, {}), "bad_request"),
    (lambda _: frames.Register(b"x" * 16, 1 << 31, 32, 16, {}), "bad_request"),
    (lambda _: frames.Register(b"x" * 16, 4096, 65, 16, {}), "bad_request"),
    (lambda _: frames.Register(b"d" * 16, 4096, 32, 16, {}), "namespace_conflict"),
    (lambda _: frames.Register(b"x" * 16, 4096, 32, 16, {"k": "v" * 1025}), "bad_request"),
    (lambda _: frames.Register(b"x" * 16, 4096, 32, 16, {}, [4096, 0]), "bad_request"),
    (lambda _: frames.Register(b"x" * 16, 4096, 32, 16, {}, [1] * 1025), "bad_request"),
    (lambda _: frames.Register(b"d" * 16, 64 << 10, 32, 16, {}, [32 << 10] * 2), "namespace_conflict"),
]


def test_bad_requests(daemon: Daemon, peer: Peer, caplog: Any) -> None:
    """Each bad request is refused with its code, the connection goes on, and one line is logged for all."""
    space = peer.register()
    for make, code in BAD_REQUESTS:
        assert peer.code_of(make(space)) == code, make(space)
    assert peer.ask(frames.Ping()) == frames.Done()
    assert len(lines(caplog)) == 1
    assert sum(daemon.door.counters["refused"].values()) == len(BAD_REQUESTS)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([2048, 2047], "columns of 4095 bytes together: they must add up to 4096"),
        ([4095], "columns of 4095 bytes together: they must add up to 4096"),
        ([1, 2] * 4 + [4084], "columns in 9 runs of equal sizes: at most 8 are allowed"),
    ],
)
def test_columns_that_cannot_be_are_refused(peer: Peer, sizes: list[int], words: str) -> None:
    """One line names the namespace, what is wrong with its columns, and what is allowed."""
    answer = peer.ask(frames.Register(b"x" * 16, 4096, 32, 16, {}, sizes))
    assert answer == frames.Error("bad_request", f"namespace {(b'x' * 16).hex()}: {words}")


def test_a_commit_of_what_was_not_reserved(daemon: Daemon, peer: Peer) -> None:
    """Indexes outside of the lease, repeated ones and missing checksums are refused; the lease lives on."""
    space = peer.register()
    lease = peer.ask(frames.Reserve(space, b"".join(hashes_of(2)), b"")).lease
    assert peer.code_of(frames.Commit(lease, [2], bytes(16))) == "index_not_reserved"
    assert peer.code_of(frames.Commit(lease, [0, 0], bytes(32))) == "index_not_reserved"
    assert peer.code_of(frames.Commit(lease, [0, 1], bytes(16))) == "bad_request"
    assert peer.ask(frames.Commit(lease, [0, 1], bytes(32))) == frames.Count(2)
    assert peer.code_of(frames.Commit(lease, [], b"")) == "unknown_lease"


def test_the_lease_of_somebody_else(daemon: Daemon, peer: Peer) -> None:
    """A lease id means nothing on another connection."""
    space = peer.register()
    lease = peer.ask(frames.Reserve(space, b"".join(hashes_of(2)), b"")).lease
    other = Peer(daemon.socket_path)
    assert other.code_of(frames.Commit(lease, [0], bytes(16))) == "unknown_lease"
    assert other.code_of(frames.Release(lease)) == "unknown_lease"
    assert other.code_of(frames.Lookup([space], bytes(32))) == "unknown_namespace"
    other.socket.close()
    assert peer.ask(frames.Commit(lease, [0], bytes(16))) == frames.Count(1)


def test_too_many_leases(daemon: Daemon, peer: Peer) -> None:
    """One connection may hold so many leases and no more; closing one makes room for one."""
    space = peer.register()
    requests = [frames.Reserve(space, hash_, b"") for hash_ in hashes_of(LEASES_MAX + 1)]
    leases = [peer.ask(request).lease for request in requests[:-1]]
    assert all(leases)
    assert peer.code_of(requests[-1]) == "limit_exceeded"
    assert peer.ask(frames.Commit(leases[0], [], b"")) == frames.Count(0)
    assert peer.ask(requests[-1]).lease


def test_a_peer_that_vanishes(daemon: Daemon, peer: Peer) -> None:
    """Leases of a peer that vanished are given back at once."""
    space = peer.register()
    assert peer.ask(frames.Reserve(space, b"".join(hashes_of(3)), b"")).lease
    peer.socket.close()
    until = time.monotonic() + 5
    while daemon.call(lambda: daemon.engine.sessions) and time.monotonic() < until:
        time.sleep(0.01)
    assert daemon.call(lambda: daemon.engine.sessions) == []
    assert daemon.call(daemon.arena.stats).used_bytes == daemon.arena.owners.quarantined() == 0


AS_ANOTHER_USER = """
import os, sys
import kvstore.client.connection  # while we may still read its files
from kvstore.client import Client, Refused
client = Client(sys.argv[1])
os.setgid(65534), os.setuid(65534)
try:
    client.ping()
except Refused as error:
    print(error.code)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(arena_path: Path, caplog: Any) -> None:
    """Even where file modes let it in, a process of another user is told no."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "s"
        daemon = Daemon(path, arena_path.with_name(f"{arena_path.stem}-2.arena"), 4 * MIB)
        try:
            assert path.stat().st_mode & 0o777 == 0o600
            path.chmod(0o666)
            command = [sys.executable, "-c", AS_ANOTHER_USER, str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.stdout == "wrong_peer\n", done.stderr
            assert daemon.door.counters["refused"] == {"wrong_peer": 1}
            assert len(lines(caplog)) == 1
        finally:
            daemon.close()


def test_a_thousand_connections(daemon: Daemon) -> None:
    """A thousand attached peers are served at once, and all leases go back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096 <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    elif soft < 4096:
        pytest.skip("needs 4096 descriptors")
    daemon.door.api.limits = daemon.door.api.limits._replace(process_connections_max=2000)
    peers = [Peer(daemon.socket_path) for _ in range(1000)]
    assert peers[-1].ask(frames.Ping()) == frames.Done()
    assert daemon.door.counters["attached"] == 1000
    for peer in peers[::50]:
        assert peer.ask(frames.Ping()) == frames.Done()
        assert peer.ask(frames.Reserve(peer.register(), os.urandom(HASH_BYTES), b"")).lease
    for peer in peers:
        peer.socket.close()
    until = time.monotonic() + 10
    while daemon.call(lambda: daemon.engine.sessions) and time.monotonic() < until:
        time.sleep(0.02)
    assert daemon.call(daemon.arena.stats).used_bytes == daemon.arena.owners.quarantined() == 0
    assert daemon.door.counters["connections"] == 0


def test_our_own_bug_is_an_answer(daemon: Daemon, peer: Peer, monkeypatch: Any, caplog: Any) -> None:
    """An exception inside the engine is logged with its traceback and answered; the connection goes on."""

    def broken(*_: object) -> int:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(daemon.engine, "find_steps", broken)
    space = peer.register()
    assert peer.code_of(frames.Lookup([space], bytes(32))) == "internal"
    assert peer.ask(frames.Ping()) == frames.Done()
    assert [record.levelno for record in caplog.records if record.name == "kvstore.door"] == [logging.ERROR]


def test_random_frames(daemon: Daemon, peer: Peer) -> None:
    """Two thousand damaged requests leave the daemon serving."""
    draw = random.Random(7)
    for _ in range(2000):
        payload = bytearray(frames.encode_frame(frames.Reserve(draw.randrange(3), bytes(64), b""))[4:])
        for _ in range(draw.randrange(1, 4)):
            payload[draw.randrange(len(payload))] = draw.randrange(256)
        try:
            peer.socket.sendall(struct.pack("<I", len(payload)) + payload)
            if not peer.receive():
                peer.socket.close()
                peer = Peer(daemon.socket_path)
        except OSError:
            peer.socket.close()
            peer = Peer(daemon.socket_path)
    peer.socket.close()
