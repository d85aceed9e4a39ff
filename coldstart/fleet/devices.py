"""Accelerators of this node: free memory, the processor's node they belong to, their link. By nvidia-ml-py, where it is installed.

Without the library, a driver or a device there are no devices, and whatever asks goes on without. What a driver does not say (some
virtual devices say little) is None, and nothing is refused for it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from tiers.reading import Unreadable, read_text
from tiers.sizes import format_bytes

T = TypeVar("T")

# Of a PCIe lane, by generation.
LANE_BYTES_PER_S: Final = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.97e9, 5: 3.94e9, 6: 7.56e9}
REFRESH_S: Final = 10.0
STALE_S: Final = 60.0  # a driver that hangs says nothing any more
_SYS: Final = Path("/sys/bus/pci/devices")


class Device(NamedTuple):
    """number: as the driver counts. numa_node: of the processor. link: generation and lanes of its PCIe link, at best."""

    number: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    numa_node: int | None
    link: tuple[int, int] | None

    @property
    def link_bytes_per_s(self) -> float | None:
        if self.link is None or self.link[0] not in LANE_BYTES_PER_S:
            return None
        return LANE_BYTES_PER_S[self.link[0]] * self.link[1]


def devices(sys: Path = _SYS) -> list[Device]:
    """All that the driver has, whatever a process may see of them. Blocks for milliseconds, or as long as the driver does."""
    try:
        import pynvml
    except ImportError:
        return []
    found = []
    with suppress(pynvml.NVMLError):  # no driver
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):  # one that is lost hides no other one
                found.append(_device(pynvml, index, sys))
        pynvml.nvmlShutdown()
    return found


def _device(nvml: Any, index: int, sys: Path) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def said(ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except nvml.NVMLError:
            return None

    memory = said(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    generation = said(lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    # A bad seat shows in the width of now; the generation of now drops when a device is idle.
    lanes = said(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle))
    address = said(lambda: _text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return Device(
        index,
        _text(said(lambda: nvml.nvmlDeviceGetUUID(handle)) or ""),
        _text(said(lambda: nvml.nvmlDeviceGetName(handle)) or "unknown"),
        int(memory.total) if memory else None,
        int(memory.free) if memory else None,
        _numa_node(sys, address or ""),
        (int(generation), int(lanes)) if generation and lanes else None,
    )


def _text(said: str | bytes) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _numa_node(sys: Path, address: str) -> int | None:
    """Of a device of PCI: the kernel has four digits of the domain where the driver says eight."""
    domain, _, rest = address.lower().partition(":")
    try:
        node = int(read_text(sys / f"{domain[-4:]}:{rest}" / "numa_node", 64)) if rest else -1
    except (Unreadable, ValueError):
        return None
    return node if node >= 0 else None


def visible(found: Sequence[Device], environ: Mapping[str, str]) -> list[Device]:
    """Those that a process with this environment uses, in its order. What is not understood (MIG) is left out."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return list(found)
    chosen: list[Device] = []
    for name in filter(None, map(str.strip, names.split(","))):
        fitting = [
            one
            for one in found
            if name == str(one.number) or (name.startswith("GPU-") and one.uuid.startswith(name))
        ]
        if len(fitting) != 1:
            break  # as CUDA does: what comes behind an unknown one is not seen
        chosen += fitting
    return chosen


def weight_bytes(sizes: Iterable[tuple[str, int]]) -> int:
    """What an engine loads of a model at least. sizes: paths of its files, and their bytes.

    Engines read one set of those beside its configuration: others of them (consolidated.safetensors), and those in folders, are
    the same weights once more.
    """
    sets = Counter[str]()
    for path, size_bytes in sizes:
        if path.endswith(".safetensors") and "/" not in path:
            sets[re.sub("[0-9]+", "", path)] += size_bytes
    return max(sets.values(), default=0)


def wrong_of_load(weight_bytes: int, shards: int, used: Sequence[Device]) -> str:
    """Why weights, shared by so many devices, cannot fit, in words; "" where they may. An engine needs more than weights: what is
    refused here could not have started."""
    each_bytes = weight_bytes // shards
    for device in used[:shards]:
        if device.free_bytes is not None and each_bytes > device.free_bytes:
            return (
                f"{format_bytes(each_bytes)} of weights for each of {shards} devices:"
                f" device {device.number} ({device.name}) has {format_bytes(device.free_bytes)} free"
            )
    return ""


class Watch:
    """Devices for whoever must not wait for a driver: asked in a thread, at most one at a time."""

    def __init__(
        self, ask: Callable[[], list[Device]] = devices, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock = ask, clock
        self._newest: list[Device] = []
        self._at_s = -STALE_S
        self._asking: threading.Thread | None = None

    def newest(self) -> list[Device]:
        """At most STALE_S old; none before the first answer."""
        age_s = self._clock() - self._at_s
        if age_s >= REFRESH_S and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._refresh, name="kvstore-devices", daemon=True)
            self._asking.start()
        return self._newest if age_s < STALE_S else []

    def _refresh(self) -> None:
        self._newest, self._at_s = self._ask(), self._clock()


def first_name(environ: Mapping[str, str] = os.environ) -> str:
    """Of the device that an engine of this environment begins with; "" without one."""
    return next((device.name for device in visible(devices(), environ)), "")
