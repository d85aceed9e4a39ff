"""What the scheduler's half of the connector remembers of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.transfer.orders import Columns
from connectors.vllm.identity.contents import Names


@dataclass(slots=True)
class Hit:
    """The daemon's answer for a prompt: local tokens before the hit, tokens it adds. It is used until `stale_s`, for a request
    that waits: vLLM asks again in every step. writing: tokens behind the hit that another engine is storing right now;
    promised: tokens behind it that one has promised to store."""

    local_tokens: int
    tokens: int
    prompt_tokens: int
    stale_s: float
    writing: int = 0
    promised: int = 0


@dataclass(slots=True)
class Wait:
    """A start of a request that waits for what is being stored. tokens: what there was when it began. grown_s: when it
    last became more; here: what there was then. over: it waits no longer, whatever comes."""

    begun_s: float
    tokens: int
    grown_s: float
    here: int
    over: bool = False


@dataclass(slots=True)
class Tracked:
    """One request. names: of its blocks. offered: by group, blocks before it were offered or are held. columns: by group, the
    namespaces that it is looked up in and saved to. started: the engine has asked about it. failed: a load of it did; it is
    not loaded again. tainted: its blocks are not saved. ticket: what the daemon's accounts know the lookup by, until its
    answer is used. looked_up: the ticket of its latest lookup; again: which is not the first that is known of the request.
    counted: in our statistics. wait: of its latest start."""

    request: Any
    names: Names
    offered: list[int]
    columns: dict[int, Columns] = field(default_factory=dict)
    hit: Hit | None = None
    wait: Wait | None = None
    sources: dict[CacheHitSource, int] = field(default_factory=dict)
    loading: bool = False
    started: bool = False
    failed: bool = False
    tainted: bool = False
    ticket: int = 0
    looked_up: int = 0
    again: bool = False
    counted: bool = False

    @property
    def withheld(self) -> bool:
        """Whether nothing of it may be saved."""
        return self.tainted or bool(self.names.unknown)
