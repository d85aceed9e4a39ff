"""Looking after storage while no daemon runs: are the books in order, are the bytes true?

    hold data dir ─▶ arena of its instance ─▶ check · verify ─┐
                  ╰▶ each NVMe directory    ─▶ check · verify ─┴─▶ one Finding each

Opens exactly what the daemon would, with the same locks, but makes nothing that is not
there. Opening an arena drops rows that a crash left half written, as any start does.
Reading a corrupt record drops it: that is how a tier answers "not what was put", and a
cache loses nothing by it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import datadir
from kvstore.config import Config
from kvstore.constants import VERIFY_BATCH_RECORDS
from kvstore.storage import arena_path, open_nvme
from tiers.arena import Arena, existing_layout, open_arena
from tiers.base import Get, Record
from tiers.errors import OpenError
from tiers.nvme import NvmeTier
from tiers.nvme_home import Home, read_marker
from tiers.rows import Rows, RowsError, rebuild

# (what, records done, records in all): called after every batch of a verification
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Finding:
    """What was seen of one store. corrupt and unreadable are counts of records."""

    store: str  # "dram" or "nvme"
    path: str
    records: int = 0
    verified: int = 0
    corrupt: int = 0
    unreadable: int = 0
    repairs: list[str] = field(default_factory=list)  # what was done about it
    problems: list[str] = field(default_factory=list)  # what is still wrong

    @property
    def is_sound(self) -> bool:
        return not self.problems


def examine(config: Config, verify: bool, repair: bool, progress: Progress) -> list[Finding]:
    """Check every store of a stopped daemon. Raises StartError, OpenError when it cannot be held."""
    data_dir = datadir.hold(config.data_dir, create=False)
    try:
        findings = []
        dram = _examine_arena(arena_path(config, data_dir.instance), verify, repair, progress)
        if dram is not None:
            findings.append(dram)
        if config.nvme.directories:
            findings.append(_examine_nvme(config, verify, repair, progress))
        return findings
    finally:
        data_dir.close()


def _examine_arena(path: Path, verify: bool, repair: bool, progress: Progress) -> Finding | None:
    """None when there is no arena: after a reboot, or a stop that gave the memory back."""
    layout = existing_layout(path)
    if layout is None:
        return None
    finding = Finding("dram", str(path))
    arena = open_arena(path, layout.capacity_bytes, layout.slab_bytes, layout.slot_bytes_min)
    try:
        if arena.torn_rows:
            finding.repairs.append(f"dropped {arena.torn_rows} rows that a crash left half written")
        slots = arena.adopted_slots()
        if verify:
            _verify_arena(arena, slots, repair, finding, progress)
        finding.problems += arena.check()
        finding.records = arena.stats().records
    finally:
        arena.close()
    return finding


def _verify_arena(
    arena: Arena, slots: Sequence[tuple[int, Record]], repair: bool, finding: Finding, progress: Progress
) -> None:
    corrupt = []
    for done, (slot, _) in enumerate(slots, 1):
        if not arena.verify(slot):
            corrupt.append(slot)
        progress("dram", done, len(slots))
    finding.verified = len(slots) - len(corrupt)
    finding.corrupt = len(corrupt)
    if repair:
        for slot in corrupt:
            arena.free(slot)
        if corrupt:
            finding.repairs.append(f"dropped {len(corrupt)} corrupt records")
    elif corrupt:
        finding.problems.append(f"dram: {len(corrupt)} corrupt records; --repair drops them")


def _examine_nvme(config: Config, verify: bool, repair: bool, progress: Progress) -> Finding:
    finding = Finding("nvme", ",".join(map(str, config.nvme.directories)))
    for directory in config.nvme.directories:
        _examine_rows(directory, repair, finding)
    if finding.problems:
        return finding
    try:
        nvme = open_nvme(config)
    except OpenError as error:
        finding.problems.append(str(error))
        return finding
    assert nvme is not None
    try:
        if verify:
            _verify_nvme(nvme, finding, progress)
        finding.problems += nvme.check()
        finding.records = nvme.stats().records
    finally:
        nvme.close()
    return finding


def _examine_rows(directory: Path, repair: bool, finding: Finding) -> None:
    """Whether every row of one directory can be read; damaged rows are rebuilt when `repair`."""
    try:
        marker = read_marker(directory)
        home = Home(directory, marker.slab_bytes, marker.slot_bytes_min)
    except OpenError as error:
        finding.problems.append(str(error))
        return
    rows = directory / "rows"
    try:
        damage = _damage_of(rows)
        if damage is not None and repair:
            aside = directory / time.strftime("rows.broken-%Y%m%d-%H%M%S")
            count = rebuild(rows, aside)
            finding.repairs.append(f"rebuilt {rows}: {count} rows salvaged, the old ones are in {aside}")
        elif damage is not None:
            finding.problems.append(damage)
    except OSError as error:
        finding.problems.append(f"nvme directory {directory}: {error.strerror or error}")
    finally:
        home.release()


def _damage_of(path: Path) -> str | None:
    """Why these rows cannot all be read, None when they can."""
    try:
        rows = Rows(path)
        try:
            for _ in rows.items():
                pass
        finally:
            rows.close()
    except (OpenError, RowsError) as error:
        return str(error)
    return None


def _verify_nvme(nvme: NvmeTier, finding: Finding, progress: Progress) -> None:
    total = nvme.stats().records
    done = 0
    for batch in _batches(nvme.scan()):
        views = [memoryview(bytearray(record.size_bytes)) for record in batch]
        answers = nvme.get([(record.key, view) for record, view in zip(batch, views, strict=True)])
        for answer, _ in answers:
            finding.verified += answer is Get.HIT
            finding.corrupt += answer is Get.CORRUPT
            finding.unreadable += answer in (Get.FAILED, Get.MISS)
        done += len(batch)
        progress("nvme", done, total)
    if finding.corrupt:
        finding.repairs.append(f"dropped {finding.corrupt} corrupt records")
    if finding.unreadable:
        finding.problems.append(f"nvme: {finding.unreadable} records could not be read")


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, VERIFY_BATCH_RECORDS)):
        yield batch
