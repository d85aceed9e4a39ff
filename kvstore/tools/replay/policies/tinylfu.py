"""W-TinyLFU (Einziger et al. 2017): a window for newcomers, and a duel by frequency at the door of the rest.

    new ─▶ window (1 %) ─▶ duel with the oldest on probation ─▶ probation ─ used ─▶ protected (80 %)

Frequencies are counted to 15 and halved every ten capacities of uses.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from kvstore.index.block import Block
from kvstore.policies.base import Policy

WINDOW_SHARE, PROTECTED_SHARE = 0.01, 0.8
USES_MAX = 15
SAMPLE_CAPACITIES = 10

Queue = OrderedDict[bytes, Block]  # oldest first


class TinyLfu(Policy):
    """A reference: it knows nothing of prefixes."""

    def __init__(self, bit: int) -> None:
        self._window: Queue = OrderedDict()
        self._probation: Queue = OrderedDict()
        self._protected: Queue = OrderedDict()
        self._uses: dict[bytes, int] = {}
        self._counted = 0
        self._capacity = 1

    def touched(self, run: Sequence[Block]) -> None:
        for block in reversed(run):
            key = block.key
            self._count(key)
            if key in self._window:
                self._window.move_to_end(key)
            elif key in self._protected:
                self._protected.move_to_end(key)
            elif self._probation.pop(key, None) is not None:
                self._protected[key] = block
                if len(self._protected) > self._capacity * (1 - WINDOW_SHARE) * PROTECTED_SHARE:
                    demoted, below = self._protected.popitem(last=False)
                    self._probation[demoted] = below
            else:
                self._window[key] = block
        held = len(self._window) + len(self._probation) + len(self._protected)
        if held > self._capacity:
            self._capacity = held
            while len(self._window) > max(1, int(held * WINDOW_SHARE)):  # filling: no duels yet
                key, block = self._window.popitem(last=False)
                self._probation[key] = block

    def left(self, run: Sequence[Block]) -> None:
        for block in run:
            key = block.key
            for queue in (self._window, self._probation, self._protected):
                queue.pop(key, None)

    def victims(self, incoming: bytes = b"") -> Iterator[Block]:
        while len(self._window) > max(1, int(self._capacity * WINDOW_SHARE)):
            key, newcomer = self._window.popitem(last=False)
            rival_key = next(iter(self._probation or self._protected), None)
            self._probation[key] = newcomer
            if rival_key is None:
                continue
            rival = self._probation.get(rival_key) or self._protected[rival_key]
            if self._uses.get(key, 0) > self._uses.get(rival_key, 0):
                loser = rival
            else:
                loser = newcomer
                self._probation.move_to_end(key, last=False)
            if not loser.pins:
                yield loser
        rest = chain(self._probation.values(), self._protected.values(), self._window.values())
        yield from (block for block in rest if not block.pins)

    def _count(self, key: bytes) -> None:
        self._uses[key] = min(self._uses.get(key, 0) + 1, USES_MAX)
        self._counted += 1
        if self._counted >= SAMPLE_CAPACITIES * max(self._capacity, 100):
            self._counted = 0
            self._uses = {key: uses // 2 for key, uses in self._uses.items() if uses > 1}
