"""How large the arena may be on this machine, decided before any of its memory is taken.

    memory limits ─╮                          ╭▶ what an earlier daemon left, where it is what is asked for
    file system  ──┴─▶ what fits at most ─────┼▶ "auto": a share of what is free
    found arena  ───── its pages are ours     ├▶ a size that fits            (few slabs for the sizes of records: smaller ones)
                                              ╰▶ one that does not: refused, or with when_short = "shrink" cut down

An arena left by an earlier daemon has its memory already, so adopting it costs nothing, however little is free. Only
where so little is left that the daemon itself would not live, or the limit is lower than the arena is large, it is
given back: records are lost, nobody is killed.

A size beyond a limit is a wrong setting. One that only does not fit at the moment may fit later: `heals`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvstore.constants import MIB
from kvstore.daemon.config.config import Dram
from kvstore.errors import MemoryShort, StartSettingError
from tiers.constants import SLAB_ALIGN_BYTES
from tiers.dram import memory_limits, pages
from tiers.dram.arena_files import existing_layout
from tiers.dram.arenas_left import held_bytes, remove_arena
from tiers.dram.memory_limits import Limit
from tiers.dram.slot_table import Layout
from tiers.errors import NotOursError, OpenError
from tiers.sizes import exact_bytes, format_bytes

SLABS_PER_SIZE: Final = 4  # of records: with fewer slabs one size takes them from another again and again
SLAB_BYTES_SMALL: Final = 16 * MIB  # and no less, while nobody knows how large records are
SLABS_FEW: Final = 64  # of an arena with more nobody makes smaller ones
DRAM_SHARE = 4  # with dram.capacity_bytes = "auto": one part in so many of the memory that is free

log = logging.getLogger("kvstore.daemon.sizing")

LARGER_SHM: Final = "docker run --shm-size=16g, in Kubernetes a volume of memory at /dev/shm"


@dataclass(slots=True, frozen=True)
class Plan:
    """Where the arena lies, or is to be made, and how large. why_smaller: than asked for, "" where it is not."""

    path: Path
    layout: Layout
    why_smaller: str = ""


def preferred_directory(dram: Dram) -> Path | None:
    """The directory that the settings ask for; None for "auto". Raises StartSettingError."""
    if dram.directory == "auto":
        return None
    try:
        is_there = dram.directory.is_dir()
    except OSError as error:
        raise StartSettingError(f"dram.directory {dram.directory}: {error.strerror}") from error
    if not is_there:
        raise StartSettingError(f'dram.directory {dram.directory}: not a directory; make it, or set "auto"')
    return dram.directory


def plan_arena(
    dram: Dram,
    instance: str,
    headroom_bytes: int,
    proc: Path = memory_limits.PROC,
    sizes: Collection[int] = (),
) -> Plan:
    """Decide, for a start. May give back an arena that there is no room for, and mount huge pages.

    sizes: bytes of records, those that are known, each once. Raises as `look_ahead`.
    """
    found = pages.find_arena(preferred_directory(dram), dram.huge_pages, instance)
    if found is not None:
        _give_back_if_short(found, headroom_bytes // 2, proc)
    plan = look_ahead(dram, instance, headroom_bytes, proc, True, sizes)
    if plan.why_smaller:
        log.warning("%s: the arena is smaller", plan.why_smaller)
    slab_bytes, capacity_bytes = plan.layout.slab_bytes, plan.layout.capacity_bytes
    if slab_bytes < dram.slab_bytes:
        log.info(
            "dram.slab_bytes = %s: too large for an arena of %s: its slabs are of %s (dram.capacity_bytes: \"auto\")",
            exact_bytes(dram.slab_bytes), exact_bytes(capacity_bytes), exact_bytes(slab_bytes),
        )  # fmt: skip
    return plan


def look_ahead(
    dram: Dram,
    instance: str,
    headroom_bytes: int,
    proc: Path = memory_limits.PROC,
    may_mount: bool = False,
    sizes: Collection[int] = (),
) -> Plan:
    """What a start would decide. Changes nothing but with may_mount. sizes: as `plan_arena`.

    Raises MemoryShort, StartSettingError, or OpenError (what is there cannot be used).
    """
    preferred = preferred_directory(dram)
    found = pages.find_arena(preferred, dram.huge_pages, instance)
    left = _left(found) if found is not None else None
    if found is not None and left is not None and _is_asked_for(left, dram, sizes):
        too_small = [
            limit
            for limit in _memory(found.parent, proc)
            if left.capacity_bytes + headroom_bytes > limit.limit_bytes
        ]
        if not too_small:
            return Plan(found, left)
    reusable_bytes = held_bytes(found) if found is not None else 0
    asked = dram.capacity_bytes
    wish = asked if isinstance(asked, int) else _share(dram, memory_limits.free_bytes(proc) + reusable_bytes)
    layout = Layout.plan(wish, dram.slab_bytes, dram.slot_bytes_min)
    path = pages.choose_arena_path(preferred, dram.huge_pages, layout.needed_bytes, instance, may_mount)
    plan = _new(dram, path, layout, headroom_bytes, reusable_bytes, proc)
    if asked != "auto":
        return plan
    slab_bytes = enough_slabs(dram, plan.layout.capacity_bytes, sizes)
    return replace(plan, layout=replace(plan.layout, slab_bytes=slab_bytes))


def enough_slabs(dram: Dram, capacity_bytes: int, sizes: Collection[int]) -> int:
    """Bytes of a slab, halved until so much is four slabs for each size of records, as far as the largest of these fits."""
    least, slab_bytes = max([dram.slot_bytes_min, *(sizes or [SLAB_BYTES_SMALL])]), dram.slab_bytes
    while capacity_bytes < SLABS_PER_SIZE * max(1, len(sizes)) * slab_bytes and slab_bytes >= 2 * least:
        if slab_bytes % (2 * SLAB_ALIGN_BYTES):
            break
        slab_bytes //= 2
    return slab_bytes


def _new(
    dram: Dram, path: Path, layout: Layout, headroom_bytes: int, reusable_bytes: int, proc: Path
) -> Plan:
    """A new arena, in place of what an earlier daemon left. reusable_bytes: of memory, that has that one."""
    bounds = [
        (limit, min(limit.limit_bytes, limit.free_bytes + reusable_bytes) - headroom_bytes)
        for limit in _memory(path.parent, proc)
    ]
    try:
        room = pages.room_of(path.parent)
    except OSError as error:
        raise StartSettingError(
            f"no shared memory for the arena: {path.parent}: {error.strerror}; mount a tmpfs there, or set dram.directory to "
            "a directory of another one"
        ) from error
    if room is not None:
        bounds.append((Limit(str(path.parent), *room), min(room[0], room[1] + reusable_bytes)))
    tightest, available = min(bounds, key=lambda bound: bound[1])
    is_memory = tightest.what != str(path.parent)
    if dram.capacity_bytes == "auto":
        layout = Layout.plan(_share(dram, available), dram.slab_bytes, dram.slot_bytes_min)
    most = _fitting(dram, available)
    if layout.capacity_bytes <= most:
        return Plan(path, layout)
    if most and dram.when_short == "shrink":
        smaller = Layout.plan(most, dram.slab_bytes, dram.slot_bytes_min)
        return Plan(path, smaller, _said(dram, tightest, most, headroom_bytes * is_memory))
    ever = min(limit.limit_bytes - headroom_bytes * is_memory for limit, _ in bounds)
    line = _said(dram, tightest, most, headroom_bytes * is_memory) + _advice(most, is_memory)
    if _fitting(dram, ever) < layout.capacity_bytes:
        raise StartSettingError(line)
    raise MemoryShort(line)


def _give_back_if_short(found: Path, least_bytes: int, proc: Path) -> None:
    """The arena that was found goes where so little memory is left."""
    memory = _memory(found.parent, proc)
    short = min(memory, key=lambda limit: limit.free_bytes, default=None)
    if short is None or short.free_bytes >= least_bytes:
        return
    freed_bytes = remove_arena(found)
    log.warning(
        "%s has %s left: the arena of an earlier daemon (%s) was given back, its records in DRAM are lost",
        short.what,
        format_bytes(short.free_bytes),
        format_bytes(freed_bytes),
    )


def _left(found: Path) -> Layout | None:
    """What the arena of an earlier daemon was made for; None: damaged, or another format. Raises NotOursError."""
    try:
        return existing_layout(found)
    except NotOursError:
        raise
    except OpenError:  # it is replaced, with a warning of its own
        return None


def _is_asked_for(left: Layout, dram: Dram, sizes: Collection[int]) -> bool:
    """Whether this is an arena that the settings ask for, or allow."""
    if left.slot_bytes_min != dram.slot_bytes_min:
        return False
    if dram.capacity_bytes == "auto":
        if left.slab_count < len(sizes) and left.slab_bytes > enough_slabs(dram, left.capacity_bytes, sizes):
            return False
        is_few = left.capacity_bytes < SLABS_FEW * dram.slab_bytes
        return left.slab_bytes == dram.slab_bytes or (is_few and dram.slab_bytes % left.slab_bytes == 0)
    if left.slab_bytes != dram.slab_bytes:
        return False
    asked_bytes = dram.capacity_bytes // dram.slab_bytes * dram.slab_bytes
    if dram.when_short == "shrink":
        return left.capacity_bytes <= asked_bytes
    return left.capacity_bytes == asked_bytes


def _memory(directory: Path, proc: Path) -> list[Limit]:
    """The limits that count here: reserved huge pages are nobody else's, and no limit counts them."""
    return [] if pages.page_kind(directory) == "hugetlb" else memory_limits.limits(proc)


