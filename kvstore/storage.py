"""What a daemon keeps bytes in, opened in order and closed in reverse.

    data dir (lock, instance id) ─▶ NVMe directories ─▶ arena of that instance (adopted or new)

The daemon and `kvstore fsck --offline` open the same things; fsck makes nothing that is
not there and never replaces an arena.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore import datadir
from kvstore.config import Config
from kvstore.datadir import DataDir
from tiers.arena import Arena, open_arena
from tiers.errors import OpenError
from tiers.pages import choose_arena_path
from tiers.slot_table import Layout

if TYPE_CHECKING:
    from tiers.nvme import NvmeTier

log = logging.getLogger("kvstore.storage")


@dataclass(slots=True)
class Storage:
    """Exclusively held storage of one daemon. nvme: None where no directories are configured."""

    data_dir: DataDir
    arena: Arena
    nvme: NvmeTier | None

    def close(self, keep_arena: bool) -> None:
        """Flush and let go of everything; the arena's memory is given back unless `keep_arena`."""
        try:
            if self.nvme is not None:
                self.nvme.close()
        finally:
            self.arena.close(unlink=not keep_arena)
            self.data_dir.close()


def open_storage(config: Config) -> Storage:
    """Take the data dir, open NVMe, adopt or make the arena.

    Raises StartError (data dir) or OpenError (tiers); whatever was opened is closed again.
    """
    with ExitStack() as opened:
        data_dir = datadir.hold(config.data_dir)
        opened.callback(data_dir.close)
        nvme = open_nvme(config)  # before the arena, which is replaced when settings changed
        if nvme is not None:
            opened.callback(nvme.close)
        arena = open_arena(
            arena_path(config, data_dir.instance),
            config.dram.capacity_bytes,
            config.dram.slab_bytes,
            config.dram.slot_bytes_min,
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
        return Storage(data_dir, arena, nvme)


def arena_path(config: Config, instance: str) -> Path:
    """Where this instance's arena is, or would be made. Raises OpenError."""
    dram = config.dram
    size_bytes = Layout.plan(dram.capacity_bytes, dram.slab_bytes, dram.slot_bytes_min).file_bytes
    preferred = None if dram.directory == "auto" else dram.directory
    if preferred is not None and not preferred.is_dir():
        raise OpenError(f'dram.directory {preferred}: not a directory; make it, or set "auto"')
    return choose_arena_path(preferred, dram.huge_pages, size_bytes, instance).path


def open_nvme(config: Config) -> NvmeTier | None:
    """The NVMe tier over all configured directories. Raises OpenError."""
    from tiers.nvme import NvmeTier  # RocksDB is loaded only where it is needed

    nvme = config.nvme
    if not nvme.directories:
        return None
    return NvmeTier(list(nvme.directories), nvme.capacity_bytes, nvme.slab_bytes, nvme.direct)
