"""The daemon of the demo: started, killed, started again over the same data, and robbed of its memory.

    start ─▶ … ─▶ kill (SIGKILL) or stop (SIGTERM) ─▶ start again

What the demo takes away is taken away from a stopped daemon: the arena's file, or bytes in a
slot file. What it counts it asks the running daemon for.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.bench.daemon import Daemon, DaemonError, settings
from kvstore.client import Client, ClientError

SHARED_MEMORY = Path("/dev/shm")
BUSY = ("adopting", "demoting_blocks", "loading_blocks", "unverified_blocks")  # fields of the status


@dataclass(slots=True, frozen=True)
class Sizes:
    """What the daemon may take, in bytes."""

    dram_bytes: int
    nvme_bytes: int
    slab_bytes: int


class DemoDaemon:
    """One `kvstore serve` at a time over the same directories."""

    def __init__(self, directory: Path, sizes: Sizes) -> None:
        """Starts nothing. directory: exists and is ours; `close` removes only shared memory."""
        self.sizes = sizes
        self._home = directory / "daemon-0"
        self._arenas = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=SHARED_MEMORY))
        self._daemon: Daemon | None = None

    @property
    def socket_path(self) -> Path:
        return self._running().socket_path

    @property
    def nvme_directory(self) -> Path:
        return self._home / "nvme"

    def start(self) -> None:
        """Start it and wait until engines can attach. Raises DaemonError."""
        chosen = settings(
            self._arenas,
            self.sizes.dram_bytes,
            dram__slab_bytes=self.sizes.slab_bytes,
            dram__keep_on_stop="true",
            nvme__directories=str(self.nvme_directory),
            nvme__capacity_bytes=self.sizes.nvme_bytes,
            nvme__slab_bytes=self.sizes.slab_bytes,
            stop_timeout_s=10,
            log__level="info",
        )
        self._daemon = Daemon(self._home, chosen)

    def kill(self) -> None:
        """kill -9: no handler runs, nothing is flushed."""
        self._running().kill()
        self._daemon = None

    def stop(self, lose_arena: bool = False) -> None:
        """SIGTERM, and wait for the end. lose_arena: as a reboot does. Raises DaemonError when it does not end well."""
        code = self._running().stop(keep_arena=not lose_arena)
        self._daemon = None
        if code != 0:
            raise DaemonError(f"the daemon ended with exit code {code}")

    def start_empty(self) -> None:
        """Stop, and start another daemon that has nothing: other directories, no arena."""
        self.stop(lose_arena=True)
        self._home = self._home.with_name("daemon-1")
        self.start()

    def status(self) -> dict[str, Any]:
        """The daemon's own report. Raises DaemonError when it does not answer."""
        return self._ask(lambda client: client.status())

    def report(self) -> dict[str, Any]:
        """Totals of all it remembers. Raises DaemonError when it does not answer."""
        return self._ask(lambda client: client.report(0))

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def settle(self) -> None:
        """Wait until what was stored is on NVMe too and what was adopted is verified. Raises DaemonError."""
        self._running().wait(lambda: not any(map(self.status().get, BUSY)), "what it still had to do", 0.05)

    def close(self) -> None:
        """End it, whatever it is doing, and give the shared memory back. Idempotent."""
        if self._daemon is not None:
            with contextlib.suppress(DaemonError):
                self.stop()
        shutil.rmtree(self._arenas, ignore_errors=True)

    def _ask(self, question: Callable[[Client], dict[str, Any]]) -> dict[str, Any]:
        try:
            with self._running().client(attach=False) as client:
                return question(client)
        except ClientError as error:
            raise DaemonError(f"the daemon does not answer: {error}") from error

    def _running(self) -> Daemon:
        if self._daemon is None:
            raise DaemonError("the daemon is not running")
        return self._daemon
