"""Pins: keeps the blocks of pinned prefixes from being evicted, and sees to it that they never fill a tier.

    pin h7 ─▶ chain h7 ▸ h6 ▸ … ▸ h0    known upwards from h7, as far as the index knows parents
                 └─▶ each is *marked*; a marked block that is held is *guarded* in its lowest
                     tier: on NVMe if it is there, else in DRAM

A user pins a prefix; the blocks of it are guarded. (`Block.pins` is another thing: the
leases of a moment.) A guarded block is no victim in that tier, whatever the policy; a DRAM
copy of what NVMe holds may go. Blocks that come later are guarded when they come.

Guarded bytes of a tier never exceed a share of its capacity. It goes to the beginning of a
prefix first, because leaves leave before their parents. Marked blocks beyond it wait, as
evictable as any other, and move up, oldest first, when guarded bytes become less.

A prefix may have tens of thousands of blocks, so chains grow, are guarded and given up in steps, after
each of which the invariants hold. What a pin does not reach yet is as evictable as any other block.

Invariants (proven by `check`): marks count the pins whose chain has the block; guarded
bytes are the sum over guarded blocks, each in its lowest tier; no tier has more than its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvstore.constants import STEP_BLOCKS
from kvstore.index.block import Block, Namespace
from kvstore.index.forest import split_hashes, upwards
from kvstore.index.table import BlockTable
from kvstore.protocol import answers
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.steps import Background, Steps

PIN_PARTS = 64  # dicts that the pinned blocks of a namespace are in
PIN_WAITING_PART = 4096  # blocks that wait, in a dict of those
PIN_STEP_BLOCKS = 100  # of a pinned prefix, marked, guarded or given up between two yields

Pinned = tuple[bytes, bytes]  # namespace digest, block hash


class Numbers:
    """A number for each hash, in many small dicts: one that grows moves all its entries at once."""

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[dict[bytes, int]] = [{} for _ in range(PIN_PARTS)]

    def get(self, block_hash: bytes, default: int = 0) -> int:
        return self.parts[block_hash[-1] % PIN_PARTS].get(block_hash, default)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.parts[block_hash[-1] % PIN_PARTS]

    def __setitem__(self, block_hash: bytes, number: int) -> None:
        self.parts[block_hash[-1] % PIN_PARTS][block_hash] = number

    def __delitem__(self, block_hash: bytes) -> None:
        del self.parts[block_hash[-1] % PIN_PARTS][block_hash]

    def add(self, block_hash: bytes, change: int) -> int:
        """Returns the sum; the hash is gone when it is 0."""
        part = self.parts[block_hash[-1] % PIN_PARTS]
        part[block_hash] = left = part.get(block_hash, 0) + change
        if not left:
            del part[block_hash]
        return left


class Waiting:
    """Marked blocks that wait for a share, oldest first, in small dicts: see `Numbers`."""

    __slots__ = ("_next", "_numbers", "_parts")

    def __init__(self) -> None:
        self._next = 0
        self._numbers: list[dict[Block, int]] = [{} for _ in range(PIN_PARTS)]
        self._parts: dict[int, dict[int, Block]] = {}  # by number; none is empty

    def __bool__(self) -> bool:
        return bool(self._parts)

    def __contains__(self, block: Block) -> bool:
        return block in self._numbers[block.hash[-1] % PIN_PARTS]

    def first(self) -> Block:
        return next(iter(next(iter(self._parts.values())).values()))

    def add(self, block: Block) -> None:
        """As the youngest, unless it waits."""
        if block not in self:
            self._numbers[block.hash[-1] % PIN_PARTS][block] = self._next
            self._parts.setdefault(self._next // PIN_WAITING_PART, {})[self._next] = block
            self._next += 1

    def discard(self, block: Block) -> None:
        number = self._numbers[block.hash[-1] % PIN_PARTS].pop(block, None)
        if number is not None:
            part = self._parts[number // PIN_WAITING_PART]
            del part[number]
            if not part:
                del self._parts[number // PIN_WAITING_PART]


class Chain:
    """Hashes of one length, in one piece: in a list the garbage collector would touch each of them, tens of thousands
    at once."""

    __slots__ = ("_joined", "_size")

    def __init__(self, first: bytes) -> None:
        self._joined = bytearray(first)
        self._size = len(first)

    def __len__(self) -> int:
        return len(self._joined) // self._size

    def __getitem__(self, at: int) -> bytes:
        start = at * self._size
        return bytes(self._joined[start : start + self._size])

    @property
    def top(self) -> bytes:
        return bytes(self._joined[-self._size :])

    def some(self, start: int, count: int) -> list[bytes]:
        """So many from this position on, or as many as there are."""
        return split_hashes(
            bytes(self._joined[start * self._size : (start + count) * self._size]), self._size
        )

    def extend(self, hashes: Sequence[bytes]) -> None:
        self._joined += b"".join(hashes)

    def take(self, count: int) -> list[bytes]:
        """Take so many out at its upper end."""
        some = self.some(max(0, len(self) - count), count)
        del self._joined[len(self._joined) - len(some) * self._size :]
        return some


@dataclass(slots=True, eq=False)
class _Space:
    """The pins of one namespace. chains: by pinned hash, from there upwards. tops: chains that end here. leaving:
    what is left of chains that are given up."""

    chains: dict[bytes, Chain] = field(default_factory=dict)
    tops: dict[bytes, set[bytes]] = field(default_factory=dict)
    leaving: list[Chain] = field(default_factory=list)
    marks: Numbers = field(default_factory=Numbers)
    guarded: Numbers = field(default_factory=Numbers)  # the tier bit
    is_arranging: bool = False


class Pins:
    """Pins in effect. `slot_bytes` of a namespace in a tier; `settle` is called with blocks that may leave again."""

    def __init__(
        self,
        slot_bytes: Callable[[Namespace, int], int],
        settle: Callable[[Block], None],
        background: Background,
    ) -> None:
        self._background = background
        self.changes = 0  # of marks and of what is guarded, which take a while: see `kvstore.engine.audit`
        self._rebuilds = 0  # under way: until they are over, tiers may not be those that blocks are in
        self.limits = {IN_DRAM: 0, IN_NVME: 0}  # bytes, by tier
        self.guarded_bytes = {IN_DRAM: 0, IN_NVME: 0}
        self._records: Counter[tuple[int, int]] = Counter()  # guarded, by tier and slot size
        self._slot_bytes = slot_bytes
        self._settle = settle
        self._spaces: dict[bytes, _Space] = {}
        self._waiting = {IN_DRAM: Waiting(), IN_NVME: Waiting()}
        self._moves_up = False

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def limit(self, limits: dict[int, int]) -> None:
        """Bytes by tier that may be guarded from now on: what waited for more moves up."""
        self.limits.update(limits)
        self._move_up()

    def guards(self, block: Block, bit: int) -> bool:
        """Whether the block must stay in this tier."""
        if not self._spaces:
            return False
        space = self._spaces.get(block.namespace.spec.digest)
        return space is not None and space.guarded.get(block.hash) == bit

    def records(self, namespace: Namespace, bit: int) -> int:
        """How many blocks of this namespace's slot size are guarded in a tier."""
        return self._records[bit, self._slot_bytes(namespace, bit)]

    def unguarded_steps(self, namespace: Namespace, block_hash: bytes) -> Steps[dict[int, int]]:
        """By tier: the bytes that this prefix, as it is held now, has and no pin guards yet."""
        space = self._spaces.get(namespace.digest)
        guarded = space.guarded if space is not None else Numbers()
        more = {IN_DRAM: 0, IN_NVME: 0}
        for looks, block in enumerate(upwards(namespace.blocks.get(block_hash)), 1):
            bit = _lowest(block)
            if bit and block.hash not in guarded:
                more[bit] += self._slot_bytes(namespace, bit)
            if looks % STEP_BLOCKS == 0:
                yield
        return more

    def pin(self, pinned: Pinned, namespace: Namespace | None) -> None:
        """Guard this prefix, held or not. Pinned already: nothing changes."""
        digest, block_hash = pinned
        space = self._spaces.setdefault(digest, _Space())
        if block_hash in space.chains:
            return
        space.chains[block_hash] = Chain(block_hash)
        space.tops.setdefault(block_hash, set()).add(block_hash)
        space.marks.add(block_hash, 1)
        if namespace is not None:
            self._background.begin(self._grow_steps(space, namespace, [block_hash]))

    def unpin(self, pinned: Pinned, namespace: Namespace | None) -> None:
        """The blocks of this prefix that no other pin covers may leave again."""
        digest, block_hash = pinned
        space = self._spaces.get(digest)
        chain = space.chains.pop(block_hash, None) if space is not None else None
        if space is None or chain is None:
            return
        _discard_top(space, chain, block_hash)
        space.leaving.append(chain)
        self._background.begin(self._leave_steps(digest, space, chain, namespace))

    def _leave_steps(
        self, digest: bytes, space: _Space, chain: Chain, namespace: Namespace | None
    ) -> Steps[None]:
        while len(chain):
            self.changes += 1
            free: list[Block] = []
            for marked in chain.take(PIN_STEP_BLOCKS):
                if space.marks.add(marked, -1):
                    continue
                block = namespace.blocks.get(marked) if namespace is not None else None
                if block is not None:
                    self._place(space, block)
                    free.append(block)
            if not len(chain):
                space.leaving.remove(chain)
                if not space.chains and not space.leaving and self._spaces.get(digest) is space:
                    del self._spaces[digest]
            for block in free:
                self._settle(block)
            self._move_up()
            if len(chain):
                yield

    def came(self, block: Block) -> None:
        """A tier has the block now."""
        space = self._spaces.get(block.namespace.spec.digest)
        if space is None:
            return
        if block.hash in space.tops and block.parent is not None:
            self._background.begin(self._grow_steps(space, block.namespace, list(space.tops[block.hash])))
        if block.hash in space.marks:
            waited = block in self._waiting[_lowest(block)]
            self._place(space, block)
            if block.children is not None and not waited and block.hash not in space.guarded:
                self._arrange(space, block.namespace)  # what hangs on it comes after it
            self._move_up()

    def gone(self, block: Block) -> None:
        """A tier lost the block."""
        space = self._spaces.get(block.namespace.spec.digest)
        if space is not None and block.hash in space.marks:
            self._place(space, block)
            self._move_up()

    def rebuild(self, namespaces: dict[bytes, Namespace]) -> None:
        """Many blocks came at once, and `came` was not called for them: look at every chain again. `namespaces`:
        by digest."""
        self._rebuilds += 1
        self._background.begin(self._rebuild_steps(namespaces))

    def _rebuild_steps(self, namespaces: dict[bytes, Namespace]) -> Steps[None]:
        try:
            for looks, (digest, space) in enumerate(list(self._spaces.items())):
                if looks:
                    yield
                if digest in namespaces:
                    yield from self._grow_steps(space, namespaces[digest], list(space.chains))
        finally:
            self._rebuilds -= 1

    def held_steps(self, pinned: Pinned, namespace: Namespace | None, blocks_max: int) -> Steps[answers.Held]:
        """For people: blocks of a pinned prefix that are known, held, and guarded; None: too many to count."""
        space = self._spaces.get(pinned[0])
        chain = space.chains.get(pinned[1]) if space is not None else None
        count = len(chain) if chain is not None else 0  # it was unpinned meanwhile
        if space is None or chain is None or count > blocks_max:
            return {"blocks": count, "held_blocks": None, "guarded_blocks": None}
        known = namespace.blocks if namespace is not None else BlockTable[Block]()
        held = guarded = 0
        for start in range(0, count, STEP_BLOCKS):
            if start:
                yield
            found = known.get_run(chain.some(start, STEP_BLOCKS))
            here = [block.hash for block in found if block is not None and _lowest(block)]
            held += len(here)
            guarded += sum(h in space.guarded for h in here)
        return {"blocks": count, "held_blocks": held, "guarded_blocks": guarded}

    def check_slices(self, namespaces: dict[bytes, Namespace]) -> Iterator[list[str]]:
        """One line per violated invariant, in slices. They hold if nothing changed meanwhile."""
        if self._rebuilds:
            return
        problems: list[str] = []
        sums = {IN_DRAM: 0, IN_NVME: 0}
        for digest, space in list(self._spaces.items()):
            yield from self._check_marks(digest, space, problems)
            yield from self._check_guarded(space, namespaces.get(digest), sums, problems)
        for bit, total in sums.items():
            if total != sum(size * n for (tier, size), n in self._records.items() if tier == bit):
                problems.append(f"pins: records guarded in tier {bit} are miscounted")
            if total != self.guarded_bytes[bit] or total > self.limits[bit]:
                counted = self.guarded_bytes[bit]
                problems.append(
                    f"pins: {total} bytes guarded in tier {bit}, counted {counted}, allowed {self.limits[bit]}"
                )
        yield problems

    def _check_marks(self, digest: bytes, space: _Space, problems: list[str]) -> Iterator[list[str]]:
        marks = Numbers()
        for chain in [*space.chains.values(), *space.leaving]:
            for start in range(0, len(chain), STEP_BLOCKS):
                for marked in chain.some(start, STEP_BLOCKS):
                    marks.add(marked, 1)
                yield []
        for kept, known in zip(space.marks.parts, marks.parts, strict=True):
            if kept != known:
                problems.append(f"pins: namespace {digest.hex()}: marks and chains disagree")
                break
            known.clear()  # a part in each piece: all of them at once take long
            yield []

    def _check_guarded(
        self, space: _Space, namespace: Namespace | None, sums: dict[int, int], problems: list[str]
    ) -> Iterator[list[str]]:
        for part in space.guarded.parts:
            if part:
                yield []
            for hashed, bit in list(part.items()):
                block = namespace.blocks.get(hashed) if namespace is not None else None
                is_true = block is not None and _lowest(block) == bit and hashed in space.marks
                if namespace is None or not is_true:
                    problems.append(f"pins: block {hashed[:8].hex()} is guarded where it is not")
                    continue
                sums[bit] += self._slot_bytes(namespace, bit)

    # -- helpers --

    def _count(self, namespace: Namespace, bit: int, change: int) -> None:
        self.changes += 1
        size = self._slot_bytes(namespace, bit)
        self.guarded_bytes[bit] += change * size
        self._records[bit, size] += change

    def _grow_steps(self, space: _Space, namespace: Namespace, pinned: Sequence[bytes]) -> Steps[None]:
        """These chains go on upwards as far as parents are known, and are guarded from their beginnings on."""
        for looks, block_hash in enumerate(pinned):
            if looks:
                yield
            while above := self._above(space, namespace, block_hash):
                self._extend(space, block_hash, above)
                if len(above) == PIN_STEP_BLOCKS:
                    yield
            yield from self._arrange_steps(space, namespace, block_hash)

    def _above(self, space: _Space, namespace: Namespace, pinned: bytes) -> list[bytes]:
        """The next blocks above a chain, as far as they are known."""
        chain = space.chains.get(pinned)
        top = namespace.blocks.get(chain.top) if chain is not None else None
        return [b.hash for b in islice(upwards(top.parent), PIN_STEP_BLOCKS)] if top is not None else []

    def _extend(self, space: _Space, pinned: bytes, above: Sequence[bytes]) -> None:
        self.changes += 1
        chain = space.chains[pinned]
        _discard_top(space, chain, pinned)
        chain.extend(above)
        space.tops.setdefault(chain.top, set()).add(pinned)
        for block_hash in above:
            space.marks.add(block_hash, 1)

    def _arrange(self, space: _Space, namespace: Namespace) -> None:
        """Guard all chains anew, unless that is under way: where the share is full, what is in a chain has to give to
        what is above it."""
        if not space.is_arranging:
            space.is_arranging = True
            self._background.begin(self._arrange_all_steps(space, namespace))

    def _arrange_all_steps(self, space: _Space, namespace: Namespace) -> Steps[None]:
        for looks, pinned in enumerate(list(space.chains)):
            if looks:
                yield
            yield from self._arrange_steps(space, namespace, pinned)
        space.is_arranging = False

    def _arrange_steps(self, space: _Space, namespace: Namespace, pinned: bytes) -> Steps[None]:
        """Guard a chain from its beginning on: a guarded block holds its ancestors as well, so that the share must go
        to them first. The blocks farthest from it make room."""
        chain = space.chains.get(pinned)
        if chain is None:
            return
        low = 0  # those before it gave up their room already
        for looks, at in enumerate(reversed(range(len(chain))), 1):
            if looks % PIN_STEP_BLOCKS == 0:
                yield
                if space.chains.get(pinned) is not chain:
                    return  # unpinned
            block = namespace.blocks.get(chain[at])
            if block is None:
                continue
            self._place(space, block)
            bit = _lowest(block)
            while bit and low < at and block.hash not in space.guarded:
                self._give_room(space, namespace.blocks.get(chain[low]), bit)
                low += 1
                self._guard(space, block, bit)

    def _give_room(self, space: _Space, block: Block | None, bit: int) -> None:
        """A block of a chain is guarded no more: what is above it goes first."""
        if block is not None and space.guarded.get(block.hash) == bit:
            del space.guarded[block.hash]
            self._count(block.namespace, bit, -1)
            self._waiting[bit].add(block)
            self._settle(block)

    def _place(self, space: _Space, block: Block) -> None:
        """Guard a marked block in its lowest tier, if the share allows; let go of any other."""
        bit = _lowest(block) if block.hash in space.marks else 0
        before = space.guarded.get(block.hash, 0)
        for tier, waiting in self._waiting.items():
            if before == bit or tier != bit:
                waiting.discard(block)
        if before == bit:
            return
        if before:
            del space.guarded[block.hash]
            self._count(block.namespace, before, -1)
        if bit and not self._guard(space, block, bit):
            self._waiting[bit].add(block)

    def _guard(self, space: _Space, block: Block, bit: int) -> bool:
        """Guard a block that is not, if the share of its tier allows: it waits no more."""
        if self.guarded_bytes[bit] + self._slot_bytes(block.namespace, bit) > self.limits[bit]:
            return False
        space.guarded[block.hash] = bit
        self._count(block.namespace, bit, 1)
        self._waiting[bit].discard(block)
        return True

    def _move_up(self) -> None:
        """Guard what waited, oldest first, as far as the shares allow."""
        if not self._moves_up:
            self._moves_up = True
            self._background.begin(self._move_up_steps())

    def _move_up_steps(self) -> Steps[None]:
        while any(self._move_some_up(bit) for bit in self._waiting):
            yield
        self._moves_up = False

    def _move_some_up(self, bit: int) -> bool:
        """Returns whether there may be more."""
        waiting = self._waiting[bit]
        for _ in range(PIN_STEP_BLOCKS):
            if not waiting:
                return False
            block = waiting.first()
            space = self._spaces.get(block.namespace.spec.digest)
            if space is not None and not self._guard(space, block, bit):
                return False
            waiting.discard(block)
        return True


def _discard_top(space: _Space, chain: Chain, pinned: bytes) -> None:
    """This chain does not end any more where it did."""
    tops = space.tops[chain.top]
    tops.discard(pinned)
    if not tops:
        del space.tops[chain.top]


def _lowest(block: Block) -> int:
    return block.where & IN_NVME or block.where & IN_DRAM
