"""What must be there while a daemon runs, and is looked at every second: its socket, its data directory, its arena's names.

    socket        engines find us by it: made again, whatever became of it
    data_dir      what we know is kept there: its lock and its mark
    arena         the next daemon finds the memory by its names

NVMe directories are looked after by kvstore/daemon/disks/watch.py.

Others remove files: an operator who tidies up, a cleaner of old files. What is gone is a
problem for as long as it is. All looks are made by I/O threads: a file system that hangs holds up
nothing but the look at itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from kvstore.daemon.storage import Storage
from kvstore.door.listener import DoorSocket
from kvstore.door.unix import Door
from kvstore.errors import StartError
from kvstore.io_pool import Io

log = logging.getLogger("kvstore.daemon.presence")

Seen = tuple[str, DoorSocket | None]
_NOT_SEEN: Seen = ("", None)


class Presence:
    """Of one daemon that serves. `missing`: what is wrong now, by what it is about."""

    def __init__(self, door: Door, make_directory: Callable[[], None], storage: Storage, io: Io) -> None:
        """make_directory: of the socket; raises StartError."""
        self.missing: dict[str, str] = {}
        self._door = door
        self._make_directory = make_directory
        self._io = io
        self._under_way: set[str] = set()
        self._looks = dict(_looks(storage))
        self.look()

    def look(self) -> None:
        """Have it looked after; returns at once."""
        if self._begins("socket"):
            self._io.submit(self._look_at_socket, self._saw_socket, failed=_NOT_SEEN)
        for name, find in self._looks.items():
            if self._begins(name):
                self._io.submit(find, partial(self._saw, name), failed=self.missing.get(name, ""))

    def _begins(self, name: str) -> bool:
        if name in self._under_way:
            return False
        self._under_way.add(name)
        return True

    def _saw(self, name: str, problem: str) -> None:
        self._under_way.discard(name)
        self.missing.pop(name, None)
        if problem:
            self.missing[name] = problem

    def _look_at_socket(self) -> Seen:
        """In an I/O thread: what is wrong, and another socket where one was needed and could be had."""
        if self._door.is_in_place():
            return "", None
        try:
            self._make_directory()
            return "", self._door.another_socket()
        except (StartError, OSError) as error:
            return f"the socket is gone, engines that come find no daemon: {error}", None

    def _saw_socket(self, seen: Seen) -> None:
        problem, another = seen
        if another is not None and self._door.listen_at(another):  # at a stop we have removed it ourselves
            log.warning("socket %s: it was removed or replaced, and made again", self._door.path)
        self._saw("socket", problem)


def _looks(storage: Storage) -> Iterator[tuple[str, Callable[[], str]]]:
    data_dir, arena = storage.data_dir, storage.arena
    yield "data_dir", data_dir.missing
    yield (
        "arena",
        lambda: (
            ""
            if arena.is_named()
            else f"arena {arena.path}: its files are gone, or others are in their place: the next start is cold"
        ),
    )
