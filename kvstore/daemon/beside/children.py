"""Processes of ours beside the daemon: begun with it, started again when they end, gone when it is.

    daemon ── stdin (a pipe, never written) ──▶ kvstore web, kvstore grpc ── Unix socket ──▶ daemon
       │                                            │
       ╰─ ends, however: the pipe ends ────────────▶╰─ ends

A child inherits nothing but stderr: no descriptor of the arena, and not its lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from pathlib import Path
from typing import IO

import kvstore
from kvstore.daemon.config.config import Config

CHILD_LOOK_S = 0.5  # between two looks whether it lives
# Pause before it is started again; doubles while it ends at once.
CHILD_RESTART_S_MIN, CHILD_RESTART_S_MAX = (0.5, 60.0)
CHILD_READ_BYTES = 64 << 10  # as much as a pipe holds
CHILD_LINE_BYTES_MAX = 16 << 10  # of a line that it says
CHILD_STEADY_S = 30.0  # one that ran for so long did not end at once
CHILD_END_S = (
    1.0  # at a stop, until it is killed: its clients should hear of it first, and it has nothing to lose
)

log = logging.getLogger("kvstore.daemon.children")

_NOT_FOR_IT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # of systemd, for us


class Child:
    """One process at a time, which ends when its stdin does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_wanted = True

    def start(
        self, command: list[str], stdout: int = subprocess.DEVNULL, stderr: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        self._process = start_child(command, stdout, stderr)
        return self._process

    def end(self) -> None:
        """Ask it to end; there is no other one from now on. Idempotent, returns at once."""
        self.is_wanted = False
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def reap(self) -> None:
        """After `end`, when the loop has nothing else to do: wait for it, kill it if it hangs."""
        self.end()
        if self._process is None:
            return
        try:
            self._process.wait(CHILD_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Lasting:
    """A child that runs as long as the daemon does. It says "ready …", or "problem …" as long as nobody is served."""

    def __init__(self, name: str, command: list[str], is_wanted: bool) -> None:
        self.problem = ""  # why nobody is served there now
        self.name, self._command = name, command
        self._child = Child()
        self._child.is_wanted = is_wanted
        self.end, self.reap = self._child.end, self._child.reap

    async def run(self) -> None:
        """Start it, and again whenever it has ended, until `end`."""
        pause_s = CHILD_RESTART_S_MIN
        clock = asyncio.get_running_loop().time
        while self._child.is_wanted:
            started_s = clock()
            reason = await self._until_it_ends()
            if reason is None:
                return
            if clock() - started_s >= CHILD_STEADY_S:
                pause_s = CHILD_RESTART_S_MIN
            log.warning("%s ended (%s); it is started again in %g s", self.name, reason, pause_s)
            self.problem = f"ended ({reason}), and is started again"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, CHILD_RESTART_S_MAX)

    async def _until_it_ends(self) -> str | None:
        """Why it did; None where it was asked to."""
        try:
            process = self._child.start(self._command, stdout=subprocess.PIPE)
        except OSError as error:
            return str(error)
        assert process.stdin is not None and process.stdout is not None
        lines = Lines(process.stdout)
        while process.poll() is None:
            for line in lines.new():
                word, _, text = line.decode(errors="replace").partition(" ")
                self.problem = text if word == "problem" else ""
            await asyncio.sleep(CHILD_LOOK_S)
        process.stdin.close()
        process.stdout.close()
        return reason_of(process.returncode) if self._child.is_wanted else None


class Lines:
    """What a child says through a pipe, without waiting for it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._rest = b""

    def new(self) -> list[bytes]:
        """Whole lines that have come since, as far as a pipe holds them."""
        *lines, self._rest = (self._rest + self._read()).split(b"\n")
        self._rest = self._rest[-CHILD_LINE_BYTES_MAX:]
        return lines

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe.fileno(), CHILD_READ_BYTES)
        except BlockingIOError:
            return b""


def reason_of(returncode: int) -> str:
    """Why a process ended, from what it returned."""
    return f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"


def start_child(
    command: list[str], stdout: int, stderr: int | None, apart: bool = False
) -> subprocess.Popen[bytes]:
    """A command of ours, without our settings. Without fork's copy of our page tables, too: subprocess uses vfork as long as
    nothing is to run in between. apart: it and what it starts are a group, to be ended together."""
    ours = str(Path(kvstore.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    for name in _NOT_FOR_IT:
        kept.pop(name, None)
    paths = [ours, *filter(None, [kept.get("PYTHONPATH")])]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        close_fds=True,
        start_new_session=apart,
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), "KVSTORE_CONFIG": "", "MALLOC_ARENA_MAX": "2"},
    )


def in_force(config: Config) -> list[str]:
    """Options of a command of ours, for it to go by what the daemon goes by, whatever a file says now."""
    return [
        "--config=/dev/null",
        f"--data-dir={config.data_dir}",
        f"--socket={config.socket_path}",
        f"--set=region={config.region}",
        f"--set=regions_file={config.regions_file}",
        f"--set=models.dir={config.models_dir}",
        f"--set=models.nvme_bytes={config.models.nvme_bytes}",
    ]
