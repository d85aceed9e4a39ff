"""On which file system does a directory lie, and is it still the same one?

What a file system says of itself outlives reboots, unlike the number of its device; not every one says something, and
then nothing is concluded. Everything here blocks on the disk.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tiers.dram.pages import mount_of

_GET_UUID: Final = 0x80111500  # ioctl FS_IOC_GETFSUUID, Linux 6.9
# Those whose f_fsid is made of their UUID, and not of the number of the device.
_TELL_BY_FSID: Final = frozenset({"ext2", "ext3", "ext4", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs"})


@dataclass(frozen=True, slots=True)
class FileSystem:
    """identity: "" where it says nothing of itself. source: the device. mount: where it is mounted."""

    identity: str
    kind: str
    source: str
    mount: Path

    @property
    def said(self) -> str:
        """For people."""
        mount = os.fsencode(self.mount).decode(errors="backslashreplace")
        root = ", the root file system" if mount == "/" else f" at {mount}"
        return f"{self.kind} {self.source}{root}"


def file_system(path: Path) -> FileSystem:
    """That of a directory, or where it is not there, of the nearest one above it. Raises OSError."""
    there = nearest_there(path)
    mount = mount_of(there)
    if mount is None:
        return FileSystem(_uuid(there), "unknown", "", there)
    identity = _uuid(there)
    if not identity and mount.kind in _TELL_BY_FSID:
        identity = f"fsid {os.statvfs(there).f_fsid:016x}"
    return FileSystem(identity, mount.kind, mount.source, mount.path)


def differ(before: str, now: str) -> bool:
    """Whether these are identities of two file systems, as far as anybody can tell."""
    comparable = before.partition(" ")[0] == now.partition(" ")[0] != ""
    return comparable and before != now


def nearest_there(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    return next((place for place in (path, *path.parents) if os.path.lexists(place)), Path("/"))


def _uuid(path: Path) -> str:
    """ "" where the kernel or the file system has none."""
    answer = bytearray(17)
    fd = os.open(path if path.is_dir() else path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _GET_UUID, answer)
    except OSError:
        return ""
    finally:
        os.close(fd)
    uuid = bytes(answer[1 : 1 + answer[0]])
    return f"uuid {uuid.hex()}" if any(uuid) else ""
