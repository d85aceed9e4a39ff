"""The driver for CUDA (and HIP, which torch presents under the same names).

Streams, events and the current device are torch's, so that we see the engine's own. What torch
does not offer comes from the runtime library that torch has loaded into this process.

Copies go to the device in one call: vLLM's `swap_blocks_batch` (cuMemcpyBatchAsync from CUDA
12.8 on) where its kernels are loaded, else one cudaMemcpyAsync each.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from connectors.device.driver import Driver, DriverError, Numbers

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegister: pinned for every device; never written by one
_COPY_DEFAULT = 4  # cudaMemcpyDefault: the direction follows from the addresses
_LIBRARIES = (("libcudart", "cuda"), ("libamdhip64", "hip"))


class CudaDriver(Driver):
    """One device of torch.cuda. Raises DriverError where its runtime library is not loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._library, self._prefix = _runtime()

    def set_device(self) -> None:
        torch.cuda.set_device(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def mark(self) -> torch.cuda.Event:
        return self.record(torch.cuda.current_stream(self._device))

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def copy(self, stream: torch.cuda.Stream, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        if hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
            with torch.cuda.stream(stream):
                torch.ops._C_cache_ops.swap_blocks_batch(
                    torch.from_numpy(sources), torch.from_numpy(targets), torch.from_numpy(sizes), False
                )
            return
        copy = self._function("MemcpyAsync")
        handle = ctypes.c_void_p(stream.cuda_stream)
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            code = copy(
                ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), _COPY_DEFAULT, handle
            )
            if code:
                raise DriverError(f"{self._prefix}MemcpyAsync: error {self.take_error()}")

    def synchronize(self, stream_or_event: Any) -> None:
        stream_or_event.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def register(self, address: int, size_bytes: int, writable: bool) -> int:
        flags = _PORTABLE if writable else _PORTABLE | _READ_ONLY
        register = self._function("HostRegister")
        return int(register(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), flags))

    def unregister(self, address: int) -> int:
        return int(self._function("HostUnregister")(ctypes.c_void_p(address)))

    def take_error(self) -> int:
        return int(self._function("GetLastError")())

    def _function(self, name: str) -> Any:
        return getattr(self._library, self._prefix + name)


@cache
def _runtime() -> tuple[ctypes.CDLL, str]:
    """The runtime library that torch uses, and the prefix of its functions."""
    paths = {line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(paths):
        for name, prefix in _LIBRARIES:
            if Path(path).name.startswith(name):
                return ctypes.CDLL(path), prefix
    raise DriverError("the accelerator's runtime library is not loaded in this process")
