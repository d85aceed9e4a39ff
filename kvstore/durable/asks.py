"""Asks: the prompts that were looked up, and which of their prefixes deserve to last.

    lookup ─▶ add ─▶ waits ─▶ count, granule by granule ─▶ Worthy: the longest prefix that is worth keeping
                              demand │ rule              └─ news: durable ones whose life grew

A granule is 256 tokens, or one block if that is more: what is counted, and persisted, together. Counting is done between
requests, in slices; each request counts once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.constants import PERSIST_ASKS_BYTES_MAX
from kvstore.durable.demand import Demand, name_of
from kvstore.durable.traffic import Traffic
from kvstore.durable.worth import Block, Worth
from kvstore.index.block import Namespace
from kvstore.steps import Steps

GRANULE_TOKENS = 256  # of a prompt, counted and persisted together; one block, if that is more
KEEP_TOLD_SHARE = 0.5  # of its life: a durable prefix that gains more is announced to be kept longer
PERSIST_TICKETS_MAX = 65_536  # requests remembered, so that each counts once


class Worthy(NamedTuple):
    """A prefix that deserves to last. hashes: all of it, in whole granules. kept_until_s: of each granule, in unix
    seconds. durable: granules that are. news: of those, by their last block, the lives that grew."""

    namespace: Namespace
    hashes: bytes
    kept_until_s: Sequence[int]
    durable: int
    news: Mapping[bytes, int]


@dataclass(slots=True, eq=False)
class _Counting:
    """A prompt on its way: how many granules of it are durable, and how many were counted."""

    namespace: Namespace
    hashes: bytes
    durable: int
    counted: int = 0
    kept_until_s: list[int] = field(default_factory=list)
    news: dict[bytes, int] = field(default_factory=dict)


def granule_blocks(namespace: Namespace) -> int:
    """Blocks that are counted and persisted together."""
    return max(1, GRANULE_TOKENS // max(1, namespace.spec.block_tokens))


class Asks:
    """Called from the engine's thread only."""

    def __init__(
        self,
        demand: Demand,
        rule: Worth,
        durable: Callable[[Namespace, bytes], Steps[int]],
        weight: Callable[[Namespace], Block],
        traffic: Traffic,
    ) -> None:
        """durable: how many leading blocks of a prompt are. weight: of a namespace's blocks. traffic: told of each prompt."""
        self.size_bytes = 0  # of the hashes that wait
        self.dropped = 0  # prompts that were not counted, because too many waited
        self._demand = demand
        self.rule = rule
        self._durable = durable
        self._weight = weight
        self.traffic = traffic
        self._waiting: deque[tuple[Namespace, bytes]] = deque()
        self._tickets: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._counting: _Counting | None = None

    @property
    def waiting(self) -> bool:
        """Whether there is something to count."""
        return bool(self._waiting or self._counting)

    def add(self, namespaces: Sequence[Namespace], hashes: bytes, ticket: int) -> None:
        """A prompt was looked up."""
        for namespace in namespaces:
            if not hashes or self._is_known(namespace, ticket):
                continue
            blocks = len(hashes) // namespace.hash_bytes
            if blocks < granule_blocks(namespace):  # never durable
                self.traffic.count(namespace, blocks, 0)
                continue
            self._waiting.append((namespace, hashes))
            self.size_bytes += len(hashes)
        while self.size_bytes > PERSIST_ASKS_BYTES_MAX:
            self.size_bytes -= len(self._waiting.popleft()[1])
            self.dropped += 1

    def _is_known(self, namespace: Namespace, ticket: int) -> bool:
        """Whether this ticket was counted already."""
        if not ticket:
            return False
        name = namespace.id, ticket
        if name in self._tickets:
            return True
        self._tickets[name] = None
        if len(self._tickets) > PERSIST_TICKETS_MAX:
            self._tickets.popitem(last=False)
        return False

    def count(self, granules_max: int, now_s: int) -> Iterator[Worthy | None]:
        """Count about so many granules. None: others may be served. now_s: unix seconds."""
        while granules_max > 0 and self.waiting:
            if self._counting is None:
                namespace, hashes = first = self._waiting[0]
                durable = yield from self._durable(namespace, hashes)
                if self._counting is not None or not self._waiting or self._waiting[0] is not first:
                    continue  # counted, or dropped, meanwhile
                self._waiting.popleft()
                self.size_bytes -= len(hashes)
                self.traffic.count(namespace, len(hashes) // namespace.hash_bytes, durable)
                self._counting = _Counting(namespace, hashes, durable // granule_blocks(namespace))
            counting = self._counting
            granules_max -= self._count(counting, granules_max, now_s) + 1
            size_bytes = granule_blocks(counting.namespace) * counting.namespace.hash_bytes
            if counting.counted == len(counting.hashes) // size_bytes:
                self._counting = None
                if counting.kept_until_s:
                    hashes = counting.hashes[: len(counting.kept_until_s) * size_bytes]
                    yield Worthy(
                        counting.namespace, hashes, counting.kept_until_s, counting.durable, counting.news
                    )

    def _count(self, counting: _Counting, granules_max: int, now_s: int) -> int:
        """Go on with a prompt; how many granules were counted."""
        namespace, hashes = counting.namespace, counting.hashes
        size, granule = namespace.hash_bytes, granule_blocks(namespace)
        begun, end = counting.counted, min(len(hashes) // (size * granule), counting.counted + granules_max)
        rule, demand, kept_until_s = self.rule, self._demand, counting.kept_until_s
        least, grown = rule.least(self._weight(namespace)), rule.grown
        for number in range(begun, end):
            at = (number + 1) * granule * size
            block_hash = hashes[at - size : at]
            place = demand.asked(name_of(namespace.digest, block_hash), now_s, grown)
            count = demand.count[place]
            if count < least or len(kept_until_s) < number:
                continue
            keep_s = int(rule.keep_s(count, least))
            kept_until_s.append(now_s + keep_s)
            has_grown = now_s + keep_s - demand.kept_until_s[place] > keep_s * KEEP_TOLD_SHARE
            if number < counting.durable and has_grown:
                counting.news[block_hash] = demand.kept_until_s[place] = now_s + keep_s
        counting.counted = end
        return end - begun
