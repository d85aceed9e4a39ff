"""A request, as the scheduler's half knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource


@dataclass(slots=True)
class Hit:
    """The daemon's answer for a prompt: local tokens before the hit, tokens it adds. It is used until
    `stale_s`, for a request that waits: vLLM asks again in every step."""

    local_tokens: int
    tokens: int
    prompt_tokens: int
    stale_s: float


@dataclass(slots=True)
class Tracked:
    """One request. offered: by group, blocks before it were offered or are held. blocks of the
    request are not saved while it is `tainted`, never loaded again once a load `failed`. ticket: what
    the daemon's accounts know the lookup by, until its answer is used. looked_up: the ticket of its latest
    lookup. counted: in our statistics."""

    request: Any
    offered: list[int]
    hit: Hit | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    loading: bool = False
    failed: bool = False
    tainted: bool = False
    ticket: int = 0
    looked_up: int = 0
    counted: bool = False
