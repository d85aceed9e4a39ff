"""Reading: records of a run, out of DRAM and NVMe, into memory for a pack.

    run ─┬─ in DRAM ──▶ copied by a thread of the engine ─┬─▶ records, their checksums and age
         ├─ on NVMe ──▶ read by threads of its device ────┤
         └─ rows ─────▶ when they were stored ────────────┘

So that nothing of the run is held while a bucket takes its time. The bytes are not verified here: what packs them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.index.block import Block
from kvstore.io_pool import Io
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.residency.residency import Residency
from tiers.base import Get
from tiers.copying import copy

_IN_DRAM = -1  # instead of the number of a device
_Reads = Sequence[tuple[Get, bytes]]


class Records(NamedTuple):
    """stored_s: when the oldest of them was stored, 0 if that is not known of all."""

    checksums: Sequence[bytes]
    stored_s: int


Done = Callable[[Records | None], None]


def read_records(
    residency: Residency, io: Io, run: Sequence[Block], views: Sequence[memoryview], done: Done
) -> None:
    """Read the records of blocks of one namespace, which owned levels have and the caller has pinned, into these views.

    `done` is called once on the engine's thread, with None if one of them could not be read.
    """
    places: dict[int, list[int]] = {}
    for position, block in enumerate(run):
        places.setdefault(_IN_DRAM if block.where & IN_DRAM else block.device, []).append(position)
    collected = _Collected(len(run), len(places) + 1, done)
    for number, positions in places.items():
        blocks, into = [run[at] for at in positions], [views[at] for at in positions]
        failed: _Reads = [(Get.FAILED, b"")] * len(positions)
        if number == _IN_DRAM:
            work, threads = _copies(residency, blocks, into), io
        else:
            member = residency.nvme.members[number]
            items = [(block.place[1], block.key, view) for block, view in zip(blocks, into, strict=True)]
            work, threads = (lambda device=member.device, items=items: device.read(items)), member.io  # type: ignore[misc]
        threads.submit(work, lambda reads, positions=positions: collected.have(positions, reads), failed)  # type: ignore[misc]
    residency.expiry.rows(run, collected.have_times)


def _copies(
    residency: Residency, blocks: Sequence[Block], into: Sequence[memoryview]
) -> Callable[[], _Reads]:
    arena = residency.arena
    checksums = [arena.record(block.slot).checksum for block in blocks]
    pairs = [(view, arena.view(block.slot)) for block, view in zip(blocks, into, strict=True)]

    def work() -> _Reads:
        copy(pairs)
        return [(Get.HIT, checksum) for checksum in checksums]

    return work


class _Collected:
    """What several places bring of one run."""

    def __init__(self, records: int, answers: int, done: Done) -> None:
        self._checksums = [b""] * records
        self._stored_s = 0
        self._outstanding = answers
        self._done = done

    def have(self, positions: Sequence[int], reads: _Reads) -> None:
        for position, (result, checksum) in zip(positions, reads, strict=True):
            self._checksums[position] = checksum if result is Get.HIT else b""
        self._ended()

    def have_times(self, times: Sequence[int]) -> None:
        self._stored_s = min(times, default=0)
        self._ended()

    def _ended(self) -> None:
        self._outstanding -= 1
        if not self._outstanding:
            is_whole = all(self._checksums)
            self._done(Records(self._checksums, self._stored_s) if is_whole else None)
