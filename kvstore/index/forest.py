"""The index: every block this node knows, as a forest of prefixes.

    lookup([h0 … h2047])  ─▶  is h1023 rooted? yes ─▶ is h1535? no ─▶ …  11 probes, not 2048

A hit counts only while the prefix is unbroken. Because ROOTED is kept up to date when
blocks come and go (see `kvstore.index.block`), the longest usable prefix is found by halving:
a block hash names everything before it, so along any chain a caller can ask for, rooted
is first true and then false.

The index knows no tier: the engine says which bits came and went. When a block in the middle of a
chain comes or goes, ROOTED changes for all blocks below it: at a start whose devices are read in any order, after
a corrupt record, wherever a gap is filled. They are updated in pieces (`spread_steps`), from the top
down. Until then they wait in `Namespace.stale`:

    h0 ROOTED ─▶ h1 gone ─▶ h2 done ─▶ h3 done, stale ─▶ h4 ROOTED still      a lookup cuts at h3, and halves again
    h0 ROOTED ─▶ h1 back ─▶ h2 done ─▶ h3 done, stale ─▶ h4 not ROOTED yet    a shorter hit than there could be

In the same pieces a block finds its place whose parent is at the end of a long chain, which may hang on the block itself
(`Namespace.hanging`), and ghosts are forgotten when the last block of a long chain of them leaves (`Namespace.unneeded`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvstore.constants import EXPIRY_LOOKS, STEP_BLOCKS
from kvstore.index.block import NVME_SHIFT, ROOTED, WITHOUT, Block, Children, Namespace, dram_bits, nvme_bits
from kvstore.index.climbs import CLIMB_LOOKS
from kvstore.protocol.residency_bits import BROKEN_PREFIX, IN_ANY, IN_DRAM, IN_NVME, WRITING
from kvstore.steps import Steps

ARRIVED_LOOKS = 32  # upwards, of one block that comes: hundreds of them come in one turn
LEFT_GHOSTS = 256  # forgotten with the blocks that leave


def split_hashes(hashes: bytes, hash_bytes: int) -> list[bytes]:
    """The block hashes of one concatenated run. Unpacked in one go: a sixth of the time of slicing."""
    return list(struct.unpack(f"{hash_bytes}s" * (len(hashes) // hash_bytes), hashes))


def rooted_prefix(namespace: Namespace, hashes: bytes, count: int) -> int:
    """How many of the first `count` hashes are present with an unbroken prefix."""
    rooted = _halve(namespace, hashes, count)
    if namespace.stale and (cut := _before_stale(namespace, hashes, rooted)) < rooted:
        return _halve(namespace, hashes, cut)
    return rooted


def _halve(namespace: Namespace, hashes: bytes, count: int) -> int:
    get, size = namespace.blocks.get, namespace.hash_bytes
    low, high = 0, count  # the answer is in [low, high]
    while low < high:
        middle = (low + high) // 2
        block = get(hashes[middle * size : (middle + 1) * size])
        if block is not None and block.where & ROOTED:
            low = middle + 1
        else:
            high = middle
    return low


def _before_stale(namespace: Namespace, hashes: bytes, count: int) -> int:
    """How many of the first `count` come before a stale one that is not rooted. Behind a gap there is always such a block in front
    of the first block that is still marked as rooted."""
    stale = namespace.stale
    asked = split_hashes(hashes[: count * namespace.hash_bytes], namespace.hash_bytes)
    if not stale.keys().isdisjoint(asked):
        for at, block_hash in enumerate(asked):
            if block_hash in stale and not stale[block_hash][0].where & ROOTED:
                return at
    return count


def shown(namespace: Namespace, hashes: Sequence[bytes], parent: bytes = b"") -> int:
    """How many of these consecutive hashes come before the first hidden one. While anything is hidden, what is held and not rooted
    counts as hidden: it may lie behind that; so does what is far below what was looked at. parent: the hash before them."""
    hidden = namespace.hidden
    if not hidden:
        return len(hashes)
    if b"" in hidden or parent in hidden:
        return 0
    above = namespace.blocks.get(hashes[0] if hashes else b"") or namespace.blocks.get(parent)
    if above is not None:
        end, left_looks = namespace.hidden_climbs.climb(above, lambda block: block.hash in hidden)
        if not left_looks or end.hash in hidden:
            return 0
    for at, block_hash in enumerate(hashes):
        block = namespace.blocks.get(block_hash)
        is_rooted = block is None or not block.where & IN_ANY or block.where & ROOTED
        if block_hash in hidden or not is_rooted:
            return at
    return len(hashes)


def shown_steps(namespace: Namespace, hashes: bytes, count: int) -> Steps[int]:
    """The same of the first `count` blocks of a prompt, in steps."""
    size, parent = namespace.hash_bytes, b""
    for start in range(0, count, STEP_BLOCKS):
        asked = split_hashes(hashes[start * size : min(count, start + STEP_BLOCKS) * size], size)
        if (end := shown(namespace, asked, parent)) < len(asked):
            return start + end
        parent = asked[-1]
        if start + STEP_BLOCKS < count:
            yield
    return count


def chain(namespace: Namespace, hashes: list[bytes]) -> list[Block | None]:
    """The block of each hash, None where the index has none.

    From the last one up along its parents, which lie side by side in memory, as far as they are what is
    asked for: among millions, looking up a hash waits for memory four times.
    """
    get = namespace.blocks.get
    found: list[Block | None] = []
    block = get(hashes[-1]) if hashes else None
    for block_hash in reversed(hashes):
        if block is None or block.hash != block_hash:
            break
        found.append(block)
        block = block.parent
    found.reverse()
    return [*namespace.blocks.get_run(hashes[: len(hashes) - len(found)]), *found]


def not_held(namespace: Namespace, hashes: list[bytes]) -> list[bytes]:
    """Those of a run, in prompt order, that no tier has: all of them, where the index does not know the
    first one, as it knows every block that something hangs on."""
    if not hashes or namespace.blocks.get(hashes[0]) is None:
        return hashes
    blocks = namespace.blocks.get_run(hashes)
    return [h for h, b in zip(hashes, blocks, strict=True) if b is None or not b.where & IN_ANY]


def knows_below(namespace: Namespace, block_hash: bytes) -> bool:
    """Whether a block of this prompt from that one on may be held, or is being written."""
    return bool(namespace.writing) or block_hash in namespace.blocks


def held_or_coming(namespace: Namespace, hashes: list[bytes]) -> int:
    """How many of these are held or being written, up to the first one that is neither."""
    get, writing = namespace.blocks.get, namespace.writing
    for count, block_hash in enumerate(hashes):
        if block_hash not in writing and ((block := get(block_hash)) is None or not block.where & IN_ANY):
            return count
    return len(hashes)


def residency(namespace: Namespace, hashes: bytes) -> bytes:
    """One byte a hash: 0 absent, WRITING, else the bits of `where`, and BROKEN_PREFIX if not rooted."""
    writing = namespace.writing
    asked = split_hashes(hashes, namespace.hash_bytes)
    places = bytes(
        0
        if b is None or not (tiers := b.where & IN_ANY)
        else tiers
        if b.where & ROOTED
        else tiers | BROKEN_PREFIX
        for b in namespace.blocks.get_run(asked)
    )
    if not writing:
        return places
    return bytes(place or (WRITING if h in writing else 0) for place, h in zip(places, asked, strict=True))


def residency_steps(namespace: Namespace, hashes: bytes) -> Steps[bytes]:
    """The same of many hashes, in steps."""
    places = bytearray()
    size = STEP_BLOCKS * namespace.hash_bytes
    for start in range(0, len(hashes), size):
        places += residency(namespace, hashes[start : start + size])
        yield
    return bytes(places)


def would_cycle(namespace: Namespace, parent: bytes, run: list[Block | None]) -> bool:
    """Whether hanging this run under `parent` would close a circle, which no true chain can. None: a block that
    the index does not have. A large circle is not seen; `arrived` closes none."""
    inner = {id(block) for block in filter(None, run) if block.children is not None}
    above = namespace.blocks.get(parent) if inner else None
    return any(id(block) in inner for block in islice(upwards(above), CLIMB_LOOKS))


def upwards(block: Block | None) -> Iterator[Block]:
    """The block, what it hangs on, and so on."""
    while block is not None:
        yield block
        block = block.parent


def arrived(namespace: Namespace, block_hash: bytes, parent: bytes, bit: int) -> Block:
    """A tier has the block now. `parent` is the hash before it, b"" for a first block; one that would close a
    circle is left out."""
    blocks = namespace.blocks
    block = blocks.get(block_hash)
    if block is None:
        block = blocks.setdefault(block_hash, Block(namespace, block_hash))
    above = block.parent
    if above is None and not block.where & IN_ANY and parent:  # new, or a ghost known only by name
        above, _ = _above(namespace, block, parent, ARRIVED_LOOKS)
        if above is not None:
            block.parent = above
            above.add_child(block)
    if not block.where & bit:
        block.where |= bit
        if above is not None and above.children is not block:
            above.count_child(bit, 1)
    _root(block)
    return block


def _above(namespace: Namespace, block: Block, parent: bytes, looks: int) -> tuple[Block | None, int]:
    """What a block without a parent is to hang on, and how many looks are left. None where that hangs on the block itself, so that it
    is made up; and where no look is left: then the block is in `hanging`."""
    namespace.hanging.pop(block.hash, None)
    above = namespace.blocks.get(parent)
    if above is None:
        return namespace.blocks.setdefault(parent, Block(namespace, parent)), looks
    if block.children is None or (above.where & ROOTED and not namespace.stale):
        return above if above is not block else None, looks  # what is rooted hangs on nothing that is not
    first, looks = namespace.climbs.climb(above, lambda _: False, looks)
    if not looks:
        namespace.hanging[block.hash] = block, parent
    return above if looks and first is not block else None, looks


def _root(block: Block) -> None:
    """It may be rooted, where its place is known."""
    above = block.parent
    is_first = above is None and block.hash not in block.namespace.hanging
    if not block.where & ROOTED and (is_first or (above is not None and above.where & ROOTED)):
        block.where |= ROOTED
        _turned(block)


def arrived_in_turn(
    namespace: Namespace, hashes: Sequence[bytes], parent: bytes, slots: Sequence[int]
) -> tuple[list[Block], list[int]]:
    """These slots of the arena have these blocks now. `parent` is the hash before the first one; the others follow
    one another. Returns the blocks, and the slots of those that were in DRAM before and stay where they are."""
    file = namespace.blocks.setdefault
    run: list[Block] = []
    spare: list[int] = []
    above: Block | None = None
    for block_hash, slot in zip(hashes, slots, strict=True):
        new = Block(namespace, block_hash)
        block = file(block_hash, new)
        if block is not new or (parent and above is None):
            if block.where & IN_DRAM:
                spare.append(slot)
            else:
                arrived(namespace, block_hash, parent, IN_DRAM).put_in(slot)
        elif above is None:
            block.where = IN_DRAM | ROOTED | dram_bits(slot)
        else:
            block.parent = above
            block.where = IN_DRAM | above.where & ROOTED | dram_bits(slot)
            if above.children is None:
                above.children = block
            else:
                above.add_child(block)
        run.append(block)
        above, parent = block, block_hash
    return run, spare


def left(run: Sequence[Block], bit: int) -> None:
    """A tier lost these blocks of one namespace. Forgets those, and ghosts above them, that nothing needs."""
    unneeded: list[bytes] = []
    others, namespace = WITHOUT[bit], run[0].namespace
    for block in run:
        above = block.parent
        if block.where & bit:
            block.where &= others
            if above is not None and above.children is not block:
                above.count_child(bit, -1)
        if block.where & IN_ANY:
            continue
        namespace.hanging.pop(block.hash, None)
        if block.children is not None:
            if block.where & ROOTED:
                block.where &= ~ROOTED
                _turned(block)
            continue
        block.where &= ~ROOTED
        _take_off(block, unneeded, LEFT_GHOSTS)
    _forget(namespace, unneeded)


def _take_off(block: Block, unneeded: list[bytes], looks: int) -> None:
    """Take a block that nothing needs, and ghosts above it that nothing else hangs on, out of the tree; what so many looks leave
    is in `Namespace.unneeded`."""
    gone = block
    while not gone.where & IN_ANY and gone.children is None:
        if looks <= 0:
            gone.namespace.unneeded[gone.hash] = gone
            return
        looks -= 1
        unneeded.append(gone.hash)
        above, gone.parent = gone.parent, None  # a reference to the block keeps no chain alive
        if above is None:
            return
        if above.children is gone:
            above.children = None
        else:
            above.remove_child(gone)
        gone = above


def _forget(namespace: Namespace, unneeded: Sequence[bytes]) -> None:
    namespace.blocks.delete_run(unneeded)
    if namespace.stale:
        for block_hash in unneeded:
            namespace.stale.pop(block_hash, None)


def load(
    namespace: Namespace, rows: Iterable[tuple[bytes, bytes, int, int]], device: int
) -> tuple[list[Block | None], list[Block]]:
    """Put many rows (hash, parent hash, slot, time) of a device into a namespace, in any order: the start-up path.

    Same result as calling `arrived` and `put_on` for each, in a third of the time where parents come just
    before their children. Returns for each row its block, None for one that NVMe has already; and those blocks
    whose child did not follow: the only ones that may be leaves now.
    """
    get, file = namespace.blocks.get, namespace.blocks.setdefault
    first = IN_NVME + nvme_bits(device, 0)
    filed: list[Block | None] = []
    ends: list[Block] = []
    last: Block | None = None
    for block_hash, parent, slot, _ in rows:
        if last is not None and last.hash == parent:
            new = Block(namespace, block_hash, last, None, first + (slot << NVME_SHIFT) | last.where & ROOTED)
            block: Block | None = file(block_hash, new)
            if block is new:
                if last.children is None:
                    last.children = new
                else:
                    last.add_child(new)
                filed.append(new)
                last = new
                continue
        else:
            block = get(block_hash)
        if last is not None:
            ends.append(last)
        if block is not None and block.where & IN_NVME:
            filed.append(None)
            continue
        last = arrived(namespace, block_hash, parent, IN_NVME)
        last.put_on(device, slot)
        filed.append(last)
    if last is not None:
        ends.append(last)
    return filed, ends


def forget(namespace: Namespace) -> None:
    """Let go of all blocks of a namespace that is given up; see the head of `kvstore.index.block`."""
    for block in namespace.blocks.values():
        block.parent = block.children = None
    namespace.blocks.clear()
    for left_over in (namespace.stale, namespace.hanging, namespace.unneeded):
        left_over.clear()
    namespace.climbs.forget()
    namespace.hidden_climbs.forget()


def _turned(block: Block) -> None:
    """It is rooted now, or no more: its children are still to be updated."""
    if block.children is not None:
        stale = block.namespace.stale
        stale.pop(block.hash, None)
        stale[block.hash] = block, block.each_child()


def spread(namespace: Namespace, looks: int, hung: Callable[[Block], None] = lambda _: None) -> None:
    """Do some of what blocks that came or went have left. `hung` is called with each block that found its parent."""
    if namespace.hanging:
        while namespace.hanging and looks > 0:
            _, (block, parent) = namespace.hanging.popitem()
            block.parent, looks = _above(namespace, block, parent, looks - 1)
            if block.parent is not None:
                block.parent.add_child(block)
                hung(block)
            _root(block)
    elif namespace.unneeded:
        unneeded: list[bytes] = []
        _, ghost = namespace.unneeded.popitem()
        if namespace.blocks.get(ghost.hash) is ghost:
            _take_off(ghost, unneeded, looks)
        _forget(namespace, unneeded)
    else:
        _spread_stale(namespace, looks)


def _spread_stale(namespace: Namespace, looks: int) -> None:
    """Update ROOTED of some descendants of blocks that came or went, those of the latest block first. Each takes it
    from what its parent is now, whatever happened meanwhile; a child that came meanwhile has it from its parent already."""
    stale = namespace.stale
    while stale and looks > 0:
        block_hash, (block, children) = stale.popitem()
        for child in children:
            looks -= 1
            rooted = block.where & ROOTED if child.where & IN_ANY else 0
            if child.where & ROOTED != rooted and child.parent is block:
                child.where ^= ROOTED
                if child.children is not None:
                    if block.children is not child:
                        stale[block_hash] = block, children  # go on with it behind the child's
                    _turned(child)
                    break
            if looks <= 0:
                stale[block_hash] = block, children
                break


def spread_steps(namespace: Namespace, hung: Callable[[Block], None] = lambda _: None) -> Steps[None]:
    """All of it, in steps."""
    while namespace.is_behind:
        spread(namespace, STEP_BLOCKS, hung)
        if namespace.is_behind:
            yield


def check_block(namespace: Namespace, block_hash: bytes, block: Block) -> list[str]:
    """One line per violated invariant of a block that is filed under this hash."""
    problems: list[str] = []
    name = f"index: block {block_hash[:8].hex()}"
    parent = block.parent
    if block.hash != block_hash:
        problems.append(f"{name}: filed under another hash")
    if not block.where & IN_ANY and block.children is None and block_hash not in namespace.unneeded:
        problems.append(f"{name}: a ghost without children")
    if parent is not None and not (namespace.blocks.get(parent.hash) is parent and parent.has_child(block)):
        problems.append(f"{name}: hangs on a parent that does not know it")
    is_first = parent is None and block_hash not in namespace.hanging
    rooted = bool(block.where & IN_ANY) and (is_first or (parent is not None and bool(parent.where & ROOTED)))
    is_updated = parent is None or parent.hash not in namespace.stale
    if bool(block.where & ROOTED) != rooted and is_updated:
        problems.append(f"{name}: where is {block.where & 255}, rooted should be {rooted}")
    return problems


def check_children(block: Block) -> Steps[list[str]]:
    """Whether the children of a block are as many as it counted, where they did not change meanwhile."""
    children = block.children
    if not isinstance(children, Children):
        return []
    before = list(children.held)
    counted = [0] * len(before)
    for number, child in enumerate(children.walk(), 1):
        for bit in (IN_DRAM, IN_NVME):
            counted[bit] += child.where & bit != 0
        if number % STEP_BLOCKS == 0:
            yield
    if before != children.held:
        return []
    wrong = counted != before or any(
        bool(children.where & bit) != bool(counted[bit]) for bit in (IN_DRAM, IN_NVME)
    )
    return [f"index: block {block.hash[:8].hex()}: counts of children are wrong"] if wrong else []


def all_leaves_first(namespace: Namespace) -> Iterator[Block | None]:
    return leaves_first(top if top.parent is None else None for top in namespace.blocks.walk())


def leaves_first(tops: Iterable[Block | None]) -> Iterator[Block | None]:
    """What hangs on each of these blocks, and then the block itself, while blocks come and go; now and then None, so
    that the caller never waits long for the next one. Blocks that get another place meanwhile may be missed."""
    steps = 0
    for top in tops:
        path = [(top, top.each_child())] if top is not None else []
        while True:
            steps += 1
            if steps % EXPIRY_LOOKS == 0:
                yield None
            if not path:
                break
            block, children = path[-1]
            child = next(children, None)
            if child is not None:
                path.append((child, child.each_child()))
            else:
                path.pop()
                yield block
