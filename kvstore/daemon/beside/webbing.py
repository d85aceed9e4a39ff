"""`kvstore web` beside the daemon: a process of its own, because rendering costs milliseconds that engines would wait for,
and because a probe from outside sees a daemon that hangs.

    daemon ── stdin (a pipe, never written) ──▶ kvstore web ── Unix socket ──▶ daemon
       │                                            │
       ╰─ ends, however: the pipe ends ────────────▶╰─ ends

The child inherits nothing but stderr: no descriptor of the arena, and not its lock. One that ends is started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import kvstore
from kvstore.daemon.config.config import Config

WEB_LOOK_S = 0.5  # between two looks whether that process lives
# Pause before the page is started again; doubles while it ends at once.
WEB_RESTART_S_MIN, WEB_RESTART_S_MAX = (0.5, 60.0)
WEB_STEADY_S = 30.0  # a page that ran for so long did not end at once
WEB_END_S = 0.3  # at a stop, until it is killed: it has nothing to lose

log = logging.getLogger("kvstore.daemon.webbing")

_NOT_FOR_IT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")  # of systemd, for us


class WebProcess:
    """The child, and its life. Without web.listen there is none."""

    def __init__(self, config: Config) -> None:
        self._command = [
            *(sys.executable, "-P", "-m", "kvstore", "web"),
            f"--listen={config.web.listen}",
            f"--names={config.web.names}",
            f"--socket={config.socket_path}",
            f"--child={config.log.level},{config.log.format}",
        ]
        self._child: subprocess.Popen[bytes] | None = None
        self._is_wanted = bool(config.web.listen)

    async def run(self) -> None:
        """Start it, and again whenever it has ended, until `end`."""
        pause_s = WEB_RESTART_S_MIN
        clock = asyncio.get_running_loop().time
        while self._is_wanted:
            started_s = clock()
            reason = await self._until_it_ends()
            if reason is None:
                return
            if clock() - started_s >= WEB_STEADY_S:
                pause_s = WEB_RESTART_S_MIN
            log.warning("kvstore web ended (%s); it is started again in %g s", reason, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, WEB_RESTART_S_MAX)

    def end(self) -> None:
        """Ask it to end; there is no other one from now on. Idempotent, returns at once."""
        self._is_wanted = False
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def reap(self) -> None:
        """After `end`, when the loop has nothing else to do: wait for it, kill it if it hangs."""
        self.end()
        if self._child is None:
            return
        try:
            self._child.wait(WEB_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    async def _until_it_ends(self) -> str | None:
        """Why it did; None where it was asked to."""
        try:
            self._child = child = start_child(self._command)
        except OSError as error:
            return str(error)
        while child.poll() is None:
            await asyncio.sleep(WEB_LOOK_S)
        if child.stdin is not None:
            child.stdin.close()
        if not self._is_wanted:
            return None
        return f"exit code {child.returncode}" if child.returncode >= 0 else f"signal {-child.returncode}"


def start_child(
    command: list[str], stdout: int = subprocess.DEVNULL, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """A command of ours, without our settings. Without fork's copy of our page tables, too: subprocess uses vfork as long as
    nothing is to run in between."""
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
        env={**kept, "PYTHONPATH": os.pathsep.join(paths), "KVSTORE_CONFIG": "", "MALLOC_ARENA_MAX": "2"},
    )
