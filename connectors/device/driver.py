"""The seam to an accelerator's runtime: what our copies need of it, and nothing more.

    engine's stream   ... step n ──● mark
                                   │ wait
    our stream                     └──▶ copy, copy, … ──● record      (one stream a thread)
                                                        │ synchronize
    our thread                                          └──▶ the lease is given back

Two implementations: `connectors.device.cuda.CudaDriver`, and the simulated one of the tests, which runs copies as late and
in as odd an order as streams and events allow. What a driver asks of its callers:

* a thread calls `set_device` before anything else: a new thread is on device 0, and would make a context there;
* host memory is registered once, and unregistered before it is unmapped;
* a copy lies inside one registered range, or outside of all of them, where it is slower;
* a call that failed leaves an error pending in its thread: `take_error` clears it, or the engine's next call reports it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class DriverError(RuntimeError):
    """The accelerator's runtime refused a call, or reported an earlier failure."""


class Driver(ABC):
    """One device of the runtime. Methods raise DriverError (or the runtime's own RuntimeError)."""

    @abstractmethod
    def set_device(self) -> None:
        """Put the calling thread on this device."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream of this device. What is given to one stream happens in order."""

    @abstractmethod
    def mark(self) -> Any:
        """An event behind everything the calling thread has given to its current stream. Does not wait."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """What the stream gets from now on happens after `event`. Does not wait."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """An event behind everything the stream has got. Does not wait."""

    @abstractmethod
    def copy(self, stream: Any, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        """Copy `sizes[i]` bytes from address `sources[i]` to `targets[i]`, in any order. Does not wait. If it raises, some
        of the copies may be under way all the same."""

    @abstractmethod
    def synchronize(self, stream_or_event: Any) -> None:
        """Wait, without the interpreter lock."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all that any thread of this process gave to the device."""

    @abstractmethod
    def register(self, address: int, size_bytes: int, writable: bool) -> int:
        """Pin host memory for copies of every device. Returns 0, or the error that is pending now."""

    @abstractmethod
    def unregister(self, address: int) -> int:
        """Undo `register`. Returns 0, or the error that is pending now."""

    @abstractmethod
    def take_error(self) -> int:
        """Clear the calling thread's pending error and return it; 0 if there is none."""
