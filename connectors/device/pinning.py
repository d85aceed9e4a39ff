"""The arena as pinned memory: registered once in a process, in pieces, by a background thread.

    pin(view) ──▶ register, piece after piece        until then copies are pageable: right, but slower
                        │
    the view is not used any more ──▶ retired ──▶ release() ──▶ unregister ──▶ unmap

A mapping stays mapped until it is unregistered. Leases and clients refer to the view, so registered memory is never given up
under a copy. Registering takes seconds for each hundred GiB, so it does not happen in a thread of the engine.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from connectors.constants import GIB
from connectors.device.driver import Driver, Numbers

PIN_PIECE_BYTES = 64 * GIB  # registered in one call: drivers limit it, and a stop waits for one


class _Pinned:
    """The registered pieces of one mapping, which it keeps mapped."""

    def __init__(self, view: Any) -> None:
        self.mapping = view.mapping
        self.starts = range(view.address, view.address + view.size_bytes, PIN_PIECE_BYTES)
        self.end: int = view.address + view.size_bytes
        self.registered: list[int] = []


class Pinning:
    """The registrations of one process. `pin` and `release` are called by one thread."""

    def __init__(self, driver: Driver, warn: Callable[[str], None]) -> None:
        self._driver, self._warn = driver, warn
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._live: list[_Pinned] = []
        self._retired: deque[_Pinned] = deque()
        self._edges: Numbers = np.empty(0, dtype=np.int64)

    def pin(self, view: Any, stopping: Callable[[], bool] = lambda: False) -> None:
        """Register the mapping of this view, unless it was tried before. Where the driver refuses, the whole arena stays
        pageable, and one line says so."""
        if view in self._known:
            return
        self._known.add(view)
        pinned = _Pinned(view)
        weakref.finalize(view, self._retired.append, pinned).atexit = False
        with self._lock:
            self._live.append(pinned)
            self._know_edges()  # before the first piece is there: no copy may cross into it
        self._driver.set_device()
        for start in pinned.starts:
            if stopping():
                return
            size_bytes = min(PIN_PIECE_BYTES, pinned.end - start)
            code = self._driver.register(start, size_bytes, view.writable)
            if code:
                self._driver.take_error()  # or the engine's next call in this thread would report it
                self._unregister(pinned)
                self._warn(f"the arena cannot be pinned (error {code}): copies work, but are slower")
                return
            pinned.registered.append(start)

    def release(self) -> None:
        """Unregister what is not referred to any more, then let it be unmapped."""
        while self._retired:
            self._give_up(self._retired.popleft())

    def close(self) -> None:
        """Unregister everything. No copy may be under way."""
        for pinned in list(self._live):
            self._give_up(pinned)
        self._retired.clear()

    def edges(self) -> Numbers:
        """Addresses that no single copy may cross, ascending."""
        return self._edges

    def _give_up(self, pinned: _Pinned) -> None:
        self._unregister(pinned)
        with self._lock:
            if pinned in self._live:
                self._live.remove(pinned)
            self._know_edges()

    def _unregister(self, pinned: _Pinned) -> None:
        self._driver.set_device()
        while pinned.registered:
            if self._driver.unregister(pinned.registered.pop()):
                self._driver.take_error()

    def _know_edges(self) -> None:
        starts = [start for pinned in self._live for start in pinned.starts[1:]]
        self._edges = np.array(sorted(starts), dtype=np.int64)


class WeightPins:
    """Memory that weights are copied out of, registered while they are: `coldstart.loading.pins.Pins`."""

    def __init__(self, driver: Driver, warn: Callable[[str], None]) -> None:
        self._driver, self._warn = driver, warn
        self._is_refused = False

    def pin(self, address: int, size_bytes: int) -> bool:
        """Of several, the first that is refused is said, and none is tried any more."""
        if self._is_refused:
            return False
        try:
            self._driver.set_device()
            code = self._driver.register(address, size_bytes, writable=False)
            why = f"error {self._driver.take_error()}" if code else ""
        except RuntimeError as error:
            why = str(error)
        if why:
            self._is_refused = True
            self._warn(f"weights cannot be pinned ({why}): they are loaded all the same, but slower")
        return not why

    def unpin(self, address: int) -> None:
        with suppress(RuntimeError):
            self._driver.set_device()
            if self._driver.unregister(address):
                self._driver.take_error()

    def landed(self) -> None:
        """Raises the device's error."""
        self._driver.set_device()
        self._driver.settle()
