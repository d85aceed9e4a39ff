"""The directories of NVMe: is there room, on what file system do they lie, do they know O_DIRECT, how fast are they?"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvstore.daemon.config.config import Nvme
from kvstore.daemon.disks.filesystem import nearest_there
from kvstore.daemon.disks.known import Known, NotItself
from kvstore.tools.doctor.apart import LOOK_S, NoAnswer, apart
from kvstore.tools.doctor.disk_speed import NotMeasured, Speed, measure
from kvstore.tools.doctor.findings import Case, Finding, Level, user_name
from kvstore.units import format_bytes
from tiers.constants import NVME_HEADROOM_BYTES
from tiers.dram import pages
from tiers.errors import DamagedError, OpenError
from tiers.nvme.device_home import MARKER, read_marker
from tiers.nvme.direct import NO_LIMIT_BYTES, free_bytes

MEASURING_S = 120.0  # without a word, where a disk is measured
DOCTOR_DISK_READ_BYTES_PER_S = 500_000_000  # slower than that is no local NVMe

_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "beegfs", "glusterfs", "gpfs", "afs")


class Facts(msgspec.Struct):
    """Of one directory: its file system by number, what is free there, what its files have. None of one that was not looked at."""

    device: int = -1
    free_bytes: int = 0
    held_bytes: int = 0


def disks(case: Case) -> Iterator[Finding]:
    """Each directory of nvme.directories, in a process of its own. What the daemon knows to be sick is not touched."""
    if case.config is None:
        return
    nvme = case.config.nvme
    if not nvme.directories:
        action = "set nvme.directories to one directory on each local disk: most of what comes back comes from there"
        yield Finding("disks", "note", "no NVMe directory is set", action)
        return
    states = {row["directory"]: row["state"] for row in (case.status or {}).get("disks", ())}
    facts: dict[Path, Facts] = {}
    for path in nvme.directories:
        state = states.get(str(path), "ok")
        if state in _TOUCHED:
            yield from _apart(case, path, facts)
        else:
            action = "what the daemon knows of it stands below; once it is well, this looks at it, too"
            yield Finding(f"disk {path}", "note", f"not looked at: it is {state}", action)
    fitted = [path for path in facts if states.get(str(path)) not in ("short", "full")]
    yield from _together(facts, fitted, nvme)


_TOUCHED = (
    "ok",
    "reading",
    "short",
    "full",
    "not set",
)  # states in which the daemon uses it, or has nothing to do with it


def _apart(case: Case, path: Path, facts: dict[Path, Facts]) -> Iterator[Finding]:
    check = f"disk {path}"
    try:
        for said in apart(lambda: _looked_at(case, check, path), MEASURING_S if case.disks else LOOK_S):
            if "check" in said:
                yield Finding(**said)
            else:
                facts[path] = Facts(**said)
    except NoAnswer:
        yield Finding(check, "problem", "does not answer", "look at dmesg, smartctl -a, its mount")
    except OSError as error:
        yield Finding(check, "problem", error.strerror or f"{error}", "look after the disk")


def _looked_at(case: Case, check: str, path: Path) -> Iterator[dict[str, Any]]:
    """In a process of its own: findings, and the facts."""
    assert case.config is not None
    nvme = case.config.nvme
    there = nearest_there(path)
    facts = Facts(os.stat(there).st_dev, free_bytes(there), _held(path))
    found = [_kind(check, there), _usable(case, check, path, there)]
    free = (
        "no limit is known"
        if facts.free_bytes == NO_LIMIT_BYTES
        else f"{format_bytes(facts.free_bytes)} free"
    )
    ours = f", {format_bytes(facts.held_bytes)} are ours" if os.access(path, os.R_OK | os.X_OK) else ""
    found.append(Finding(check, "ok", f"{free}{ours}"))
    if nvme.direct != "off" and (direct := _direct(check, path)) is not None:
        found.append(direct)
    if case.status is None and (unknown := _recognised(case, check, path)) is not None:
        found.append(unknown)
    well = ", ".join(each.found for each in found if each.level == "ok")
    yield asdict(Finding(check, "ok", well))
    yield from (asdict(each) for each in found if each.level != "ok")
    yield msgspec.structs.asdict(facts)
    if case.disks:
        yield asdict(_measured(check, there))


def _recognised(case: Case, check: str, path: Path) -> Finding | None:
    """Whether the next start would take it for what it was."""
    if case.data_dir is None:
        return None
    try:
        Known(case.data_dir / "disks.json", may_write=False).recognise(path)
    except NotItself as error:
        why = str(error).removeprefix(f"nvme directory {path}: ")
        action = f"mount its disk; or kvstore disks --accept {path}, to take what is there now"
        return Finding(check, "problem", f"{why}; the next start leaves it alone", action)
    except OpenError:  # said already
        return None
    return None


def _together(facts: dict[Path, Facts], fitted: list[Path], nvme: Nvme) -> Iterator[Finding]:
    """What directories of one file system share. fitted: of those it is not known yet whether there is room for them."""
    by_device: dict[int, list[Path]] = {}
    for path, fact in facts.items():
        by_device.setdefault(fact.device, []).append(path)
    for paths in by_device.values():
        for path in paths:
            if path in fitted and (short := _room(path, [facts[each] for each in paths], nvme)) is not None:
                yield short
        if len(paths) > 1:
            others = ", ".join(map(str, paths[1:]))
            shared = f"on one file system with {others}: they share its speed, and its failures"
            yield Finding(f"disk {paths[0]}", "note", shared, "one directory for each disk is enough")


def _kind(check: str, there: Path) -> Finding:
    mount = pages.mount_of(there)
    kind = mount.kind if mount is not None else "unknown"
    said = f"file system {kind}"
    if kind in _MEMORY:
        return Finding(check, "warning", f"{said}: this is memory", "name a directory on a local disk")
    if kind in _NETWORK or kind.startswith("fuse"):
        return Finding(check, "warning", f"{said}: bytes cross a network", "name a directory on a local disk")
    if kind in ("overlay", "aufs"):
        found = f"{said}: the container's own layer, slow and gone with it"
        return Finding(check, "warning", found, "mount a volume of a local disk there")
    if mount is not None and mount.path == Path("/"):
        action = (
            "is its disk mounted? Else name a directory on a disk of its own: what fills / stops everything"
        )
        return Finding(check, "note", f"{said}: the root file system", action)
    return Finding(check, "ok", said)


def _usable(case: Case, check: str, path: Path, there: Path) -> Finding:
    """Whether a daemon of this user would take it."""
    me = user_name(os.geteuid())
    if there != path:
        if not os.access(there, os.W_OK | os.X_OK):
            action = f"install -d -m 700 -o {me} {path}"
            return Finding(check, "problem", f"is not there, and {me} may not make it in {there}", action)
        return Finding(check, "ok", "is not there yet; a daemon makes it")
    owner = path.stat()
    if owner.st_mode & 0o022:
        return Finding(check, "problem", "others may write into it: no daemon takes it", f"chmod go-w {path}")
    if os.geteuid() not in (0, owner.st_uid):
        level: Level = "note" if case.status is not None else "problem"
        whose = user_name(owner.st_uid)
        action = f"run this and the daemon as {whose}; where no daemon of theirs uses it, chown {me} {path}"
        return Finding(check, level, f"belongs to {whose}, and you are {me}", action)
    try:
        read_marker(path)
    except DamagedError as error:
        return Finding(check, "warning", str(error), "nothing: the next start makes it anew, cold")
    except OpenError as error:
        return Finding(check, "problem", str(error), "name an empty directory")
    return Finding(check, "ok", f"of {user_name(owner.st_uid)}")


def _room(path: Path, beside: list[Facts], nvme: Nvme) -> Finding | None:
    """Whether the capacity still fits, beside what others have there. beside: all of ours on this file system."""
    free, held_bytes = beside[0].free_bytes, sum(fact.held_bytes for fact in beside)
    left_bytes = held_bytes + free - NVME_HEADROOM_BYTES
    if free == NO_LIMIT_BYTES or nvme.capacity_bytes * len(beside) <= left_bytes:
        return None
    times = f" for each of {len(beside)} directories" if len(beside) > 1 else ""
    said = f"{format_bytes(free)} free, {format_bytes(held_bytes)} are ours{' together' if times else ''}"
    found = f"{said}: nvme.capacity_bytes = {format_bytes(nvme.capacity_bytes)}{times} does not fit"
    action = f"set at most {format_bytes(max(0, left_bytes) // len(beside))}, or make room: a full disk only behaves as full"
    return Finding(f"disk {path}", "warning", found, action)


def _held(path: Path) -> int:
    """What the files in there have, as far as we may see them."""
    held_bytes = 0
    try:
        for entry in os.scandir(path):
            held_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:  # not there, or not for us
        pass
    return held_bytes


def _direct(check: str, path: Path) -> Finding | None:
    """Asked of a file of ours that is there: nothing is made for it. None where there is none, or none for us."""
    try:
        os.close(os.open(path / MARKER, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError as error:
        if error.errno != errno.EINVAL:
            return None
        found = "no O_DIRECT: bytes go through the page cache, and take its memory"
        return Finding(check, "warning", found, "use ext4 or xfs")
    return Finding(check, "ok", "O_DIRECT works")


def _measured(check: str, there: Path) -> Finding:
    try:
        speed = measure(there)
    except NotMeasured as error:
        return Finding(
            check,
            "note",
            f"not measured: {error}",
            f"kvstore bench --only disk --dir {there} measures with named files",
        )
    if speed.read_bytes_per_s < DOCTOR_DISK_READ_BYTES_PER_S:
        action = "loads slower than computing are not made: is it a local NVMe disk, and idle?"
        return Finding(check, "warning", _said(speed), action)
    return Finding(check, "ok", _said(speed))


def _said(speed: Speed) -> str:
    read, written = (round(n / 1e6) for n in (speed.read_bytes_per_s, speed.write_bytes_per_s))
    cached = "" if speed.direct else ", through the page cache"
    return (
        f"reads {read:,} MB/s, writes {written:,} MB/s; 4 KiB in {1e6 * speed.latency_p50_s:,.0f} µs"
        f" (99 of 100 in {1e6 * speed.latency_p99_s:,.0f} µs){cached}"
    )
