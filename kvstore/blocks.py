"""A block in the index: one node of the prefix forest.

    namespace ──▶ hash ──▶ Block ──parent──▶ Block ──parent──▶ (root)
                             │ where: in which tiers its bytes are
                             └ … and ROOTED: present, and so is everything before it

A block that no tier holds stays in the forest as a *ghost* while it has descendants, so
that they are found again as soon as it comes back.

Invariants (proven by `Index.check`):

* rooted(b) ⇔ b is in some tier, and b is a first block or rooted(parent(b));
  so rooted is monotone along a chain, and a lookup may search it by halves;
* a ghost has children; where there are several, they are counted by tier;
* pins > 0 means that somebody uses the bytes: the block is in no policy's queue of victims.

There are millions of these, so a block is 64 bytes: a struct without a garbage collector's
header, which collections do not walk either (a full one over millions of ordinary objects
stops the daemon for seconds). The price is that circles of blocks are never found by the
collector. `index.left` opens them when a block goes, `index.forget` when a namespace does.
And its tiers, slot and pins are one number:

    where   … pins │ slot + 1 (44 bits) │ BROKEN_PREFIX … ROOTED IN_NVME IN_DRAM (8 bits)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kvstore.namespaces import Namespace
    from kvstore.policies.reuse import Stretch

IN_DRAM = 1
IN_NVME = 2
IN_ANY = IN_DRAM | IN_NVME
ROOTED = 4
BROKEN_PREFIX = 128  # only in answers to residency: the block is there, a parent is not
NO_SLOT = -1
_SLOT_SHIFT = 8
SLOT_MAX = (1 << 44) - 2
_SLOT_MASK = SLOT_MAX + 1
_WITHOUT_SLOT = ~(_SLOT_MASK << _SLOT_SHIFT)
_PIN_SHIFT = 52
PIN = 1 << _PIN_SHIFT  # one pin, as `Block.where` counts them


class Block(msgspec.Struct, gc=False, eq=False):
    """One block: where its bytes are and what it hangs on."""

    namespace: Namespace
    hash: bytes
    parent: Block | None = None
    children: Block | Children | None = None  # most blocks have none or one
    where: int = 0  # IN_DRAM, IN_NVME, ROOTED (no tier, no ROOTED); above them the slot, then the pins
    stretch: Stretch | None = None  # its last use, which it shares with its neighbours

    @property
    def slot(self) -> int:
        """The arena's slot while in DRAM, else NO_SLOT."""
        return (self.where >> _SLOT_SHIFT & _SLOT_MASK) - 1

    def put_in(self, slot: int) -> None:
        """Its bytes are in this slot of the arena."""
        self.where = self.where & _WITHOUT_SLOT | (slot + 1) << _SLOT_SHIFT

    def take_out(self) -> int:
        """Its bytes are in no slot of the arena any more: answers in which they were."""
        where = self.where
        self.where = where & _WITHOUT_SLOT
        return (where >> _SLOT_SHIFT & _SLOT_MASK) - 1

    @property
    def pins(self) -> int:
        """How many use its bytes; each adds PIN to `where`."""
        return self.where >> _PIN_SHIFT

    @property
    def key(self) -> bytes:
        return self.namespace.digest + self.hash

    @property
    def parent_key(self) -> bytes:
        return self.parent.key if self.parent is not None else b""

    @property
    def touched_s(self) -> float:
        """When it was used last; 0 if nobody has used it since it was adopted."""
        return self.stretch.touched_s if self.stretch is not None else 0.0

    def has_child_in(self, bit: int) -> bool:
        """Whether a child is in that tier, so that this block is no leaf there."""
        return self.children is not None and self.children.where & bit != 0

    def each_child(self) -> Iterator[Block]:
        if self.children is None:
            return iter(())
        if isinstance(self.children, Block):
            return iter((self.children,))
        return iter(self.children.blocks)

    def add_child(self, child: Block) -> None:
        if self.children is None:
            self.children = child
        elif isinstance(self.children, Block):
            self.children = Children(self.children, child)
        else:
            self.children.add(child)

    def remove_child(self, child: Block) -> None:
        """A child that is in no tier."""
        if self.children is child:
            self.children = None
        elif isinstance(self.children, Children):
            self.children.blocks.discard(child)
            if not self.children.blocks:
                self.children = None

    def count_child(self, bit: int, change: int) -> None:
        """A child came to that tier (1), or left it (-1). One child alone is asked itself."""
        if isinstance(self.children, Children):
            self.children.count(bit, change)

    def __repr__(self) -> str:
        return f"<Block {self.hash[:4].hex()} where={self.where & 255} pins={self.pins}>"


class Children:
    """Several children of one block. `held[bit]`: how many of them are in the tier of that bit; `where`: the
    tiers of all of them together."""

    __slots__ = ("blocks", "held", "where")

    def __init__(self, *blocks: Block) -> None:
        self.blocks: set[Block] = set()
        self.held = [0] * (IN_NVME + 1)
        self.where = 0
        for block in blocks:
            self.add(block)

    def add(self, block: Block) -> None:
        self.blocks.add(block)
        for bit in (IN_DRAM, IN_NVME):
            if block.where & bit:
                self.count(bit, 1)

    def count(self, bit: int, change: int) -> None:
        """A child came to that tier (1), or left it (-1)."""
        self.held[bit] += change
        self.where = self.where | bit if self.held[bit] else self.where & ~bit
