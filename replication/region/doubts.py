"""Doubts: packs that a reader did not find, or found to be wrong, though their place proves to be the place.

    a miss, other bytes ─▶ add ─▶ not held, nor what hangs on it, for DOUBT_S_MIN; twice as long each time, up to DOUBT_S_MAX
                                  ╰─▶ then asked for again ─▶ well ─▶ over          persisted again by who has it ─▶ over

They are one reader's own, in memory: a catalogue forgets nothing because of them. Blocks that another pack has, too, are held as ever.
One loop changes them; any thread asks `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import Pack

DOUBTED_PACKS_MAX: Final = 1024  # the latest ones
DOUBT_S_MIN: Final = 60.0
DOUBT_S_MAX: Final = 3600.0


class _Doubt(NamedTuple):
    """until_s: it is asked for again then. blocks: those that no other pack has."""

    namespace: bytes
    until_s: float
    pause_s: float
    blocks: frozenset[bytes]


class Doubts:
    """Of one reader. now_s: never goes back."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._doubts: dict[bytes, _Doubt] = {}  # by id of the pack
        self._until_s: dict[bytes, dict[bytes, float]] = {}  # by namespace and block; replaced, never changed

    def __len__(self) -> int:
        """How many packs are not held because of them now."""
        now_s = self._now_s()
        return sum(now_s < doubt.until_s for doubt in self._doubts.values())

    @property
    def ids(self) -> frozenset[bytes]:
        """Of packs that are not to be read now."""
        now_s = self._now_s()
        return frozenset(name for name, doubt in self._doubts.items() if now_s < doubt.until_s)

    def add(self, pack: Pack, blocks: Iterable[bytes]) -> bool:
        """It is bad, again perhaps; whether that is news. blocks: see `_Doubt`."""
        known, now_s = self._doubts.pop(pack.id, None), self._now_s()
        if known is not None and now_s < known.until_s:
            self._doubts[pack.id] = known  # asked for before it was doubted
            return False
        pause_s = DOUBT_S_MIN if known is None else min(2 * known.pause_s, DOUBT_S_MAX)
        namespace = pack.header.spec.digest
        self._doubts[pack.id] = _Doubt(namespace, now_s + pause_s, pause_s, frozenset(blocks))
        if len(self._doubts) > DOUBTED_PACKS_MAX:
            del self._doubts[next(iter(self._doubts))]
        self._sort()
        return known is None

    def over(self, pack_id: bytes) -> bool:
        """It is well, or put again; whether it was doubted."""
        if self._doubts.pop(pack_id, None) is None:
            return False
        self._sort()
        return True

    def end(self, spec: NamespaceSpec, hashes: bytes, start: int, end: int) -> int:
        """How many of the first `end` blocks of a prompt are in no doubt, never less than `start`. From any thread."""
        doubted = self._until_s.get(spec.digest)
        if not doubted:
            return end
        size, now_s = spec.hash_bytes, self._now_s()
        blocks = [hashes[at * size : (at + 1) * size] for at in range(start, end)]
        if doubted.keys().isdisjoint(blocks):
            return end
        return next((at for at, block in enumerate(blocks, start) if now_s < doubted.get(block, 0.0)), end)

    def _sort(self) -> None:
        until_s: dict[bytes, dict[bytes, float]] = {}
        for doubt in self._doubts.values():
            of_namespace = until_s.setdefault(doubt.namespace, {})
            for block in doubt.blocks:
                of_namespace[block] = max(doubt.until_s, of_namespace.get(block, 0.0))
        self._until_s = until_s
