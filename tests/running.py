"""Running the real command in processes of its own, as a user would."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120


def environment(**extra: str) -> dict[str, str]:
    """Ours, without whatever settings the developer has."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**kept, "PYTHONPATH": str(ROOT), "KVSTORE_CONFIG": "", **extra}


def kvstore(
    *arguments: str | Path, stdin: str | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """One finished run of the command."""
    return subprocess.run(
        [sys.executable, "-m", "kvstore", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(**extra),
    )


@dataclass
class Daemon:
    """A serving daemon; its ready line has been read."""

    process: subprocess.Popen[str]
    ready: dict[str, str]
    socket: Path
    errors: Path
    arguments: list[str] = field(default_factory=list)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(TIMEOUT_S)

    def log(self) -> str:
        return self.errors.read_text()


@dataclass
class Place:
    """Directories of one daemon, with settings that are small and on this file system."""

    path: Path

    @property
    def data_dir(self) -> Path:
        return self.path / "data"

    @property
    def socket(self) -> Path:
        return self.path / "s"

    @property
    def arguments(self) -> list[str]:
        (self.path / "shm").mkdir(exist_ok=True)
        return [
            f"--data-dir={self.data_dir}",
            f"--socket={self.socket}",
            f"--set=dram.directory={self.path / 'shm'}",
            "--set=dram.capacity_bytes=16MiB",
            "--set=dram.slab_bytes=4MiB",
            "--set=nvme.capacity_bytes=64MiB",
            "--set=nvme.slab_bytes=4MiB",
            "--set=web.listen=",  # one process less; tests/web have it
        ]

    def with_nvme(self) -> list[str]:
        return [*self.arguments, f"--set=nvme.directories={self.path / 'nvme0'},{self.path / 'nvme1'}"]

    def arena(self) -> Path:
        (path,) = (self.path / "shm").glob("kvstore-*.arena")
        return path


@contextmanager
def daemons(directory: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons, whose errors are written to files here; what still runs at the end is killed."""
    running: list[subprocess.Popen[str]] = []

    def start(place: Place, *arguments: str, **extra: str) -> Daemon:
        errors = directory / f"stderr{len(running)}"
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

    try:
        yield start
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait(TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()
