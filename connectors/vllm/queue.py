"""Requests in vLLM's queue: their blocks come up from slower tiers while they wait.

taken in ─▶ vLLM asks for matched tokens in the same step: it starts, nothing is done
        └─▶ it does not: the request waits, and what NVMe holds of its prompt is promoted, once
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from connectors import constants as limits
from connectors.transfer.fetching import Fetching
from connectors.transfer.orders import Columns, Part
from connectors.vllm.spaces import Spaces
from connectors.vllm.tracked import Tracked

# Requests that wait in the engine's queue and whose blocks are promoted meanwhile.
QUEUED_PROMOTIONS_MAX = 32


class Queue:
    """Promotes the blocks of the first QUEUED_PROMOTIONS_MAX requests that vLLM has not asked about. columns_of: the
    namespaces that a request is looked up in, as far as is known."""

    def __init__(
        self, spaces: Spaces, fetching: Fetching, columns_of: Callable[[Any], dict[int, Columns]]
    ) -> None:
        self._spaces, self._fetching, self._columns_of = spaces, fetching, columns_of
        self._waiting: dict[str, Tracked] = {}
        self._promoted: set[str] = set()

    def add(self, tracked: Tracked) -> None:
        self._waiting[tracked.request.request_id] = tracked

    def remove(self, request_id: str) -> None:
        """It was asked about, or is gone."""
        self._waiting.pop(request_id, None)
        self._promoted.discard(request_id)

    def promote(self) -> None:
        """Called at the end of a step: who is still here waits."""
        plan = self._spaces.plan
        if plan is None or not self._spaces.columns:
            return
        for request_id, tracked in itertools.islice(self._waiting.items(), QUEUED_PROMOTIONS_MAX):
            if request_id in self._promoted:
                continue
            columns = self._columns_of(tracked.request)
            if not columns:
                continue
            self._promoted.add(request_id)
            parts = []
            for group in plan.full:
                count = min(group.blocks_in(tracked.request.num_tokens), limits.LOOKUP_HASHES_MAX)
                hashes = plan.hashes(group, tracked.names, 0, count)
                parts.append(Part(columns[group.index], [], hashes))
            self._fetching.promote(parts)
