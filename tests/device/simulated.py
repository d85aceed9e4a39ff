"""A simulated accelerator: copies happen late, and in any order that streams and events allow.

    stream   ──[copy]──[wait]──[copy, copy]──[record]──▶   in order; the copies of one batch in any order

Whenever the driver is called a few pending operations happen, drawn from a seed, on any stream
whose next one may. The rest happens when somebody waits for it, and not before. It refuses
what a driver refuses: to register a range twice or to unregister what is not registered, a
copy that crosses the end of a registered range, a thread on another device, and any call
while an error is pending, which it reports as the first victim's.

Device memory is host memory of the test; `refuse` fails calls on demand.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from connectors.device.driver import Driver, DriverError, Numbers

ALREADY_REGISTERED, NOT_REGISTERED, OUT_OF_MEMORY = 712, 713, 2


@dataclass(eq=False)
class Event:
    happened: bool = False


@dataclass(eq=False)
class Stream:
    pending: deque[tuple[str, Any]] = field(default_factory=deque)


class SimulatedDriver(Driver):
    """device: its number; threads start on device 0. refuse: names of calls -> the chance that they fail."""

    def __init__(self, seed: int, device: int = 0) -> None:
        self.device = device
        self.refuse: dict[str, float] = {}
        self.registered: dict[int, int] = {}  # address -> bytes
        self.touched_devices: set[int] = set()  # where a context would have been made
        self.pageable_copies = self.registrations = 0
        self.engine_stream = Stream()  # what the engine gives work to; see `compute`
        self._streams = [self.engine_stream]
        self._draw = random.Random(seed)
        self._lock = threading.RLock()
        self._threads = threading.local()

    # ---- what tests do ----

    def compute(self, work: Callable[[], None]) -> None:
        """The engine gives its device something to do, some time from now."""
        with self._lock:
            self.engine_stream.pending.append(("compute", work))

    def pass_time(self) -> None:
        """Some of what is pending happens."""
        with self._lock:
            for _ in range(self._draw.choice((0, 0, 1, 3, 20))):
                if not self._happen():
                    return

    def finish(self) -> None:
        """All that is pending happens."""
        with self._lock:
            while self._happen():
                pass

    def is_registered(self, address: int, size_bytes: int) -> bool:
        """Whether any byte of the range is registered."""
        return any(
            start < address + size_bytes and address < start + size for start, size in self.registered.items()
        )

    # ---- the driver ----

    def set_device(self) -> None:
        self._threads.device = self.device

    def new_stream(self) -> Stream:
        self._call("new_stream")
        stream = Stream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def mark(self) -> Event:
        self._report_pending_error()
        return self.record(self.engine_stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._call("wait")
        with self._lock:
            stream.pending.append(("wait", event))

    def record(self, stream: Stream) -> Event:
        event = Event()
        with self._lock:
            stream.pending.append(("record", event))
        return event

    def copy(self, stream: Stream, sources: Numbers, targets: Numbers, sizes: Numbers) -> None:
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._draw.shuffle(pieces)
        for target, source, size in pieces:
            pinned = [self._require_one_kind(address, size) for address in (target, source)]
            self.pageable_copies += not any(pinned)
        with self._lock:
            failed = self._draw.random() < self.refuse.get("copy", 0.0)
            issued = pieces[: self._draw.randrange(len(pieces))] if failed else pieces
            stream.pending.append(("copy", issued))
        if failed:  # half of the batch is under way
            self._threads.error = OUT_OF_MEMORY
        self._call("copy")

    def synchronize(self, stream_or_event: Any) -> None:
        self._require_device()
        with self._lock:
            target = stream_or_event if isinstance(stream_or_event, Event) else self.record(stream_or_event)
            while not target.happened:
                if not self._happen():
                    raise AssertionError("waiting for an event that nobody recorded")

    def settle(self) -> None:
        self._require_device()
        self.finish()

    def register(self, address: int, size_bytes: int, writable: bool) -> int:
        self._require_device()
        if self._refused("register"):
            return self._fail(OUT_OF_MEMORY)
        if self.is_registered(address, size_bytes):
            return self._fail(ALREADY_REGISTERED)
        self.registrations += 1
        self.registered[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        self._require_device()
        return 0 if self.registered.pop(address, 0) else self._fail(NOT_REGISTERED)

    def take_error(self) -> int:
        code: int = getattr(self._threads, "error", 0)
        self._threads.error = 0
        return code

    # ---- inside ----

    def _happen(self) -> bool:
        """One operation, of any stream whose next one may happen; False if there is none."""
        ready = [
            stream
            for stream in self._streams
            if stream.pending and not (stream.pending[0][0] == "wait" and not stream.pending[0][1].happened)
        ]
        if not ready:
            return False
        what, value = self._draw.choice(ready).pending.popleft()
        if what == "copy":
            for piece in value:
                ctypes.memmove(*piece)
        elif what == "record":
            value.happened = True
        elif what == "compute":
            value()
        return True

    def _call(self, name: str) -> None:
        self._require_device()
        if name != "copy" and self._refused(name):
            self._threads.error = OUT_OF_MEMORY
        self._report_pending_error()
        self.pass_time()

    def _report_pending_error(self) -> None:
        if code := self.take_error():
            raise DriverError(f"simulated: error {code}")

    def _refused(self, name: str) -> bool:
        return self._draw.random() < self.refuse.get(name, 0.0)

    def _fail(self, code: int) -> int:
        self._threads.error = code
        return code

    def _require_device(self) -> None:
        device = getattr(self._threads, "device", 0)
        self.touched_devices.add(device)
        if device != self.device:
            raise DriverError(f"simulated: a thread on device {device} uses device {self.device}")

    def _require_one_kind(self, address: int, size_bytes: int) -> bool:
        """A copy lies in one registered range (then True), or outside of all."""
        inside = any(
            start <= address and address + size_bytes <= start + size
            for start, size in self.registered.items()
        )
        if not inside and self.is_registered(address, size_bytes):
            raise DriverError("simulated: a copy crosses the end of registered memory")
        return inside
