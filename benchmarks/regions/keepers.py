"""Keepers that are killed in the middle of the first half: with -9, whoever keeps NA and EU of the durable set just then.

    middle ─▶ who keeps? a daemon says so itself, else it is the mirror ─▶ kill -9 ─▶ news of a later term: taken over, by whom

A mirror is started again at once, as its unit does it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.regions.deployment import Deployment, Mirror
from kvstore.client import ClientError
from kvstore.tools.bench.daemon import Daemon, DaemonError

LOOK_S = 0.5
TAKEN_OVER_S_MAX = 60.0


@dataclass(slots=True)
class Killed:
    """One keeper. killed_s: after the first prompt. kept_again_s: after that, None: not seen. by: "daemon" or "mirror". looked_s: how long
    somebody looked."""

    region: str
    who: str
    killed_s: float
    term: int
    kept_again_s: float | None = None
    by: str = ""
    looked_s: float = 0.0


class Kills:
    """Of one deployment. Context manager."""

    def __init__(
        self,
        deployment: Deployment,
        daemons: Mapping[str, Sequence[Daemon]],
        mirrors: Mapping[str, Mirror],
        after_s: float,
    ) -> None:
        """daemons: by region, those that may be killed. mirrors: the same. after_s: when."""
        self.killed: list[Killed] = []
        self._deployment = deployment
        self._daemons = daemons
        self._mirrors = mirrors
        self._after_s = after_s
        self._begun_s = time.monotonic()
        self._end = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kills", daemon=True)

    def __enter__(self) -> Kills:
        self._begun_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Raises DaemonError, ClientError: of the thread."""
        self._end.set()
        self._thread.join()
        if self._error is not None and error[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._end.wait(self._after_s)
            left = list(self._daemons)
            while not self._end.is_set() and (left or any(one.kept_again_s is None for one in self.killed)):
                left = [region for region in left if not self._kill(region)]
                self._end.wait(LOOK_S)
                self._look()
        except (DaemonError, ClientError) as error:
            self._error = error

    def _kill(self, region: str) -> bool:
        """Whether it was kept by somebody who may be killed."""
        term = self._deployment.news(region)[0]
        keeping = [daemon for daemon in self._daemons[region] if _keeps(daemon)]
        killed_s = time.monotonic() - self._begun_s
        if not keeping and region not in self._mirrors:
            return False
        for daemon in keeping:
            daemon.kill()
        if not keeping:
            self._mirrors[region].start_again()
        self.killed.append(Killed(region, "daemon" if keeping else "mirror", killed_s, term))
        return True

    def _look(self) -> None:
        for one in self.killed:
            if one.kept_again_s is None:
                one.looked_s = time.monotonic() - self._begun_s - one.killed_s
                term, who = self._deployment.news(one.region)
                if term > one.term:
                    one.kept_again_s, one.by = one.looked_s, who


def _keeps(daemon: Daemon) -> bool:
    """Raises ClientError."""
    with daemon.client(attach=False) as client:
        return bool((client.status()["region"] or {}).get("keeps"))
