"""Doubts: packs that a reader did not find, or found to be wrong, though their place proves to be the place.

    a miss, other bytes ─▶ add ─▶ not held, nor what hangs on it, for DOUBT_S_MIN; twice as long each time, up to DOUBT_S_MAX
                                  ╰─▶ then asked for again ─▶ well ─▶ over          persisted again by who has it ─▶ over

They are one reader's own, in memory: a catalogue forgets nothing because of them. Blocks that another pack has, too, are held as ever.
One loop changes them; any thread asks `end`.

Holes are blocks that no pack has, though some behind them are durable, as somebody found who was promised them: prompts end there, and who has the
blocks persists them again, until one is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tiers.base import NAMESPACE_BYTES
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import Pack

DOUBTED_PACKS_MAX: Final = 1024  # the latest ones
HOLES_MAX: Final = 1 << 16  # blocks; then they are found anew
DOUBT_S_MIN: Final = 60.0
DOUBT_S_MAX: Final = 3600.0


class _Doubt(NamedTuple):
    """until_s: it is asked for again then. blocks: those that no other pack has. is_ours: only we cannot read it."""

    namespace: bytes
    until_s: float
    pause_s: float
    blocks: frozenset[bytes]
    is_ours: bool


class Holes:
    """Of one reader. may_have: whether a block may be durable, by its key."""

    def __init__(self, may_have: Callable[[bytes], bool]) -> None:
        self._may_have = may_have
        self._blocks: dict[bytes, set[bytes]] = {}  # by namespace
        self._count = 0

    def add(self, key: bytes) -> None:
        """Nobody has this block."""
        if self._count >= HOLES_MAX:
            self._blocks, self._count = {}, 0
        blocks = self._blocks.setdefault(key[:NAMESPACE_BYTES], set())
        self._count -= len(blocks)
        blocks.add(key[NAMESPACE_BYTES:])
        self._count += len(blocks)

    def end(self, spec: NamespaceSpec, hashes: bytes, start: int, end: int) -> int:
        """How many of the first `end` blocks of a prompt come before a hole, never less than `start`. From any thread."""
        holes = self._blocks.get(spec.digest)
        if not holes:
            return end
        size, may_have = spec.hash_bytes, self._may_have
        blocks = [hashes[at * size : (at + 1) * size] for at in range(start, end)]
        found = (
            at
            for at, block in enumerate(blocks, start)
            if block in holes and not may_have(spec.digest + block)
        )
        return next(found, end)


class Doubts:
    """Of one reader. now_s: never goes back."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._doubts: dict[bytes, _Doubt] = {}  # by id of the pack
        # By namespace and block the one that lasts longest. Nobody walks through it, so whoever asks meanwhile gets yesterday's answer.
        self._doubted: dict[bytes, dict[bytes, _Doubt]] = {}

    def __len__(self) -> int:
        """How many packs are not held because of them now."""
        now_s = self._now_s()
        return sum(now_s < doubt.until_s for doubt in self._doubts.values())

    @property
    def ids(self) -> frozenset[bytes]:
        """Of packs that are not to be read now."""
        now_s = self._now_s()
        return frozenset(name for name, doubt in self._doubts.items() if now_s < doubt.until_s)

    @property
    def told(self) -> frozenset[bytes]:
        """Of those that the keeper is to look at."""
        return frozenset(name for name in self.ids if not self._doubts[name].is_ours)

    def add(self, pack: Pack, blocks: Iterable[bytes], is_ours: bool = False) -> bool:
        """It is bad, again perhaps; whether that is news. blocks, is_ours: see `_Doubt`."""
        known, now_s = self._doubts.pop(pack.id, None), self._now_s()
        if known is not None and now_s < known.until_s:
            self._doubts[pack.id] = known  # asked for before it was doubted
            return False
        pause_s = DOUBT_S_MIN if known is None else min(2 * known.pause_s, DOUBT_S_MAX)
        if known is not None:
            self._show(known)
        if len(self._doubts) == DOUBTED_PACKS_MAX:
            self._show(self._doubts.pop(next(iter(self._doubts))))
        doubt = _Doubt(pack.header.spec.digest, now_s + pause_s, pause_s, frozenset(blocks), is_ours)
        self._doubts[pack.id] = doubt
        doubted = self._doubted.setdefault(doubt.namespace, {})
        for block in doubt.blocks:
            if doubted.setdefault(block, doubt).until_s < doubt.until_s:
                doubted[block] = doubt
        return known is None

    def over(self, pack_id: bytes) -> bool:
        """It is well, or put again; whether it was doubted."""
        doubt = self._doubts.pop(pack_id, None)
        if doubt is not None:
            self._show(doubt)
        return doubt is not None

    def _show(self, doubt: _Doubt) -> None:
        """Its blocks are in no doubt, but for those of another pack that is doubted for longer."""
        doubted = self._doubted.get(doubt.namespace, {})
        for block in doubt.blocks:
            if doubted.get(block) is doubt:
                del doubted[block]
        if not doubted:
            self._doubted.pop(doubt.namespace, None)

    def end(self, spec: NamespaceSpec, hashes: bytes, start: int, end: int) -> int:
        """How many of the first `end` blocks of a prompt are in no doubt, never less than `start`. From any thread."""
        doubted = self._doubted.get(spec.digest)
        if not doubted:
            return end
        size, now_s = spec.hash_bytes, self._now_s()
        blocks = [hashes[at * size : (at + 1) * size] for at in range(start, end)]
        if doubted.keys().isdisjoint(blocks):
            return end
        found = ((at, doubted.get(block)) for at, block in enumerate(blocks, start))
        return next((at for at, doubt in found if doubt is not None and now_s < doubt.until_s), end)
