"""What a fault is tried on: a daemon with two disks and a region, its web process, and an engine that stores and loads all the time.

    moto ◀── proxy ◀── kvstore serve ◀── Traffic (a client in a thread)
                          ╰─ kvstore web

Everything is a process as users run it, and the CLI is asked as they would. A directory below `home` is all that is left of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.drill.traffic import Traffic
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, init, regions_file
from tests.running import Daemon, Place, daemons, environment, kvstore
from tests.web.asked import url_of

LIBRARIES = ("tests/kill/sick_disk.c", "benchmarks/drill/shifted_clock.c")
ROOT = Path(__file__).parents[2]
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]'


class Node:
    """One, not started yet. Context manager: leaving ends all of it. settings: of the daemon, more may be added before `start`."""

    def __init__(self, home: Path, regions: Sequence[str], group: Path | None = None) -> None:
        self.home = home
        self.settings = {
            "dram.capacity_bytes": "16MiB",
            "dram.slab_bytes": "4MiB",
            "nvme.capacity_bytes": "64MiB",
            "nvme.slab_bytes": "4MiB",
            "nvme.stall_s": "1",
            "durable.seen_times": "1",
            "web.listen": "127.0.0.1:0",
            "log.format": "json",
            "region": regions[-1],
        }
        self.disks = [home / "nvme0", home / "nvme1"]
        self.place = Place(home)
        self.environ: dict[str, str] = dict(S3_KEYS)
        self.group = group
        self.traffic = Traffic(self.place.socket)
        self._names = tuple(regions)
        self._stack = ExitStack()

    def __enter__(self) -> Node:
        self.home.mkdir(parents=True)
        s3 = S3Server()
        self._stack.callback(s3.stop)
        self.proxy = Proxy(s3.port, seed=1)
        self._stack.callback(self.proxy.close)
        rules = RULES if len(self._names) > 1 else ""
        self.regions = regions_file(self.home, *self._names, s3=s3, rules=rules)
        init(self.regions, *self._names)
        text = self.regions.read_text().replace(s3.endpoint, self.proxy.endpoint)
        self.regions.write_text(
            text.replace(f'"{self.proxy.endpoint}"', f'"{self.proxy.endpoint}"\nstall_s = 2.0')
        )
        self._start = self._stack.enter_context(daemons(self.home))
        return self

    def __exit__(self, *_: object) -> None:
        self.traffic.stop()
        if hasattr(self, "daemon"):
            self.signal(signal.SIGCONT)
        self._stack.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def start(self) -> None:
        """Daemon and traffic, until it serves and the first prompts are everywhere."""
        self._preload()
        (self.home / "shm").mkdir(exist_ok=True)
        self.daemon: Daemon = self._start(self.place, *self.words, **self.environ)
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(self.daemon.process.pid))
        self.url = url_of(self.daemon)
        self.traffic.start()
        self._stack.callback(self.traffic.stop)

    @property
    def words(self) -> list[str]:
        """The daemon's options."""
        return [
            f"--data-dir={self.place.data_dir}",
            f"--socket={self.place.socket}",
            f"--set=dram.directory={self.home / 'shm'}",
            f"--set=regions_file={self.regions}",
            f"--set=nvme.directories={','.join(map(str, self.disks))}",
            *(f"--set={key}={value}" for key, value in self.settings.items()),
        ]

    def callback(self, done: Callable[[], object]) -> None:
        """To be called at the end."""
        self._stack.callback(done)

    def signal(self, how: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.daemon.process.pid, how)

    def child(self, name: str) -> int:
        """The process number of one of the daemon's children."""
        pid = self.daemon.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if name.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                    return int(child)
        raise LookupError(f"no {name} beside the daemon")

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command of an operator, in the node's surroundings: a disk that hangs does so for it, too."""
        return kvstore(*words, **self.environ)

    def mirror(self) -> subprocess.Popen[bytes]:
        """`kvstore mirror` into this region."""
        words = [
            "mirror",
            f"--regions={self.regions}",
            f"--set=region={self._names[-1]}",
            f"--data-dir={self.home / 'mirror'}",
        ]
        with open(self.home / "mirror.log", "a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore", *words], stdout=log, stderr=log, env=environment(**self.environ)
            )  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _preload(self) -> None:
        made = []
        for source in LIBRARIES:
            library = self.home.parent / f"{Path(source).stem}.so"
            if not library.exists():
                words = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(ROOT / source), "-ldl"]
                subprocess.run(words, check=True)
            made.append(str(library))
        self.sick, self.clock = self.home / "sick", self.home / "clock"
        self.environ |= {
            "LD_PRELOAD": ":".join(made),
            "SICK_DISK": str(self.sick),
            "SICK_BELOW": str(self.disks[-1]) if self.disks else "/nowhere",
            "SHIFTED_CLOCK": str(self.clock),
        }
