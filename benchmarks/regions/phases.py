"""What the demo does, in order.

first half     NA serves it, with two deployments at once: one persists what is worth it, the other one everything. Mirrors
               copy to EU and APAC meanwhile. In the middle those who keep NA and EU are killed with -9.
a grace        GRACE_S without traffic: what was just asked for is persisted, announced, copied. At the speed of the
               demo these seconds would be minutes of the workload, so packs whose life ends in them are still there.
NA dies        kill -9 of its daemons; mirrors and daemons elsewhere are stopped, too
second half    a new, empty EU cluster serves it, three times: with the durable set, with everything, cold. What
               passed since the first half counts as none: a slow machine would take minutes of the workload for it
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.regions import prices
from benchmarks.regions.deployment import Deployment, Mirror, start
from benchmarks.regions.keepers import Killed, Kills
from benchmarks.regions.monitor import Monitor, Pair
from benchmarks.regions.servers import S3
from benchmarks.regions.serving import Served, serve_at_once, serve_paced
from benchmarks.regions.workload import RECORD_BYTES, Prompt
from kvstore.tools.bench.daemon import Daemon

# Clocks do not differ on one machine, but within a skew everybody must have read what was announced: a second until it is,
# and six between two looks.
SKEW_S = 8.0
# A pack is deleted two skews after its life, or a little later: what was worth keeping when the first half ended is there
# when the grace is over.
GRACE_S = 2 * SKEW_S
ARENA_SPARE = 1.3
IDLE_ARENA_BYTES = 0  # of a daemon that serves nobody: the least there is
PROGRESS_S = 10.0
RUNS = ("durable", "everything", "cold")  # lives go on to end
ORIGIN, TARGET = "na", "eu"


@dataclass(slots=True)
class Run:
    """The second half, once. ready_s: from the start of the daemon until it knows the region's packs."""

    name: str
    ready_s: float
    serving_s: float
    served: list[Served]


@dataclass(slots=True)
class Shown:
    """What was seen. late_s: by how much the first half was behind its times at worst."""

    server: str = ""
    late_s: float = 0.0
    sizes_bytes: dict[tuple[str, str], int] = field(default_factory=dict)  # by deployment and region
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)  # by deployment and region that copies
    killed: list[Killed] = field(default_factory=list)  # keepers
    runs: list[Run] = field(default_factory=list)


