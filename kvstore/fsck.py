"""Looking after storage while no daemon runs: are the books in order, are the bytes true?

    hold data dir ─▶ arena of its instance ─▶ check · verify ─┐
                  ╰▶ each NVMe directory    ─▶ check · verify ─┴─▶ one Finding each

Opens exactly what the daemon would, with the same locks, but makes nothing that is not
there. Opening an arena drops rows that a crash left half written, as any start does.
Reading a corrupt record from NVMe drops it: that is how the tier answers "not what was
put", and a cache loses nothing by it; without `mend` it still counts as a problem, so that
a dying disk is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore import datadir
from kvstore.config import Config
from kvstore.constants import VERIFY_BATCH_RECORDS
from kvstore.storage import arena_path, open_nvme
from tiers.arena import Arena, existing_layout, open_arena
from tiers.base import Get, Record
from tiers.errors import OpenError, TierError
from tiers.nvme import NvmeTier, repair
from tiers.nvme_home import read_marker

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


def examine(config: Config, verify: bool, mend: bool, progress: Progress) -> list[Finding]:
    """Check every store of a stopped daemon; mend: put right what can be.

    Raises StartError or OpenError when the storage cannot be held.
    """
    data_dir = datadir.hold(config.data_dir, create=False)
    try:
        findings = []
        dram = _examine_arena(arena_path(config, data_dir.instance), verify, mend, progress)
        if dram is not None:
            findings.append(dram)
        if config.nvme.directories:
            findings.append(_examine_nvme(config, verify, mend, progress))
        return findings
    finally:
        data_dir.close()


def _examine_arena(path: Path, verify: bool, mend: bool, progress: Progress) -> Finding | None:
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
            _verify_arena(arena, slots, mend, finding, progress)
        finding.problems += arena.check()
        finding.records = arena.stats().records
    finally:
        arena.close()
    return finding


def _verify_arena(
    arena: Arena, slots: Sequence[tuple[int, Record]], mend: bool, finding: Finding, progress: Progress
) -> None:
    corrupt = []
    for done, (slot, _) in enumerate(slots, 1):
        if not arena.verify(slot):
            corrupt.append(slot)
        progress("dram", done, len(slots))
    finding.verified = len(slots) - len(corrupt)
    finding.corrupt = len(corrupt)
    if mend:
        for slot in corrupt:
            arena.free(slot)
        if corrupt:
            finding.repairs.append(f"dropped {len(corrupt)} corrupt records")
    elif corrupt:
        finding.problems.append(f"dram: {len(corrupt)} corrupt records; --repair drops them")


def _examine_nvme(config: Config, verify: bool, mend: bool, progress: Progress) -> Finding:
    finding = Finding("nvme", ",".join(map(str, config.nvme.directories)))
    for directory in config.nvme.directories:
        try:
            read_marker(directory)  # opening would make what is not there
            repaired = repair(directory) if mend else None
        except OpenError as error:
            finding.problems.append(str(error))
            continue
        if repaired is not None and repaired.kept_at is not None:
            finding.repairs.append(
                f"{directory}: {repaired.rows} rows salvaged, the damaged ones are kept in {repaired.kept_at}"
            )
    if not finding.problems:
        _examine_tier(config, verify, mend, finding, progress)
    return finding


def _examine_tier(config: Config, verify: bool, mend: bool, finding: Finding, progress: Progress) -> None:
    try:
        nvme = open_nvme(config)
    except OpenError as error:
        finding.problems.append(str(error))
        return
    assert nvme is not None, "asked only where directories are configured"
    try:
        held = [(record.key, record.size_bytes) for record in nvme.scan()]
        finding.problems += nvme.check()
        if verify and not finding.problems:
            _verify_nvme(nvme, held, mend, finding, progress)
        finding.records = nvme.stats().records
    except TierError as error:  # rows that cannot be read to the end
        finding.problems.append(str(error))
    finally:
        nvme.close()


def _verify_nvme(
    nvme: NvmeTier, held: Sequence[tuple[bytes, int]], mend: bool, finding: Finding, progress: Progress
) -> None:
    for at in range(0, len(held), VERIFY_BATCH_RECORDS):
        batch = held[at : at + VERIFY_BATCH_RECORDS]
        answers = nvme.get([(key, memoryview(bytearray(size_bytes))) for key, size_bytes in batch])
        for answer, _ in answers:
            finding.verified += answer is Get.HIT
            finding.corrupt += answer is Get.CORRUPT
            finding.unreadable += answer in (Get.FAILED, Get.MISS)
        progress("nvme", at + len(batch), len(held))
    if finding.corrupt and mend:
        finding.repairs.append(f"dropped {finding.corrupt} corrupt records")
    elif finding.corrupt:
        finding.problems.append(f"nvme: {finding.corrupt} corrupt records; reading them dropped them")
    if finding.unreadable:
        finding.problems.append(f"nvme: {finding.unreadable} records could not be read")
