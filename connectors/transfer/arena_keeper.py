"""Keeps the arena of this process mapped, pinned, and the current one, in a thread of its own.

It starts with the connector, so that mapping and registering (tens of seconds for a large arena) are over before the first
hit. Then it asks now and then: an idle line would keep the memory of a replaced arena for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from connectors.constants import THREAD_JOIN_S
from connectors.device.pinning import Pinning
from connectors.transfer.link import Line
from kvstore.client import ClientError

ARENA_REFRESH_S = 5.0  # an idle connection sees within this time that the arena was replaced


class ArenaKeeper:
    """pinning: None where the device needs none. note: what to do with an error of ours."""

    def __init__(
        self, line: Line, pinning: Pinning | None, note: Callable[[str, BaseException], None]
    ) -> None:
        self._line, self._pinning, self._note = line, pinning, note
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-arena", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. The arena stays pinned until `Pinning.close`."""
        self._stop.set()
        self._thread.join(THREAD_JOIN_S)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.refresh()
            self._stop.wait(ARENA_REFRESH_S)

    def refresh(self) -> None:
        """Ask once. Never raises: without pinning copies are slower, not wrong."""
        try:
            view = self._line.refresh()
            if self._pinning is not None:
                self._pinning.pin(view, self._stop.is_set)
            del view  # or the arena would not be let go of when it is replaced
        except ClientError:
            pass  # the daemon is away: the next call of the line says so, and the next round tries again
        except Exception as error:  # noqa: BLE001 - of the driver; the engine must not notice
            self._note("arena", error)
        if self._pinning is not None:
            self._pinning.release()
