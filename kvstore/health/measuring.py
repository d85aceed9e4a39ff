"""Measuring: when to look again at a source that was refused because it is slow.

refused ─▶ measured at once ─▶ still slow: after 1 s, 2 s, … a minute ─▶ used again: from 1 s on
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kvstore.constants import BREAKER_PAUSE_JITTER, PROBE_READS_MAX, PROBE_TARGETS_MAX, require

PROBE_PAUSE_S_MIN = 1.0  # between two measurements of a tier that was refused; doubles with each
PROBE_PAUSE_S_MAX = 60.0  # between two such measurements, until the tier is used again
PROBE_GAIN = 1.2  # times as fast as before: a tier recovers, and is measured again soon
require(
    PROBE_PAUSE_S_MIN <= PROBE_PAUSE_S_MAX and PROBE_READS_MAX <= PROBE_TARGETS_MAX, "probes are possible"
)


class Measuring:
    """Of one source. clock: in seconds."""

    def __init__(self, clock: Callable[[], float], chance: random.Random) -> None:
        self._clock = clock
        self._chance = chance
        self._at_s = 0.0
        self._pause_s = PROBE_PAUSE_S_MIN
        self._begun = 0
        self._bytes_per_s = 0.0

    def may_begin(self, begun: int, bytes_per_s: float) -> bool:
        """Whether it is time; if so it begins now. begun: loads so far that requests asked for."""
        now_s = self._clock()
        if now_s < self._at_s:
            return False
        if begun != self._begun:  # used since: begin with a short pause again
            self._begun = begun
            self._pause_s = PROBE_PAUSE_S_MIN
        self._at_s = now_s + self._pause_s * (1 + self._chance.random() * BREAKER_PAUSE_JITTER)
        self._pause_s = min(PROBE_PAUSE_S_MAX, 2 * self._pause_s)
        self._bytes_per_s = bytes_per_s
        return True

    def ended(self, bytes_per_s: float) -> None:
        """So fast it is now."""
        if bytes_per_s > PROBE_GAIN * self._bytes_per_s:
            self._pause_s = PROBE_PAUSE_S_MIN  # it recovers: look again soon
