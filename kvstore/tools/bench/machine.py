"""The machine that the figures are of, and how much of it others used meanwhile."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from pathlib import Path

from kvstore import __version__
from kvstore.tools.bench.figures import Value
from tiers.dram.pages import mount_of, page_kind

PACKAGES = ("msgspec", "xxhash", "uvloop")


def facts(directory: Path, arena_directory: Path) -> dict[str, Value]:
    """CPU, kernel, pages, file system of `directory`, versions."""
    mount = mount_of(directory)
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "page_kind": page_kind(arena_directory),
        "arena_directory": str(arena_directory),
        "directory": str(directory),
        "filesystem": mount.kind if mount is not None else "unknown",
        "python_version": platform.python_version(),
        "kvstore_version": __version__,
        **{f"{name}_version": importlib.metadata.version(name) for name in PACKAGES},
    }


class Others:
    """CPU time of all other processes, between making this and asking."""

    def __init__(self) -> None:
        self._busy, self._total = _machine_jiffies()
        self._ours_s = _our_seconds()

    def percent(self) -> float:
        """Of the machine's CPU time. Ended children of ours count as ours, running ones do not."""
        busy, total = _machine_jiffies()
        ours = (_our_seconds() - self._ours_s) * os.sysconf("SC_CLK_TCK")
        spent = max(0.0, busy - self._busy - ours)
        return round(100 * spent / max(1, total - self._total), 1)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _machine_jiffies() -> tuple[int, int]:
    """(busy, all) of all CPUs since boot. Steal counts as busy: another machine had the CPU."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, words)
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait


def _our_seconds() -> float:
    ours = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in ours)
