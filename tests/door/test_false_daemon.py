"""Something else than the daemon listens on its socket: the client says so, and takes nothing from it."""

from __future__ import annotations

import array
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvstore.client import Client, Refused, Unavailable
from kvstore.protocol import frames
from tests.door.conftest import RECORD_BYTES, hashes_of, space_of
from tests.door.daemon import MIB

NOBODY = 65534


@contextmanager
def false_daemon(path: Path, uid: int, protocol: int = frames.PROTOCOL_VERSION) -> Iterator[None]:
    """A process of another user that greets every client and hands it an arena."""
    ready, ready_in = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            _serve(path, uid, protocol, ready_in)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"x"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(ready_in)


def _serve(path: Path, uid: int, protocol: int, ready_in: int) -> None:
    if uid != os.geteuid():
        os.setgid(uid)
        os.setuid(uid)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    arena = os.memfd_create("false")
    os.ftruncate(arena, MIB)
    os.write(ready_in, b"x")
    while True:
        peer, _ = listener.accept()
        peer.recv(frames.HELLO_BYTES_MAX)
        welcome = frames.encode_frame(frames.Welcome(protocol, "false", MIB, 1, 1 << 62, MIB))
        rights = array.array("i", [arena, arena])
        with suppress(OSError):
            peer.sendmsg([welcome], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            peer.recv(1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_daemon_of_another_user_is_not_believed() -> None:
    """Where another user listens, every call raises Unavailable with one line that names the user."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        path = Path(directory) / "s"
        with false_daemon(path, NOBODY), Client(path) as client:
            with pytest.raises(Unavailable, match="runs as uid 65534; only uid 0 and root") as raised:
                client.get(space_of(client), hashes_of(1), [bytearray(RECORD_BYTES)])
            assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_may_ask_any_daemon_without_the_arena() -> None:
    """An administrator's tool, which takes nothing from the arena, may look at another user's daemon."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        path = Path(directory) / "s"
        with false_daemon(path, NOBODY), Client(path, timeout_s=0.2, attach=False) as client:
            with pytest.raises(Unavailable):
                client.ping()  # greeted, and then nobody answers
            assert "no answer in time" in client._reason


def test_another_protocol_is_refused(tmp_path: Path) -> None:
    """A daemon that speaks another version of the protocol is refused by its number."""
    path = tmp_path / "s"
    with false_daemon(path, os.geteuid(), protocol=77), Client(path) as client:
        with pytest.raises(Refused, match=rf"wrong_protocol.*77, this client {frames.PROTOCOL_VERSION}"):
            client.ping()
        assert not client.connected


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(4096), b"\xff" * 4096, b"\3\0\0\0\x81\xa1\xff"]
)
def test_another_program_is_called_one(tmp_path: Path, said: bytes) -> None:
    """Whatever it says in place of a welcome."""
    path = tmp_path / "s"

    def speak(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, suppress(OSError):
            peer.sendall(said)
            peer.recv(frames.HELLO_BYTES_MAX)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threading.Thread(target=speak, args=(listener,), daemon=True).start()
        with Client(path, timeout_s=30, attach=False) as client, pytest.raises(Unavailable) as raised:
            client.ping()
    assert str(raised.value) == f"kvstore daemon at {path}: what answers there is no kvstore daemon"