class Show:
    """The phases, in an empty directory. say: takes progress, a line each."""

    def __init__(
        self,
        directory: Path,
        arenas: Path,
        halves: tuple[Sequence[Prompt], Sequence[Prompt]],
        speed: float,
        say: Callable[[str], None],
        real_server: bool = True,
        late_s_max: float = math.inf,
    ) -> None:
        """arenas: a directory in memory, for blocks. real_server: radosgw, where it is installed. late_s_max: of the first half."""
        self.shown = Shown()
        self._directory = directory
        self._arenas = arenas
        self._first, self._second = halves
        self._speed = speed
        self._say = say
        self._real_server = real_server
        self._late_s_max = late_s_max
        self._stop = threading.Event()
        self._quiet_s = 0.0  # when the first half ended

    def carry_out(self) -> Shown:
        """All of it; every process is gone then. Raises DaemonError, ClientError, ServerError, TooLate."""
        with ExitStack() as stack:
            s3 = stack.enter_context(S3(self._directory / "s3", self._real_server))
            self.shown.server = s3.name
            self._say(f"{s3.name} answers at {s3.endpoint}")
            deployments = [
                Deployment("durable", ("na", "eu", "apac"), s3, self._directory / "durable", SKEW_S),
                Deployment("everything", ("na", "eu"), s3, self._directory / "everything", SKEW_S),
            ]
            self._serve_in_na(deployments)
            for deployment in deployments:
                for region in deployment.regions:
                    size = deployment.size_bytes(region)
                    self.shown.sizes_bytes[deployment.name, region] = size
            for name in RUNS:
                self._serve_in_eu(name, {one.name: one for one in deployments}.get(name))
        return self.shown

    # -- the first half --

    def _serve_in_na(self, deployments: Sequence[Deployment]) -> None:
        """Raises DaemonError, ClientError."""
        rules = {"durable": prices.by_cost(self._speed), "everything": prices.everything()}
        with ExitStack() as stack:
            daemons = []
            durable = deployments[0]
            spare = stack.enter_context(
                durable.daemon(ORIGIN, self._arenas, IDLE_ARENA_BYTES, rules[durable.name], spare=True)
            )
            with spare.client(attach=False) as client:  # it is there first, and so keeps NA
                spare.wait(lambda: (client.status()["region"] or {}).get("keeps") is True, "keeping NA")
            may_die: dict[str, list[Daemon]] = {ORIGIN: [spare], TARGET: []}
            mirrors: dict[str, Mirror] = {}
            for deployment in deployments:
                arena_bytes = _arena_bytes(self._first)
                rule = rules[deployment.name]
                daemons.append(
                    stack.enter_context(deployment.daemon(ORIGIN, self._arenas, arena_bytes, rule))
                )
                for region in deployment.regions[1:]:
                    idle = deployment.daemon(region, self._arenas, IDLE_ARENA_BYTES, rule)
                    stack.enter_context(idle)
                    mirror = stack.enter_context(deployment.mirror(region))
                    if (deployment, region) == (durable, TARGET):
                        may_die[region].append(idle)
                        mirrors[region] = mirror
            for daemon in daemons:
                joined_s(daemon)
            middle_s = self._first[-1].at_s / self._speed / 2
            with Monitor(deployments) as monitor:
                with Kills(durable, may_die, mirrors, middle_s) as kills:
                    self._pace(daemons)
                    self._say(f"{GRACE_S:g} s for what was just asked for")
                    time.sleep(max(0.0, GRACE_S - monitor.look_s))  # longer, and EU would delete what counts
                self.shown.killed = kills.killed
                monitor.look()
                for daemon in daemons:
                    daemon.kill()
                self._say("NA is switched off")
            self.shown.pairs = monitor.pairs

    def _pace(self, daemons: Sequence[Daemon]) -> None:
        took_s = self._first[-1].at_s / self._speed
        self._say(
            f"NA serves {len(self._first)} prompts of {self._first[-1].at_s / 60:.0f} minutes in {took_s:.0f} s"
        )
        with ThreadPoolExecutor(len(daemons)) as threads, self._stopping():
            begin_s = time.monotonic()
            jobs = [
                threads.submit(
                    serve_paced,
                    one.socket_path,
                    self._first,
                    begin_s,
                    self._speed,
                    self._stop,
                    self._late_s_max,
                )
                for one in daemons
            ]
            wait(jobs, return_when=FIRST_EXCEPTION)
            self._quiet_s = time.monotonic()
            self._stop.set()
            self.shown.late_s = max(job.result() for job in jobs)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Threads end when this does, however it does."""
        self._stop.clear()
        try:
            yield
        finally:
            self._stop.set()

    # -- the second half --

    def _serve_in_eu(self, name: str, deployment: Deployment | None) -> None:
        arena_bytes = _arena_bytes(self._second, self._first if deployment else ())
        begun_s = time.monotonic()
        late_s = begun_s - self._quiet_s
        if deployment is None:
            daemon = start(self._directory / name, self._arenas, arena_bytes, {})
        else:
            daemon = deployment.daemon(TARGET, self._arenas, arena_bytes, prices.nothing(), late_s)
        with daemon:
            if deployment is not None:
                joined_s(daemon)
            ready_s = time.monotonic() - begun_s
            self._say(f"a new EU cluster serves {len(self._second)} prompts: {name}")
            begun_s = time.monotonic()
            served = serve_at_once(daemon.socket_path, self._second, self._progress(name))
            self.shown.runs.append(Run(name, ready_s, time.monotonic() - begun_s, served))

    def _progress(self, name: str) -> Callable[[int], None]:
        next_s = time.monotonic() + PROGRESS_S

        def told(count: int) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                self._say(f"{name}: {100 * count // len(self._second)} %")
                next_s = time.monotonic() + PROGRESS_S

        return told


def joined_s(daemon: Daemon) -> None:
    """Wait until a daemon has read all of its region's feed. Raises DaemonError, ClientError."""
    with daemon.client(attach=False) as client:
        daemon.wait(
            lambda: (client.status()["region"] or {}).get("feed_age_s") is not None, "joining the region"
        )


def _arena_bytes(*parts: Sequence[Prompt]) -> int:
    """That nothing is evicted of what these prompts bring."""
    different = {block_hash for prompts in parts for prompt in prompts for block_hash in prompt.hashes}
    return int(len(different) * RECORD_BYTES * ARENA_SPARE)
