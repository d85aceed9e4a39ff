"""Memory: does the arena fit, is it on huge pages, can it be swapped out, was somebody killed for it?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvstore.constants import GIB, MIB
from kvstore.daemon.config import Dram
from kvstore.daemon.last_run import LastRun
from kvstore.doctor.findings import Case, Finding, read_text
from kvstore.doctor.places import instance_of
from kvstore.units import format_bytes
from tiers import memory_limits, pages
from tiers.arenas_left import find_arenas, held_bytes
from tiers.constants import MEMORY_HEADROOM_BYTES
from tiers.slot_table import Layout

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
    yield _before_a_start(case, case.config.dram, limits, said)


def _before_a_start(case: Case, dram: Dram, limits: list[memory_limits.Limit], said: str) -> Finding:
    if dram.capacity_bytes == "auto":
        return Finding("memory", "ok", f'{said}; dram.capacity_bytes is "auto"')
    needed_bytes = Layout.plan(dram.capacity_bytes, dram.slab_bytes, dram.slot_bytes_min).needed_bytes
    headroom_bytes = LastRun(case.data_dir / "serving.json", case.proc).headroom_bytes if case.data_dir else 0
    asked = f"dram.capacity_bytes = {format_bytes(dram.capacity_bytes)}"
    if pages.page_kind(_place(dram, needed_bytes)) == "hugetlb":  # whose memory is nobody else's
        return Finding("memory", "ok", f"{said}; the arena has reserved huge pages of its own")
    ever = min(limits, key=lambda limit: limit.limit_bytes)
    if needed_bytes + headroom_bytes > ever.limit_bytes:
        found = f"{asked}, and {ever.what} has {format_bytes(ever.limit_bytes)} in all"
        return Finding("memory", "problem", found, "lower it, or raise the memory limit of the container")
    own = _own_arena(case, dram)
    free_bytes = min(limit.free_bytes for limit in limits) + (held_bytes(own) if own is not None else 0)
    if needed_bytes + headroom_bytes > free_bytes:
        what = f'lower it, make room, or set dram.when_short = "shrink"; {format_bytes(headroom_bytes)} stay free'
        return Finding("memory", "problem", f"{asked} does not fit now: {said}", what)
    return Finding("memory", "ok", f"{said}; the arena fits")


def _own_arena(case: Case, dram: Dram) -> Path | None:
    instance = instance_of(case.data_dir) if case.data_dir is not None else None
    return pages.find_arena(_directory(dram), dram.huge_pages, instance) if instance else None


def _directory(dram: Dram) -> Path | None:
    return None if dram.directory == "auto" else dram.directory


def _place(dram: Dram, size_bytes: int) -> Path:
    """Where a new arena would lie, as `pages.choose_arena_path` has it, without a mount of its own."""
    places = (place for place in pages.places(_directory(dram), dram.huge_pages) if place != pages.SHM)
    default = _directory(dram) or pages.SHM
    return next((place for place in places if pages.has_pages(place, size_bytes)), default)


def shared_memory(case: Case) -> Iterator[Finding]:
    """The file system that the arena lies on: in containers it is one of 64 MiB unless somebody says otherwise."""
    if case.config is None or case.status is not None:
        return  # a daemon that serves has its arena
    dram = case.config.dram
    asked_bytes = dram.slab_bytes if dram.capacity_bytes == "auto" else dram.capacity_bytes
    directory = _place(dram, asked_bytes)
    try:
        room = pages.room_of(directory)
    except OSError as error:
        action = (
            "make it, or set another dram.directory" if dram.directory != "auto" else "mount a tmpfs there"
        )
        yield Finding("shared memory", "problem", f"{directory}: {error.strerror}", action)
        return
    if room is None:
        yield Finding("shared memory", "ok", f"{directory} has no limit of its own")
        return
    said = f"{directory} has {format_bytes(room[1])} of {format_bytes(room[0])} free"
    larger = "docker run --shm-size=16g, in Kubernetes a volume of memory at /dev/shm"
    if asked_bytes > room[0]:
        yield Finding(
            "shared memory", "problem", f"{said}; {format_bytes(asked_bytes)} are asked for", larger
        )
    elif room[0] <= _CONTAINER_SHM_BYTES:
        yield Finding("shared memory", "warning", f"{said}, as containers have it by default", larger)
    else:
        yield Finding("shared memory", "ok", said)


def huge_pages(case: Case) -> Iterator[Finding]:
    """Huge pages about double the speed of copies and of disk reads."""
    free_bytes = _free_huge_bytes()
    mounted = [mount.path for mount in pages.mounts() if mount.kind == "hugetlbfs"]
    if free_bytes >= GIB and (not mounted or not any(os.access(place, os.W_OK) for place in mounted)):
        found = f"{format_bytes(free_bytes)} of reserved huge pages that this user cannot have"
        yield Finding(
            "huge pages", "warning", found, "mount hugetlbfs writable for the daemon's user, or free them"
        )
    advice = "mount a tmpfs with huge=always at /run/kvstore/huge, as deploy/kvstore.service does"
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
        kinds = set(map(pages.page_kind, pages.places(_directory(dram), dram.huge_pages))) - {"4 KiB"}
        if kinds or (dram.directory == "auto" and os.geteuid() == 0):
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
    for arena in found:
        held = format_bytes(arena.held_bytes)
        if arena.instance == own:
            yield Finding("arena", "ok", f"the last daemon left {held}, which the next one adopts")
            continue
        said = f"{held} in {arena.path.parent} are of a daemon that does not run ({arena.state})"
        yield Finding(
            "arena", "warning", said, f"is its data directory gone? kvstore arena rm {arena.instance}"
        )
    if not found:
        yield Finding("arena", "ok", "none is left over")
