"""Memory to measure with: mapped, on the pages that are wanted, touched before use.

Private memory is what an engine's host memory is like; shared memory is a file in the arena's directory,
so that it lies on the same kind of pages. Both are filled, so that no page is the zero page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from tiers.dram.pages import advise_huge, require_room

HUGE_PAGE_BYTES = 2 << 20


class Region:
    """`count` blocks of `block_bytes`, contiguous, page-aligned, warm."""

    def __init__(self, count: int, block_bytes: int, directory: Path | None = None) -> None:
        """directory: of the arena, for a nameless file there. Raises OpenError where it does not fit, OSError."""
        size_bytes = -(-count * block_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapping = mmap.mmap(-1, size_bytes) if directory is None else _shared(directory, size_bytes)
        advise_huge(mapping)
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self.block_bytes = block_bytes
        self.addresses = [ctypes.addressof(self._anchor) + n * block_bytes for n in range(count)]
        whole = memoryview(mapping)
        self.views = [whole[n * block_bytes : (n + 1) * block_bytes] for n in range(count)]
        pattern = os.urandom(block_bytes)
        for number, view in enumerate(self.views):
            view[:] = pattern
            view[:8] = number.to_bytes(8, "little")


def _shared(directory: Path, size_bytes: int) -> mmap.mmap:
    require_room(directory, size_bytes)  # touching memory that is not there would kill us
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
