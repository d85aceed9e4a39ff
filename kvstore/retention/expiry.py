"""Expiry: blocks under a TTL are misses as soon as their time is over, and dropped by the next sweep.

    stored ──── ttl ────▶ over: a miss at once ── next sweep ──▶ dropped from all tiers

A block's TTL is that of the nearest prefix at or above it that has one, else that of its namespace,
else that of its tenant. It counts from when the block was stored. Using a block does not prolong its
time; storing it again when it is over makes it new.

When a block was stored is written in its row, in the arena and on NVMe, and read when the row is
adopted. In memory a time is kept only in namespaces with a TTL: about 50 bytes a block. When a namespace
with blocks gets its first TTL, their times are read from the rows in the background (`rows`). Until then they
count as stored when the TTL was set: too young perhaps, but none lives longer than its TTL from then on.

Lookups: the blocks of a prefix are mostly stored in order, so that the first one is over first. The first
block that is over is one of these: the first of all; one that is older than its parent; one where the TTL
of a prefix begins. `newer` has the parents of the second kind, `prefixes` the third, and where both are
empty a lookup looks at one block only.

Sweeps: all blocks of a namespace are looked at now and then, in slices. The pause between two sweeps is a
tenth of the shortest TTL, within 10 s and 10 min, or 20 times what the sweep itself takes if that is more.

Invariants (proven by `check`): only held blocks have a time; where a held block is older than its held parent,
the parent is in `newer`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeGuard

from kvstore.constants import EXPIRY_LOOKS, STEP_BLOCKS
from kvstore.index.block import Block, Namespace
from kvstore.index.climbs import CLIMB_LOOKS, Climbs
from kvstore.index.forest import all_leaves_first, split_hashes
from kvstore.index.table import BlockTable
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.retention.clock import Clock
from kvstore.steps import Steps

EXPIRY_FIND_BLOCKS = 256  # blocks whose rows are asked for their times at once
EXPIRY_SWEEP_SHARE = 0.1  # of the shortest TTL of a namespace: the pause between two sweeps
EXPIRY_SWEEP_S_MIN = 10.0  # of that pause
EXPIRY_SWEEP_S_MAX = 600.0  # of that pause
EXPIRY_REST_S_PER_LOOK = 2e-5  # of that pause for each block at least: 20 times what a look takes
EXPIRY_CHILDREN_COMPARED = 16  # beyond it a block counts as newer than one of its children
EXPIRY_SECONDS_SHARED = 4096  # seconds of which all blocks share one object

NEVER = float("inf")

Rows = Callable[[Sequence[Block], Callable[[Sequence[int]], None]], None]


@dataclass(slots=True, eq=False)
class _Space:
    """The TTLs of one namespace and the times of its blocks."""

    assumed_s: int  # the time of blocks that have none in `times`
    ttl_s: float = NEVER  # of blocks that no prefix of `prefixes` covers
    prefixes: dict[bytes, float] = field(default_factory=dict)
    least_s: float = NEVER  # the shortest of these
    times: BlockTable[int] = field(default_factory=BlockTable)  # it grows in small steps, unlike a large dict
    newer: set[bytes] = field(default_factory=set)  # blocks that may have a child older than they are
    sweep_s: float = 0.0  # when the next sweep begins
    climbs: Climbs[Block] = field(default_factory=Climbs)  # to the nearest of `prefixes`

    def time(self, block_hash: bytes) -> int:
        stored_s = self.times.get(block_hash)
        return self.assumed_s if stored_s is None else stored_s

    def note(self, block: Block, stored_s: int) -> None:
        """The block has this time from now on."""
        block_hash, times = block.hash, self.times
        if times.setdefault(block_hash, stored_s) != stored_s:
            times.delete_run([block_hash])
            times.setdefault(block_hash, stored_s)
        if block.children is not None and self._has_older_child(block, stored_s):
            self.newer.add(block_hash)
        else:
            self.newer.discard(block_hash)
        self.compare(block)

    def compare(self, block: Block) -> None:
        """With its parent."""
        parent = block.parent
        if _is_held(parent) and self.time(block.hash) < self.time(parent.hash):
            self.newer.add(parent.hash)

    def ttl_of(self, block: Block, known: dict[Block, float], looks: int) -> tuple[float | None, int]:
        """The TTL of a block, None where so many looks do not tell; and how many are left. `known`: TTLs of blocks."""
        prefixes = self.prefixes
        above, looks = self.climbs.climb(block, lambda one: one in known or one.hash in prefixes, looks)
        if not looks:
            return None, 0
        known[block] = ttl_s = known[above] if above in known else prefixes.get(above.hash, self.ttl_s)
        return ttl_s, looks

    def _has_older_child(self, block: Block, stored_s: int) -> bool:
        """Whether a child is older than that; True as well where there are too many to compare."""
        children = list(islice(block.each_child(), EXPIRY_CHILDREN_COMPARED + 1))
        return len(children) > EXPIRY_CHILDREN_COMPARED or any(
            child.where & IN_ANY and self.time(child.hash) < stored_s for child in children
        )


class Expiry:
    """TTLs in effect. Called from the engine's thread only."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.rows: Rows = (
            _no_rows  # asks the rows of these blocks for their times, 0 for unknown; answers later
        )
        self.changed: Callable[[], None] = lambda: None  # called when a rule does
        self._spaces: dict[bytes, _Space] = {}
        self._work: deque[Callable[[], None]] = deque()  # each does a little, and appends what is left of it
        self._seconds: dict[int, int] = {}  # one object for each second: most blocks share theirs
        self._known: Callable[[bytes], Namespace | None] = lambda digest: None
        self._drop: Callable[[Block], bool] = lambda block: False

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def start(
        self, clock: Clock, known: Callable[[bytes], Namespace | None], drop: Callable[[Block], bool]
    ) -> None:
        """known: the namespace of a digest. drop: forget a block that is over, in all tiers."""
        self.clock, self._known, self._drop = clock, known, drop

    def now_s(self) -> float:
        """Unix seconds that do not go back. Rows are to be written with the whole seconds of it."""
        return self.clock.now_s()

    # -- rules --

    def covers(self, namespace: Namespace) -> bool:
        """Whether some of its blocks have a TTL."""
        return namespace.digest in self._spaces

    def set_ttl(self, digest: bytes, ttl_s: float | None, since_s: float) -> None:
        """The TTL of a namespace, None for none. since_s: what blocks without a time count from."""
        ttl_s = NEVER if ttl_s is None else ttl_s
        space = self._spaces.get(digest)
        if space is None and ttl_s == NEVER:
            return
        space = space or self._govern(digest, since_s)
        space.ttl_s = ttl_s
        self._changed(digest, space)

    def set_prefix(
        self, digest: bytes, block_hash: bytes, ttl_s: float | None, since_s: float, is_set: bool
    ) -> None:
        """The TTL of a prefix and everything below it. ttl_s None: it never expires."""
        space = self._spaces.get(digest)
        if is_set:
            space = space or self._govern(digest, since_s)
            space.prefixes[block_hash] = NEVER if ttl_s is None else ttl_s
        elif space is not None:
            space.prefixes.pop(block_hash, None)
        if space is not None:
            self._changed(digest, space)

    def _govern(self, digest: bytes, since_s: float) -> _Space:
        """A namespace gets its first rule: the times of what it holds are to be found."""
        space = self._spaces[digest] = _Space(int(since_s))
        namespace = self._known(digest)
        if namespace is not None and namespace.blocks:
            self._work.append(partial(self._find, digest, space, namespace.blocks.walk()))
        return space

    def _changed(self, digest: bytes, space: _Space) -> None:
        self.changed()
        space.climbs.forget()
        space.least_s = min(space.ttl_s, *space.prefixes.values(), NEVER)
        space.sweep_s = 0.0
        if space.ttl_s == NEVER and not space.prefixes:
            del self._spaces[digest]
            self._work.append(partial(self._free, space.times.dicts()))

    # -- blocks --

    def stored(self, block: Block, stored_s: int | None = None) -> None:
        """The block was stored at that time, None for now; or it was over and is offered again."""
        space = self._spaces.get(block.namespace.digest)
        if space is not None:
            space.note(block, self._shared(int(self.now_s()) if stored_s is None else stored_s))

    def adopted(self, block: Block, stored_s: int) -> None:
        """A row says that the block was stored at that time; 0 if it does not say."""
        space = self._spaces.get(block.namespace.digest)
        if space is not None:
            space.note(block, self._of_row(space, stored_s))

    def hung(self, block: Block) -> None:
        """The block hangs on another one now."""
        space = self._spaces.get(block.namespace.digest)
        if space is not None:
            space.compare(block)

    def stored_s(self, block: Block) -> int:
        """When it was stored, for its row; 0 where no rule governs it."""
        space = self._spaces.get(block.namespace.digest)
        return space.time(block.hash) if space is not None else 0

    def _of_row(self, space: _Space, stored_s: int) -> int:
        """The time that a row says. One in the future was written before the clock went back, over a reboot:
        the age of the block is unknown, so it is over; and it is at least as late as the row says."""
        if stored_s > self.now_s():
            self.clock.move_to(stored_s)
            return 0
        return self._shared(stored_s or space.assumed_s)

    def _shared(self, stored_s: int) -> int:
        if len(self._seconds) >= EXPIRY_SECONDS_SHARED:
            self._seconds.clear()
        return self._seconds.setdefault(stored_s, stored_s)

    def gone(self, block: Block) -> None:
        """No tier has the block any more."""
        space = self._spaces.get(block.namespace.digest)
        if space is not None:
            space.newer.discard(block.hash)
            if block.hash in space.times:
                space.times.delete_run([block.hash])

    # -- what is over --

    def live_steps(self, namespace: Namespace, hashes: bytes, count: int) -> Steps[int]:
        """How many of the first `count` blocks of a prompt, all of them held, come before the first that is over."""
        space = self._spaces.get(namespace.digest)
        if space is None or not count:
            return count
        now_s, size = self.now_s(), namespace.hash_bytes
        time, newer, prefixes, ttl_s = space.time, space.newer, space.prefixes, space.ttl_s
        if not newer and not prefixes:
            return 0 if time(hashes[:size]) + ttl_s <= now_s else count
        may_be_over = True
        for at, block_hash in enumerate(split_hashes(hashes[: count * size], size)):
            if block_hash in prefixes:
                ttl_s, may_be_over = prefixes[block_hash], True
            if may_be_over and time(block_hash) + ttl_s <= now_s:
                return at
            may_be_over = block_hash in newer
            if at % STEP_BLOCKS == STEP_BLOCKS - 1:
                yield
        return count

    def over(self, run: Sequence[Block], in_doubt: bool = True) -> set[Block]:
        """Those of these blocks of one namespace, a parent before its children, whose time is over. in_doubt: what is said of blocks so
        far below a prefix with a TTL that it is not found yet; the next call looks further."""
        space = self._spaces.get(run[0].namespace.digest) if run else None
        if space is None or space.least_s == NEVER:
            return set()
        now_s, least_s, time = self.now_s(), space.least_s, space.time
        past = [(block, stored_s) for block in run if (stored_s := time(block.hash)) + least_s <= now_s]
        if not space.prefixes:
            return {block for block, _ in past}
        found: set[Block] = set()
        known: dict[Block, float] = {}  # neighbours share theirs
        looks = CLIMB_LOOKS
        for block, stored_s in past:
            ttl_s, looks = space.ttl_of(block, known, looks)
            if in_doubt if ttl_s is None else stored_s + ttl_s <= now_s:
                found.add(block)
        return found

    # -- work in slices --

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._work)

    def tick(self) -> None:
        """Once a second: begin the sweeps that are due."""
        now_s, due = self.now_s(), list[tuple[bytes, _Space]]()
        for digest, space in self._spaces.items():
            if space.sweep_s <= now_s and space.least_s != NEVER:
                space.sweep_s = NEVER
                due.append((digest, space))
        if due:
            self._work.append(partial(self._begin, iter(due)))

    def _begin(self, due: Iterator[tuple[bytes, _Space]]) -> None:
        """The sweeps of some of these."""
        some = list(islice(due, EXPIRY_LOOKS))
        for digest, space in some:
            namespace = self._known(digest)
            if namespace is not None:
                self._work.append(partial(self._sweep, digest, space, all_leaves_first(namespace), 0))
            else:
                space.sweep_s = 0.0
        if some:
            self._work.append(partial(self._begin, due))

    def step(self, may_go_on: Callable[[], bool]) -> None:
        """Do what is to be done, a millisecond at a time, as long as `may_go_on` says so."""
        while self._work and may_go_on():
            self._work.popleft()()

    def _sweep(self, digest: bytes, space: _Space, walk: Iterator[Block | None], looks: int) -> None:
        """Drop what is over of the next few blocks of a namespace. What is in use stays until the next sweep."""
        if self._spaces.get(digest) is not space:
            return
        batch = list(islice(walk, EXPIRY_LOOKS))
        if batch:
            held = [block for block in batch if block is not None and block.where & IN_ANY]
            over = self.over(held[::-1], in_doubt=False)
            for block in held:
                if block in over:
                    self._drop(block)
            self._work.append(partial(self._sweep, digest, space, walk, looks + len(batch)))
            return
        pause_s = min(max(space.least_s * EXPIRY_SWEEP_SHARE, EXPIRY_SWEEP_S_MIN), EXPIRY_SWEEP_S_MAX)
        next_s = self.now_s() + max(pause_s, looks * EXPIRY_REST_S_PER_LOOK)
        space.sweep_s = min(space.sweep_s, next_s)  # 0 if a rule has changed meanwhile

    def _find(self, digest: bytes, space: _Space, walk: Iterator[Block]) -> None:
        """Have the rows asked for the times of the next few blocks of a namespace that have none."""
        batch = list(islice(walk, EXPIRY_FIND_BLOCKS))
        if not batch:
            space.sweep_s = 0.0  # much may turn out to be over
        if not batch or self._spaces.get(digest) is not space:
            return
        times = space.times
        blocks = [block for block in batch if block.where & IN_ANY and block.hash not in times]

        def found(rows: Sequence[int]) -> None:
            for block, stored_s in zip(blocks, rows, strict=True):
                if block.where & IN_ANY and block.hash not in times:  # not stored anew meanwhile
                    space.note(block, self._of_row(space, stored_s))
            self._work.append(partial(self._find, digest, space, walk))

        if blocks:
            self.rows(blocks, found)
        else:
            found(())

    def _free(self, dicts: Iterator[dict[bytes, int]]) -> None:
        """Let go of the times of a namespace that has no rule any more: millions at once would take a while."""
        part = next(dicts, None)
        if part is not None:
            part.clear()
            self._work.append(partial(self._free, dicts))

    def check_slices(self, namespaces: dict[bytes, Namespace]) -> Iterator[list[str]]:
        """One line per violated invariant, in slices."""
        for digest, space in list(self._spaces.items()):
            known = namespaces[digest].blocks if digest in namespaces else BlockTable[Block]()
            times = space.times.walk_items()
            while piece := list(islice(times, EXPIRY_LOOKS)):
                gone = [h for h, _ in piece if h in space.times and not _is_held(known.get(h))]
                yield [f"ttl: block {h[:8].hex()}: a time of a block that is not held" for h in gone]
            walk = known.walk()
            while blocks := list(islice(walk, EXPIRY_LOOKS)):
                yield [
                    f"ttl: block {block.hash[:8].hex()} is older than its parent"
                    for block in blocks
                    if _is_held(block)
                    and (parent := block.parent) is not None
                    and _is_held(parent)
                    and parent.hash not in space.newer
                    and space.time(block.hash) < space.time(parent.hash)
                ]


def _is_held(block: Block | None) -> TypeGuard[Block]:
    return block is not None and bool(block.where & IN_ANY)


def _no_rows(blocks: Sequence[Block], found: Callable[[Sequence[int]], None]) -> None:
    found([0] * len(blocks))
