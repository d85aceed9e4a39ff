"""Directory trees that stand for /proc and the cgroup file systems of other machines."""

from __future__ import annotations

from pathlib import Path

MIB = 1 << 20
NONE_V1 = 9223372036854771712  # what the kernel writes for "no limit"


class Tree:
    """A machine with so much memory, and no cgroups yet."""

    def __init__(self, path: Path, total_bytes: int, available_bytes: int, oom_kills: int = 0) -> None:
        self.proc = path / "proc"
        self.cgroups = path / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.available(total_bytes, available_bytes)
        self.killed(oom_kills)
        self._paths: list[str] = []
        self._mounts: list[str] = []

    def available(self, total_bytes: int, available_bytes: int) -> None:
        """What the kernel says of the machine."""
        (self.proc / "meminfo").write_text(
            f"MemTotal: {total_bytes >> 10} kB\nMemFree: 0 kB\nMemAvailable: {available_bytes >> 10} kB\n"
        )

    def killed(self, oom_kills: int) -> None:
        """So many processes since boot."""
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {oom_kills}\n")

    def v2(self, own: str, root: str = "/") -> None:
        """Our group's path, and which part of the tree is mounted."""
        self._paths.append(f"0::{own}")
        self._mounts.append(f"30 23 0:26 {root} {self.cgroups / 'v2'} rw - cgroup2 cgroup2 rw")
        self._write()

    def v1(self, own: str, root: str = "/") -> None:
        """The same for the memory controller of version 1, beside another one."""
        self._paths += ["3:cpu,cpuacct:/elsewhere", f"4:memory:{own}"]
        mount = self.cgroups / "v1"
        self._mounts += [
            f"31 23 0:27 / {self.cgroups / 'cpu'} rw - cgroup cgroup rw,cpu",
            f"32 23 0:28 {root} {mount} rw,relatime shared:9 - cgroup cgroup rw,memory",
        ]
        self._write()

    def _write(self) -> None:
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in self._paths))
        (self.proc / "self/mountinfo").write_text("".join(f"{line}\n" for line in self._mounts))

    def group2(
        self, path: str, limit: int | str, used_bytes: int, cache_bytes: int = 0, high: str = "max"
    ) -> None:
        """A group of version 2."""
        directory = self.cgroups / "v2" / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{limit}\n")
        (directory / "memory.high").write_text(f"{high}\n")
        (directory / "memory.current").write_text(f"{used_bytes}\n")
        (directory / "memory.stat").write_text(f"anon 1\ninactive_file {cache_bytes}\nactive_file 0\n")

    def group1(
        self, path: str, limit: int, used_bytes: int, above: int = NONE_V1, cache_bytes: int = 0
    ) -> None:
        """A group of version 1. above: the tightest limit of the groups above it."""
        directory = self.cgroups / "v1" / path
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.usage_in_bytes").write_text(f"{used_bytes}\n")
        (directory / "memory.stat").write_text(
            f"cache 1\nhierarchical_memory_limit {min(limit, above)}\ntotal_inactive_file {cache_bytes}\n"
        )
