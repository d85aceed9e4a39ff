"""What a check says, and what it looks at."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvstore.daemon.config.config import Config
from tiers.dram import memory_limits

Level = Literal["ok", "note", "warning", "problem"]
Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """check: what was looked at, in a word or two. action: one line, "" where there is nothing to do."""

    check: str
    level: Level
    found: str
    action: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """What is looked at.

    config: None where it is wrong, and config_problems says how. status: the daemon's, None where none answered, and
    unreachable says why. clock: unix seconds. proc: what stands for /proc. disks: measure them, too.
    """

    socket: Path
    clock: Callable[[], float]
    config: Config | None = None
    config_problems: tuple[str, ...] = ()
    config_from: str = ""
    status: Status | None = None
    unreachable: str = ""
    disks: bool = False
    config_file: Path | None = None  # that was read, or would have been
    proc: Path = memory_limits.PROC

    @property
    def data_dir(self) -> Path | None:
        """That of the daemon that answers, else that of the settings."""
        if self.status is not None:
            return Path(self.status["daemon"]["data_dir"])
        return self.config.data_dir if self.config is not None else None

    @property
    def pid(self) -> int | None:
        """The daemon's process, where it is one that we see."""
        if self.status is None:
            return None
        pid = int(self.status["daemon"]["pid"])
        return pid if is_ours(pid, self.proc) else None


def is_ours(pid: int, proc: Path = memory_limits.PROC) -> bool:
    """Whether this process runs kvstore, as far as one can see. In another pid namespace it is somebody else."""
    try:
        return b"kvstore" in (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def user_name(uid: int) -> str:
    """For people."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def read_text(path: Path) -> str:
    """A small file of the kernel; "" where it is not there or not for us."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
