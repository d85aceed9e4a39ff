"""One cell of the table: a trace, a policy and a capacity, run through the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from kvstore.constants import REPLAY_HASH_BYTES
from kvstore.engine.engine import Engine
from kvstore.index import forest
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking
from kvstore.policies.base import Policies
from kvstore.protocol.frames import Acquired
from kvstore.tools.replay.slots import RECORD_BYTES, CountedSlots
from kvstore.tools.replay.trace import Trace
from tiers.base import CHECKSUM_BYTES, NAMESPACE_BYTES
from tiers.namespace_spec import NamespaceSpec

T = TypeVar("T")
_CHECKSUMS = bytes(CHECKSUM_BYTES)


class NoIo:
    """There is no slower tier: nothing is ever submitted."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T], None], failed: T, urgent: bool = False
    ) -> None:
        done(work())

    def lengths(self) -> tuple[int, int]:
        return 0, 0


class Node:
    """An engine with counted slots and a clock that the trace sets."""

    def __init__(self, slots: int, policies: Policies, hash_bytes: int = REPLAY_HASH_BYTES) -> None:
        self.now_s = 0.0
        self.hash_bytes = hash_bytes
        places = CountedSlots(slots, NAMESPACE_BYTES + hash_bytes)
        self.engine = Engine(places, [], NamespaceRegistry(), NoIo(), policies, clock=lambda: self.now_s)
        self.engine.adopt()
        self.session = self.engine.open_session(0, "replay")
        self._ticket = 0
        self.space = self.engine.register(NamespaceSpec(bytes(NAMESPACE_BYTES), RECORD_BYTES, hash_bytes))

    def ask(self, now_s: float, hashes: bytes) -> int:
        """One request: look up, read what is held, store the rest. Returns the number of hit blocks."""
        self.now_s = now_s
        engine, size = self.engine, self.hash_bytes
        self._ticket += 1
        hits = engine.find([self.space], hashes, Asking(self._ticket)).usable
        at = hits * size
        answers: list[Acquired] = []
        if hits:
            engine.acquire(self.session, self.space, hashes[:at], answers.append, ticket=self._ticket)
        if at < len(hashes):
            parent = hashes[at - size : at] if hits else b""
            answer = engine.reserve(self.session, self.space, hashes[at:], parent, self._ticket)
            if answer.lease:
                positions = [position for position, granted in enumerate(answer.granted) if granted]
                engine.commit(self.session, answer.lease, positions, _CHECKSUMS * len(positions))
        if answers:
            engine.release(self.session, answers[0].lease)
        return hits

    def close(self) -> None:
        """Let go of the blocks: the next cell runs in the same process."""
        for namespace in self.engine.namespaces:
            forest.forget(namespace)


def run(trace: Trace, slots: int, policies: Policies, after: Callable[[int], None] | None = None) -> float:
    """The share of looked-up blocks that were hits. `after` is called with each request's number."""
    hits = 0
    with contextlib.closing(Node(slots, policies)) as node:
        for number, (now_s, hashes) in enumerate(zip(trace.times_s, trace.prompts, strict=True)):
            hits += node.ask(now_s, hashes)
            if after is not None:
                after(number)
    return hits / trace.block_refs
