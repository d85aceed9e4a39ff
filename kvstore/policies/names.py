"""Policies by name: what the setting `engine.policy` may say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvstore.policies.base import Policies
from kvstore.policies.learned import Learned
from kvstore.policies.lru import LeafLru

OURS = "kvstore"
# Each takes what does its lessons later, or nothing: at once.
SELECTABLE: dict[str, Callable[..., Policies]] = {OURS: Learned, "lru": partial(Policies, LeafLru)}
