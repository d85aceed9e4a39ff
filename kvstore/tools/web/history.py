"""The last hours, in samples: what the page draws.

    daemon's minutes │ sample │ sample │ gap │ sample │ …     kept as JSON: a few hundred bytes each

A daemon that is met for the first time, or was started anew, tells its minutes; from then on each answer makes a
sample of what came since the one before. Where nobody answered for long, nothing is told of that time: counts that are
known only from its two ends would be drawn as if somebody had looked. Times are the daemon's: where its clock is set back,
samples of times that are to come again are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.constants import WEB_HISTORY_S, WEB_SAMPLE_S
from kvstore.tools.web.samples import Counts, Sample, counts_of, minute_samples, sample_of

SAMPLES_MAX = int(WEB_HISTORY_S / WEB_SAMPLE_S)
GAP_SAMPLES = 3  # times WEB_SAMPLE_S: so long nobody looked, or nobody answered
CLOCKS_DIFFER_S = 2.0  # an answer takes time, and uptimes are rounded

_encoder = msgspec.json.Encoder()


class History:
    """Of one socket, whichever daemon answers there."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=SAMPLES_MAX)  # its t, its JSON
        self._before: _Look | None = None

    def is_new(self, live: Mapping[str, Any], at_s: float) -> bool:
        """Whether this answer is another daemon's than the last one: its minutes are wanted. at_s: monotonic."""
        before = self._before
        if before is None or live["pid"] != before.pid:
            return True
        return bool(live["uptime_s"] - before.uptime_s < at_s - before.at_s - CLOCKS_DIFFER_S)

    def note(self, live: Mapping[str, Any], at_s: float) -> None:
        """The newest answer; with the minutes of the daemon's life where it is a new one's."""
        before = self._before
        if before is None or self.is_new(live, at_s):
            now_s: float = live["now_s"]
            for sample in minute_samples(live, max(now_s - live["uptime_s"], now_s - WEB_HISTORY_S)):
                self._keep(sample)
        elif 0 < (span_s := at_s - before.at_s) <= GAP_SAMPLES * WEB_SAMPLE_S:
            self._keep(sample_of(before.counts, live, span_s))
        self._before = _Look(live["pid"], live["uptime_s"], at_s, counts_of(live))

    @property
    def newest(self) -> bytes:
        """JSON."""
        return self._samples[-1][1] if self._samples else b"null"

    def since(self, since_s: float) -> bytes:
        """JSON of an array: samples newer than that; all of them for who knows one from before the clock was set back."""
        is_back = bool(self._samples) and since_s > self._samples[-1][0]
        return b"[" + b",".join(sample for t, sample in self._samples if t > since_s or is_back) + b"]"

    def _keep(self, sample: Sample) -> None:
        while self._samples and self._samples[-1][0] > sample.t:
            self._samples.pop()
        sample.gap = not self._samples or self._samples[-1][0] < sample.t - sample.s - WEB_SAMPLE_S
        self._samples.append((sample.t, _encoder.encode(sample)))


class _Look(msgspec.Struct, frozen=True):
    """The last answer, and when it came."""

    pid: int
    uptime_s: float
    at_s: float
    counts: Counts
