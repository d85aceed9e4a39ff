"""Reads from rows when blocks were stored; needed when a namespace gets its first TTL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.index.block import Block
from kvstore.io_pool import Io
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from tiers.nvme.device_table import Row


def stored_times(
    residency: Residency, io: Io, blocks: Sequence[Block], done: Callable[[Sequence[int]], None]
) -> None:
    """The time of each of these blocks, 0 where its row cannot be read; `done` is called later."""
    record = residency.arena.record
    times = [record(block.slot).stored_s if block.where & IN_DRAM else 0 for block in blocks]
    waiting = 1

    def found(asked: Sequence[tuple[int, Block]], rows: Sequence[Row | None]) -> None:
        nonlocal waiting
        for (position, block), row in zip(asked, rows, strict=False):
            if row is not None and row.key == block.key:
                times[position] = row.stored_s
        waiting -= 1
        if not waiting:
            done(times)

    for member in residency.nvme.members:
        asked = [
            (position, block)
            for position, block in enumerate(blocks)
            if block.where & IN_ANY == IN_NVME and block.device == member.number
        ]
        if asked:
            waiting += 1
            slots = [block.place[1] for _, block in asked]
            nothing: Sequence[Row | None] = []
            member.io.submit(
                lambda member=member, slots=slots: member.device.rows(slots),  # type: ignore[misc]
                lambda rows, asked=asked: found(asked, rows),  # type: ignore[misc]
                failed=nothing,
            )
    io.submit(lambda: None, lambda _: found((), ()), failed=None)
