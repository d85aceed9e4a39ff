"""A block in the index: one node of the prefix forest.

    namespace ──▶ hash ──▶ Block ──parent──▶ Block ──parent──▶ (root)
                             │ where: in which tiers its bytes are
                             └ rooted: present, and so is everything before it

A block that no tier holds stays in the forest as a *ghost* while it has descendants, so
that they are found again as soon as it comes back.

Invariants (proven by `Index.check`):

* rooted(b) ⇔ b is in some tier, and b is a first block or rooted(parent(b));
  so rooted is monotone along a chain, and a lookup may search it by halves;
* a ghost has children; kids_dram and kids_nvme count the children in that tier;
* pins > 0 means that somebody uses the bytes: the block is in no policy's queue of victims.

Slots and not a dataclass: there are millions of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.namespaces import Namespace
    from kvstore.policies.reuse import Stretch

IN_DRAM = 1
IN_NVME = 2
BROKEN_PREFIX = 128  # only in answers to residency: the block is there, a parent is not
NO_SLOT = -1


class Block:
    """One block: where its bytes are and what it hangs on."""

    __slots__ = (
        "children",
        "hash",
        "kids_dram",
        "kids_nvme",
        "namespace",
        "parent",
        "pins",
        "queued",
        "rooted",
        "slot",
        "stretch",
        "touched_s",
        "where",
    )

    def __init__(self, namespace: Namespace, block_hash: bytes) -> None:
        self.namespace = namespace
        self.hash = block_hash
        self.parent: Block | None = None
        self.children: Block | set[Block] | None = None  # most blocks have none or one
        self.where = 0
        self.rooted = False
        self.slot = NO_SLOT  # arena slot while in DRAM
        self.pins = 0
        self.kids_dram = 0
        self.kids_nvme = 0
        self.queued = 0  # tiers (bits as in `where`) whose policy has it queued as a victim
        self.touched_s = 0.0
        self.stretch: Stretch | None = None  # what the learning policy knows of its last use

    @property
    def key(self) -> bytes:
        return self.namespace.digest + self.hash

    @property
    def parent_key(self) -> bytes:
        return self.parent.key if self.parent is not None else b""

    def each_child(self) -> Iterator[Block]:
        if self.children is None:
            return iter(())
        if isinstance(self.children, Block):
            return iter((self.children,))
        return iter(self.children)

    def add_child(self, child: Block) -> None:
        if self.children is None:
            self.children = child
        elif isinstance(self.children, Block):
            self.children = {self.children, child}
        else:
            self.children.add(child)

    def remove_child(self, child: Block) -> None:
        if self.children is child:
            self.children = None
        elif isinstance(self.children, set):
            self.children.discard(child)
            if not self.children:
                self.children = None

    def __repr__(self) -> str:
        return f"<Block {self.hash[:4].hex()} where={self.where} rooted={self.rooted} pins={self.pins}>"
