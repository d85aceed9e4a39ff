"""What is tried again: a port that is taken, and a web process that does not stay."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import subprocess
import sys

import pytest

from kvstore.daemon.beside import children
from kvstore.daemon.beside.doors import web_process
from kvstore.daemon.config.config import Config, Web
from kvstore.daemon.listening import Listen
from kvstore.errors import StartError
from kvstore.tools import beside


def test_a_port_is_waited_for_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is tried; when it is free, it is taken."""
    monkeypatch.setattr(beside, "BIND_TRIES", 2)
    tries: list[float] = []

    async def bound(other: socket.socket) -> int:
        async def wait(pause_s: float) -> None:
            tries.append(pause_s)
            if len(tries) == 6:
                other.close()

        monkeypatch.setattr(asyncio, "sleep", wait)
        door = await beside.bound("web", Listen("127.0.0.1", other.getsockname()[1]), is_patient=True)
        with door:
            return int(door.getsockname()[1])

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert asyncio.run(bound(other)) == port
    assert tries == [beside.BIND_PAUSE_S] * 2 + [beside.BIND_RETRY_S] * 4
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "address already in use" in warning.getMessage()


def test_what_does_not_pass_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A port that needs a privilege is not tried ten times before the warning; by hand it is an error."""

    def refused(_listen: Listen) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    pauses: list[float] = []

    async def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        raise asyncio.CancelledError

    monkeypatch.setattr(beside, "bind", refused)
    monkeypatch.setattr(asyncio, "sleep", wait)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(beside.bound("web", Listen("127.0.0.1", 80), is_patient=True))
    assert pauses == [beside.BIND_RETRY_S]
    assert "web: cannot listen on 127.0.0.1:80: permission denied" in caplog.text
    with pytest.raises(StartError, match="permission denied; choose another one with --listen"):
        asyncio.run(beside.bound("web", Listen("127.0.0.1", 80), is_patient=False))


def test_a_web_process_that_ends_at_once_is_started_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pauses double up to a limit, whether it ends or cannot be started; nothing is raised into the daemon."""
    pauses: list[float] = []
    process = web_process(Config(web=Web(listen="127.0.0.1:0")))
    sleep = asyncio.sleep

    async def wait(pause_s: float) -> None:
        await sleep(0)
        if pause_s != children.CHILD_LOOK_S:
            pauses.append(pause_s)
        if len(pauses) == 10:
            process.end()

    def start(_command: list[str], *_: object) -> subprocess.Popen[bytes]:
        if len(pauses) % 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(asyncio, "sleep", wait)
    monkeypatch.setattr(children, "CHILD_LOOK_S", 0.0)
    monkeypatch.setattr(children, "CHILD_STEADY_S", 1e9)
    monkeypatch.setattr(children, "start_child", start)
    asyncio.run(process.run())
    process.reap()
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert "kvstore web ended (exit code 3); it is started again in 0.5 s" in caplog.text
    assert "kvstore web ended ([Errno 12] Cannot allocate memory)" in caplog.text
