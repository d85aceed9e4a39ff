"""The clock of TTLs: unix seconds that do not go back, not even over a kill.

    now = seconds since the machine's boot + ahead_s         ahead_s is kept with the rules

The wall clock may be set back, and no block may live longer for it. So the wall clock says only
where time begins; then the clock of this boot counts, which all processes share, and which goes on while the
machine sleeps. A daemon that starts in the same boot goes on where the last one was, whatever the wall clock says by then (if it is
ahead, time jumps ahead: blocks become older, never younger).

Over a reboot there is only the wall clock to believe. Time is then not before the latest rule was set,
and not before the latest row (`Expiry.adopted`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """Seconds since 1970 by a clock that does not go back."""

    def __init__(self, monotonic: Callable[[], float] = lambda: 0.0) -> None:
        self.ahead_s = 0.0  # of that clock
        self._monotonic = monotonic

    def now_s(self) -> float:
        return self._monotonic() + self.ahead_s

    def move_to(self, now_s: float) -> None:
        """It is at least this late. The clock never goes back."""
        self.ahead_s = max(self.ahead_s, now_s - self._monotonic())


def boot_id() -> str:
    """The identity of this boot of the machine; "" where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except (OSError, ValueError):
        return ""
