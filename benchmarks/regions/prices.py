"""What deserves to last in the demo: the settings of the deployment that persists by the cost rule.

One second of the demo's clock is `speed` seconds of the workload, and a record of 4 KiB stands for a block, so real prices would
mean nothing here. They are chosen for the outcome that they would have: from a count of LEAST_COUNT on a prefix is kept. With a
count that halves every HALF_LIFE_S of the workload, a prefix asked for once is kept for HALF_LIFE_S × log2(1 / LEAST_COUNT),
300 s, and one asked for twice HALF_LIFE_S longer.
"""

from __future__ import annotations

import math

from benchmarks.regions.workload import BLOCK_TOKENS, RECORD_BYTES

HALF_LIFE_S = 300.0  # of the workload
LEAST_COUNT = 0.5
PREFILL_TOKENS_PER_S = 10_000.0  # what the engines of the demo say
GPU_HOUR_PRICE = 2.0
FOUND_NOWHERE_SHARE = 0.1
Settings = dict[str, str | int]
_MONTH_S = 365.25 / 12 * 24 * 3600


def by_cost(speed: float) -> Settings:
    """Settings of a daemon that keeps what is worth more than it costs."""
    half_life_s = HALF_LIFE_S / speed
    prefill_s = BLOCK_TOKENS / PREFILL_TOKENS_PER_S
    saved = FOUND_NOWHERE_SHARE * prefill_s * GPU_HOUR_PRICE / 3600  # by one ask for a block
    life_s = half_life_s / math.log(2)
    storage = LEAST_COUNT * saved / (RECORD_BYTES / 1e9 * life_s / _MONTH_S)
    return {
        "durable.rule": "cost",
        "durable.half_life_s": str(half_life_s),
        "durable.storage_gb_month_price": str(storage),
        "durable.put_million_price": 0,
        "durable.found_nowhere_share": str(FOUND_NOWHERE_SHARE),
        "report.gpu_hour_price": str(GPU_HOUR_PRICE),
    }


def everything() -> Settings:
    """Settings of a daemon that persists whatever it is asked for, for good."""
    return {"durable.rule": "seen", "durable.seen_times": 1, "durable.keep_s": 365 * 24 * 3600}


def nothing() -> Settings:
    """Settings of a daemon that only uses what others persisted."""
    return {"durable.rule": "off"}
