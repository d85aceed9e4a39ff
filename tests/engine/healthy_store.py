"""A store of constant bandwidth in virtual time, for records of any size: they have no bytes here.

    fetch ─▶ latency ─▶ bytes flow, all of the bandwidth at any moment ─▶ done

How requests share the bandwidth is the store's affair: in turn, side by side, or the last one first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.engine.engine import Engine
from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.movement.shared import Done, SharedLevel, SharedLimits, Wanted
from kvstore.movement.sources import SharedSource
from kvstore.protocol.frames import Acquired
from kvstore.tools.replay.slots import CountedLayout, CountedSlots
from tests.engine.fakes import SteppedIo
from tiers.base import NAMESPACE_BYTES, Get, Record
from tiers.namespace_spec import NamespaceSpec

LOOK_S = 0.25  # between two looks at what hangs
HASH_BYTES = 16


@dataclass(eq=False)
class Request:
    left_bytes: float
    flows_s: float  # from then on
    done: Callable[[], None]


class Store(SharedLevel):
    """sizes: of records, by digest of their namespace. order: "in turn", "side by side" or "last first"."""

    name = "object"

    def __init__(
        self, sizes: dict[bytes, int], bytes_per_s: float, latency_s: float, order: str, limits: SharedLimits
    ) -> None:
        self.limits = limits
        self.now_s = 0.0
        self.hangs = False
        self.loses_one = False  # the next request is never answered
        self.fetched: list[bytes] = []  # keys, in the order in which they were asked for
        self.under_way_most = 0
        self._sizes, self._bytes_per_s, self._latency_s, self._order = sizes, bytes_per_s, latency_s, order
        self._requests: list[Request] = []

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        return len(hashes) // namespace.hash_bytes

    def probe(self, done: Callable[[bool], None]) -> None:
        self._requests.append(Request(0.0, self.now_s + self._latency_s, lambda: done(True)))

    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        answers = [(Get.HIT, self._record(one.key)) for one in wanted]
        size_bytes = sum(record.size_bytes for _, record in answers)
        self.fetched += [one.key for one in wanted]
        if not self.loses_one:
            self._requests.append(Request(size_bytes, self.now_s + self._latency_s, lambda: done(answers)))
        self.loses_one = False
        self.under_way_most = max(self.under_way_most, len(self._requests))

    def _record(self, key: bytes) -> Record:
        digest, number = key[:NAMESPACE_BYTES], int.from_bytes(key[NAMESPACE_BYTES:], "big")
        parent = digest + (number - 1).to_bytes(HASH_BYTES, "big") if number % BLOCKS_MAX else b""
        return Record(key, parent, self._sizes[digest], bytes(16))

    def go_on(self, until_s: float) -> None:
        """Let time pass, to the next moment at which something ends, or until then."""
        ready = [one for one in self._requests if one.flows_s <= self.now_s]
        active = {"in turn": ready[:1], "last first": ready[-1:], "side by side": ready}[self._order]
        flow = 0.0 if self.hangs or not active else self._bytes_per_s / len(active)
        moments = [until_s, *(one.flows_s for one in self._requests if one.flows_s > self.now_s)]
        if flow:
            moments += [self.now_s + one.left_bytes / flow for one in active]
        next_s = min(moments)
        for one in active:
            one.left_bytes -= flow * (next_s - self.now_s)
        self.now_s = next_s
        if not self.hangs:
            for one in [one for one in active if one.left_bytes <= 1e-3]:
                self._requests.remove(one)
                one.done()


BLOCKS_MAX = 1 << 20  # of one prompt


class StoreNode:
    """An engine in front of a store. Namespaces differ in the size of their records."""

    def __init__(
        self,
        sizes: Sequence[int],
        bytes_per_s: float,
        latency_s: float,
        order: str = "in turn",
        limits: SharedLimits = SharedLimits(64, 64, 5.0),  # noqa: B008 immutable
    ) -> None:
        digests = [bytes([number + 1]) * NAMESPACE_BYTES for number in range(len(sizes))]
        self.store = Store(dict(zip(digests, sizes, strict=True)), bytes_per_s, latency_s, order, limits)
        places = CountedSlots(200_000, NAMESPACE_BYTES + HASH_BYTES)
        places.layout = CountedLayout(slab_bytes=1 << 30)
        self.engine = Engine(
            places, [], NamespaceRegistry(), SteppedIo(), clock=lambda: self.store.now_s, shared=[self.store]
        )  # fmt: skip
        self.engine.adopt()
        self.session = self.engine.open_session(0)
        self.spaces = [
            self.engine.register(NamespaceSpec(digest, size, HASH_BYTES, 16))
            for digest, size in zip(digests, sizes, strict=True)
        ]
        self.source: SharedSource = self.engine.loader.shared[0]
        self.came: dict[
            int, tuple[float, int]
        ] = {}  # by prompt: when it was answered, and with how many blocks
        self._prompts = 0

    def ask(self, space: int, blocks: int, patience_s: float = float("inf")) -> int:
        """A prompt that nobody had before. Returns its number."""
        self._prompts += 1
        prompt = self._prompts
        numbers = range(prompt * BLOCKS_MAX, prompt * BLOCKS_MAX + blocks)
        hashes = b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)

        def came(told: Acquired) -> None:
            self.came[prompt] = self.store.now_s, len(told.tiers) - told.tiers.count(0)

        self.engine.acquire(self.session, self.spaces[space], hashes, came, patience_s=patience_s)
        return prompt

    def run(self, until_s: float, until: Callable[[], bool] = lambda: False) -> None:
        look_s = self.store.now_s
        while self.store.now_s < until_s and not until():
            self.store.go_on(min(until_s, look_s + LOOK_S))
            if self.store.now_s >= look_s + LOOK_S:
                look_s = self.store.now_s
                self.engine.look()
