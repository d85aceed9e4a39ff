"""Fixtures for every room: a place for one daemon, and daemons in processes of their own."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.objects import S3Server
from tests.running import TIMEOUT_S, Daemon, Place, environment

# Where a shell starts the tests in the background, they and all that they start would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time limits of tests are pytest's: a slow machine proves nothing.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons; what still runs at the end of the test is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(place: Place, *arguments: str, **extra: str) -> Daemon:
        errors = tmp_path / f"stderr{len(running)}"
        words = list(arguments) or place.arguments
        with open(errors, "w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", "serve", *words],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(**extra),
            )
        running.append(process)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        assert line.startswith("ready "), errors.read_text()
        ready = dict(word.split("=", 1) for word in line.split()[1:])
        return Daemon(process, ready, place.socket, errors, words)

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait(TIMEOUT_S)
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server with a bucket "kvstore", of one module: it keeps in memory whatever it was given."""
    server = S3Server()
    try:
        server.make_bucket("kvstore")
        yield server
    finally:
        server.stop()
