"""Guards: which blocks a pin keeps from being evicted, and that this never fills a tier.

    pin h7 ─▶ chain h7 ▸ h6 ▸ … ▸ h0    known upwards from h7, as far as the index knows parents
                 └─▶ each is *marked*; a marked block that is held is *guarded* in its lowest
                     tier: on NVMe if it is there, else in DRAM

A user pins a prefix; the blocks of it are guarded. (`Block.pins` is another thing: the
leases of a moment.) A guarded block is no victim in that tier, whatever the policy; a DRAM
copy of what NVMe holds may go. Blocks that come later are guarded when they come.

Guarded bytes of a tier never exceed a share of its capacity. It goes to the beginning of a
prefix first, because leaves leave before their parents. Marked blocks beyond it wait, as
evictable as any other, and move up, oldest first, when guarded bytes become less.

Invariants (proven by `check`): marks count the pins whose chain has the block; guarded
bytes are the sum over guarded blocks, each in its lowest tier; no tier has more than its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvstore.constants import STEP_BLOCKS
from kvstore.index.block import Block, Namespace
from kvstore.index.table import BlockTable
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.steps import Steps

Pinned = tuple[bytes, bytes]  # namespace digest, block hash


@dataclass(slots=True, eq=False)
class _Space:
    """The pins of one namespace. chains: by pinned hash, from there upwards. tops: chains that end here."""

    chains: dict[bytes, list[bytes]] = field(default_factory=dict)
    tops: dict[bytes, set[bytes]] = field(default_factory=dict)
    marks: dict[bytes, int] = field(default_factory=dict)
    guarded: dict[bytes, int] = field(default_factory=dict)  # hash -> tier bit


class Guards:
    """Pins in effect. `slot_bytes` of a namespace in a tier; `settle` is told of blocks that may leave again."""

    def __init__(self, slot_bytes: Callable[[Namespace, int], int], settle: Callable[[Block], None]) -> None:
        self.limits = {IN_DRAM: 0, IN_NVME: 0}  # bytes, by tier
        self.guarded_bytes = {IN_DRAM: 0, IN_NVME: 0}
        self._records: Counter[tuple[int, int]] = Counter()  # guarded, by tier and slot size
        self._slot_bytes = slot_bytes
        self._settle = settle
        self._spaces: dict[bytes, _Space] = {}
        self._waiting: dict[int, dict[Block, None]] = {IN_DRAM: {}, IN_NVME: {}}

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def guards(self, block: Block, bit: int) -> bool:
        """Whether the block must stay in this tier."""
        if not self._spaces:
            return False
        space = self._spaces.get(block.namespace.spec.digest)
        return space is not None and space.guarded.get(block.hash) == bit

    def records(self, namespace: Namespace, bit: int) -> int:
        """How many blocks of this namespace's slot size are guarded in a tier."""
        return self._records[bit, self._slot_bytes(namespace, bit)]

    def unguarded_bytes(self, namespace: Namespace, block_hash: bytes) -> dict[int, int]:
        """By tier: the bytes that this prefix, as it is held now, has and no pin guards yet."""
        space = self._spaces.get(namespace.digest)
        guarded = space.guarded if space is not None else {}
        more = {IN_DRAM: 0, IN_NVME: 0}
        for block in _upwards(namespace.blocks.get(block_hash)):
            bit = _lowest(block)
            if bit and block.hash not in guarded:
                more[bit] += self._slot_bytes(namespace, bit)
        return more

    def pin(self, pinned: Pinned, namespace: Namespace | None) -> None:
        """Guard this prefix, held or not. Pinned already: nothing changes."""
        digest, block_hash = pinned
        space = self._spaces.setdefault(digest, _Space())
        if block_hash in space.chains:
            return
        space.chains[block_hash] = [block_hash]
        space.tops.setdefault(block_hash, set()).add(block_hash)
        block = namespace.blocks.get(block_hash) if namespace is not None else None
        space.marks[block_hash] = space.marks.get(block_hash, 0) + 1
        if block is not None:
            self._place(space, block)
            self._extend(space, block)

    def unpin(self, pinned: Pinned, namespace: Namespace | None) -> None:
        """The blocks of this prefix that no other pin covers may leave again."""
        digest, block_hash = pinned
        space = self._spaces.get(digest)
        hashes = space.chains.pop(block_hash, None) if space is not None else None
        if space is None or hashes is None:
            return
        tops = space.tops[hashes[-1]]
        tops.discard(block_hash)
        if not tops:
            del space.tops[hashes[-1]]
        free: list[Block] = []
        for marked in hashes:
            space.marks[marked] -= 1
            if space.marks[marked]:
                continue
            del space.marks[marked]
            block = namespace.blocks.get(marked) if namespace is not None else None
            if block is not None:
                self._place(space, block)
                free.append(block)
        if not space.chains:
            del self._spaces[digest]
        for block in free:
            self._settle(block)
        self._move_up()

    def came(self, block: Block) -> None:
        """A tier has the block now."""
        space = self._spaces.get(block.namespace.spec.digest)
        if space is None:
            return
        if block.hash in space.tops:
            self._extend(space, block)
        if block.hash in space.marks:
            waited = block in self._waiting[_lowest(block)]
            self._place(space, block)
            if block.children is not None and not waited and block.hash not in space.guarded:
                self._arrange(space, block.namespace, list(space.chains))  # what hangs on it comes after it
            self._move_up()

    def gone(self, block: Block) -> None:
        """A tier lost the block."""
        space = self._spaces.get(block.namespace.spec.digest)
        if space is not None and block.hash in space.marks:
            self._place(space, block)
            self._move_up()

    def rebuild(self, namespaces: dict[bytes, Namespace]) -> None:
        """Many blocks came at once: find every chain anew. `namespaces`: by digest."""
        pins = [(digest, block_hash) for digest, space in self._spaces.items() for block_hash in space.chains]
        before = {digest: space.guarded for digest, space in self._spaces.items()}
        self._spaces.clear()
        self.guarded_bytes = {IN_DRAM: 0, IN_NVME: 0}
        self._records.clear()
        for waiting in self._waiting.values():
            waiting.clear()
        for pinned in pins:
            self.pin(pinned, namespaces.get(pinned[0]))
        for digest, guarded in before.items():
            known = namespaces[digest].blocks if digest in namespaces else BlockTable()
            self._release([(known[h], bit) for h, bit in guarded.items() if h in known])

    def held_steps(
        self, pinned: Pinned, namespace: Namespace | None, blocks_max: int
    ) -> Steps[dict[str, int | None]]:
        """For people: blocks of a pinned prefix that are known, held, and guarded; None: too many to count."""
        space = self._spaces.get(pinned[0])
        hashes = space.chains.get(pinned[1], []) if space is not None else []  # or it was unpinned meanwhile
        count = len(hashes)
        if space is None or count > blocks_max:
            return {"blocks": count, "held_blocks": None, "guarded_blocks": None}
        known = namespace.blocks if namespace is not None else BlockTable[Block]()
        held = guarded = 0
        for start in range(0, count, STEP_BLOCKS):
            if start:
                yield
            found = known.get_run(hashes[start : start + STEP_BLOCKS])
            here = [block.hash for block in found if block is not None and _lowest(block)]
            held += len(here)
            guarded += sum(h in space.guarded for h in here)
        return {"blocks": count, "held_blocks": held, "guarded_blocks": guarded}

    def check_slices(self, namespaces: dict[bytes, Namespace]) -> Iterator[list[str]]:
        """One line per violated invariant, in slices. They hold if nothing changed meanwhile."""
        problems: list[str] = []
        sums = {IN_DRAM: 0, IN_NVME: 0}
        for digest, space in list(self._spaces.items()):
            namespace = namespaces.get(digest)
            marks = Counter(chain.from_iterable(space.chains.values()))
            if marks != Counter(space.marks):
                problems.append(f"pins: namespace {digest.hex()}: marks and chains disagree")
            for looks, (hashed, bit) in enumerate(list(space.guarded.items()), 1):
                if looks % STEP_BLOCKS == 0:
                    yield []
                block = namespace.blocks.get(hashed) if namespace is not None else None
                if namespace is None or block is None or _lowest(block) != bit or hashed not in space.marks:
                    problems.append(f"pins: block {hashed[:8].hex()} is guarded where it is not")
                    continue
                sums[bit] += self._slot_bytes(namespace, bit)
        for bit, total in sums.items():
            if total != sum(size * n for (tier, size), n in self._records.items() if tier == bit):
                problems.append(f"pins: records guarded in tier {bit} are miscounted")
            if total != self.guarded_bytes[bit] or total > self.limits[bit]:
                counted = self.guarded_bytes[bit]
                problems.append(
                    f"pins: {total} bytes guarded in tier {bit}, counted {counted}, allowed {self.limits[bit]}"
                )
        yield problems

    # -- helpers --

    def _count(self, namespace: Namespace, bit: int, change: int) -> None:
        size = self._slot_bytes(namespace, bit)
        self.guarded_bytes[bit] += change * size
        self._records[bit, size] += change

    def _extend(self, space: _Space, top: Block) -> None:
        """The chains that ended here go on upwards as far as parents are known."""
        above = list(_upwards(top.parent))
        if not above:
            return
        pinned = space.tops.pop(top.hash)
        for block_hash in pinned:
            space.chains[block_hash] += [block.hash for block in above]
        space.tops.setdefault(above[-1].hash, set()).update(pinned)
        for block in above:
            space.marks[block.hash] = space.marks.get(block.hash, 0) + len(pinned)
        self._arrange(space, top.namespace, pinned)

    def _arrange(self, space: _Space, namespace: Namespace, pinned: Iterable[bytes]) -> None:
        """Guard these chains anew, from their beginnings on: a guarded block holds its ancestors as well, so
        that the share must go to them first."""
        before: list[tuple[Block, int]] = []
        hashes = list(dict.fromkeys(h for p in pinned for h in reversed(space.chains[p])))
        blocks = [block for h in hashes if (block := namespace.blocks.get(h)) is not None]
        for block in blocks:
            bit = space.guarded.pop(block.hash, 0)
            if bit:
                before.append((block, bit))
                self._count(namespace, bit, -1)
            for waiting in self._waiting.values():
                waiting.pop(block, None)
        for block in blocks:
            self._place(space, block)
        self._release(before)

    def _release(self, before: Iterable[tuple[Block, int]]) -> None:
        """Those that are not guarded in that tier any more may leave it: no policy has them in its order."""
        for block, bit in before:
            if not self.guards(block, bit):
                self._settle(block)

    def _place(self, space: _Space, block: Block) -> None:
        """Guard a marked block in its lowest tier, if the share allows; let go of any other."""
        bit = _lowest(block) if block.hash in space.marks else 0
        before = space.guarded.get(block.hash, 0)
        for tier, waiting in self._waiting.items():
            if before == bit or tier != bit:
                waiting.pop(block, None)
        if before == bit:
            return
        if before:
            del space.guarded[block.hash]
            self._count(block.namespace, before, -1)
        if bit and not self._guard(space, block, bit):
            self._waiting[bit][block] = None

    def _guard(self, space: _Space, block: Block, bit: int) -> bool:
        """Guard a block that is not, if the share of its tier allows."""
        if self.guarded_bytes[bit] + self._slot_bytes(block.namespace, bit) > self.limits[bit]:
            return False
        space.guarded[block.hash] = bit
        self._count(block.namespace, bit, 1)
        return True

    def _move_up(self) -> None:
        """Guard what waited, oldest first, as far as the share allows."""
        for bit, waiting in self._waiting.items():
            while waiting:
                block = next(iter(waiting))
                space = self._spaces.get(block.namespace.spec.digest)
                if space is not None and not self._guard(space, block, bit):
                    break
                del waiting[block]


def _upwards(block: Block | None) -> Iterator[Block]:
    while block is not None:
        yield block
        block = block.parent


def _lowest(block: Block) -> int:
    return block.where & IN_NVME or block.where & IN_DRAM
