"""A block in the index: one node of the prefix forest.

    namespace ──▶ hash ──▶ Block ──parent──▶ Block ──parent──▶ (root)
                             │ where: which owned levels hold its bytes, and in which slots
                             └ … and ROOTED: held, and so is everything before it

A block that no level holds stays in the forest as a *ghost* while it has descendants, so
that they are found again as soon as it comes back.

Invariants (proven by `forest.check`):

* rooted(b) ⇔ some level holds b, and b is a first block or rooted(parent(b));
  so rooted is monotone along a chain, and a lookup may search it by halves;
  but for children of the blocks in `Namespace.stale`: those are still to be updated (see `kvstore.index.forest`);
* a ghost has children, but for those in `Namespace.unneeded`; where there are several, they are counted by level;
* a held block without a parent is a first block, but for those in `Namespace.hanging`: these are not rooted;
* pins > 0 means that the bytes are in use: no policy may choose the block as a victim.

There are millions of these, so a block is 64 bytes: a struct without a garbage collector's
header, which collections do not walk either (a full one over millions of ordinary objects
stops the daemon for seconds). The price is that circles of blocks are never found by the
collector. `forest.left` opens them when a block goes, `forest.forget` when a namespace does.
And its levels, slots and pins are one number:

    where  │ pins │ NVMe: device (8 bits), slot + 1 (36) │ DRAM: slot + 1 (44) │ ROOTED IN_NVME IN_DRAM (8) │

Only `kvstore.residency` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from kvstore.index.climbs import Climbs
from kvstore.index.stretch import Stretch
from kvstore.index.table import BlockTable
from kvstore.protocol import answers
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from tiers.checksum import column_runs, column_sizes
from tiers.namespace_spec import NamespaceSpec
from tiers.slots import slot_bytes_for

CHILDREN_FEW_MAX = 500  # children of one block; more are in a table, which grows in small steps

ROOTED = 4
NO_SLOT = -1
DEVICES_MAX = 256  # of one node's NVMe level
DEVICE_SHIFT = 36  # a slot of a device, below the device's number
SLOT_MAX = (1 << 44) - 2  # of the arena, or of a device together with its number
_SLOT_MASK = SLOT_MAX + 1
_DRAM_SHIFT, NVME_SHIFT = 8, 52
_WITHOUT_DRAM = ~(_SLOT_MASK << _DRAM_SHIFT)
_WITHOUT_NVME = ~(_SLOT_MASK << NVME_SHIFT)
WITHOUT = {IN_DRAM: _WITHOUT_DRAM & ~IN_DRAM, IN_NVME: _WITHOUT_NVME & ~IN_NVME}  # a tier and its slot
_PIN_SHIFT = 96
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
        return (self.where >> _DRAM_SHIFT & _SLOT_MASK) - 1

    def put_in(self, slot: int) -> None:
        """Its bytes are in this slot of the arena."""
        self.where = self.where & _WITHOUT_DRAM | dram_bits(slot)

    @property
    def place(self) -> tuple[int, int]:
        """(device, slot) on NVMe; meaningless for a block that is not there."""
        at = (self.where >> NVME_SHIFT & _SLOT_MASK) - 1
        return at >> DEVICE_SHIFT, at & (1 << DEVICE_SHIFT) - 1

    @property
    def device(self) -> int:
        """The number of the device that holds it; meaningless for a block that is not on NVMe."""
        return (self.where >> NVME_SHIFT & _SLOT_MASK) - 1 >> DEVICE_SHIFT

    def put_on(self, device: int, slot: int) -> None:
        """Its bytes are in this slot of a device."""
        self.where = self.where & _WITHOUT_NVME | nvme_bits(device, slot)

    @property
    def pins(self) -> int:
        """How many use its bytes; each adds PIN to `where`."""
        return self.where >> _PIN_SHIFT

    @property
    def key(self) -> bytes:
        return self.namespace.digest + self.hash

    @property
    def touched_s(self) -> float:
        """When it was used last; 0 if it was not used since it was adopted."""
        return self.stretch.touched_s if self.stretch is not None else 0.0

    def has_child_in(self, bit: int) -> bool:
        """Whether a child is in that tier, so that this block is no leaf there."""
        return self.children is not None and self.children.where & bit != 0

    def each_child(self) -> Iterator[Block]:
        """Every child that it has all the time, while others come and go."""
        if self.children is None:
            return iter(())
        if isinstance(self.children, Block):
            return iter((self.children,))
        return self.children.walk()

    def has_child(self, block: Block) -> bool:
        """Whether that block is filed as a child of this one."""
        if isinstance(self.children, Children):
            return block in self.children
        return self.children is block

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
            self.children.remove(child)
            if not self.children:
                self.children = None

    def count_child(self, bit: int, change: int) -> None:
        """A child came to that tier (1), or left it (-1). One child alone is asked itself."""
        if isinstance(self.children, Children):
            self.children.count(bit, change)

    def __repr__(self) -> str:
        return f"<Block {self.hash[:4].hex()} where={self.where & 255} pins={self.pins}>"


def dram_bits(slot: int) -> int:
    """The part of `where` that names this slot of the arena."""
    return (slot + 1) << _DRAM_SHIFT


def nvme_bits(device: int, slot: int) -> int:
    """The part of `where` that names this slot of a device; the next slot is 1 << NVME_SHIFT more."""
    return ((device << DEVICE_SHIFT | slot) + 1) << NVME_SHIFT


class Children:
    """Several children of one block. `held[bit]`: how many of them are in the tier of that bit; `where`: the
    tiers of all of them together. Many are in a table, which grows in small steps."""

    __slots__ = ("_few", "_many", "held", "where")

    def __init__(self, *blocks: Block) -> None:
        self._few: set[Block] = set()
        self._many: BlockTable[Block] | None = None
        self.held = [0] * (IN_NVME + 1)
        self.where = 0
        for block in blocks:
            self.add(block)

    def __len__(self) -> int:
        return len(self._few) if self._many is None else len(self._many)

    def __contains__(self, block: Block) -> bool:
        return block in self._few if self._many is None else self._many.get(block.hash) is block

    def walk(self) -> Iterator[Block]:
        """Each that is here all the time, while others come and go."""
        if self._many is None:
            return iter(tuple(self._few))
        return self._many.walk()

    def add(self, block: Block) -> None:
        if self._many is not None:
            self._many.setdefault(block.hash, block)
        else:
            self._few.add(block)
            if len(self._few) > CHILDREN_FEW_MAX:
                self._many = BlockTable()
                for child in self._few:
                    self._many.setdefault(child.hash, child)
                self._few.clear()
        for bit in (IN_DRAM, IN_NVME):
            if block.where & bit:
                self.count(bit, 1)

    def remove(self, block: Block) -> None:
        """One that is in no tier."""
        if self._many is None:
            self._few.discard(block)
        elif self._many.get(block.hash) is block:
            self._many.delete_run([block.hash])

    def count(self, bit: int, change: int) -> None:
        """A child came to that tier (1), or left it (-1)."""
        self.held[bit] += change
        self.where = self.where | bit if self.held[bit] else self.where & ~bit


class Namespace:
    """A registered namespace and the blocks this node knows of it."""

    __slots__ = (
        "asked_blocks",
        "blocks",
        "climbs",
        "column_count",
        "columns",
        "digest",
        "erasures",
        "hanging",
        "hash_bytes",
        "hidden",
        "hidden_climbs",
        "hit_blocks",
        "id",
        "incoming",
        "is_ended",
        "record_bytes",
        "registered",
        "salt",
        "slot_bytes",
        "spec",
        "stale",
        "unneeded",
        "users",
        "writing",
    )

    def __init__(self, number: int, spec: NamespaceSpec) -> None:
        self.id = number
        self.registered = False  # by a client, in this daemon's life
        self.users = 0  # connections that have it registered now
        self.is_ended = False  # gone for good: its blocks are being dropped
        self.salt = (
            int.from_bytes(spec.digest[:8], "little") >> 1
        )  # distinguishes namespaces with equal hashes
        self.spec = spec
        self.digest = spec.digest
        self.hash_bytes = spec.hash_bytes
        self.record_bytes = spec.record_bytes
        self.columns = spec.columns
        self.column_count = len(column_sizes(spec.columns, spec.record_bytes))
        self.slot_bytes = slot_bytes_for(spec.record_bytes)
        self.blocks = BlockTable[Block]()
        self.writing: set[bytes] = set()  # reserved and not yet committed
        # Blocks that changed ROOTED, whose children are still to be updated, the latest last.
        self.stale: dict[bytes, tuple[Block, Iterator[Block]]] = {}
        # Blocks that came below a long chain, and the hash before each: whether that hangs on the block itself is still to be found.
        self.hanging: dict[bytes, tuple[Block, bytes]] = {}
        self.unneeded: dict[bytes, Block] = {}  # ghosts that nothing hangs on any more, still to be forgotten
        self.climbs = Climbs[Block]()  # to first blocks
        self.hidden_climbs = Climbs[Block]()  # to what is hidden
        self.incoming = 0  # blocks that are not here, and on their way from a shared level
        self.asked_blocks = 0  # of lookups whose first namespace this is …
        self.hit_blocks = 0  # … and what they found
        # Blocks that are being erased: neither they nor those behind them are handed out. b"": all that there are.
        self.hidden: dict[bytes, int] = {}  # for how many reasons each
        self.erasures = (
            0  # that have named it: what was asked of a shared level before the last one is not let in
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here, and nothing is on its way."""
        return not (self.blocks or self.writing or self.incoming)

    @property
    def is_behind(self) -> bool:
        """Whether blocks that came or went leave something to be updated."""
        return bool(self.stale or self.hanging or self.unneeded)

    def hide(self, block_hash: bytes) -> None:
        """For one more reason."""
        self.hidden_climbs.forget()
        self.hidden[block_hash] = self.hidden.get(block_hash, 0) + 1

    def show(self, block_hash: bytes) -> None:
        """For one reason less."""
        self.hidden[block_hash] -= 1
        if not self.hidden[block_hash]:
            del self.hidden[block_hash]

    def names_of(self, hashes: Iterable[bytes]) -> list[int]:
        """Short names of these blocks' keys, signed and of 64 bits, for tables of this process that may be wrong once in
        2**63 times. Python keeps the hash of bytes that were looked up."""
        salt = self.salt
        return [hash(block_hash) ^ salt for block_hash in hashes]

    def as_dict(self) -> answers.SmallNamespace:
        """As it is in answers; the fields are documented in docs/cli.md."""
        return {
            "digest": self.digest.hex(),
            "record_bytes": self.record_bytes,
            "hash_bytes": self.hash_bytes,
            "columns": self.column_count,
            "column_runs": column_runs(self.spec.columns),
            "block_tokens": self.spec.block_tokens,
            "blocks": len(self.blocks),
            "asked_blocks": self.asked_blocks,
            "hit_blocks": self.hit_blocks,
            "fields": self.spec.fields,
        }

    def holds(self, block_hash: bytes) -> bool:
        """Whether some tier has this block."""
        block = self.blocks.get(block_hash)
        return block is not None and block.where & IN_ANY != 0
