"""A device that copies from registered memory as late as it may, and from other memory at once, as drivers do."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch


class LateDevice:
    """Pins of loads (coldstart/loading/pins.py). found: what has been copied, by name. refuses: to register anything."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.registered: dict[int, int] = {}  # address → bytes
        self.pinned_bytes = self.late_bytes = 0
        self.refuses = False
        self._pending: list[tuple[str, int, Any]] = []
        self._guard = threading.Lock()

    def copy(self, name: str, tensor: Any) -> None:
        into = self.found[name] = torch.empty_like(tensor)
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        with self._guard:
            inside = [at <= start and end <= at + size for at, size in self.registered.items()]
            touched = [start < at + size and at < end for at, size in self.registered.items()]
            assert inside == touched, f"{name}: reaches out of what is registered"
            self._pending.append((name, start, into))
            self.late_bytes += tensor.nbytes if any(inside) else 0
            if not any(inside):
                self._land()

    def pin(self, address: int, size_bytes: int) -> bool:
        if self.refuses:
            return False
        with self._guard:
            assert address not in self.registered
            self.registered[address] = size_bytes
            self.pinned_bytes += size_bytes
        return True

    def unpin(self, address: int) -> None:
        with self._guard:
            start, end = address, address + self.registered.pop(address)
            assert not [name for name, at, _ in self._pending if start <= at < end]

    def landed(self) -> None:
        with self._guard:
            self._land()

    def _land(self) -> None:
        for _, address, into in self._pending:
            ctypes.memmove(into.data_ptr(), address, into.nbytes)
        self._pending = []
