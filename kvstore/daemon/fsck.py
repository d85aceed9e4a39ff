"""Looking after storage while no daemon runs: are the books in order, are the bytes true?

    hold data dir ─▶ arena of its instance ─▶ check · verify ─┐
                  ╰▶ each NVMe directory    ─▶ check · verify ─┴─▶ one Finding each

Opens what a daemon left, as it was made, whatever the settings say now, and with the same locks. Without `mend` nothing
on NVMe is changed, and damage is a problem; with it damaged rows and corrupt records are dropped. A cache loses nothing
by that. A disk that is sick is one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.daemon.config.config import Config
from kvstore.daemon.config.sizing import preferred_directory
from kvstore.daemon.data_dir import hold
from kvstore.daemon.disks.known import Known
from kvstore.units import plural
from tiers.base import Get
from tiers.dram.arena import Arena, open_arena
from tiers.dram.arena_files import existing_layout
from tiers.dram.pages import find_arena
from tiers.errors import OpenError
from tiers.nvme.device import Device, device_as_made
from tiers.nvme.device_home import read_marker
from tiers.nvme.direct import LookingIO

VERIFY_BATCH_RECORDS = 8  # records in flight while fsck --verify reads


# (what, records done, records in all): called after every batch of a verification
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Finding:
    """What was seen of one store. corrupt and unreadable are counts of records; slabs, corrupt_slabs: of models."""

    store: str  # "dram" or "nvme"
    path: str
    records: int = 0
    verified: int = 0
    corrupt: int = 0
    unreadable: int = 0
    slabs: int = 0
    corrupt_slabs: int = 0
    repairs: list[str] = field(default_factory=list)  # what was done about it
    problems: list[str] = field(default_factory=list)  # what is still wrong

    def dropped(self, count: int, what: str, mend: bool, otherwise: str, where: str = "") -> None:
        """Damage that is gone: repaired if that was asked for, else a problem; `otherwise` says what drops it."""
        if count and mend:
            self.repairs.append(f"{where}dropped {count} {what}")
        elif count:
            self.problems.append(f"{where or self.store + ': '}{count} {what}; {otherwise}")


def examine(config: Config, verify: bool, mend: bool, progress: Progress) -> list[Finding]:
    """Check every store of a stopped daemon; mend: put right what can be.

    Raises StartError or OpenError when the storage cannot be held.
    """
    data_dir = hold(config.data_dir, create=False)
    try:
        findings = []
        dram = config.dram
        arena = find_arena(preferred_directory(dram), dram.huge_pages, data_dir.instance)
        found = _examine_arena(arena, verify, mend, progress) if arena is not None else None
        if found is not None:
            findings.append(found)
        if config.nvme.directories:
            findings.append(
                _examine_nvme(
                    config, Known(data_dir.disks_path, config.nvme.directories, mend), verify, mend, progress
                )
            )
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
        slots, slabs = arena.adopted_slots(), arena.adopted_slabs()
        finding.slabs = len(slabs)
        if verify:
            _verify_arena(arena, [slot for slot, _ in slots], mend, finding, progress)
            _verify_models(arena, [slot for slot, _ in slabs], mend, finding)
        finding.problems += arena.check()
        finding.records = arena.stats().records
    finally:
        arena.close()
    return finding


def _verify_arena(
    arena: Arena, slots: Sequence[int], mend: bool, finding: Finding, progress: Progress
) -> None:
    corrupt = []
    for done, slot in enumerate(slots, 1):
        if not arena.verify(slot):
            corrupt.append(slot)
        progress("dram", done, len(slots))
    finding.verified = len(slots) - len(corrupt)
    finding.corrupt = len(corrupt)
    if mend:
        for slot in corrupt:
            arena.free_run([slot])
    finding.dropped(len(corrupt), "corrupt records", mend, "--repair drops them")


def _verify_models(arena: Arena, slots: Sequence[int], mend: bool, finding: Finding) -> None:
    corrupt = [slot for slot in slots if not arena.verify(slot)]
    finding.corrupt_slabs = len(corrupt)
    if mend:
        arena.free_run(corrupt)
    finding.dropped(len(corrupt), "corrupt slabs of models", mend, "--repair drops them")


def _examine_nvme(config: Config, known: Known, verify: bool, mend: bool, progress: Progress) -> Finding:
    finding = Finding("nvme", ",".join(map(str, config.nvme.directories)))
    for path in config.nvme.directories:
        try:
            device = _opened(path, config, known, mend)
            if device is None:
                continue
            try:
                _examine_device(device, verify, mend, finding, progress)
            finally:
                device.close()
        except OpenError as error:
            finding.problems.append(str(error))
        except OSError as error:
            finding.problems.append(f"nvme directory {path}: {error.strerror or error}")
    if mend:
        finding.records -= finding.corrupt
    finding.dropped(finding.corrupt, "corrupt records", mend, "--repair drops them")
    if finding.unreadable:
        finding.problems.append(f"nvme: {finding.unreadable} records could not be read")
    return finding


def _opened(path: Path, config: Config, known: Known, mend: bool) -> Device | None:
    """None for an empty directory. Raises OpenError, OSError."""
    marker = read_marker(path)
    known.recognise(path)
    if marker is None:
        return None
    io, memory = (None, known) if mend else (LookingIO(), None)
    device = device_as_made(path, config.nvme.direct, io, memory)
    device.open()
    return device


def _examine_device(device: Device, verify: bool, mend: bool, finding: Finding, progress: Progress) -> None:
    held = [row for piece in device.scan() for row in piece.rows()]
    finding.records += len(held)
    finding.problems += device.check()
    rows = device.counters.rows_damaged + device.counters.rows_lost
    finding.dropped(rows, "damaged rows", mend, "--repair drops them", f"{device.path}: ")
    if device.counters.io_errors:
        failed = plural(device.counters.io_errors, "read")
        finding.problems.append(
            f"nvme directory {device.path}: {failed} of its table failed: look at dmesg, smartctl -a"
        )
    if not verify:
        return
    for at in range(0, len(held), VERIFY_BATCH_RECORDS):
        batch = held[at : at + VERIFY_BATCH_RECORDS]
        answers = device.read([(r.slot, r.key, memoryview(bytearray(r.size_bytes))) for r in batch])
        for answer, _ in answers:
            finding.verified += answer is Get.HIT
            finding.corrupt += answer is Get.CORRUPT
            finding.unreadable += answer in (Get.FAILED, Get.MISS)
        progress("nvme", at + len(batch), len(held))
