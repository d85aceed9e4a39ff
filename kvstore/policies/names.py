"""Policies by name: what `kvstore replay --policy` and the setting `engine.policy` may say."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policies.arc import Arc
from kvstore.policies.base import Policies
from kvstore.policies.learned import Learned
from kvstore.policies.lfu import Lfu
from kvstore.policies.lru import LeafLru
from kvstore.policies.s3fifo import S3Fifo
from kvstore.policies.sieve import Sieve
from kvstore.policies.tinylfu import TinyLfu

OURS = "kvstore"
REFERENCES: dict[str, Callable[[], Policies]] = {
    "lru": lambda: Policies(LeafLru),
    "arc": lambda: Policies(Arc),
    "s3fifo": lambda: Policies(S3Fifo),
    "sieve": lambda: Policies(Sieve),
    "lfu": lambda: Policies(Lfu),
    "wtinylfu": lambda: Policies(TinyLfu),
}
POLICIES: dict[str, Callable[[], Policies]] = {OURS: Learned, **REFERENCES}
BOUND = "belady"  # knows the future: only a replay can run it; approximate, as it keeps prefixes whole
EVERYTHING = "infinite"  # a cache that never evicts
