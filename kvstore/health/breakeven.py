"""Break-even: how far along a prefix loading beats recomputing.

    blocks    │ in DRAM │ slower only │ in DRAM │ slower only … │
              0         k0                                    count
    gain(k) = tokens before k / prefill rate  −  time to load the slower blocks before k

The prefix that is used ends where the gain is largest. Each block in DRAM adds to it (a copy
runs at memory speed), so it ends before a slower block or nowhere. Blocks that the engine
holds itself are neither loaded nor computed. Sources load side by side: what several of them
bring takes as long as the slowest of them.

Most lookups need no look at the blocks: if one block takes longer to compute than to load from
any source, queue and latency included, then so does any number of them, wherever they are.
Otherwise the chain is walked once, and where further blocks cost less than computing them it is,
of each source, all or nothing: a far one that is slow takes nothing from a near one.

The prefill rate is that of the request; else what this namespace's engines said last; else
a setting. Where it is not known, nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from kvstore.constants import NAMESPACES_MAX, STEP_BLOCKS, STEP_SLOW_BLOCKS
from kvstore.index.block import Namespace
from kvstore.ledger.accounts import Asking
from kvstore.steps import Steps

PREFILL_SHARE = 0.3  # of one more statement of an engine in what is known of its prefill rate
PREFILL_RATES_MAX = NAMESPACES_MAX  # namespaces whose rate is remembered


class Priced(Protocol):
    """Something to load from."""

    def load_s(self, size_bytes: int) -> float:
        """Predicted seconds from now until so much is there."""


class Slow(NamedTuple):
    """A block that DRAM does not have, and what loading it takes."""

    position: int
    source: Priced
    size_bytes: int


class BreakEven:
    """Chooses prefixes. Changes nothing but what it knows of prefill rates."""

    def __init__(self) -> None:
        self.configured = 0.0  # tokens a second: a setting
        self._learned: dict[int, float] = {}  # by namespace; those not heard of for longest are forgotten

    def learn(self, namespace: Namespace, tokens_per_s: float) -> None:
        """An engine said how fast it computes."""
        before = self._learned.pop(namespace.id, tokens_per_s)
        self._learned[namespace.id] = before + PREFILL_SHARE * (tokens_per_s - before)
        if len(self._learned) > PREFILL_RATES_MAX:
            del self._learned[next(iter(self._learned))]

    def rate(self, namespace: Namespace, asking: Asking) -> float:
        """Prompt tokens per second, 0 where it is not known."""
        return asking.prefill_tokens_per_s or self._learned.get(namespace.id) or self.configured

    def usable(
        self,
        namespaces: Sequence[Namespace],
        count: int,
        asking: Asking,
        sources: Iterable[Priced],
        slow: Callable[[], Steps[Sequence[Slow]]],
    ) -> Steps[int]:
        """How many of the first `count` blocks, all of them held, are sooner loaded than computed.

        `sources`: those that may have some of them. `slow`: finds, in prompt order, those that DRAM has not.
        """
        rate = self.rate(namespaces[0], asking)
        if not rate:
            return count
        block_tokens = max(1, namespaces[0].spec.block_tokens)
        size_bytes = sum(namespace.record_bytes for namespace in namespaces)
        least_tokens = block_tokens - asking.local_tokens % block_tokens  # of a block that is not whole
        sources = list(sources)
        if all(source.load_s(size_bytes) <= least_tokens / rate for source in sources):
            return count
        there = yield from slow()
        ends: Iterable[int]
        if all(_flow_s(source, size_bytes) <= block_tokens / rate for source in sources):
            # Once latency is paid, each further block is worth loading: it ends before the first one of a source, or nowhere.
            ends = sorted({*(yield from _firsts(there)), count})
        else:
            ends = chain((position for position, _, _ in there), [count])
        return (yield from _best(there, ends, block_tokens, asking.local_tokens, rate))


def _firsts(slow: Sequence[Slow]) -> Steps[Iterable[int]]:
    """The position of the first one of each source."""
    firsts: dict[Priced, int] = {}
    for at, (position, source, _) in enumerate(slow, 1):
        firsts.setdefault(source, position)
        if at % STEP_BLOCKS == 0:
            yield
    return firsts.values()


def _flow_s(source: Priced, size_bytes: int) -> float:
    """What one more block takes, behind the first."""
    return source.load_s(2 * size_bytes) - source.load_s(size_bytes)


def _best(
    slow: Sequence[Slow], ends: Iterable[int], block_tokens: int, local_tokens: int, rate: float
) -> Steps[int]:
    """Where the gain is largest, of these ends, which ascend. slow: in prompt order."""
    best, best_gain_s = 0, 0.0
    loads: dict[Priced, int] = {}  # bytes before the end, by source
    at, before, looks = 0, -1, 0
    for end in ends:
        if end == before:
            continue  # the same block of another namespace
        before = end
        while at < len(slow) and slow[at].position < end:
            _, source, size_bytes = slow[at]
            loads[source] = loads.get(source, 0) + size_bytes
            at += 1
            looks += 1
            if looks % STEP_SLOW_BLOCKS == 0:
                yield
        load_s = max((source.load_s(before_bytes) for source, before_bytes in loads.items()), default=0.0)
        gain_s = max(0, end * block_tokens - local_tokens) / rate - load_s
        if gain_s > best_gain_s or not loads:
            best, best_gain_s = end, gain_s
    return best
