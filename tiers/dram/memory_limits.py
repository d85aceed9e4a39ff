"""How much memory may still be taken here, and who says so.

    /proc/meminfo                 MemTotal, MemAvailable                     the machine
    cgroup v2, ours and above     memory.max, memory.high, memory.current    a container, a pod, a unit
    cgroup v1, ours and above     memory.stat, memory.usage_in_bytes         the same on older systems

Each is a `Limit`; the tightest one counts. Page cache counts as free: the kernel gives it up before it
kills a process. Where our group lies is read from the mount table, so that it is found in a container, too,
which sees a part of the tree or calls its own group "/". Whatever cannot be read sets no limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from tiers.constants import MEMORY_HEADROOM_BYTES
from tiers.parsing import mount_path

PROC: Final = Path("/proc")
_NO_LIMIT_BYTES: Final = 1 << 60  # cgroup v1 says "none" by a number near 2**63


@dataclass(slots=True, frozen=True)
class Limit:
    """what: for people. limit_bytes: never more than this. free_bytes: of that, now."""

    what: str
    limit_bytes: int
    free_bytes: int


class _Hierarchy(NamedTuple):
    """Names of the files of one version of cgroups."""

    limits: tuple[str, ...]
    used: str
    said: str  # in memory.stat: the tightest of its own limit and those above, which we may not see
    cache: tuple[str, ...]


_V1: Final = _Hierarchy(
    (), "memory.usage_in_bytes", "hierarchical_memory_limit", ("total_inactive_file", "total_active_file")
)
_V2: Final = _Hierarchy(("memory.max", "memory.high"), "memory.current", "", ("inactive_file", "active_file"))


def limits(proc: Path = PROC, process: str = "self") -> list[Limit]:
    """All limits that a process, this one, is under; never empty on Linux. proc: what stands for /proc."""
    found: list[Limit] = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
        meminfo = {name: rest.split() for name, _, rest in lines}
        total, available = (int(meminfo[name][0]) << 10 for name in ("MemTotal", "MemAvailable"))
        found.append(Limit("this machine", total, available))
    with contextlib.suppress(OSError, ValueError, IndexError):
        for hierarchy, mount, group in _groups(proc, process):
            inside = [group, *group.parents]
            found += [
                limit
                for directory in inside[: inside.index(mount) + 1]
                if (limit := _limit(hierarchy, directory, f"cgroup /{directory.relative_to(mount)}"))
            ]
    return found


def free_bytes(proc: Path = PROC) -> int:
    """What may be taken until the tightest limit is reached."""
    return min((limit.free_bytes for limit in limits(proc)), default=_NO_LIMIT_BYTES)


def memory_left(size_bytes: int, headroom_bytes: int = MEMORY_HEADROOM_BYTES, proc: Path = PROC) -> bool:
    """Whether this much may be taken, so that `headroom_bytes` are left.

    Without this question the kernel would kill a process.
    """
    return free_bytes(proc) >= size_bytes + headroom_bytes


def oom_kills(proc: Path = PROC) -> int | None:
    """How many processes of this machine the kernel has killed for memory since boot; None: it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


def _groups(proc: Path, process: str = "self") -> Iterator[tuple[_Hierarchy, Path, Path]]:
    """(version, where its tree is mounted, directory of our group) for each tree that may limit memory."""
    paths: dict[_Hierarchy, str] = {}
    for line in (proc / process / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths[_V2] = path
        elif "memory" in controllers.split(","):
            paths[_V1] = path
    for row in (proc / process / "mountinfo").read_bytes().rstrip(b"\n").split(b"\n"):
        before, _, after = row.partition(b" - ")
        root, mount = map(mount_path, before.split(b" ")[3:5])
        kind, _, options = after.decode(errors="backslashreplace").split()[:3]
        hierarchy = {"cgroup": _V1, "cgroup2": _V2}.get(kind)
        if hierarchy is None or hierarchy not in paths:
            continue
        if hierarchy is _V1 and "memory" not in options.split(","):
            continue
        yield hierarchy, Path(mount), _below(Path(mount), root, paths.pop(hierarchy))


def _below(mount: Path, root: str, path: str) -> Path:
    """The directory of a group, where the mount shows the tree from `root` on."""
    with contextlib.suppress(ValueError):
        inside = Path(path).relative_to(root)
        if ".." not in inside.parts and (mount / inside).is_dir():
            return mount / inside
    return mount  # a container: what is mounted is its own group


def _limit(hierarchy: _Hierarchy, directory: Path, what: str) -> Limit | None:
    """What one group says; None: no limit, or it cannot be read."""
    try:
        stat = dict(line.split(" ", 1) for line in (directory / "memory.stat").read_text().splitlines())
        used = int((directory / hierarchy.used).read_text())
    except (OSError, ValueError):
        return None
    said = [stat.get(hierarchy.said, "max")]
    for name in hierarchy.limits:
        with contextlib.suppress(OSError):
            said.append((directory / name).read_text().strip())
    limit = min((int(text) for text in said if text.isdigit()), default=_NO_LIMIT_BYTES)
    if limit >= _NO_LIMIT_BYTES:
        return None
    used -= sum(int(stat.get(name, 0)) for name in hierarchy.cache)
    return Limit(what.removesuffix("."), limit, max(0, limit - used))
