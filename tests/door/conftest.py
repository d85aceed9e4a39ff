"""A daemon per test, in a thread, on an arena of its own; and the same as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.client import Client, Namespace
from tests.door.daemon import MIB, Daemon

RECORD_BYTES = 64 << 10
HASH_BYTES = 32
LEASES_MAX = 100


class DaemonProcess:
    """`python -m tests.door.daemon`, to be stopped, continued and killed."""

    def __init__(self, socket_path: Path, arena_path: Path, capacity_bytes: int = 16 * MIB) -> None:
        self.socket_path = socket_path
        self.arena_path = arena_path
        self._command = [
            *(sys.executable, "-m", "tests.door.daemon"),
            *(str(socket_path), str(arena_path), str(capacity_bytes)),
        ]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def arena_path() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvstore-test-door-{os.getpid()}.arena")
    yield path
    for file in path.parent.glob(f"{path.stem}[.-]*"):  # the table of slots lies beside the slabs
        file.unlink()


@pytest.fixture
def daemon(tmp_path: Path, arena_path: Path) -> Iterator[Daemon]:
    running = Daemon(
        tmp_path / "s", arena_path, 16 * MIB, leases_max=LEASES_MAX, stalled_s_max=1.0, hello_timeout_s=1.0
    )
    yield running
    problems = running.call(running.engine.check)
    running.close()
    assert problems == []


@pytest.fixture
def process(tmp_path: Path, arena_path: Path) -> Iterator[DaemonProcess]:
    running = DaemonProcess(tmp_path / "s", arena_path)
    yield running
    running.kill()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.socket_path, timeout_s=20, label="test") as connected:
        yield connected


def space_of(
    client: Client, name: str = "model", record_bytes: int = RECORD_BYTES, columns: Sequence[int] = ()
) -> Namespace:
    """A namespace whose digest is its name."""
    digest = name.encode().ljust(16, b".")
    return client.namespace(digest, record_bytes, HASH_BYTES, 16, {"model": name}, columns)


def check(socket_path: str | Path) -> list[str]:
    """What an administrator's tool is told about the books."""
    with Client(socket_path, timeout_s=20, label="check", attach=False) as tool:
        return tool.check()


def hashes_of(count: int, prefix: str = "h") -> list[bytes]:
    return [f"{prefix}-{number}".encode().ljust(HASH_BYTES, b".") for number in range(count)]


def records_of(count: int, record_bytes: int = RECORD_BYTES) -> list[bytes]:
    return [bytes([number % 251 + 1]) * record_bytes for number in range(count)]
