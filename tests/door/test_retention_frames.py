"""Rules through the door: answered when they are on disk, in order, and never holding up others."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvstore.client import Client
from kvstore.protocol import frames
from tests.door.daemon import Daemon
from tests.door.peer import REGISTER, Peer

HASH = b"h" * 32


@pytest.fixture
def peer(daemon: Daemon) -> Iterator[Peer]:
    peer = Peer(daemon.socket_path)
    peer.socket.sendall(frames.encode_frame(REGISTER))
    peer.receive()
    yield peer
    peer.socket.close()


def answer(peer: Peer) -> frames.Answer:
    return frames.answer_decoder.decode(peer.receive())


def test_an_answer_waits_for_the_disk(daemon: Daemon, peer: Peer) -> None:
    """What is sent behind a command is answered after it; others are served meanwhile."""
    requests = [frames.encode_frame(frames.SetPin("", HASH, True)), frames.encode_frame(frames.Ping())]
    peer.socket.sendall(b"".join(requests))
    peer.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        peer.socket.recv(1, socket.MSG_PEEK)
    with Client(daemon.socket_path, timeout_s=5, attach=False) as other:
        other.ping()
        assert other.retention()["pins"] == []
        peer.socket.settimeout(5)
        daemon.call(daemon.io.run)
        assert answer(peer) == frames.StatusReport({"namespaces": [REGISTER.digest.hex()]})
        assert answer(peer) == frames.Done()
        assert [pin["block_hash"] for pin in other.retention()["pins"]] == [HASH.hex()]


def test_whoever_hangs_up_meanwhile_harms_nobody(daemon: Daemon, peer: Peer) -> None:
    """The rule is set all the same, once its write has begun."""
    peer.socket.sendall(frames.encode_frame(frames.SetTtl("", b"", "acme", 60.0, True)))
    with Client(daemon.socket_path, timeout_s=5, attach=False) as other:
        other.ping()
        while not daemon.call(lambda: len(daemon.io.waiting)):
            other.ping()
        peer.socket.close()
        other.ping()
        daemon.call(daemon.io.run)
        assert [ttl["ttl_s"] for ttl in other.retention()["ttls"]] == [60.0]


@pytest.mark.parametrize(
    ("request_", "code", "says"),
    [
        (frames.SetPin("", b"", True), "bad_request", "an empty block hash"),
        (frames.SetPin("", b"x" * 8, True), "bad_request", "block hash of 8 bytes"),
        (frames.SetPin("zz", HASH, True), "bad_request", "regex"),
        (frames.SetPin("", HASH, False), "not_found", "no pin is set"),
        (frames.SetTtl("", b"", None, -1.0, True), "bad_request", "> 0"),
        (frames.SetTtl("64", b"", "acme", 1.0, True), "bad_request", "only one of them is allowed"),
        (frames.SetQuota("", "t" * 2000, 1, None), "bad_request", "1024"),
        (frames.SetQuota("", "acme", -2, None), "bad_request", ">= -1"),
        (frames.SetQuota("", "acme", None, None), "not_found", "no quota is set for tenant 'acme'"),
        (frames.Clear("", b"", None, False, False), "bad_request", "one of them"),
        (frames.Clear("", b"", "acme", True, False), "bad_request", "one of them"),
        (
            frames.Clear("", b"", "acme", False, False),
            "not_found",
            "tenant acme: nothing of it is known here",
        ),
        (frames.Clear("", HASH, None, False, True), "not_found", "nothing of it is held here"),
        (frames.Clear("0", b"", None, False, True), "not_found", "namespace 0: none is known here"),
        (frames.FindPrefixes("", "abc"), "bad_request", "regex"),
        (frames.FindPrefixes("", "ABCD"), "bad_request", "regex"),
        (frames.FindPrefixes("ff", "abcd"), "not_found", "namespace ff: none is known here"),
    ],
)
def test_a_bad_rule_is_refused(
    daemon: Daemon, peer: Peer, request_: frames.Request, code: str, says: str
) -> None:
    """One Error frame, and the connection goes on."""
    peer.socket.sendall(frames.encode_frame(request_))
    refusal = answer(peer)
    assert isinstance(refusal, frames.Error)
    assert refusal.code == code
    assert says in refusal.message
    peer.socket.sendall(frames.encode_frame(frames.Ping()))
    assert answer(peer) == frames.Done()
    assert not daemon.io.waiting
