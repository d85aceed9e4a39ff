"""Prompts: what a lookup told about a request, for when its blocks are acquired and stored.

    lookup(h0 … h9): 4 hits ─▶ remember: 10 blocks, the last is h9
    acquire(h0 … h3) ─▶ recall by h3       reserve(h4 …) ─▶ recall by h4, then by its lease

An engine asks for a prompt first and reads and stores pieces of it later; only the lookup
names all of it. Nothing depends on remembering: a prompt that is forgotten is known by the
piece at hand.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.constants import PROMPTS_REMEMBERED_MAX


class Prompt:
    """One request. `blocks`: its length; `first`, `last`: hashes of its first and last block, empty if not
    known; `turn`: 0 until somebody counts."""

    __slots__ = ("blocks", "first", "last", "turn")

    def __init__(self, blocks: int, first: bytes = b"", last: bytes = b"") -> None:
        self.blocks = blocks
        self.first = first
        self.last = last
        self.turn = 0


class Prompts:
    """The latest prompts, by the blocks at which they are continued."""

    def __init__(self) -> None:
        self._latest: OrderedDict[tuple[int, bytes], Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    def remember(self, number: int, hashes: bytes, hash_bytes: int, hits: int) -> None:
        """A lookup of namespace `number` found `hits` leading blocks."""
        if not hashes:
            return
        prompt = Prompt(len(hashes) // hash_bytes, hashes[:hash_bytes], hashes[-hash_bytes:])
        at = hits * hash_bytes
        if hits:
            self._latest[number, hashes[at - hash_bytes : at]] = prompt
        if at < len(hashes):
            self._latest[number, hashes[at : at + hash_bytes]] = prompt
        while len(self._latest) > PROMPTS_REMEMBERED_MAX:
            self._latest.popitem(last=False)

    def recall(self, number: int, block_hash: bytes) -> Prompt | None:
        return self._latest.get((number, block_hash))
