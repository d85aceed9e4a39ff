"""The directories of NVMe: is there room, on what file system do they lie, do they know O_DIRECT, how fast are they?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.daemon.config.config import Nvme
from kvstore.tools.doctor.disk_speed import NotMeasured, Speed, measure, nameless
from kvstore.tools.doctor.findings import Case, Finding, Level, nearest_there, user_name
from kvstore.units import format_bytes
from tiers.constants import NVME_HEADROOM_BYTES
from tiers.dram import pages
from tiers.errors import DamagedError, OpenError
from tiers.nvme.device_home import read_marker
from tiers.nvme.direct import NO_LIMIT_BYTES, free_bytes

DOCTOR_DISK_READ_BYTES_PER_S = 500_000_000  # slower than that is no local NVMe

_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "lustre", "beegfs", "glusterfs", "gpfs", "afs")


def disks(case: Case) -> Iterator[Finding]:
    """Each directory of nvme.directories."""
    if case.config is None:
        return
    nvme = case.config.nvme
    if not nvme.directories:
        action = "set nvme.directories to one directory on each local disk: most of what comes back comes from there"
        yield Finding("disks", "note", "no NVMe directory is set", action)
        return
    for path in nvme.directories:
        check = f"disk {path}"
        beside = [other for other in nvme.directories if _device(other) == _device(path)]
        try:
            found = list(_looked_at(case, check, path, beside, nvme))
        except OSError as error:
            yield Finding(
                check, "problem", f"{error.filename or path}: {error.strerror}", "look after the disk"
            )
            continue
        well = ", ".join(each.found for each in found if each.level == "ok")
        yield from [Finding(check, "ok", well)] * bool(well)
        yield from (each for each in found if each.level != "ok")
        if path != beside[0]:
            shared = f"on the same file system as {beside[0]}: they share its speed, and its failures"
            yield Finding(check, "note", shared, "one directory for each disk is enough")


def _device(path: Path) -> int:
    """That of the file system; -1 where it does not say, which is found out below."""
    try:
        return nearest_there(path).stat().st_dev
    except OSError:
        return -1


def _looked_at(case: Case, check: str, path: Path, beside: list[Path], nvme: Nvme) -> Iterator[Finding]:
    there = nearest_there(path)
    yield _kind(check, there)
    yield _usable(check, path, there, is_served=case.status is not None)
    yield _room(check, beside, nvme)
    if nvme.direct != "off" and (direct := _direct(check, there)) is not None:
        yield direct
    if case.disks:
        yield _measured(check, there)


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
    return Finding(check, "ok", said)


def _usable(check: str, path: Path, there: Path, *, is_served: bool) -> Finding:
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
        level: Level = "note" if is_served else "problem"
        return Finding(
            check, level, f"belongs to {user_name(owner.st_uid)}, and you are {me}", f"chown {me} {path}"
        )
    try:
        read_marker(path)
    except DamagedError as error:
        return Finding(check, "warning", str(error), "nothing: the next start makes it anew, cold")
    except OpenError as error:
        return Finding(check, "problem", str(error), "name an empty directory")
    return Finding(check, "ok", f"of {user_name(owner.st_uid)}")


def _room(check: str, beside: list[Path], nvme: Nvme) -> Finding:
    """Whether the capacity still fits, beside what others have there. beside: all of ours on this file system."""
    free = free_bytes(nearest_there(beside[0]))
    held_bytes = sum(map(_held, beside))
    left_bytes = held_bytes + free - NVME_HEADROOM_BYTES
    said = f"{'no limit is known' if free == NO_LIMIT_BYTES else f'{format_bytes(free)} free'}, {format_bytes(held_bytes)} are ours"
    if nvme.capacity_bytes * len(beside) > left_bytes:
        times = f" for each of {len(beside)} directories" if len(beside) > 1 else ""
        found = f"{said}: nvme.capacity_bytes = {format_bytes(nvme.capacity_bytes)}{times} does not fit"
        action = f"set at most {format_bytes(max(0, left_bytes) // len(beside))}, or make room: a full disk only behaves as full"
        return Finding(check, "warning", found, action)
    return Finding(check, "ok", said)


def _held(path: Path) -> int:
    """What the files in there have, as far as we may see them."""
    held_bytes = 0
    try:
        for entry in os.scandir(path):
            held_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
    except OSError:  # not there, or not for us
        pass
    return held_bytes


def _direct(check: str, there: Path) -> Finding | None:
    """Asked with a file that has no name, so that nothing is left."""
    try:
        fd, direct = nameless(there)
    except OSError:  # not for us, read-only, full, or no file without a name
        return None
    os.close(fd)
    if direct:
        return Finding(check, "ok", "O_DIRECT works")
    found = "no O_DIRECT: bytes go through the page cache, and take its memory"
    return Finding(check, "warning", found, "use ext4 or xfs")


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
