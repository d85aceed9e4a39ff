"""A real daemon, `kvstore serve` as a process of its own, for a measurement or for the demo.

Neither the machine's configuration file nor its KVSTORE_ variables have a say: a figure is
of the settings that are written here. The arena goes when the daemon is stopped, unless it is to be kept.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import kvstore
from kvstore.client import Client
from kvstore.tools.bench.plan import CALL_TIMEOUT_S, SETTLE_TIMEOUT_S, START_TIMEOUT_S, STOP_TIMEOUT_S
from kvstore.units import exact_bytes

LOG_TAIL_LINES = 30


class DaemonError(Exception):
    """A daemon or an engine did not start, or did not do what it was started for; the message says what."""


class Daemon:
    """A running daemon. Context manager: leaving stops it and removes its arena."""

    def __init__(self, home: Path, settings: Mapping[str, str | int]) -> None:
        """Start it and wait until engines can attach. `home` is kept: start again to adopt what is there.

        Raises DaemonError.
        """
        home.mkdir(parents=True, exist_ok=True)
        (home / "empty.toml").touch()
        self.socket_path = home / "s"
        self._log = home / "log"
        self._arena: Path | None = None
        self.started_s = time.perf_counter()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                _command(home, self.socket_path, settings),
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def client(self, attach: bool = True) -> Client:
        return Client(self.socket_path, timeout_s=CALL_TIMEOUT_S, label="kvstore bench", attach=attach)

    def wait_until_prefaulted(self, arena_bytes: int) -> None:
        """Until no put pays for a first touch. Raises DaemonError."""
        with self.client(attach=False) as client:
            self.wait(lambda: client.status()["arena"]["prefaulted_bytes"] >= arena_bytes, "prefault")

    def wait_until_demoted(self) -> None:
        """Until everything committed is on NVMe, too. Raises DaemonError."""
        with self.client(attach=False) as client:
            self.wait(lambda: client.status()["demoting_blocks"] == 0, "demotion")

    def wait(self, done: Callable[[], bool], what: str, poll_s: float = 0.02) -> None:
        """Ask again and again until it is done. Raises DaemonError, ClientError."""
        give_up_at = time.monotonic() + SETTLE_TIMEOUT_S
        while not done():
            if time.monotonic() > give_up_at:
                raise DaemonError(f"{what} did not end within {SETTLE_TIMEOUT_S:g} s:\n{log_tail(self._log)}")
            time.sleep(poll_s)

    def stop(self, keep_arena: bool = False) -> int:
        """SIGTERM, then SIGKILL; the exit code. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        code = self.kill()
        if self._arena is not None and not keep_arena:
            self._arena.unlink(missing_ok=True)
        return code

    def kill(self) -> int:
        """kill -9; the exit code. The arena stays. Idempotent."""
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.wait()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline().decode() if readable else ""
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if not line.startswith("ready ") or "arena" not in words:
            raise DaemonError(f"kvstore serve did not become ready:\n{log_tail(self._log)}")
        self._arena = Path(words["arena"])


def log_tail(path: Path) -> str:
    """The last lines of a log, indented."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines)


def settings(arena_directory: Path, arena_bytes: int, **others: str | int) -> dict[str, str | int]:
    """Settings of a daemon to measure; in `others` a double underscore stands for the dot of a key."""
    return {
        "dram.directory": str(arena_directory),
        "dram.capacity_bytes": exact_bytes(arena_bytes),
        "dram.keep_on_stop": "false",
        "stop_timeout_s": 1,
        "log.level": "warning",
        **{name.replace("__", "."): value for name, value in others.items()},
    }


def _command(home: Path, socket_path: Path, settings: Mapping[str, str | int]) -> list[str]:
    command = [sys.executable, "-m", "kvstore", "serve", "--config", str(home / "empty.toml")]
    command += ["--data-dir", str(home / "data"), "--socket", str(socket_path), "--set", "web.listen="]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def _environment() -> dict[str, str]:
    """Ours, without settings, and so that the daemon imports the same kvstore."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    package_root = str(Path(kvstore.__file__).resolve().parents[1])
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, ours.get("PYTHONPATH", "")]))
    return ours
