"""How each NVMe directory is: looked after every second, told of wherever levels are named.

    member of the level ─┬─ not opened: why (known.py says whether it is itself), tried again every few seconds
                         ├─ a look by one of its own threads: is it there, is it still the same one, how much is free?
                         ╰─ its breakers
                                  ╰─▶ one row a directory: state, problem, what to do    status, top, page, metrics, doctor

The look is a few calls that a disk which works answers from memory; one that does not come back within seconds is told of,
and holds up nothing but itself. All of this object is the event loop's; what blocks runs in I/O threads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.daemon.disks.filesystem import FileSystem, file_system, nearest_there
from kvstore.daemon.disks.known import Known, Row
from kvstore.errors import Failed, NotFound, NotSaved, RequestError
from kvstore.io_pool import Io
from kvstore.movement.adoption import Adoption
from kvstore.protocol import answers
from kvstore.residency.levels import Member
from kvstore.units import count, format_bytes
from replication.problems import Level, Problem
from tiers.constants import NVME_HEADROOM_BYTES
from tiers.nvme.direct import free_bytes

DISK_ANSWERS_S: Final = 5.0  # for one look, and for a directory to be opened
DISK_RETRY_S: Final = 5.0  # between two tries to open what was left alone
NOT_USED: Final = frozenset({"left alone", "gone", "empty", "another", "elsewhere", "removed", "silent"})

log = logging.getLogger("kvstore.daemon.disks")


@dataclass(frozen=True, slots=True)
class Seen:
    """By one look. is_in_place: it was not removed, or replaced, under the daemon."""

    is_in_place: bool
    on: FileSystem
    device: int
    free_bytes: int


class Disk:
    """One member, and what was seen of it."""

    def __init__(self, member: Member, path: Path, began_s: float) -> None:
        self.member = member
        self.path = path
        self.seen: Seen | None = None
        self.look_s: float | None = None  # since when a look is under way
        self.is_trying = False  # to open it again
        self.try_at_s = 0.0
        self.began_s = began_s  # when it was to be opened
        self.was_told = False  # its line in the log

    def silent_s(self, now_s: float) -> float:
        """For how long it has not answered what it was asked."""
        member = self.member
        is_opening = not (member.ready or member.left_alone or member.device.instance)
        asked_s = min(filter(None, (self.look_s, self.began_s if is_opening else None)), default=now_s)
        return now_s - asked_s


class Disks:
    """Of one daemon that serves. directories: of the members, in their order. io: for the small file."""

    def __init__(
        self,
        members: Sequence[Member],
        directories: Sequence[Path],
        known: Known,
        adoption: Adoption,
        io: Io,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disks = [Disk(m, path, clock()) for m, path in zip(members, directories, strict=True)]
        self._directories = tuple(directories)
        self._known = known
        self._adoption = adoption
        self._io = io
        self._clock = clock

    # -- looking --

    def look(self) -> None:
        """Have them looked after; returns at once."""
        now_s = self._clock()
        for disk in self._disks:
            member = disk.member
            if disk.look_s is None:
                disk.look_s = now_s
                member.io.submit(partial(_look, disk), partial(self._saw, disk), failed=None)
            if (
                member.left_alone
                and not member.device.instance
                and not disk.is_trying
                and now_s >= disk.try_at_s
            ):
                disk.is_trying = True
                self._adoption.again(member, partial(self._tried, disk))
        for disk in self._disks:
            self._tell(disk)

    def _tell(self, disk: Disk) -> None:
        """One line for each at a start."""
        member = disk.member
        if disk.was_told or disk.seen is None or not (member.ready or member.left_alone):
            return
        disk.was_told = True
        stats = member.device.stats()
        used = f"{format_bytes(stats.used_bytes)} of {format_bytes(stats.capacity_bytes)}"
        said = f"{count(stats.records)} records, {used}" if member.ready else "not used"
        log.info("%s %s: %s, on %s", member.name, disk.path, said, disk.seen.on.said)

    def _tried(self, disk: Disk) -> None:
        disk.is_trying = False
        disk.try_at_s = self._clock() + DISK_RETRY_S

    def _saw(self, disk: Disk, seen: Seen | None) -> None:
        disk.look_s = None
        disk.seen = seen or disk.seen

    def _saved(self) -> str:
        """In an I/O thread: what went wrong."""
        try:
            self._known.save()
        except OSError as error:
            return f"the data directory: {error.strerror}"
        return ""

    # -- what is told --

    def rows(self) -> list[answers.Disk]:
        """One for each directory; docs/cli.md names the fields."""
        shares = self._shares()
        return [self._row(disk, shares.get(disk)) for disk in self._disks]

    def known_rows(self) -> list[answers.Disk]:
        """The same, and what is remembered of directories that are not in the settings any more."""
        mine = {str(path) for path in self._directories}
        return [*self.rows(), *(unused_row(row) for row in self._known.rows() if row.directory not in mine)]

    def wrong(self) -> Iterator[Problem]:
        """What is wrong now with each that is not well; breakers are problems of their own."""
        for row in self.rows():
            if row["problem"] and row["state"] != "off":
                level: Level = "problem" if row["state"] in NOT_USED else "warning"
                text = row["problem"].removeprefix(f"{row['level']} ")
                yield Problem("disk", row["level"], text, row["todo"], level)

    def _shares(self) -> dict[Disk, int]:
        """What each may have in the end, where its file system has too little room for all that is to lie there."""
        here: dict[int, list[Disk]] = {}
        for disk in self._disks:
            if disk.seen is not None and disk.member.ready and disk.seen.is_in_place:
                here.setdefault(disk.seen.device, []).append(disk)
        shares = {}
        for disks in here.values():
            wanted_bytes = sum(disk.member.device.unbacked_bytes for disk in disks)
            room_bytes = max(0, min(d.seen.free_bytes for d in disks if d.seen) - NVME_HEADROOM_BYTES)
            for disk in disks if wanted_bytes > room_bytes else ():
                device = disk.member.device
                backed_bytes = device.stats().capacity_bytes - device.unbacked_bytes
                more_bytes = room_bytes * device.unbacked_bytes // wanted_bytes
                shares[disk] = backed_bytes + more_bytes // device.slab_bytes * device.slab_bytes
        return shares

    def _row(self, disk: Disk, share_bytes: int | None) -> answers.Disk:
        member = disk.member
        state, why, todo = self._state(disk, share_bytes)
        stats = member.device.stats()
        on = disk.seen.on if disk.seen is not None else None
        return {
            "level": member.name,
            "directory": str(disk.path),
            "device": on.source if on is not None else "",
            "file_system": on.said if on is not None else "",
            "state": state,
            "problem": f"{member.name} {disk.path}: {why}" if why else "",
            "todo": todo,
            "records": stats.records,
            "used_bytes": stats.used_bytes,
            "capacity_bytes": stats.capacity_bytes,
            "room_bytes": stats.capacity_bytes if share_bytes is None else share_bytes,
        }

    def _state(self, disk: Disk, share_bytes: int | None) -> tuple[str, str, str]:
        """A word; why, and what to do, "" where all is well."""
        member, path = disk.member, disk.path
        if member.left_alone:
            why = member.left_alone.removeprefix(f"nvme directory {path}: ")
            state = self._known.state(path)
            if not state:
                # What was open is not opened again: a part of what it holds is in the index.
                again = "restart the daemon" if member.device.instance else "it is tried again by itself"
                return "left alone", f"is left alone: {why}", f"mend what it names: {again}"
            todo = f"mount its disk: it is used again by itself; or kvstore disks --accept {path}, to take what is there now"
            return state, f"is left alone: {why}", todo
        silent_s = disk.silent_s(self._clock())
        if silent_s > DISK_ANSWERS_S:
            return "silent", f"has not answered for {silent_s:.0f} s", "look at dmesg, the disk, its mount"
        if disk.seen is not None and not disk.seen.is_in_place:
            return (
                "removed",
                "it, or a file in it, was removed, unmounted or replaced under the daemon: what it holds is lost with the next start",
                "put it back, or mount its disk; else restart the daemon, and kvstore disks --accept it",
            )
        if hung := next((b for b in (member.loads, member.stores) if not b.closed), None):
            why = f"{hung.name.removeprefix(member.name).strip()} are switched off: {hung.reason}"
            return "off", why, "it is tried again by itself: look at dmesg, smartctl -a"
        if not member.ready:
            return "reading", "", ""
        if share_bytes is None:
            return "ok", "", ""
        asked, share = format_bytes(member.device.stats().capacity_bytes), format_bytes(share_bytes)
        todo = f"make room on it, or set nvme.capacity_bytes to {share}"
        if member.device.is_full:
            why = f"its file system is full: it has {share} of the {asked} that were asked for, and evicts within them"
            return "full", why, todo
        return "short", f"its file system has room for {share} of the {asked} that were asked for", todo

    # -- what operators say --

    def change(self, directory: str, accept: bool, done: Done) -> None:
        """Take what is there now (accept), or remember nothing of it. `done` is called once that is on disk, or is refused."""
        disk = next((each for each in self._disks if str(each.path) == directory), None)
        try:
            if accept and disk is None:
                raise NotFound(f"{directory}: is not one of nvme.directories")
            is_lost = disk is not None and disk.seen is not None and not disk.seen.is_in_place
            if disk is not None and disk.member.device.instance and not is_lost:
                raise Failed(f"{directory}: is in use, and is the one that is known")
            if not accept and not self._known.forget(directory):
                raise NotFound(f"{directory}: nothing is remembered of it")
        except RequestError as refusal:
            done(refusal, {})
            return
        if accept and disk is not None:
            disk.member.io.submit(
                partial(_accepted, self._known, disk.path),
                partial(self._changed, disk, done),
                failed="",
                urgent=True,
            )
        else:
            self._changed(disk, done, "nothing")

    def _changed(self, disk: Disk | None, done: Done, on: str) -> None:
        """on: what lies where, for people; "" where that could not be looked at."""
        if not on:
            done(Failed(f"{disk.path if disk else ''}: cannot be looked at"), {})
            return

        def saved(problem: str) -> None:
            if disk is not None:
                disk.try_at_s = 0.0
            is_used_now = disk is not None and not disk.member.device.instance
            done(NotSaved(problem) if problem else None, {"on": on, "now": is_used_now})

        self._io.submit(self._saved, saved, failed="disks.json could not be written")


Done = Callable[[RequestError | None, dict[str, Any]], None]


def unused_row(row: Row) -> answers.Disk:
    """Of a directory that is remembered and not in the settings."""
    todo = f"kvstore disks --forget {row.directory}, if it is not to come back"
    return empty_row("", row.directory, row.on, "not set", todo, 0)


def empty_row(
    level: str, directory: str, file_system: str, state: str, todo: str, capacity_bytes: int
) -> answers.Disk:
    """Of a directory of which no more is known."""
    return {
        "level": level,
        "directory": directory,
        "device": "",
        "file_system": file_system,
        "state": state,
        "problem": "",
        "todo": todo,
        "records": None,
        "used_bytes": None,
        "capacity_bytes": capacity_bytes,
        "room_bytes": capacity_bytes,
    }


def _accepted(known: Known, path: Path) -> str:
    """In an I/O thread."""
    try:
        return known.accept(path).said
    except OSError:
        return ""


def _look(disk: Disk) -> Seen | None:
    """In an I/O thread of its own; None where nothing could be seen, which its breakers tell of."""
    try:
        is_in_place = disk.member.device.is_in_place()
        there = nearest_there(disk.path)
        return Seen(is_in_place, file_system(there), os.stat(there).st_dev, free_bytes(there))
    except OSError:
        return None
