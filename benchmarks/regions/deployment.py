"""A deployment of the demo: its buckets, its file of regions, and the processes that run in its regions.

[regions.na] ──rule──▶ [regions.eu], [regions.apac]      NA: a daemon │ others: a daemon, and a mirror that pulls from NA
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.regions.prices import Settings
from benchmarks.regions.radosgw import ServerError
from benchmarks.regions.servers import BUCKET_REGION, S3
from kvstore.tools.bench.daemon import Daemon, DaemonError, log_tail, settings
from kvstore.tools.bench.plan import START_TIMEOUT_S
from replication.errors import Damaged
from replication.formats.keeping import NEWS, NEWS_FORMAT

MIB = 1 << 20
SLAB_BYTES = 16 * MIB
ARENA_BYTES_MIN = 4 * SLAB_BYTES
COMMAND_S_MAX = 60.0
PACKS = "packs/"


class Deployment:
    """regions: the first one produces, the others copy from it."""

    def __init__(self, name: str, regions: Sequence[str], s3: S3, home: Path, skew_s: float) -> None:
        """home: made, for its files. skew_s: how much clocks differ. Makes the buckets; raises DaemonError."""
        self.name = name
        self.regions = tuple(regions)
        self._home = home
        self._s3 = s3
        self._skew_s = skew_s
        home.mkdir()
        self.file = self._write("regions.toml", skew_s)
        for region in regions:
            s3.make_bucket(self._bucket(region))
            kvstore("region", "init", region, "--regions", self.file)

    def daemon(
        self,
        region: str,
        arenas: Path,
        arena_bytes: int,
        rule: Settings,
        late_s: float = 0.0,
        spare: bool = False,
    ) -> Daemon:
        """A daemon in a region, new each time. late_s: it begins after a pause that counts as none. spare: a second one.
        Raises DaemonError."""
        file = self._write("late.toml", self._skew_s + late_s) if late_s else self.file
        home = self._home / f"{region}{'-new' if late_s else ''}{'-spare' if spare else ''}"
        return start(home, arenas, arena_bytes, {**rule, "regions_file": str(file), "region": region})

    def mirror(self, region: str) -> Mirror:
        """What copies into a region. Raises DaemonError."""
        return Mirror(self._home / f"{region}-mirror", self.file, region)

    def mirror_status(self) -> list[dict[str, Any]]:
        """What `kvstore region status` says of each pair of regions. Raises DaemonError."""
        said = kvstore("region", "status", "--regions", self.file, "-o", "json", allowed=(0, 1))
        pairs: list[dict[str, Any]] = msgspec.json.decode(said)["mirrors"]
        return pairs

    def news(self, region: str) -> tuple[int, str]:
        """The term of whoever keeps a region, and whether that is a "mirror" or a "daemon"; 0 of nobody."""
        try:
            news = NEWS_FORMAT.unseal(self._s3.read(self._bucket(region), NEWS), NEWS)
        except (ServerError, Damaged):
            return 0, ""
        return news.term, "mirror" if news.holder.is_mirror else "daemon"

    def size_bytes(self, region: str) -> int:
        """Of the packs in the bucket of a region."""
        return self._s3.size_bytes(self._bucket(region), PACKS)

    def _bucket(self, region: str) -> str:
        return f"{self.name}-{region}"

    def _write(self, name: str, skew_s: float) -> Path:
        source, *others = self.regions
        lines = [f'deployment = "{self.name}"', f"clock_skew_s = {skew_s}"]
        for region in self.regions:
            lines += [
                f"[regions.{region}]",
                f'url = "s3://{self._bucket(region)}"',
                f'bucket_region = "{BUCKET_REGION}"',
                f'endpoint = "{self._s3.endpoint}"',
            ]
        lines += ["[[rules]]", f'from = ["{source}"]', f"to = {others}".replace("'", '"'), ""]
        path = self._home / name
        path.write_text("\n".join(lines), encoding="utf-8")
        return path


class Mirror:
    """`kvstore mirror` as a process of its own. Context manager."""

    def __init__(self, home: Path, regions_file: Path, region: str) -> None:
        """Start it and wait until it has joined. Raises DaemonError."""
        home.mkdir()
        (home / "empty.toml").touch()
        self._home, self._regions_file, self._region = home, regions_file, region
        self._log = home / "log"
        self._start()

    def start_again(self) -> None:
        """After kill -9, with what it has on disk. Raises DaemonError."""
        self.stop()
        self._start()

    def _start(self) -> None:
        home = self._home
        command = [sys.executable, "-m", "kvstore", "mirror", "--config", str(home / "empty.toml")]
        command += ["--data-dir", str(home / "data")]
        command += ["--set", f"regions_file={self._regions_file}", "--set", f"region={self._region}"]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment())
        try:
            assert self._process.stdout is not None
            readable, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
            if not readable or not self._process.stdout.readline().startswith(b"ready"):
                raise DaemonError(f"kvstore mirror did not become ready:\n{log_tail(self._log)}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """kill -9. Idempotent."""
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def start(home: Path, arenas: Path, arena_bytes: int, more: Settings) -> Daemon:
    """A daemon with nothing of its own. Raises DaemonError."""
    chosen = settings(arenas, max(ARENA_BYTES_MIN, -(-arena_bytes // SLAB_BYTES) * SLAB_BYTES))
    chosen |= {"dram.slab_bytes": SLAB_BYTES, "dram.slot_bytes_min": "4KiB"}
    return Daemon(home, {**chosen, **more})


def kvstore(*words: object, allowed: Sequence[int] = (0,), timeout_s: float = COMMAND_S_MAX) -> bytes:
    """What the command says on stdout. Raises DaemonError."""
    command = [sys.executable, "-m", "kvstore", *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=timeout_s, env=_environment())
    if done.returncode not in allowed:
        raise DaemonError(
            f"kvstore {' '.join(map(str, words))}: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout


def _environment() -> dict[str, str]:
    """Ours, without settings of whoever runs this."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
