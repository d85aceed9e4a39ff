"""Policies by name: what the setting `engine.policy` may say."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.policies.base import Policies
from kvstore.policies.learned import Learned
from kvstore.policies.lru import LeafLru

OURS = "kvstore"
SELECTABLE: dict[str, Callable[[], Policies]] = {OURS: Learned, "lru": lambda: Policies(LeafLru)}
