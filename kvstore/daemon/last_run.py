"""What became of the daemon before this one: did the kernel kill it for memory?

    a start writes serving.json ─▶ serves ─▶ a clean stop removes it
                                      └ killed: it stays, with the kernel's count of OOM kills as it was then

If the count has grown in the same boot, memory ran out while that daemon served. Then this one leaves twice
as much of the memory to others as that one did, so that starts do not end the same way again and again. The
count is the machine's: where another process was killed and the daemon died of something else, too, the
price is a little memory that stays free.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from kvstore.constants import KIB
from kvstore.daemon.config.config import Dram
from kvstore.retention.clock import boot_id
from tiers.constants import MEMORY_HEADROOM_BYTES
from tiers.dram import memory_limits
from tiers.files import replace_file
from tiers.reading import Unreadable, read_json

SERVING_BYTES_MAX = 64 * KIB  # serving.json is a hundred bytes

log = logging.getLogger("kvstore.daemon.last_run")


class Serving(msgspec.Struct):
    """headroom_bytes: of the memory, that this daemon leaves to others. oom_kills: since boot, when it started."""

    boot_id: str
    oom_kills: int
    headroom_bytes: int


class LastRun:
    """`serving.json` of a data dir. `headroom_bytes` and `was_killed` are for the daemon that starts now."""

    def __init__(self, path: Path, proc: Path = memory_limits.PROC) -> None:
        """Reads what the last daemon left; changes nothing."""
        self._path = path
        self._now = Serving(boot_id(), memory_limits.oom_kills(proc) or 0, MEMORY_HEADROOM_BYTES)
        last = self._read()
        self.was_killed = (
            last is not None and last.boot_id == self._now.boot_id and last.oom_kills < self._now.oom_kills
        )
        if last is not None and self.was_killed:
            tightest = min((limit.limit_bytes for limit in memory_limits.limits(proc)), default=1 << 63)
            twice = 2 * max(last.headroom_bytes, MEMORY_HEADROOM_BYTES)
            self._now.headroom_bytes = max(MEMORY_HEADROOM_BYTES, min(twice, tightest // 2))

    @property
    def headroom_bytes(self) -> int:
        """Of the memory, to be left to others."""
        return self._now.headroom_bytes

    def asks(self, dram: Dram) -> Dram:
        """For this start. After such a kill none is refused: less is taken, whatever the settings say."""
        return dram.model_copy(update={"when_short": "shrink"}) if self.was_killed else dram

    def begin(self) -> None:
        """This daemon takes memory from now on. Blocks on the disk."""
        try:
            replace_file(self._path, msgspec.json.encode(self._now))
        except OSError as error:
            log.warning("a start after an OOM kill will not know of it: %s: %s", self._path, error)

    def end(self) -> None:
        """It stops in good order."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: %s", self._path, error)

    def _read(self) -> Serving | None:
        try:
            return read_json(self._path, SERVING_BYTES_MAX, Serving)
        except Unreadable:  # none, or damaged: a hint was lost, no more
            return None
