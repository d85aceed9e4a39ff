"""Windows: up to where KV groups that need only the end of a prefix have what they need to go on: sliding windows and states.

    blocks   [ … left … ][ there ][ there ][ there ][ being written ]
                         │←────── window ──────────→T

A prefix ends at its first gap, so a lookup halves. A window may lack whatever lies before it, so its blocks are looked at one by
one, from the end of the prompt on. T is a hit where each group has all blocks of its last window, by the rules of a lookup
(`kvstore.engine.lookups`): in an owned level, alive and on a device that works, or in a shared level; and where loading what DRAM
lacks of all of them takes no longer than computing T tokens. Else the last block that is in the way has to go: no T behind its
beginning is a hit, and the next one to look at lies there. So each block is looked at about once, of a hit those of a window only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.constants import STEP_BLOCKS
from kvstore.engine.parts import Parts
from kvstore.errors import BadRequest
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.ledger.accounts import Asking
from kvstore.movement.sources import DeviceSource, SharedSource
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.steps import Steps

_Source = DeviceSource | SharedSource


class Asked(NamedTuple):
    """groups: namespaces, and how many tokens before the next one each needs. hashes: of the prompt, one every `hash_tokens`. A hit is a
    multiple of align_tokens, at most held_tokens; with what is being written at most reach_tokens."""

    groups: Sequence[tuple[Namespace, int]]
    hashes: bytes
    hash_tokens: int
    align_tokens: int
    held_tokens: int
    reach_tokens: int
    asking: Asking


def find_steps(engine: Parts, asked: Asked) -> Steps[tuple[int, int]]:
    """The longest hit in tokens, and the longest one when what is being written is there. Counts the demand for the prompt.
    Raises BadRequest."""
    _require_whole(asked)
    asking, break_even = asked.asking, engine.lookups.break_even
    chains: dict[int, bytes] = {}  # by how many hashes a block has
    for namespace, _ in asked.groups:
        step = namespace.spec.block_tokens // asked.hash_tokens
        if step not in chains:
            chains[step] = _every(asked.hashes, namespace.hash_bytes, step)
            if step > 1:
                yield
        if asking.prefill_tokens_per_s:
            break_even.learn(namespace, asking.prefill_tokens_per_s)
        engine.prompts.remember(namespace.id, asking.ticket, chains[step], namespace.hash_bytes)
        if engine.persister is not None and asking.lasting:
            engine.persister.asked([namespace], chains[step], asking.ticket)
    search = _Search(engine, asked, chains, coming=False)
    held = yield from search.end_steps(min(asked.held_tokens, asked.reach_tokens))
    search.note()
    reach = held
    if asked.reach_tokens > asked.held_tokens or any(namespace.writing for namespace, _ in asked.groups):
        reach = yield from _Search(engine, asked, chains, coming=True).end_steps(asked.reach_tokens)
    return held, max(held, reach)


def _require_whole(asked: Asked) -> None:
    """Blocks are whole hashes, and hits whole blocks."""
    if len({namespace.hash_bytes for namespace, _ in asked.groups}) > 1:
        raise BadRequest("windows: namespaces with block hashes of different sizes have no block in common")
    for namespace, _ in asked.groups:
        tokens = namespace.spec.block_tokens
        if tokens % asked.hash_tokens or asked.align_tokens % tokens:
            raise BadRequest(
                f"windows: blocks of {tokens} tokens: a multiple of hash_tokens {asked.hash_tokens} and a part of "
                f"align_tokens {asked.align_tokens} is required"
            )


def _every(hashes: bytes, hash_bytes: int, step: int) -> bytes:
    """Every so many hashes the last one, joined."""
    return hashes if step == 1 else b"".join(forest.split_hashes(hashes, hash_bytes)[step - 1 :: step])


class _Search:
    """One way down a prompt. coming: what is being written counts as there."""

    def __init__(self, engine: Parts, asked: Asked, chains: Mapping[int, bytes], coming: bool) -> None:
        self._engine = engine
        self._asked = asked
        self._groups = [
            _Group(
                engine,
                space,
                window_tokens,
                asked.asking.local_tokens,
                chains[space.spec.block_tokens // asked.hash_tokens],
                coming,
            )
            for space, window_tokens in asked.groups
        ]
        self._too_slow: tuple[_Source, bytes, int] | None = None  # what was in the way first: key and bytes

    def end_steps(self, tokens: int) -> Steps[int]:
        """The longest hit of at most so many tokens."""
        asked, looks = self._asked, 0
        tokens = min(tokens, len(asked.hashes) // asked.groups[0][0].hash_bytes * asked.hash_tokens)
        while tokens := tokens - tokens % asked.align_tokens:
            end = tokens
            for group in self._groups:
                looks += 1
                if looks % STEP_BLOCKS == 0:
                    yield
                end = yield from group.end_steps(tokens)
                if end < tokens:
                    break
            else:
                end = self._end_of_fast(tokens)
            if end == tokens:
                return tokens
            tokens = end
        return 0

    def _end_of_fast(self, tokens: int) -> int:
        """These tokens if loading the windows before them beats computing, else those before the last block to be loaded."""
        asking = self._asked.asking
        lacking = tokens - asking.local_tokens
        rate = self._engine.lookups.break_even.rate(self._asked.groups[0][0], asking)
        loads: Counter[_Source] = sum((group.slow_bytes for group in self._groups), Counter())
        if not rate or not loads or lacking <= 0:
            return tokens
        if max(source.load_s(size_bytes) for source, size_bytes in loads.items()) <= lacking / rate:
            return tokens
        last = max((group for group in self._groups if group.slow), key=lambda group: group.slow_tokens)
        self._too_slow = self._too_slow or last.last_slow()
        return last.slow_tokens

    def note(self) -> None:
        """Remember what was refused: a device that is sick is probed with it, a source that is slow is measured again."""
        counters = self._engine.counters
        sick = next((group.sick for group in self._groups if group.sick is not None), None)
        if sick is not None:
            counters.refused_unavailable += 1
            sick[0].wanted(sick[1])
        elif self._too_slow is not None:
            counters.refused_slower += 1
            source, key, size_bytes = self._too_slow
            if isinstance(source, SharedSource):
                source.refuse(key, size_bytes)
            else:
                source.wanted(key)
                source.refused = True


class _Group:
    """One group, looked at from behind. hashes: of its blocks. slow: of the blocks that are known to be there, those that DRAM lacks, the last one first.
    sick: a device that was in the way, and the key of the block."""

    def __init__(
        self,
        engine: Parts,
        namespace: Namespace,
        window_tokens: int,
        local_tokens: int,
        hashes: bytes,
        coming: bool,
    ) -> None:
        self._engine = engine
        self._hashes = hashes
        self._namespace = namespace
        self._tokens = namespace.spec.block_tokens
        self._window_tokens = window_tokens
        self._coming = coming
        self._skip = (
            local_tokens // self._tokens
        )  # blocks that the engine has itself: it does not matter where else they are
        self._low = len(hashes)  # from here on all blocks are there, up to the end in question
        self._shared: list[tuple[SharedSource, int]] | None = None  # up to which block each has the prompt
        self._shown: int | None = None  # blocks before the first hidden one; None: not looked at yet
        self.slow: deque[tuple[int, _Source]] = deque()
        self.slow_bytes: Counter[_Source] = Counter()
        self.sick: tuple[DeviceSource, bytes] | None = None

    @property
    def slow_tokens(self) -> int:
        """Tokens before the last block that is to be loaded."""
        return self.slow[0][0] * self._tokens

    def last_slow(self) -> tuple[_Source, bytes, int]:
        """The last block that is to be loaded: from where, its key and bytes."""
        position, source = self.slow[0]
        return source, self._namespace.digest + self._hash(position), self._namespace.record_bytes

    def end_steps(self, tokens: int) -> Steps[int]:
        """These tokens if the window before them is there, else those before the last block that is not. Asked for ever
        shorter ends."""
        first, end = max(0, tokens - self._window_tokens) // self._tokens, tokens // self._tokens
        if end < self._low:  # what is known to be there lies behind it
            self._low = end
            self.slow.clear()
            self.slow_bytes.clear()
        while self.slow and self.slow[0][0] >= end:
            _, source = self.slow.popleft()
            self.slow_bytes[source] -= self._namespace.record_bytes
        if self._namespace.hidden and self._shown is None:
            count = len(self._hashes) // self._namespace.hash_bytes
            self._shown = yield from forest.shown_steps(self._namespace, self._hashes, count)
        if self._shared is None:  # asked once: what is durable is closed under prefixes
            self._shared = []
            for source in self._engine.loader.shared:
                if source.loads.closed:
                    held = yield from source.level.held_steps(self._namespace, self._hashes, 0)
                    self._shared.append((source, held))
        while self._low > first:
            if not self._is_there(self._low - 1):
                return (self._low - 1) * self._tokens
            self._low -= 1
            if self._low % STEP_BLOCKS == 0:
                yield
        return tokens

    def _is_there(self, position: int) -> bool:
        namespace = self._namespace
        if namespace.hidden and (self._shown is None or position >= self._shown):
            return False
        block_hash = self._hash(position)
        block = namespace.blocks.get(block_hash)
        if block is not None and block.where & IN_ANY:
            return self._is_usable(block, position)
        if self._coming and block_hash in namespace.writing:
            return True
        ends = self._shared or ()
        working = (source for source, end in ends if position < end)
        shared = next((source for source in working if not source.is_too_old(namespace, block_hash)), None)
        if shared is not None:
            self._add_slow(position, shared)
        return shared is not None

    def _is_usable(self, block: Block, position: int) -> bool:
        """Whether a block that an owned level has is alive, and on a device that works."""
        expiry = self._engine.blocks.expiry
        if expiry and expiry.over([block]):
            return False
        if block.where & IN_DRAM or position < self._skip:
            return True
        device = self._engine.loader.devices[block.device]
        if not device.loads.closed:
            self.sick = self.sick or (device, block.key)
            return False
        self._add_slow(position, device)
        return True

    def _hash(self, position: int) -> bytes:
        size = self._namespace.hash_bytes
        return self._hashes[position * size : (position + 1) * size]

    def _add_slow(self, position: int, source: _Source) -> None:
        if position < self._skip:
            return
        self.slow.append((position, source))
        self.slow_bytes[source] += self._namespace.record_bytes
