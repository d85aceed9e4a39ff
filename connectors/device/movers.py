"""Which movers an engine's blocks need: the place that knows which devices there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from connectors.device import BlockMover, Blocks
from connectors.device.cpu import CpuMover
from connectors.device.driver import DriverError
from connectors.device.pinning import Pinning, WeightPins


def weight_pins(warn: Callable[[str], None]) -> WeightPins | None:
    """For weights that this process copies to its device; None where it has none, or its runtime is not there."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    from connectors.device.cuda import CudaDriver

    try:
        return WeightPins(CudaDriver(torch.device("cuda", torch.cuda.current_device())), warn)
    except DriverError:
        return None


def movers_for(
    groups: Mapping[int, Blocks], warn: Callable[[str], None]
) -> tuple[dict[int, BlockMover], Pinning | None]:
    """A mover for each group of one rank, and what pins the arena for them (host memory needs nothing).

    warn: takes one line for the engine's log. Raises ValueError for a device we cannot copy from,
    DriverError where its runtime is not there.
    """
    devices = {storage.device for blocks in groups.values() for storage in blocks.storages}
    if all(device.type == "cpu" for device in devices):
        return {group: CpuMover(blocks) for group, blocks in groups.items()}, None
    if len(devices) != 1 or any(device.type != "cuda" for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"KV tensors are on {names}: all must be on one cuda device, or in host memory")
    from connectors.device.accelerator import AcceleratorMover
    from connectors.device.cuda import CudaDriver

    driver = CudaDriver(devices.pop())
    pinning = Pinning(driver, warn)
    return {group: AcceleratorMover(blocks, driver, pinning) for group, blocks in groups.items()}, pinning
