"""Arenas in memory, as a daemon would hand them to a client."""

from __future__ import annotations

import os

from kvstore.client.arena_view import ArenaView, mapped


def arena_file(size_bytes: int) -> int:
    """The descriptor of a new file of this size in memory."""
    fd = os.memfd_create("arena")
    os.ftruncate(fd, size_bytes)
    return fd


def map_file(fd: int, size_bytes: int, writable: bool = True) -> ArenaView:
    """This process's mapping of the file, which is its own table of generations."""
    return mapped(fd, size_bytes, fd, size_bytes, writable)


def arena(size_bytes: int, writable: bool = True) -> ArenaView:
    """A new arena, mapped."""
    fd = arena_file(size_bytes)
    try:
        return map_file(fd, size_bytes, writable)
    finally:
        os.close(fd)
