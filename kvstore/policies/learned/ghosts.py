"""Ghosts: blocks that left, and what their last use was. A bounded number; the oldest are forgotten.

Many small dicts, by the highest bits of a name, each in the order in which its blocks left: one large dict
that grows moves all its entries at once, 0.1 s at a million, and no request is answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from kvstore.constants import REUSE_GHOSTS_MIN
from kvstore.index.stretch import Stretch

REUSE_GHOSTS_PARTS = 256  # dicts that they are in, so that none is large; a power of two

_SHIFT, _MASK = 48, REUSE_GHOSTS_PARTS - 1  # of a name; a dict uses the low bits itself


class Ghosts:
    """Uses by `Namespace.names_of`."""

    def __init__(self) -> None:
        self._parts: list[dict[int, Stretch]] = [{} for _ in range(REUSE_GHOSTS_PARTS)]
        self.bound(REUSE_GHOSTS_MIN)

    def bound(self, ghosts_max: int) -> None:
        """Remember about so many from now on."""
        part = ghosts_max // REUSE_GHOSTS_PARTS
        self._forget = part // 8  # at once: a dict finds its first entry slowly when many left before it
        self._part_max = part + self._forget

    def get(self, name: int) -> Stretch | None:
        return self._parts[name >> _SHIFT & _MASK].get(name)

    def pop_run(self, names: Iterable[int]) -> list[Stretch | None]:
        """These blocks are back, those that are known."""
        parts = self._parts
        return [parts[name >> _SHIFT & _MASK].pop(name, None) for name in names]

    def add(self, gone: Iterable[tuple[int, Stretch]]) -> None:
        """These blocks have left, the newest is the last."""
        parts, part_max = self._parts, self._part_max
        for name, stretch in gone:
            part = parts[name >> _SHIFT & _MASK]
            part[name] = stretch
            if len(part) > part_max:
                for oldest in list(islice(part, len(part) - part_max + self._forget)):
                    if (use := part.pop(oldest)).alive:
                        use.alive -= 1
