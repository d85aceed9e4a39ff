"""Traffic: of the tokens that were asked for lately, how many were durable, by model and tenant.

asks ─▶ count: a prompt, and how much of it the bucket has ─▶ rows ─▶ told in the region's bucket (`replication.formats.nodes`)

Counts fade: a token counts half after TRAFFIC_HALF_LIFE_S. Called from the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from kvstore.index.block import Namespace
from replication.constants import NODE_ROWS_MAX
from replication.formats.nodes import Asked, faded

TRAFFIC_KINDS_MAX = 4096  # models and tenants whose traffic is counted, those asked for latest


@dataclass(slots=True)
class _Count:
    asked_tokens: float
    durable_tokens: float
    at_s: float


class Traffic:
    """clock: unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[tuple[str, str], _Count] = {}

    def count(self, namespace: Namespace, blocks: int, durable_blocks: int) -> None:
        """A prompt was looked up, once."""
        fields, tokens = namespace.spec.fields, max(1, namespace.spec.block_tokens)
        self._add(
            (fields.get("model", ""), fields.get("tenant", "")), blocks * tokens, durable_blocks * tokens
        )

    def rows(self) -> list[Asked]:
        """Those that are most asked for."""
        now_s = self._clock()
        rows = []
        for (model, tenant), count in self._counts.items():
            left = faded(now_s - count.at_s)
            rows.append(Asked(model, tenant, left * count.asked_tokens, left * count.durable_tokens))
        return nlargest(NODE_ROWS_MAX, rows, key=lambda row: row.asked_tokens)

    def restore(self, rows: Sequence[Asked], at_s: float) -> None:
        """Go on from what an earlier life told then."""
        left = faded(self._clock() - at_s)
        for row in rows:
            self._add((row.model, row.tenant), left * row.asked_tokens, left * row.durable_tokens)

    def _add(self, kind: tuple[str, str], asked_tokens: float, durable_tokens: float) -> None:
        now_s = self._clock()
        count = self._counts.pop(kind, None) or _Count(0.0, 0.0, now_s)
        left = faded(now_s - count.at_s)
        count.asked_tokens = left * count.asked_tokens + asked_tokens
        count.durable_tokens = left * count.durable_tokens + durable_tokens
        count.at_s = now_s
        self._counts[kind] = count  # the latest one last
        if len(self._counts) > TRAFFIC_KINDS_MAX:
            del self._counts[next(iter(self._counts))]
