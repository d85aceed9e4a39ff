"""The block table of a namespace: block hash → block, in many small dicts instead of one large one.

    hash ─▶ directory, by as many of its bits as needed ─▶ part: a dict of about a thousand blocks
                                                             full ─▶ split by the next bits

A dict that grows moves all its entries at once, and no request is answered meanwhile: 0.8 s at eleven
million blocks. And where blocks come and go, as in every cache that is full, the places of those
that went are not used again before it grows, to up to six places for each block. A part moves
a thousand entries, or drops the places of those that went when that is enough: it
takes a tenth of a millisecond, and half of one when they are not in the processor's cache. Hashes
fill all parts alike, so each is full at another size: else thousands would split at the same time.

This is *extendible hashing* (Fagin et al., TODS 1979). Parts stay when blocks go; a part that
becomes empty gives its memory back.

Invariants: a part of depth d is named by each entry of the directory that ends in the same d
bits; its dict is the one of these entries, and never grows beyond what it holds at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Generic, TypeVar

import msgspec

# Blocks that a dict takes before it grows: 2/3 of 512, of 1,024 and of 2,048.
TABLE_PART_ENTRIES = (341, 682, 1365)
TABLE_SPLIT_BITS = 2  # a part that is too full becomes four: a third of the moves that two would take

B = TypeVar("B")

_SHIFT = 24  # of the hash; a dict uses the bits below for itself
_SCATTER = 40503  # by the golden ratio (Knuth, The Art of Computer Programming, 6.4): neighbours are far from each other
_SPLIT_PARTS = 1 << TABLE_SPLIT_BITS


class Part(msgspec.Struct, Generic[B], gc=False, eq=False):
    """Blocks whose hashes end, above `_SHIFT`, in the same `depth` bits. room: entries left, each for one
    block that comes, before the dict would grow; those of blocks that went are free only after a tidy-up."""

    blocks: dict[bytes, B]
    depth: int
    room: int = TABLE_PART_ENTRIES[0]


class BlockTable(Generic[B]):
    """Like a dict: while one goes through it blocks may neither come nor go, but see `walk`."""

    __slots__ = ("_count", "_dicts", "_mask", "_parts")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        part: Part[B] = Part({}, 0)
        self._count = 0
        self._mask = 0
        self._parts = [part]
        self._dicts = [part.blocks]  # the same by the same number: one step less to a block

    def get(self, block_hash: bytes) -> B | None:
        return self._dicts[hash(block_hash) >> _SHIFT & self._mask].get(block_hash)

    def __getitem__(self, block_hash: bytes) -> B:
        return self._dicts[hash(block_hash) >> _SHIFT & self._mask][block_hash]

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._dicts[hash(block_hash) >> _SHIFT & self._mask]

    def setdefault(self, block_hash: bytes, block: B) -> B:
        """The block that is here; this one, if none is."""
        number = hash(block_hash) >> _SHIFT & self._mask
        found = self._dicts[number].setdefault(block_hash, block)
        if found is block:
            self._count += 1
            part = self._parts[number]
            room = part.room = part.room - 1
            if room <= 0:
                self._make_room(number, part)
        return found

    def get_run(self, hashes: Iterable[bytes]) -> list[B | None]:
        """The block of each hash, None where there is none; in less time than a call for each."""
        dicts, mask = self._dicts, self._mask
        return [dicts[hash(block_hash) >> _SHIFT & mask].get(block_hash) for block_hash in hashes]

    def delete_run(self, hashes: Sequence[bytes]) -> None:
        """Raises KeyError for one that is not here."""
        dicts, mask = self._dicts, self._mask
        for block_hash in hashes:
            blocks = dicts[hash(block_hash) >> _SHIFT & mask]
            del blocks[block_hash]
            self._count -= 1
            if not blocks:
                blocks.clear()  # the places of all that ever were there
                self._parts[hash(block_hash) >> _SHIFT & mask].room = TABLE_PART_ENTRIES[0]

    def __len__(self) -> int:
        return self._count

    def values(self) -> Iterator[B]:
        return chain.from_iterable(blocks.values() for blocks in self.dicts())

    def walk(self) -> Iterator[B]:
        """Every block that is here all the time while blocks come and go; some of them perhaps twice."""
        return chain.from_iterable(list(blocks.values()) for blocks in self.dicts())

    def walk_items(self) -> Iterator[tuple[bytes, B]]:
        """The same with their hashes. Of those that went meanwhile, some are named still."""
        return chain.from_iterable(list(blocks.items()) for blocks in self.dicts())

    def dicts(self) -> Iterator[dict[bytes, B]]:
        """Of each part. Where one splits meanwhile, both halves have numbers no smaller than its own."""
        return (part.blocks for number, part in enumerate(self._parts) if number >> part.depth == 0)

    def _make_room(self, number: int, part: Part[B]) -> None:
        """No entry is left: drop those of blocks that went, and let it grow; or make several parts of this one."""
        blocks = part.blocks
        low = number & ((1 << part.depth) - 1)
        part.room = _room(len(blocks), low)
        if part.room:
            part.blocks = {}
            part.blocks.update(blocks)
            for same in range(low, len(self._parts), 1 << part.depth):
                self._dicts[same] = part.blocks
            return
        if part.depth == self._mask.bit_length():
            self._parts *= _SPLIT_PARTS
            self._dicts *= _SPLIT_PARTS
            self._mask = len(self._parts) - 1
        self._split(part, low)

    def _split(self, part: Part[B], low: int) -> None:
        """By the next bits. `low`: the bits that all its hashes end in."""
        dicts: list[dict[bytes, B]] = [{} for _ in range(_SPLIT_PARTS)]
        bit = _SHIFT + part.depth
        for block_hash, block in part.blocks.items():
            dicts[hash(block_hash) >> bit & _SPLIT_PARTS - 1][block_hash] = block
        depth = part.depth + TABLE_SPLIT_BITS
        for which, blocks in enumerate(dicts):
            first = low | which << part.depth
            split = Part(blocks, depth, _room(len(blocks), first))
            for number in range(first, len(self._parts), 1 << depth):
                self._parts[number], self._dicts[number] = split, blocks


def _room(count: int, low: int) -> int:
    """Entries left in the smallest dict that holds so many blocks and need not be tidied up again at once; 0 where the
    part `low` would have to be larger than it may be."""
    *smaller, largest = TABLE_PART_ENTRIES
    spread = largest - smaller[-1]
    sizes = (*smaller, largest - low * _SCATTER % spread)
    return next((most - count for most in sizes if count <= most * 15 // 16), 0)
