"""Accelerators: which there are, how they are attached, and whether the library that says so is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from coldstart.fleet.devices import Device, devices
from kvstore.tools.doctor.findings import Case, Finding
from kvstore.units import format_bytes, format_rate

_DRIVER = Path("driver/nvidia/version")  # below /proc


def accelerators(case: Case) -> Iterator[Finding]:
    """One line for each device; nothing where the machine has none."""
    found = devices()
    if not found and (case.proc / _DRIVER).exists():
        if find_spec("pynvml") is None:
            action = "pip install nvidia-ml-py: loads that cannot fit are then refused before they start"
            yield Finding("accelerators", "note", "there is a driver, and no nvidia-ml-py", action)
        else:
            yield Finding(
                "accelerators",
                "problem",
                "the driver does not answer, or has no device",
                "nvidia-smi says why",
            )
    widths = Counter(device.link[1] for device in found if device.link)
    for device in found:
        yield _finding(device, max(widths, default=0))


def _finding(device: Device, usual_lanes: int) -> Finding:
    free = "unknown" if device.free_bytes is None else format_bytes(device.free_bytes)
    node = "NUMA node unknown" if device.numa_node is None else f"NUMA node {device.numa_node}"
    rate = device.link_bytes_per_s
    link = "link unknown" if device.link is None else f"PCIe {device.link[0]} x{device.link[1]}"
    speed = f" ({format_rate(rate)})" if rate else ""
    said = f"{device.name}: {free} free, {node}, {link}{speed}"
    if device.link is not None and device.link[1] < usual_lanes:
        return Finding(
            f"device {device.number}", "warning", said, f"others have x{usual_lanes}: is it seated well?"
        )
    return Finding(f"device {device.number}", "ok", said)
