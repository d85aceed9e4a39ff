"""Whoever reaches the port says as much as subscriptions and requests are, and no more: ZeroMQ itself keeps whatever comes."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvstore.events import guests
from kvstore.events.wire import sequence_bytes
from tests.events.following import wait_until
from tests.events.test_publisher import TIMEOUT_MS, Node, asked, context, nodes

__all__ = ["context", "nodes"]  # fixtures

MOST_BYTES = 128 << 20  # that may come between two looks, and wait in both kernels' buffers
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE = 1


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    node = nodes(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    assert node.publisher._router is not None
    node.endpoint, node.replay = (
        one.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        for one in (node.publisher._pub, node.publisher._router)
    )
    return node


def connected(endpoint: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), timeout=60)


def greeted(endpoint: str, kind: bytes) -> socket.socket:
    """A peer that has said what it is."""
    peer = connected(endpoint)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    peer.sendall(GREETING + bytes([4, len(ready)]) + ready)
    peer.recv(1 << 10)
    return peer


def parts() -> Iterator[bytes]:
    """Of one message, without end."""
    yield from iter(lambda: 10_000 * (bytes([MORE, 100]) + bytes(100)), b"")


def subscriptions() -> Iterator[bytes]:
    """To something else each."""
    for number in count():
        yield b"".join(bytes([0, 101, 1]) + struct.pack(">QQ", number, n) + bytes(84) for n in range(10_000))


def large_one() -> Iterator[bytes]:
    """Of which most is still to come."""
    yield bytes([2]) + struct.pack(">Q", 1 << 40) + b"\1"
    yield from iter(lambda: bytes(1 << 20), b"")


def say(peer: socket.socket, all_of_it: Iterator[bytes]) -> None:
    sent = 0
    for what in all_of_it:
        peer.sendall(what)
        sent += len(what)
        assert sent < MOST_BYTES


@pytest.mark.parametrize(
    ("door", "kind", "saying"),
    [("replay", b"DEALER", parts), ("endpoint", b"SUB", subscriptions), ("endpoint", b"SUB", large_one)],
)
def test_who_says_too_much_is_cut_off(
    node: Node, context: Any, door: str, kind: bytes, saying: Callable[[], Iterator[bytes]]
) -> None:
    """Parts of a message that has no end, subscriptions to everything, one of a terabyte: the connection ends, and others go on."""
    live = context.socket(zmq.SUB)
    live.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    live.connect(node.endpoint)
    live.subscribe("")
    live.recv_multipart()
    with greeted(getattr(node, door), kind) as peer, pytest.raises(ConnectionError):
        say(peer, saying())
    node.store(1)
    assert live.recv_multipart()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(node.replay)
    assert asked(dealer, sequence_bytes(0))


def test_no_more_than_so_many_are_let_in(node: Node, context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes then is cut off, and those that are here stay; whoever goes makes room, and leaves no descriptor behind."""
    monkeypatch.setattr(guests, "GUESTS_MAX", 3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    here = [greeted(node.replay, b"DEALER") for _ in range(3)]
    (router,) = node.publisher._guests[1:]
    wait_until(lambda: len(router._here) == 3)
    with suppress(ConnectionError), connected(node.replay) as one_more:
        while one_more.recv(1 << 10):
            pass
    here[0].sendall(
        b"".join(bytes([flags, len(x)]) + x for flags, x in ((MORE, b""), (0, sequence_bytes(0))))
    )
    assert here[0].recv(1 << 10)
    for peer in here:
        peer.close()
    wait_until(lambda: not router._here)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
