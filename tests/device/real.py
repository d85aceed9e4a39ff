"""A real accelerator that fails on demand, with what tests ask of the simulated one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from connectors.device.cuda import CudaDriver
from connectors.device.driver import DriverError, Numbers

SPIN_CYCLES = 200_000  # about 0.1 ms


class RealDriver(CudaDriver):
    """Device 0. refuse: names of calls -> the chance that they fail. Work of the engine takes a while."""

    def __init__(self, seed: int) -> None:
        torch.cuda.init()
        super().__init__(torch.device("cuda", 0))
        self.refuse: dict[str, float] = {}
        self.registered: dict[int, int] = {}  # address -> bytes
        self._draw = random.Random(seed)

    def compute(self, work: Callable[[], None]) -> None:
        """The engine gives its device something to do, behind something that takes its time."""
        torch.cuda._sleep(self._draw.randrange(SPIN_CYCLES))
        work()

    def soon(self, work: Callable[[], None]) -> None:
        """It happens on another thread while copies are under way."""
        threading.Timer(self._draw.random() / 1000, work).start()

    def finish(self) -> None:
        torch.cuda.synchronize()

    def new_stream(self) -> Any:
        self._refuse("new_stream")
        return super().new_stream()

    def wait(self, stream: Any, event: Any) -> None:
        self._refuse("wait")
        super().wait(stream, event)

    def copy(self, stream: Any, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        if self._refused("copy"):  # half of the batch is under way
            half = self._draw.randrange(len(sizes))
            if half:
                super().copy(stream, sources[:half], targets[:half], sizes[:half])
            raise DriverError("planted: copy")
        super().copy(stream, sources, targets, sizes)

    def register(self, address: int, size_bytes: int, writable: bool) -> int:
        if self._refused("register"):
            return super().register(0, size_bytes, writable)  # a real error, which stays pending
        code = super().register(address, size_bytes, writable)
        if not code:
            self.registered[address] = size_bytes
        return code

    def unregister(self, address: int) -> int:
        self.registered.pop(address, None)
        return super().unregister(address)

    def _refuse(self, name: str) -> None:
        if self._refused(name):
            raise DriverError(f"planted: {name}")

    def _refused(self, name: str) -> bool:
        return self._draw.random() < self.refuse.get(name, 0.0)
