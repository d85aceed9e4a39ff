"""Garbage at every door of a daemon: whatever comes, and however it was changed, costs its own connection and nobody else anything.

INPUTS=2000 (`make soak`) sends so many of them to each door in place of a few.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.protocol import frames
from tests.fuzz.mutator import changed
from tests.region.regions import chain, read, space_of, store
from tests.rpc.serving import resident_bytes, target_of, until
from tests.running import TIMEOUT_S, Daemon, Place, daemons
from tests.security import certificates
from tests.security.certificates import Authority

INPUTS = int(os.environ.get("INPUTS", "12"))
GROWTH_BYTES_MAX = 64 << 20
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# How those begin who have business at one of the doors.
BEGINNINGS = (
    b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\nnothing",
    b"POST /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\nx",
    HTTP2 + bytes([0, 0, 5, 1, 5, 0, 0, 0, 1]) + b"\x83\x86\x84\x41\x8c",
    HTTP2 + struct.pack(">I", 0xFFFFFF)[1:] + bytes([0, 0, 0, 0, 0, 1]) + bytes(4096),
    b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(range(190)),
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48) + b"\4\x19\5READY\x0bSocket-Type\0\0\0\3SUB\0\1\1",
    frames.encode_frame(frames.Hello(frames.PROTOCOL_VERSION, "garbage"))
    + frames.encode_frame(frames.Status()),
    b"\0" * 4096,
)


def free_ports(count: int) -> list[int]:
    """A moment ago nobody had them."""
    with contextlib.ExitStack() as held:
        made = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def ports_of(daemon: Daemon) -> list[int]:
    """Where it and its children listen, as the kernel says."""
    found = set()
    listening = {
        fields[9]: int(fields[1].rpartition(":")[2], 16)
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }
    main = daemon.process.pid
    for pid in (main, *map(int, Path(f"/proc/{main}/task/{main}/children").read_text().split())):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inode = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                found |= {listening[inode[1]]} if inode and inode[1] in listening else set()
    return sorted(found)


@pytest.fixture(params=["plain", "tls"])
def secured(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> Iterator[tuple[Daemon, Any]]:
    """A daemon with all of its doors, and how a client of them proves who it is."""
    (tmp_path / "tls").mkdir()
    words, credentials = [], None
    if request.param == "tls":
        authority = Authority()
        files = certificates.write(tmp_path / "tls", *authority.signed(["node"]), authority.pem)
        certificate, key = authority.signed(["somebody"])
        credentials = grpc.ssl_channel_credentials(authority.pem, key, certificate)
        words = [*certificates.settings(files), "--set=security.plain=web,events"]
    events = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    listen = ["grpc.listen=127.0.0.1:0", "web.listen=127.0.0.1:0"]
    listen += [f"events.endpoint={events[0]}", f"events.replay_endpoint={events[1]}"]
    with daemons(tmp_path) as start:
        daemon = start(place, *place.arguments, *[f"--set={one}" for one in listen], *words)
        yield daemon, credentials


def throw(kind: int, where: Any, garbage: bytes) -> None:
    """One connection that says this, and nothing more."""
    with contextlib.suppress(OSError), socket.socket(kind) as peer:
        peer.settimeout(0.1)
        peer.connect(where)
        peer.sendall(garbage)
        peer.shutdown(socket.SHUT_WR)
        for _ in range(8):
            if not peer.recv(4096):
                break


def test_garbage_harms_nobody(secured: tuple[Daemon, Any], place: Place) -> None:
    """At every port that any process of it listens at, and at its socket: no process ends, none grows, nothing of ours is raised, and
    who has business there is served."""
    daemon, credentials = secured
    target = target_of(daemon)
    until(lambda: len(ports_of(daemon)) == 4, "the page, gRPC, events and their replay listen")
    doors = [(socket.AF_INET, ("127.0.0.1", port)) for port in ports_of(daemon)]
    main = daemon.process.pid
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    before = {pid: resident_bytes(int(pid)) for pid in (str(main), *children)}

    @settings(
        max_examples=INPUTS,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 1 << 62))
    def attack(seed: int) -> None:
        chance = random.Random(seed)
        for kind, where in (*doors, (socket.AF_UNIX, str(place.socket))):
            throw(kind, where, changed(chance, chance.choice(BEGINNINGS))[: 1 << 20])

    with Client(place.socket, 10.0) as client:
        space, hashes = space_of(client, "acme"), chain("acme", 3)
        store(client, space, hashes)
        attack()
        assert read(client, space, hashes) == 3
    assert Path(f"/proc/{main}/task/{main}/children").read_text().split() == children
    for pid, was in before.items():
        assert resident_bytes(int(pid)) - was < GROWTH_BYTES_MAX, pid
    name = target.replace("127.0.0.1", "localhost")
    channel = grpc.secure_channel(name, credentials) if credentials else grpc.insecure_channel(name)
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
    page = re.search(r"http://127\.0\.0\.1:\d+", daemon.log())
    assert page is not None
    with urllib.request.urlopen(f"{page[0]}/healthz", timeout=TIMEOUT_S) as answer:
        assert answer.status == 200
    assert "Traceback" not in daemon.log()
