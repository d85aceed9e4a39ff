"""What a daemon keeps bytes in, opened in order and closed in reverse.

    data dir (lock, instance id) ─▶ size of the arena (sizing.py) ─▶ arena of that instance (adopted or new)
    NVMe directories: one device each, opened in the background, where it is the one that is known: one that hangs holds
    up nothing

`kvstore fsck --offline` opens the same things as they were made; it makes nothing that is not there and never replaces an arena.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvstore.daemon.config.config import Config
from kvstore.daemon.config.sizing import plan_arena
from kvstore.daemon.data_dir import DataDir, hold
from kvstore.daemon.disks.known import Known
from kvstore.daemon.last_run import LastRun
from kvstore.door.listener import require_free
from kvstore.index.namespaces import NamespaceRegistry
from tiers.dram.arena import Arena, open_arena
from tiers.errors import OpenError
from tiers.nvme.device import Device
from tiers.nvme.device_home import require_place
from tiers.sizes import format_bytes

# For NVMe directories to prove at a start that they are ours; one that hangs is left out.
PLACE_CHECK_S = 1.0

log = logging.getLogger("kvstore.daemon.storage")


@dataclass(slots=True)
class Storage:
    """Exclusively held storage of one daemon. Devices are opened later, each by its own threads."""

    data_dir: DataDir
    last_run: LastRun
    arena: Arena
    devices: list[Device]
    known: Known
    namespaces: NamespaceRegistry

    def close(self, keep_arena: bool) -> None:
        """Flush and let go of everything; the arena's memory is given back unless `keep_arena`."""
        try:
            for device in self.devices:
                device.close()
        finally:
            self.arena.close(unlink=not keep_arena)
            self.last_run.end()
            self.data_dir.close()


def open_storage(config: Config) -> Storage:
    """Take the data dir, adopt or make the arena.

    Raises StartError (data dir) or OpenError (tiers); whatever was opened is closed again.
    """
    with ExitStack() as opened:
        data_dir = hold(config.data_dir)
        opened.callback(data_dir.close)
        require_free(config.socket_path)
        known = Known(data_dir.disks_path, config.nvme.directories)
        devices = nvme_devices(config, known)
        _require_places([path for path in config.nvme.directories if path not in known])
        last_run = LastRun(data_dir.serving_path)
        if last_run.was_killed:
            log.warning(
                "memory ran out while the last daemon served, and the kernel killed: %s of it stay free now",
                format_bytes(last_run.headroom_bytes),
            )
        namespaces = NamespaceRegistry(data_dir.namespaces_path)
        sizes = {namespace.slot_bytes for namespace in namespaces}
        plan = plan_arena(last_run.asks(config.dram), data_dir.instance, last_run.headroom_bytes, sizes=sizes)
        last_run.begin()  # before memory is touched
        opened.callback(last_run.end)
        layout = plan.layout
        arena = open_arena(
            plan.path,
            layout.capacity_bytes,
            layout.slab_bytes,
            layout.slot_bytes_min,
            last_run.headroom_bytes,
        )
        log.info(
            "arena adopted" if arena.adopted else "arena made",
            extra={
                "path": str(arena.path),
                "pages": arena.page_kind,
                "capacity_bytes": arena.capacity_bytes,
                "records": arena.stats().records,
            },
        )
        opened.pop_all()
        return Storage(data_dir, last_run, arena, devices, known, namespaces)


def _require_places(directories: Sequence[Path]) -> None:
    """Refuse directories that were named by mistake: new ones. One that does not answer in time is left to its device.

    Raises OpenError.
    """
    refused: list[OpenError] = []

    def look(directory: Path) -> None:
        try:
            require_place(directory)
        except OpenError as error:
            refused.append(error)

    threads = [threading.Thread(target=look, args=(directory,), daemon=True) for directory in directories]
    for thread in threads:
        thread.start()
    give_up_s = time.monotonic() + PLACE_CHECK_S
    for thread in threads:
        thread.join(max(0.0, give_up_s - time.monotonic()))
    if refused:
        raise refused[0]


def nvme_devices(config: Config, known: Known) -> list[Device]:
    """One for each configured directory; touches no disk."""
    nvme = config.nvme
    return [
        Device(directory, nvme.capacity_bytes, nvme.slab_bytes, nvme.direct, memory=known)
        for directory in nvme.directories
    ]
