"""The daemon as a child process: `kvstore serve` in a directory of its own.

    start ─▶ ready line ─▶ … ─▶ kill (SIGKILL) or stop (SIGTERM) ─▶ start again

What the demo takes away is taken away from a stopped daemon: the arena's file, or bytes in a
slot file. What it counts it asks the running daemon for.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.client import Client, ClientError
from kvstore.demo import constants as c

SHARED_MEMORY = Path("/dev/shm")
BUSY = ("adopting", "demoting_blocks", "loading_blocks", "unverified_blocks")  # fields of the status


class DemoError(Exception):
    """The demo cannot go on; the message says what happened and shows the end of the log."""


@dataclass(slots=True, frozen=True)
class Sizes:
    """What the daemon may take, in bytes."""

    dram_bytes: int
    nvme_bytes: int
    slab_bytes: int


class Daemon:
    """One `kvstore serve` at a time over the same data, socket and arena directory."""

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        """Starts nothing. directory: exists and is ours; `close` removes only shared memory."""
        self.socket_path = directory / "kvstore.sock"
        self.log_path = directory / "daemon.log"
        self.directory = directory
        self.sizes = sizes
        self._arenas = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=SHARED_MEMORY))
        self._generation = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def nvme_directory(self) -> Path:
        return self.directory / f"nvme-{self._generation}"

    def start(self) -> None:
        """Start it and wait until engines can attach. Raises DemoError."""
        command = [sys.executable, "-m", "kvstore", "serve", "--socket", str(self.socket_path)]
        command += ["--data-dir", str(self.directory / f"data-{self._generation}")]
        for setting in (
            f"dram.capacity_bytes={self.sizes.dram_bytes}",
            f"dram.slab_bytes={self.sizes.slab_bytes}",
            f"dram.directory={self._arenas}",
            f"nvme.directories={self.nvme_directory}",
            f"nvme.capacity_bytes={self.sizes.nvme_bytes}",
            f"nvme.slab_bytes={self.sizes.slab_bytes}",
            "log.format=json",
        ):
            command += ["--set", setting]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        if not self._ready_line().startswith(b"ready "):
            self.kill()
            raise DemoError(f"the daemon did not start:\n{log_tail(self.log_path)}")

    def _ready_line(self) -> bytes:
        """Its first line on stdout; empty when it ended or took too long."""
        output = self._running().stdout
        if output is None:
            return b""
        ready, _, _ = select.select([output], [], [], c.DAEMON_START_S_MAX)
        return output.readline() if ready else b""

    def kill(self) -> None:
        """kill -9: no handler runs, nothing is flushed."""
        process = self._running()
        process.send_signal(signal.SIGKILL)
        self._reap(process)

    def stop(self) -> None:
        """SIGTERM, and wait for the end. Raises DemoError when it does not end well."""
        process = self._running()
        process.terminate()
        code = self._reap(process)
        if code != 0:
            raise DemoError(f"the daemon ended with exit code {code}:\n{log_tail(self.log_path)}")

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        try:
            code = process.wait(c.DAEMON_STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        return code

    def throw_arena_away(self) -> None:
        """Remove the arena's file: what a reboot does to shared memory. The daemon must not run."""
        for path in self._arenas.glob("*.arena"):
            path.unlink()

    def start_empty(self) -> None:
        """Stop, and start another daemon that has nothing: other directories, no arena."""
        self.stop()
        self.throw_arena_away()
        self._generation += 1
        self.start()

    def status(self) -> dict[str, Any]:
        """The daemon's own report. Raises DemoError when it does not answer."""
        return self._ask(lambda client: client.status())

    def _ask(self, question: Callable[[Client], dict[str, Any]]) -> dict[str, Any]:
        try:
            with Client(self.socket_path, c.STATUS_TIMEOUT_S, label="demo", attach=False) as client:
                return question(client)
        except ClientError as error:
            raise DemoError(f"the daemon does not answer: {error}\n{log_tail(self.log_path)}") from error

    def report(self) -> dict[str, Any]:
        """Totals of all it remembers. Raises DemoError when it does not answer."""
        return self._ask(lambda client: client.report(0))

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def settle(self) -> None:
        """Wait until what was stored is on NVMe too and what was adopted is proven. Raises DemoError."""
        deadline = time.monotonic() + c.SETTLE_S_MAX
        while time.monotonic() < deadline:
            status = self.status()
            if not any(status[name] for name in BUSY):
                return
            time.sleep(c.POLL_INTERVAL_S)
        raise DemoError(f"the daemon is still busy after {c.SETTLE_S_MAX:.0f} s")

    def close(self) -> None:
        """End it, whatever it is doing, and give the shared memory back. Idempotent."""
        if self._process is not None:
            with contextlib.suppress(DemoError):
                self.stop()
        shutil.rmtree(self._arenas, ignore_errors=True)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise DemoError("the daemon is not running")
        return self._process


def log_tail(path: Path) -> str:
    """The last lines of a log, indented; a line in their place when there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-c.LOG_TAIL_LINES :]
    except OSError as error:
        return f"    (no log: {error.strerror})"
    return "\n".join(f"    {line}" for line in lines) or "    (the log is empty)"
