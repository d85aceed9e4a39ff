"""Memory for packs: records are read to where they lie in the object, and are sent from there.

    │ room for any header … │ header │ record 0 │ record 1 │ … │
                            ╰──────────── the object ──────────╯

What costs time is memory that was never touched: 16 MiB of it took 24 ms to fill, of memory used before 1.5. So
`PackRoom` keeps some, and lets it be used again when it is not read any more: a request that was given up may.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Final, overload

from tiers.constants import MIB
from tiers.packs.packs import PACK_HEADER_BYTES_MAX, PRELUDE_BYTES
from tiers.slots import slot_bytes_for

PACK_ROOM_BYTES_MAX: Final = 128 * MIB  # kept to be filled again

_START = slot_bytes_for(PRELUDE_BYTES + PACK_HEADER_BYTES_MAX)


class PackMemory(Sequence[memoryview]):
    """A sequence of views, one for each record, each aligned so that a device can read into it."""

    def __init__(self, memory: mmap.mmap, count: int, record_bytes: int) -> None:
        self.memory = memory
        self._size = record_bytes
        self._all = memoryview(memory)
        stride = slot_bytes_for(record_bytes)
        ends = range(_START, _START + count * stride, stride)
        self._views = [self._all[at : at + record_bytes] for at in ends]
        self._object: memoryview | None = None

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    def join(self) -> None:
        """Move the records together. They are one behind the other already if their size is a multiple of SLOT_ALIGN_BYTES."""
        if slot_bytes_for(self._size) != self._size:
            starts = range(_START, _START + len(self) * self._size, self._size)
            joined = [self._all[at : at + self._size] for at in starts]
            for into, view in zip(joined, self._views, strict=True):
                into[:] = view
            self._views = joined

    def object(self, first: bytes) -> memoryview:
        """The object that begins with these bytes, behind `join`. No view may be written from now on."""
        begin = _START - len(first)
        self._all[begin:_START] = first
        self._object = self._all[begin : _START + len(self) * self._size].toreadonly()
        return self._object

    def release(self) -> bool:
        """Give up all views. False where one is still in use: then the memory stays with its user."""
        try:
            for view in (*self._views, *filter(None, [self._object]), self._all):
                view.release()
            self.memory.resize(len(self.memory))  # refused while there is any view of it
        except BufferError:
            return False
        return True


class PackRoom:
    """Lends memory for packs. One thread."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []

    def take(self, count: int, record_bytes: int) -> PackMemory:
        needed = _START + count * slot_bytes_for(record_bytes)
        for memory in self._kept:
            if len(memory) >= needed:
                self._kept.remove(memory)
                return PackMemory(memory, count, record_bytes)
        return PackMemory(mmap.mmap(-1, needed), count, record_bytes)

    def give_back(self, memory: PackMemory) -> None:
        """It is used again, or goes when its last reader does."""
        if memory.release():
            self._kept.append(memory.memory)
            while sum(map(len, self._kept)) > PACK_ROOM_BYTES_MAX:
                self._kept.pop(0)
