"""A stretch: the last use of a block, shared by neighbours that one request used alike.

The policies learn from it; the index only keeps it with the block.
"""

from __future__ import annotations

import msgspec

REUSE_SHARED_USES = 6  # a block used so often is shared by all: what follows it is a first turn

TURNS_COUNTED_MAX = 8


class Stretch(msgspec.Struct, gc=False, eq=False):
    """Blocks of one request that are alike. `alive`: those not used since, held or ghosts; 0 if not counted."""

    touched: int = 0  # clock of `Reuse`
    kind: int = 0
    uses: float = 1.0
    turn: int = 1  # of the request that brought the blocks
    asked_turn: int = 1  # of the request that used them last
    touched_s: float = 0.0  # the engine's clock
    alive: int = 0

    def next_turn(self) -> int:
        """The turn of a request that goes on behind these blocks."""
        return 1 if self.uses >= REUSE_SHARED_USES else min(self.turn + 1, TURNS_COUNTED_MAX)
