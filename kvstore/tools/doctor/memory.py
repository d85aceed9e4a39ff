"""Memory: does the arena fit, is it on huge pages, can it be swapped out, was somebody killed for it?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.constants import GIB, MIB
from kvstore.daemon.config.config import Dram
from kvstore.daemon.config.sizing import LARGER_SHM, look_ahead
from kvstore.daemon.last_run import LastRun
from kvstore.errors import StartError
from kvstore.tools.doctor.findings import Case, Finding, read_text, user_name
from kvstore.tools.doctor.places import instance_of
from kvstore.units import format_bytes, plural
from tiers.constants import MEMORY_HEADROOM_BYTES
from tiers.dram import memory_limits, pages
from tiers.dram.arenas_left import Found, find_arenas
from tiers.errors import OpenError

DOCTOR_SWAP_USED_BYTES = 256 * MIB  # less in use may be anything

_HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CONTAINER_SHM_BYTES = 64 * MIB  # what Docker and Kubernetes give who says nothing


def memory(case: Case) -> Iterator[Finding]:
    """What the machine and every cgroup leave; before a start, whether the arena fits into that."""
    limits = memory_limits.limits(case.proc, str(case.pid) if case.pid is not None else "self")
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is None:
        yield Finding("memory", "note", "the kernel does not say how much memory there is")
        return
    said = f"{format_bytes(tightest.free_bytes)} of {format_bytes(tightest.limit_bytes)} free, by {tightest.what}"
    if case.status is not None or case.config is None:
        if tightest.free_bytes < MEMORY_HEADROOM_BYTES:
            action = "lower dram.capacity_bytes, or raise the limit: the kernel kills who takes the rest"
            yield Finding("memory", "warning", said, action)
        else:
            yield Finding("memory", "ok", said)
        return
    yield from _before_a_start(case, case.config.dram, said)


def _before_a_start(case: Case, dram: Dram, said: str) -> Iterator[Finding]:
    """What a start would say to the memory, and to the file system that the arena lies on."""
    last_run = LastRun(case.data_dir / "serving.json", case.proc) if case.data_dir else None
    instance = instance_of(case.data_dir) if case.data_dir else None
    headroom_bytes, asked = (last_run.headroom_bytes, last_run.asks(dram)) if last_run else (0, dram)
    try:
        plan = look_ahead(asked, instance or "", headroom_bytes, proc=case.proc)
    except (StartError, OpenError) as error:
        found, _, action = str(error).rpartition("; ")
        yield Finding("memory", "problem", found or action, action if found else "")
        return
    yield Finding("memory", "ok", f"{said}; an arena of {format_bytes(plan.layout.capacity_bytes)} fits")
    room = pages.room_of(plan.path.parent)
    if room is None:
        yield Finding("shared memory", "ok", f"{plan.path.parent} has no limit of its own")
        return
    found = f"{plan.path.parent} has {format_bytes(room[1])} of {format_bytes(room[0])} free"
    if room[0] <= _CONTAINER_SHM_BYTES:
        found, action = f"{found}, as containers have it by default", LARGER_SHM
        yield Finding("shared memory", "warning", found, action)
    else:
        yield Finding("shared memory", "ok", found)


def huge_pages(case: Case) -> Iterator[Finding]:
    """Huge pages about double the speed of copies and of disk reads."""
    free_bytes = _free_huge_bytes()
    mounted = [mount.path for mount in pages.mounts() if mount.kind == "hugetlbfs"]
    if free_bytes >= GIB and (not mounted or not any(os.access(place, os.W_OK) for place in mounted)):
        found = f"{format_bytes(free_bytes)} of reserved huge pages that this user cannot have"
        yield Finding(
            "huge pages", "warning", found, "mount hugetlbfs writable for the daemon's user, or free them"
        )
    advice = _huge_advice()
    if case.status is not None:
        kind = case.status["arena"]["pages"]
        if kind != "4 KiB":
            yield Finding("huge pages", "ok", f"the arena is on {kind}")
            return
    elif case.config is None:
        return
    else:
        dram = case.config.dram
        if dram.huge_pages == "off":
            yield Finding("huge pages", "note", 'dram.huge_pages is "off"', 'copies are faster with "auto"')
            return
        directory = None if dram.directory == "auto" else dram.directory
        kinds = set(map(pages.page_kind, pages.places(directory, dram.huge_pages))) - {"4 KiB"}
        if kinds or (directory is None and os.geteuid() == 0):
            yield Finding(
                "huge pages", "ok", f"can be had: {', '.join(sorted(kinds)) or 'root mounts its own'}"
            )
            return
        if dram.huge_pages == "on":
            yield Finding("huge pages", "problem", 'dram.huge_pages is "on", and there are none', advice)
            return
    if "[deny]" in read_text(_SHMEM_HUGE):
        advice = f"echo advise > {_SHMEM_HUGE}; then {advice}"
    yield Finding(
        "huge pages", "note", "the arena is on 4 KiB pages, which cost up to half the speed", advice
    )


def _huge_advice() -> str:
    """How to come to huge pages, as it is here."""
    place = pages.HUGE_TMPFS
    if not any(mount.path == place for mount in pages.mounts()):
        return f"mount a tmpfs with huge=always at {place}, as deploy/kvstore.service does"
    if os.access(place, os.W_OK | os.X_OK):
        return f"make room in {place}, or mount it larger"
    me = user_name(os.geteuid())
    try:
        owner = user_name(place.stat().st_uid)
    except PermissionError:  # it is in a directory of theirs
        owner = f"another user than {me}"
    return f"{place} is mounted for {owner}: mount another tmpfs with huge=always for {me}, and name it in dram.directory"


def _free_huge_bytes() -> int:
    numbers = [read_text(_HUGE / name) for name in ("free_hugepages", "resv_hugepages")]
    return (int(numbers[0]) - int(numbers[1])) * 2 * MIB if all(n.isdigit() for n in numbers) else 0


def swap(case: Case) -> Iterator[Finding]:
    """Shared memory can be swapped out; a hit from swap is slower than one from NVMe."""
    lines = (line.partition(":") for line in read_text(case.proc / "meminfo").splitlines())
    sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in lines if rest.split()[:1]}
    total_bytes = sizes.get("SwapTotal", 0)
    used_bytes = total_bytes - sizes.get("SwapFree", 0)
    if not total_bytes:
        yield Finding("swap", "ok", "none")
    elif used_bytes >= DOCTOR_SWAP_USED_BYTES:
        found = (
            f"{format_bytes(used_bytes)} of {format_bytes(total_bytes)} are in use: maybe parts of the arena"
        )
        yield Finding("swap", "warning", found, "swapoff -a, or vm.swappiness = 1, and a smaller arena")
    else:
        found = f"{format_bytes(total_bytes)}, hardly used; the arena could be swapped out"
        yield Finding("swap", "note", found, "vm.swappiness = 1, or swapoff -a")


def killed(case: Case) -> Iterator[Finding]:
    """Whether memory ran out while this daemon, or the last one, served."""
    if case.data_dir is None or not os.access(case.data_dir, os.R_OK | os.X_OK):
        return
    if LastRun(case.data_dir / "serving.json", case.proc).was_killed:
        who = "since this daemon started" if case.status is not None else "while the last daemon served"
        action = "lower dram.capacity_bytes, or give engines less: `dmesg | grep -i oom` says who was killed"
        yield Finding("killed for memory", "warning", f"the kernel killed a process {who}", action)
    else:
        yield Finding("killed for memory", "ok", "nobody, as far as is known")


def arenas(case: Case) -> Iterator[Finding]:
    """Arenas that hold memory and that nobody uses."""
    directories = pages.arena_directories()
    if case.config is not None and case.config.dram.directory != "auto":
        directories = [*directories, case.config.dram.directory]
    own = instance_of(case.data_dir) if case.data_dir is not None else None
    found = [arena for arena in find_arenas(directories) if arena.state in ("left", "damaged")]
    by_place: dict[Path, list[Found]] = {}
    for arena in found:
        if arena.instance == own:
            held = format_bytes(arena.held_bytes)
            yield Finding("arena", "ok", f"the last daemon left {held}, which the next one adopts")
        else:
            by_place.setdefault(arena.path.parent, []).append(arena)
    for place, others in by_place.items():
        held = format_bytes(sum(arena.held_bytes for arena in others))
        said = f"{held} in {place} are of {plural(len(others), 'daemon')} that {'does' if len(others) == 1 else 'do'} not run"
        one = others[0].instance if len(others) == 1 else "INSTANCE, as kvstore arena ls lists them"
        yield Finding("arena", "warning", said, f"is its data directory gone? kvstore arena rm {one}")
    if not found:
        yield Finding("arena", "ok", "none is left over")
