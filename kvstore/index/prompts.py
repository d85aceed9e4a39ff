"""Prompts: what a lookup said about a request, kept until its blocks are acquired and stored.

    lookup(ticket, h0 … h9) ─▶ remember     acquire(ticket, h0 … h3), reserve(ticket, h4 …) ─▶ recall

An engine asks for a prompt first and reads and stores pieces of it later; only the lookup
names all of it. Nothing depends on remembering: a request without a ticket, or whose prompt is
forgotten, is known by the piece at hand.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.constants import PROMPTS_REMEMBERED_MAX


class Prompt:
    """One request. `blocks`: its length; `last`: hash of its last block, empty if not known; `turn`: of its conversation,
    0 where it was not counted."""

    __slots__ = ("blocks", "last", "turn")

    def __init__(self, blocks: int, last: bytes = b"") -> None:
        self.blocks = blocks
        self.last = last
        self.turn = 0


class Prompts:
    """The latest prompts, by namespace and ticket."""

    def __init__(self) -> None:
        self._latest: OrderedDict[tuple[int, int], Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    def remember(self, number: int, ticket: int, hashes: bytes, hash_bytes: int) -> None:
        """A lookup of namespace `number`."""
        if not hashes or not ticket:
            return
        prompt = Prompt(len(hashes) // hash_bytes, hashes[-hash_bytes:])
        self._latest[number, ticket] = prompt
        if len(self._latest) > PROMPTS_REMEMBERED_MAX:
            self._latest.popitem(last=False)

    def recall(self, number: int, ticket: int, blocks: int) -> Prompt:
        """The prompt that a lookup named, or what is known of it: this many blocks."""
        return self._latest.get((number, ticket)) or Prompt(blocks)
