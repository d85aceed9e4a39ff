"""Break-even: how far along a prefix loading beats recomputing.

    blocks    │ in DRAM │ NVMe only │ in DRAM │ NVMe only … │
              0         k0                                  count
    gain(k) = tokens before k / prefill rate  −  time to load the NVMe-only blocks before k

The prefix that is used ends where the gain is largest. Each block in DRAM adds to it (a copy
runs at memory speed), so it ends before an NVMe-only block or nowhere. Blocks that the engine
holds itself are neither loaded nor computed.

Most lookups need no look at the blocks: if one block takes longer to compute than to load,
the tier's latency and queue included, then so does any number of them, wherever they are.
Otherwise the chain is walked once, from its end, along the parents.

The prefill rate is that of the request; else what this namespace's engines said last; else
a setting. Where it is not known, nothing is refused.
"""

from __future__ import annotations

from kvstore.accounts import Asking
from kvstore.blocks import IN_DRAM
from kvstore.constants import PREFILL_RATES_MAX, PREFILL_SHARE
from kvstore.namespaces import Namespace
from kvstore.speed import TierSpeed


class BreakEven:
    """Chooses prefixes. Changes nothing but what it knows of prefill rates."""

    def __init__(self, speed: TierSpeed, prefill_tokens_per_s: float) -> None:
        self._speed = speed
        self._configured = prefill_tokens_per_s
        self._learned: dict[int, float] = {}  # by namespace; those not told for longest are forgotten

    def learn(self, namespace: Namespace, tokens_per_s: float) -> None:
        """An engine said how fast it computes."""
        before = self._learned.pop(namespace.id, tokens_per_s)
        self._learned[namespace.id] = before + PREFILL_SHARE * (tokens_per_s - before)
        if len(self._learned) > PREFILL_RATES_MAX:
            del self._learned[next(iter(self._learned))]

    def rate(self, namespace: Namespace, asking: Asking) -> float:
        """Prompt tokens per second, 0 where nobody knows."""
        return asking.prefill_tokens_per_s or self._learned.get(namespace.id) or self._configured

    def usable(self, namespaces: list[Namespace], hashes: bytes, count: int, asking: Asking) -> int:
        """How many of the first `count` blocks, all of them held, are sooner loaded than computed."""
        rate = self.rate(namespaces[0], asking)
        if not rate:
            return count
        block_tokens = max(1, namespaces[0].spec.block_tokens)
        size_bytes = sum(namespace.record_bytes for namespace in namespaces)
        least_tokens = block_tokens - asking.local_tokens % block_tokens  # of a block that is not whole
        if self._speed.load_s(size_bytes) <= least_tokens / rate:
            return count
        slow = slow_blocks(namespaces, hashes, count, asking.local_tokens // block_tokens)
        if self._speed.flow_s(size_bytes) <= block_tokens / rate and slow:
            # Once latency is paid, each further block is worth loading: none of them, or all.
            slow = [(slow[0][0], sum(size for _, size in slow))]
        return self._best(slow, count, block_tokens, asking.local_tokens, rate)

    def _best(
        self, slow: list[tuple[int, int]], count: int, block_tokens: int, local_tokens: int, rate: float
    ) -> int:
        """slow: (position, bytes) of blocks that only NVMe has, in prompt order."""
        best, best_gain_s = 0, 0.0
        load_bytes, ahead_s = 0, self._speed.ahead_s()
        for position, size_bytes in [*slow, (count, 0)]:
            gain_s = max(0, position * block_tokens - local_tokens) / rate
            if load_bytes:
                gain_s -= ahead_s + self._speed.flow_s(load_bytes)
            if gain_s > best_gain_s or not load_bytes:
                best, best_gain_s = position, gain_s
            load_bytes += size_bytes
        return best


def slow_blocks(
    namespaces: list[Namespace], hashes: bytes, count: int, skip: int = 0
) -> list[tuple[int, int]]:
    """(position, bytes) of those among the blocks [skip, count), all held, that DRAM has not, in order."""
    bytes_at: dict[int, int] = {}
    for namespace in namespaces:
        size_bytes = namespace.record_bytes
        for position in _slow_positions(namespace, hashes, count, skip):
            bytes_at[position] = bytes_at.get(position, 0) + size_bytes
    found = list(bytes_at.items())
    return found if len(namespaces) == 1 else sorted(found)


def _slow_positions(namespace: Namespace, hashes: bytes, count: int, skip: int) -> list[int]:
    """The same of one namespace, without the bytes."""
    size = namespace.hash_bytes
    block = namespace.blocks.get(hashes[(count - 1) * size : count * size])
    found: list[int] = []
    for position in range(count - 1, skip - 1, -1):
        if block is None:
            break
        if not block.where & IN_DRAM:
            found.append(position)
        block = block.parent
    found.reverse()
    return found
