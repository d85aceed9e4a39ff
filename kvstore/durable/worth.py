"""Worth: whether a prefix deserves to last, and until when. One of two rules, chosen by `durable.rule`.

seen   It was asked for `times` times, never with more than `within_s` between two of them. It is kept for `keep_s` after
       each of the later asks.

cost   What it is expected to save is worth more than keeping it costs. A count that halves every `half_life_s` is, at
       a steady rate of asks, that rate times the mean life of an ask in it, half_life / ln 2. So over one mean life
       as many asks are expected as the count says now:

           count × share of asks that find no nearer copy × seconds to compute a block × price of the GPUs
         > bytes × (storage + copies to mirrors) + share of the requests of a pack

       It is kept until its count, if nobody asks, has fallen so far that this does not hold any more.

Counts fall along a prompt, so a prefix is kept at least as long as what hangs on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from kvstore.constants import DAY_S, HOUR_S

_MONTH_S = 365.25 / 12 * DAY_S
_GB = 1e9
LONGEST_S = 10 * 365 * DAY_S  # that anything is kept: times fit into 32 bits


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of a namespace weighs. prefill_s: to compute it on `gpus` GPUs; 0 where nobody knows, and it is worth nothing then."""

    size_bytes: int
    prefill_s: float
    gpus: int


class Worth(Protocol):
    """A rule."""

    def grown(self, count: float, pause_s: int) -> float:
        """The count of a prefix that is asked for again after so long."""

    def least(self, block: Block) -> float:
        """The count from which on such a block is kept."""

    def keep_s(self, count: float, least: float) -> float:
        """For how long it is kept from now on, if nobody asks for it."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Asked for so many times, each within so many seconds of the one before."""

    times: int
    within_s: float
    kept_s: float

    def grown(self, count: float, pause_s: int) -> float:
        return count + 1.0 if pause_s <= self.within_s else 1.0

    def least(self, block: Block) -> float:
        return float(self.times)

    def keep_s(self, count: float, least: float) -> float:
        return self.kept_s


@dataclass(frozen=True, slots=True)
class Prices:
    """In one currency. found_nowhere_share: of asks for a known prefix, how many find no nearer copy of it."""

    gpu_hour: float
    storage_gb_month: float
    put_per_million: float
    copy_gb: float  # to all mirrors together
    found_nowhere_share: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Saves more than it costs."""

    prices: Prices
    half_life_s: float
    pack_bytes: int

    def grown(self, count: float, pause_s: int) -> float:
        return float(count * 2.0 ** (-max(0, pause_s) / self.half_life_s)) + 1.0

    def least(self, block: Block) -> float:
        prices = self.prices
        saved = prices.found_nowhere_share * block.prefill_s * block.gpus * prices.gpu_hour / HOUR_S
        if not saved:
            return math.inf
        life_s = self.half_life_s / math.log(2)
        storage = prices.storage_gb_month * life_s / _MONTH_S
        requests = prices.put_per_million / 1e6 * min(1.0, block.size_bytes / self.pack_bytes)
        return (block.size_bytes / _GB * (storage + prices.copy_gb) + requests) / saved

    def keep_s(self, count: float, least: float) -> float:
        if count <= least:
            return 0.0
        return (
            min(LONGEST_S, self.half_life_s * (math.log2(count) - math.log2(least))) if least else LONGEST_S
        )
