"""The policy interface: who leaves a tier when room is needed.

One policy object serves one size class of one tier. It sees blocks (their parents, pins,
sizes through the namespace, last use) and never bytes. The engine tells it what happened;
it answers with victims, best first. Leaves go before their parents, because a block is
worthless once the prefix before it is broken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from kvstore.blocks import Block


class Policy(ABC):
    """Orders the blocks of one size class in one tier. Called from the engine's thread only."""

    @abstractmethod
    def may_leave(self, block: Block) -> None:
        """The block is resident here and could be a victim now.

        Told when it arrives, when it was used, when its last pin or last child in this
        tier is gone. Telling it twice is harmless.
        """

    @abstractmethod
    def victims(self) -> Iterator[Block]:
        """Blocks to evict, best first: resident, without pins, without children here.

        The caller evicts each block, or calls `may_leave` for it later; a block that was
        yielded is not remembered.
        """

    @abstractmethod
    def coldest_s(self) -> float | None:
        """When the next victim was last used, None if there is none. Changes nothing."""
