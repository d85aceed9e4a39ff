"""Lookups: how much of a prompt's prefix is usable, and why not more. The one place that says so.

    blocks │ held by owned levels, prefix unbroken │ shared levels go on │ missing │
           │ … and alive (TTL)                     │                     │
           │ … within what DRAM may hold (quota)   │                     │
           │ … its source works (breaker) and loading beats computing    │

Each line can only shorten what is used; the reason of the first that does is the outcome of the
tokens behind it. Where all that is held is used, the answer also says how many blocks behind it are
being written right now: a later lookup will find them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import merge
from typing import NamedTuple

from kvstore.constants import STEP_BLOCKS
from kvstore.health.breakeven import BreakEven, Priced, Slow
from kvstore.index import forest
from kvstore.index.block import Namespace
from kvstore.ledger.accounts import Asking, Found
from kvstore.movement.sources import DeviceSource, SharedSource
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from kvstore.steps import Steps

LOOKUP_WRITING_MAX = 4096  # blocks behind those held of which a lookup says that they are being written


class Lookup(NamedTuple):
    """What is asked: the same prompt in each of these namespaces."""

    namespaces: Sequence[Namespace]
    hashes: bytes
    asking: Asking

    @property
    def skip(self) -> int:
        """Blocks that the engine holds itself."""
        return self.asking.local_tokens // max(1, self.namespaces[0].spec.block_tokens)

    @property
    def lacks_last_block_only(self) -> bool:
        """vLLM computes at least one token of each prompt, and a block in the same time: a load costs a step more."""
        lacking = self.asking.tokens - self.asking.local_tokens
        return self.skip > 0 and 0 < lacking <= self.namespaces[0].spec.block_tokens


class SharedEnd(NamedTuple):
    """Up to which block a shared level goes on, where the one before it ends."""

    source: SharedSource
    end: int


class Lookups:
    """Answers lookups. Changes no block."""

    def __init__(
        self,
        residency: Residency,
        break_even: BreakEven,
        devices: Sequence[DeviceSource],
        shared: Sequence[SharedSource],
    ) -> None:
        self._residency = residency
        self.break_even = break_even
        self._devices = devices
        self._shared = shared

    def find_steps(self, asked: Lookup) -> Steps[Found]:
        """How much is there, and how much of it is to be used. Most lookups are over with the first piece."""
        namespaces, hashes = asked.namespaces, asked.hashes
        owned = len(hashes) // namespaces[0].hash_bytes
        for namespace in namespaces:
            owned = forest.rooted_prefix(namespace, hashes, owned)
            if namespace.hidden:
                owned = yield from forest.shown_steps(namespace, hashes, owned)
        live = owned
        if self._residency.expiry:
            for namespace in namespaces:
                live = yield from self._residency.expiry.live_steps(namespace, hashes, live)
        if live < owned:
            return (yield from self._used(asked, live, ()))._replace(expired=owned - live)
        found = yield from self._used(asked, owned, (yield from self._shared_ends(asked, owned)))
        if found.usable == found.held and not asked.lacks_last_block_only:
            writing = self._writing(asked, found.held)
            return found._replace(writing=writing) if writing else found
        return found

    def _writing(self, asked: Lookup, held: int) -> int:
        """How many blocks behind those held are being written, up to the first that is neither; see Found."""
        if not any(namespace.writing for namespace in asked.namespaces):
            return 0
        size = asked.namespaces[0].hash_bytes
        behind = asked.hashes[held * size : (held + LOOKUP_WRITING_MAX) * size]
        run = forest.split_hashes(behind, size)
        for namespace in asked.namespaces:
            run = run[: forest.held_or_coming(namespace, run)]
        return len(run)

    def load_steps(self, asked: Lookup, found: Found) -> Steps[float]:
        """How long it takes, as far as is known, until DRAM has all that is to be used. Sources load side by side."""
        loads: dict[Priced, int] = {}  # bytes
        if found.usable and (self._devices or self._shared):
            slow = yield from self._slow(asked, found.held - found.shared, found.held)
            for at, (_, source, size_bytes) in enumerate(
                slow[: bisect_left(slow, found.usable, key=_position)], 1
            ):
                loads[source] = loads.get(source, 0) + size_bytes
                if at % STEP_BLOCKS == 0:
                    yield
        return max((source.load_s(size_bytes) for source, size_bytes in loads.items()), default=0.0)

    def note(self, asked: Lookup, found: Found) -> None:
        """A lookup was answered: learn the prefill rate of the client, and remember what was refused."""
        namespaces, hashes, asking = asked
        if asking.prefill_tokens_per_s:
            for namespace in namespaces:
                self.break_even.learn(namespace, asking.prefill_tokens_per_s)
        if found.usable == found.held:
            return
        counters = self._residency.counters
        if found.why == outcomes.OVER_QUOTA:
            counters.refused_over_quota += 1
            return
        if found.why == outcomes.SLOWER:
            counters.refused_slower += 1
        else:
            counters.refused_unavailable += 1
        size = namespaces[0].hash_bytes
        wanted = hashes[found.usable * size : (found.usable + 1) * size]
        for namespace in namespaces:
            block = namespace.blocks.get(wanted)
            if block is not None and self._devices and not block.where & IN_DRAM and block.where:
                source = self._devices[block.device]
                source.wanted(block.key)
                source.refused |= found.why == outcomes.SLOWER and not asked.lacks_last_block_only
                return
        if found.why == outcomes.SLOWER and not asked.lacks_last_block_only:
            self._refuse_shared(namespaces[0], hashes, found.usable)

    def _refuse_shared(self, namespace: Namespace, hashes: bytes, start: int) -> None:
        """The shared level that has the first block that was not used, if one has it, was too slow."""
        size = namespace.hash_bytes
        for source in self._shared:
            if source.loads.closed and source.held(namespace, hashes[: (start + 1) * size], start) > start:
                key = namespace.digest + hashes[start * size : (start + 1) * size]
                source.refuse(key, namespace.record_bytes)
                return

    def _shared_ends(self, asked: Lookup, owned: int) -> Steps[list[SharedEnd]]:
        """The shared levels that go on behind the owned part of the prefix, one behind the other."""
        end, ends = owned, list[SharedEnd]()
        for source in self._shared:
            if source.loads.closed and end * asked.namespaces[0].hash_bytes < len(asked.hashes):
                further = len(asked.hashes)
                for namespace in asked.namespaces:
                    further = min(further, (yield from source.held_steps(namespace, asked.hashes, end)))
                if further > end:
                    end = further
                    ends.append(SharedEnd(source, end))
        return ends

    def _used(self, asked: Lookup, owned: int, ends: Sequence[SharedEnd]) -> Steps[Found]:
        """What to use of a prefix of which owned levels have the first `owned` blocks, and shared ones the rest."""
        held = ends[-1].end if ends else owned
        near = next((at for source, at in reversed(ends) if not source.level.is_far), owned)
        if asked.lacks_last_block_only:
            return Found(min(asked.skip, held), held, outcomes.SLOWER, shared=held - owned, far=held - near)
        if not held or not (self._devices or self._shared):
            return Found(held, held)
        known: list[list[Slow]] = []

        def find_slow() -> Steps[list[Slow]]:
            if not known:
                known.append((yield from self._slow(asked, owned, held)))
            return known[0]

        end, why = held, outcomes.SLOWER
        if not all(source.loads.closed for source in self._devices):
            end = yield from _first_sick((yield from find_slow()), held)
            why = outcomes.UNAVAILABLE
        sources = [*self._devices, *(source for source, _ in ends)]
        healthy = [source for source in sources if source.loads.closed]
        if end == held or healthy:

            def before_end() -> Steps[list[Slow]]:
                slow = yield from find_slow()
                return slow[: bisect_left(slow, end, key=_position)]

            worth = yield from self.break_even.usable(
                asked.namespaces, end, asked.asking, healthy, before_end
            )
            if worth < end:
                end, why = worth, outcomes.SLOWER
        if self._residency.quotas:
            fitting = yield from self._within_quotas(asked, end, find_slow)
            if fitting < end:
                end, why = fitting, outcomes.OVER_QUOTA
        return Found(end, held, why, shared=held - owned, far=held - near)

    def _within_quotas(
        self, asked: Lookup, end: int, find_slow: Callable[[], Steps[list[Slow]]]
    ) -> Steps[int]:
        """No more than may be in DRAM at once: waiting for the rest would be in vain."""
        fitting = self._residency.quotas.fitting(asked.namespaces, IN_DRAM)
        if fitting is None or end <= asked.skip + fitting:
            return end
        slow = yield from find_slow()
        return max(asked.skip + fitting, slow[0].position) if slow else end

    def _slow(self, asked: Lookup, owned: int, held: int) -> Steps[list[Slow]]:
        """Of the blocks behind those that the engine has: those that DRAM has not, in prompt order."""
        found: list[list[Slow]] = []
        for namespace in asked.namespaces:
            near = yield from self._slow_in(namespace, asked.hashes, owned, asked.skip)
            far = yield from self._slow_shared(namespace, asked.hashes, max(owned, asked.skip), held)
            found.append(near + far)
        return found[0] if len(found) == 1 else (yield from _in_order(found))

    def _slow_in(self, namespace: Namespace, hashes: bytes, count: int, skip: int) -> Steps[list[Slow]]:
        """In owned levels, from the last block up along the parents."""
        size, devices, record_bytes = namespace.hash_bytes, self._devices, namespace.record_bytes
        block = namespace.blocks.get(hashes[(count - 1) * size : count * size]) if count else None
        found: list[Slow] = []
        for looks, position in enumerate(range(count - 1, skip - 1, -1), 1):
            if block is None:
                break  # or it left meanwhile
            if not block.where & IN_DRAM and block.where & IN_NVME:
                found.append(Slow(position, devices[block.device], record_bytes))
            block = block.parent
            if looks % STEP_BLOCKS == 0:
                yield
        found.reverse()
        return found

    def _slow_shared(self, namespace: Namespace, hashes: bytes, start: int, held: int) -> Steps[list[Slow]]:
        """In shared levels, behind the owned prefix."""
        found: list[Slow] = []
        for source in self._shared:
            if start >= held:
                break
            if source.loads.closed:
                end = min(held, (yield from source.held_steps(namespace, hashes, start)))
                for position in range(start, end):
                    found.append(Slow(position, source, namespace.record_bytes))
                    if len(found) % STEP_BLOCKS == 0:
                        yield
                start = max(start, end)
        return found


def _position(slow: Slow) -> int:
    return slow.position


def _in_order(found: Sequence[list[Slow]]) -> Steps[list[Slow]]:
    """All of these by their position."""
    merged: list[Slow] = []
    for slow in merge(*found, key=_position):
        merged.append(slow)
        if len(merged) % STEP_BLOCKS == 0:
            yield
    return merged


def _first_sick(found: Sequence[Slow], held: int) -> Steps[int]:
    """The position of the first one whose device may not be used; `held` if there is none."""
    for at, (position, source, _) in enumerate(found, 1):
        if isinstance(source, DeviceSource) and not source.loads.closed:
            return position
        if at % STEP_BLOCKS == 0:
            yield
    return held
