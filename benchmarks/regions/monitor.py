"""What `kvstore region status` said of each mirror while NA was serving: the last figures, and the worst age.

Asked as an operator asks, with the credentials of the buckets only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.regions.deployment import Deployment
from kvstore.tools.bench.daemon import DaemonError

LOOK_S = 10.0  # between two looks


@dataclass(slots=True)
class Pair:
    """One mirror. rpo_s_max: the greatest age of what was announced in the source and not at home yet."""

    source: str
    status: dict[str, Any]
    rpo_s_max: float = 0.0


class Monitor:
    """Looks now and then. Context manager; pairs: by deployment and the region that copies. look_s: how long the latest one took."""

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self.pairs: dict[tuple[str, str], Pair] = {}
        self.look_s = 0.0
        self._deployments = deployments
        self._guard = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def look(self) -> None:
        """Raises DaemonError."""
        with self._guard:
            begun_s = time.monotonic()
            for deployment in self._deployments:
                for status in deployment.mirror_status():
                    name = deployment.name, status["region"]
                    pair = self.pairs.setdefault(name, Pair(status["source"], status))
                    pair.status = status
                    pair.rpo_s_max = max(pair.rpo_s_max, status.get("oldest_age_s") or 0.0)
            self.look_s = time.monotonic() - begun_s

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                self.look()
            except DaemonError:
                pass  # the last look is the caller's, and says what is wrong
