"""Faults of the second of two disks."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from pathlib import Path

from benchmarks.drill.fault import Cause, Fault, NotHere
from benchmarks.drill.node import Node

FULL_BYTES = 400 << 20  # of a file system that is to be full
CLONE_NEWNS = 0x00020000
_FLIP_EVERY_BYTES = 16 * 1024


class DiskHung(Fault):
    name = "disk hung"
    causes = (Cause("disk", "nvme1", "has not answered for"), Cause("breaker", "nvme1 .*"))

    def break_(self, node: Node) -> None:
        node.sick.write_text("x")

    def mend(self, node: Node) -> None:
        node.sick.unlink(missing_ok=True)


class DiskFull(Fault):
    name = "disk full"
    causes = (Cause("disk", "nvme1", "file system (is full|has room for)"),)

    def prepare(self, node: Node) -> None:
        node.settings["nvme.capacity_bytes"] = "256MiB"
        mounted(node, node.disks[1], FULL_BYTES)
        node.disks[1] = node.disks[1] / "kv"

    def break_(self, node: Node) -> None:
        file = node.disks[1].parent / "filler"
        with suppress(OSError), file.open("wb", buffering=0) as filler:
            while filler.write(bytes(1 << 20)):
                pass

    def mend(self, node: Node) -> None:
        (node.disks[1].parent / "filler").unlink(missing_ok=True)


class DiskUnmounted(Fault):
    name = "disk unmounted"
    causes = (Cause("disk", "nvme1", "(another directory, or file system, is in its place|was removed)"),)

    def prepare(self, node: Node) -> None:
        self._real = node.home / "device"
        mounted(node, self._real, 2 * FULL_BYTES)
        node.disks[1].mkdir()
        self._mount(node)
        node.callback(
            lambda: subprocess.run(["umount", "-l", node.home / "nvme1"], check=False, capture_output=True)
        )
        node.disks[1] = node.disks[1] / "kv"

    def _mount(self, node: Node) -> None:
        subprocess.run(["mount", "--bind", self._real, node.home / "nvme1"], check=True)

    def break_(self, node: Node) -> None:
        subprocess.run(["umount", "-l", node.home / "nvme1"], check=True)

    def mend(self, node: Node) -> None:
        if not os.path.ismount(node.home / "nvme1"):
            self._mount(node)


class DiskRemoved(Fault):
    name = "disk removed"
    causes = (Cause("disk", "nvme1", "was removed"),)

    def break_(self, node: Node) -> None:
        node.disks[1].rename(node.home / "elsewhere")

    def mend(self, node: Node) -> None:
        with suppress(FileNotFoundError):
            (node.home / "elsewhere").rename(node.disks[1])


class DiskDamaged(Fault):
    name = "disk damaged"
    causes = (Cause("damage", "nvme1", "came back with other bytes"),)

    def break_(self, node: Node) -> None:
        for file in node.disks[1].rglob("*.kvs"):
            flip(file)

    def mend(self, node: Node) -> None:
        """What is damaged is dropped when it is read."""


def flip(file: Path) -> None:
    """A byte of each record of a file."""
    with file.open("r+b") as slab:
        for at in range(0, file.stat().st_size, _FLIP_EVERY_BYTES):
            slab.seek(at)
            if byte := slab.read(1):
                slab.seek(at)
                slab.write(bytes([byte[0] ^ 0xFF]))
        slab.flush()
        os.fsync(slab.fileno())


def mounted(node: Node, path: Path, size_bytes: int) -> None:
    """A file system of memory, only in here. Raises NotHere."""
    path.mkdir()
    if os.geteuid() != 0:
        raise NotHere("needs root, to mount a file system")
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(path)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotHere(f"a file system cannot be mounted: {done.stderr.strip()}")
    node.callback(lambda: subprocess.run(["umount", "-l", path], check=False, capture_output=True))


def alone() -> None:
    """Mounts of this process and those that it starts are nobody else's, and end with them; without root there are none."""
    if os.geteuid() == 0 and not ctypes.CDLL(None).unshare(CLONE_NEWNS):
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