def _share(dram: Dram, free_bytes: int) -> int:
    return max(dram.slab_bytes, free_bytes // DRAM_SHARE // dram.slab_bytes * dram.slab_bytes)


def _fitting(dram: Dram, available_bytes: int) -> int:
    """The largest capacity whose slabs and table fit into so many bytes; 0 where not even one slab does."""
    slabs = max(0, available_bytes) // dram.slab_bytes
    while slabs:
        layout = Layout.plan(slabs * dram.slab_bytes, dram.slab_bytes, dram.slot_bytes_min)
        over_bytes = layout.needed_bytes - available_bytes
        if over_bytes <= 0:
            return layout.capacity_bytes
        slabs -= -(-over_bytes // (2 * dram.slab_bytes))
    return 0


def _said(dram: Dram, limit: Limit, most: int, headroom_bytes: int) -> str:
    """What does not fit, into what, and what would."""
    asked = exact_bytes(dram.capacity_bytes) if isinstance(dram.capacity_bytes, int) else dram.capacity_bytes
    kept = f" and {format_bytes(headroom_bytes)} are to stay free" if headroom_bytes else ""
    slab = exact_bytes(dram.slab_bytes)
    fits = f"at most {exact_bytes(most)} would fit" if most else f"not even one slab of {slab} would fit"
    return (
        f"dram.capacity_bytes = {asked}: of the {format_bytes(limit.limit_bytes)} of {limit.what} "
        f"{format_bytes(limit.free_bytes)} are free{kept}; {fits}"
    )


def _advice(most: int, is_memory: bool) -> str:
    """is_memory: what is short is memory itself. Else it is a file system, in containers one of 64 MiB."""
    what = 'set that, or dram.when_short = "shrink"' if most else "make room, or set smaller dram.slab_bytes"
    return f"; {what}" if is_memory else f"; {what}, or make it larger (in a container: {LARGER_SHM})"
