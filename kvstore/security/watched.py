"""Files that are read again when they have changed: certificates, the access file.

Looked at once a second at most, however often is asked. Renamed, rewritten in place or behind a link that turns
(as Kubernetes projects them): any of them is a change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 1.0


class Watched:
    """Some files, together."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._seen: list[tuple[int, ...] | None] = []
        self._looked_s = float("-inf")

    def has_changed(self) -> bool:
        """Whether they are others than when this was last true; so it is at first. What is read afterwards is no older."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        before, self._seen = self._seen, [_state(path) for path in self._paths]
        return before != self._seen

    def forget(self) -> None:
        """What was read was of no use: the next look finds them changed."""
        self._seen = []


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
