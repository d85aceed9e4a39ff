"""Policies by name: what `kvstore replay --policy` may say. A daemon can select ours and LRU only."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policies.base import Policies
from kvstore.policies.names import OURS, SELECTABLE
from kvstore.tools.replay.policies.arc import Arc
from kvstore.tools.replay.policies.lfu import Lfu
from kvstore.tools.replay.policies.s3fifo import S3Fifo
from kvstore.tools.replay.policies.sieve import Sieve
from kvstore.tools.replay.policies.tinylfu import TinyLfu

REFERENCES: dict[str, Callable[[], Policies]] = {
    "lru": SELECTABLE["lru"],
    "arc": lambda: Policies(Arc),
    "s3fifo": lambda: Policies(S3Fifo),
    "sieve": lambda: Policies(Sieve),
    "lfu": lambda: Policies(Lfu),
    "wtinylfu": lambda: Policies(TinyLfu),
}
POLICIES: dict[str, Callable[[], Policies]] = {OURS: SELECTABLE[OURS], **REFERENCES}
BOUND = "belady"  # knows the future: only a replay can run it; approximate, as it keeps prefixes whole
EVERYTHING = "infinite"  # a cache that never evicts
