"""Memory to measure with: mapped, on the pages that are wanted, touched before use.

`private` is what an engine's host memory is like; `shared` is a file beside the arena, so
that it lies on the same kind of pages. Both are filled, so that no page is the zero page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from tiers.pages import advise_huge, require_room

HUGE_PAGE_BYTES = 2 << 20


class Region:
    """`count` blocks of `block_bytes`, contiguous, page-aligned, warm."""

    def __init__(self, mapping: mmap.mmap, count: int, block_bytes: int) -> None:
        self._mapping = mapping
        self._anchor = ctypes.c_char.from_buffer(mapping)
        self.block_bytes = block_bytes
        self.addresses = [ctypes.addressof(self._anchor) + n * block_bytes for n in range(count)]
        whole = memoryview(mapping)
        self.views = [whole[n * block_bytes : (n + 1) * block_bytes] for n in range(count)]
        pattern = os.urandom(block_bytes)
        for number, view in enumerate(self.views):
            view[:] = pattern
            view[:8] = number.to_bytes(8, "little")

    @classmethod
    def private(cls, count: int, block_bytes: int) -> Region:
        """Anonymous memory, on huge pages where the kernel gives them."""
        mapping = mmap.mmap(-1, _whole_pages(count * block_bytes))
        advise_huge(mapping)
        return cls(mapping, count, block_bytes)

    @classmethod
    def shared(cls, directory: Path, count: int, block_bytes: int) -> Region:
        """A nameless file in the arena's directory. Raises OpenError where it does not fit, OSError."""
        size_bytes = _whole_pages(count * block_bytes)
        require_room(directory, size_bytes)  # touching memory that is not there would kill us
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size_bytes)
            mapping = mmap.mmap(fd, size_bytes)
        finally:
            os.close(fd)
        advise_huge(mapping)
        return cls(mapping, count, block_bytes)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
