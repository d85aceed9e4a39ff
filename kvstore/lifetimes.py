"""Lifetimes: the TTLs of one namespace, when its blocks were stored, and which are over first.

    rule (a prefix, or all) ─▶ lane:  second ─▶ [hash, hash, …]     oldest second + TTL = due
    times: hash ─▶ second                                           what is true

Each rule has a lane: the blocks that it governs, by the second in which they were stored. So what
is over is found without looking at what is not, and a short TTL of one prefix waits behind nobody.
An entry of a lane is only a hint: it counts if `times` says the same second and the block has no
nearer rule. Else it is outdated, and thrown away when its turn comes.

Invariant: every time has an entry in the lane of its block's rule, unless work is left (`is_exact`).
Then `oldest_s`, which no time is below, decides when somebody has to look. Work is done in slices:

* `file_all` goes through the namespace: after the first rule (blocks that have no time get one),
  after a start, and when most entries are outdated;
* `_file_below` goes through what hangs on a block: after the rule of a prefix came or went, and
  after a block came that others hung on already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from kvstore.blocks import IN_DRAM, IN_NVME, Block
from kvstore.constants import EXPIRY_NOTE_BLOCKS, EXPIRY_STALE_ENTRIES_MIN
from kvstore.namespaces import Namespace

NEVER = float("inf")
HELD = IN_DRAM | IN_NVME
ALL = b""  # the rule of what no prefix covers


class Lane:
    """Blocks of one rule, by the second in which they were stored; some entries are outdated."""

    __slots__ = ("_at", "_seconds", "entries", "ttl_s")

    def __init__(self, ttl_s: float = NEVER) -> None:
        self.ttl_s = ttl_s
        self.entries = 0
        self._seconds: list[int] = []  # a heap
        self._at: dict[int, list[bytes]] = {}

    @property
    def oldest_s(self) -> float:
        return self._seconds[0] if self._seconds else NEVER

    @property
    def due_s(self) -> float:
        """Before this nothing here is over."""
        return self.oldest_s + self.ttl_s

    def file(self, block_hash: bytes, stored_s: int) -> None:
        self.entries += 1
        found = self._at.get(stored_s)
        if found is None:
            self._at[stored_s] = [block_hash]
            heappush(self._seconds, stored_s)
        else:
            found.append(block_hash)

    def take(self) -> tuple[bytes, int]:
        """An entry of the oldest second, which is there: the latest of it, so that leaves come before parents."""
        stored_s = self._seconds[0]
        found = self._at[stored_s]
        block_hash = found.pop()
        self.entries -= 1
        if not found:
            del self._at[stored_s]
            heappop(self._seconds)
        return block_hash, stored_s

    def each(self) -> Iterator[tuple[bytes, int]]:
        return ((block_hash, second) for second, found in self._at.items() for block_hash in found)

    def emptied(self, count: int) -> Iterator[None]:
        """Let go of all entries, so many between two yields: millions at once would take a while."""
        while self._at:
            found = self._at[next(iter(self._at))]
            del found[-count:]
            if not found:
                del self._at[next(iter(self._at))]
            yield


class Lifetimes:
    """The TTLs and times of one namespace. ttl_s: of blocks that no prefix of `prefixes` covers."""

    __slots__ = (
        *("_last", "_whole", "assumed_s", "below", "due_s", "in_use", "is_filed", "lanes", "least_s"),
        *("oldest_s", "prefixes", "since_s", "times", "ttl_s", "_walk"),
    )

    def __init__(self) -> None:
        self.ttl_s = NEVER
        self.prefixes: dict[bytes, float] = {}
        self.least_s = NEVER  # the shortest of these
        self.times: dict[bytes, int] = {}
        self.lanes: dict[bytes, Lane] = {ALL: Lane()}
        self.assumed_s = NEVER  # the time of blocks whose time is still to be noted
        self.since_s = NEVER  # when the oldest of these rules was set
        self.oldest_s = NEVER  # no block here was stored before this
        self.due_s = NEVER  # before this nothing here is over
        self.is_filed = True  # all times have been in a lane
        self.in_use: dict[bytes, None] = {}  # over, and to be dropped when they are given back
        self.below: dict[bytes, None] = {}  # blocks whose rule changed, and that of what hangs on them
        self._whole: Iterator[None] | None = None  # work under way
        self._walk: Iterator[None] | None = None
        self._last: tuple[Block | None, bytes] = None, ALL  # the block stored last, and its rule

    @property
    def has_rules(self) -> bool:
        return self.ttl_s != NEVER or bool(self.prefixes)

    @property
    def is_exact(self) -> bool:
        """Whether every time is in the lane of its rule."""
        return self.is_filed and self.assumed_s == NEVER and not (self.has_work or self.in_use)

    @property
    def has_work(self) -> bool:
        return self._whole is not None or self._walk is not None or bool(self.below)

    # -- rules --

    def adopt(self, times: dict[bytes, int]) -> None:
        """What an earlier daemon noted, oldest first."""
        self.times = times
        self.is_filed = not times
        self.oldest_s = next(iter(times.values()), NEVER)

    def set_ttl(self, ttl_s: float) -> None:
        """Of everything here, but for prefixes with one of their own."""
        self.ttl_s = self.lanes[ALL].ttl_s = ttl_s

    def set_prefix(self, block_hash: bytes, ttl_s: float) -> None:
        """Of a block and what hangs on it."""
        self.prefixes[block_hash] = ttl_s
        self.lanes.setdefault(block_hash, Lane()).ttl_s = ttl_s
        self._rule_changed(block_hash)

    def unset_prefix(self, block_hash: bytes) -> None:
        """The next rule above holds there again."""
        if self.prefixes.pop(block_hash, None) is not None:
            del self.lanes[block_hash]
            self._rule_changed(block_hash)

    def _rule_changed(self, block_hash: bytes) -> None:
        self._last = None, ALL
        self.below[block_hash] = None

    def rule_of(self, block: Block, known: dict[bytes, bytes] | None = None) -> bytes:
        """The nearest prefix at or above a block that has a TTL, or ALL. `known`: answers for blocks passed on
        the way up, which neighbours share."""
        if not self.prefixes:
            return ALL
        passed: list[bytes] = []
        above: Block | None = block
        rule = ALL
        while above is not None:
            if above.hash in self.prefixes:
                rule = above.hash
                break
            if known is not None:
                if above.hash in known:
                    rule = known[above.hash]
                    break
                passed.append(above.hash)
            above = above.parent
        if known is not None:
            known.update(dict.fromkeys(passed, rule))
        return rule

    def is_over(self, block: Block, now_s: float, known: dict[bytes, bytes]) -> bool:
        """Whether the time of a block is over."""
        ttl_s = self.lanes[self.rule_of(block, known)].ttl_s
        return self.times.get(block.hash, self.assumed_s) + ttl_s <= now_s

    def refresh(self) -> None:
        """When rules or work changed, and now and then: what is due when."""
        self.least_s = min(self.ttl_s, NEVER, *self.prefixes.values())
        if self.is_exact:
            lanes = self.lanes.values()
            self.oldest_s = min(lane.oldest_s for lane in lanes)
            self.due_s = min(lane.due_s for lane in lanes)
        else:
            self.oldest_s = min(self.oldest_s, self.assumed_s)
            self.due_s = self.oldest_s + self.least_s

    # -- blocks --

    def stored(self, block: Block, stored_s: int) -> None:
        """The block was stored at that time, and no other is known later."""
        self.times[block.hash] = stored_s
        if not self.prefixes:
            rule = ALL
        else:
            last, rule = self._last
            if block.hash in self.prefixes or last is None or block.parent is not last:
                rule = self.rule_of(block)
            self._last = block, rule
            if block.children is not None and self._fills_gap(block):
                self.below[block.hash] = None
        self.lanes[rule].file(block.hash, stored_s)
        self.oldest_s = min(self.oldest_s, stored_s)
        self.due_s = min(self.due_s, self.oldest_s + self.least_s)

    def _fills_gap(self, block: Block) -> bool:
        """Whether something was there before that hangs on this block; it may not have known its rule."""
        return any(child.hash in self.times or not child.where & HELD for child in block.each_child())

    def take(self, rule: bytes, namespace: Namespace, known: dict[bytes, bytes]) -> Block | None:
        """The next entry of a lane, which has one: a block of that rule, or None for an outdated entry."""
        block_hash, stored_s = self.lanes[rule].take()
        if self.times.get(block_hash) != stored_s:
            return None
        block = namespace.blocks.get(block_hash)
        if block is None or self.rule_of(block, known) != rule:
            return None
        return block

    def put_back(self, namespace: Namespace) -> None:
        """What was over and in use may be dropped now."""
        for block_hash in self.in_use:
            stored_s, block = self.times.get(block_hash), namespace.blocks.get(block_hash)
            if stored_s is not None and block is not None:
                self.lanes[self.rule_of(block)].file(block_hash, stored_s)
        self.in_use.clear()

    # -- work --

    @property
    def is_littered(self) -> bool:
        """Whether most entries are outdated."""
        entries = sum(lane.entries for lane in self.lanes.values())
        return entries > 2 * len(self.times) + EXPIRY_STALE_ENTRIES_MIN

    def begin(self, namespace: Namespace, note: Callable[[bytes, int], None]) -> None:
        """File everything anew; blocks without a time get `assumed_s`, and `note` is told."""
        self._walk = None
        self._last = None, ALL
        self._whole = self._file_all(namespace, note)

    def work(self, namespace: Namespace) -> None:
        """One slice of the work that is left."""
        if self._whole is not None:
            if next(self._whole, self) is self:
                self._whole = None
            return
        if self._walk is None:
            self._walk = self._file_below(namespace)
        if next(self._walk, self) is self:
            self._walk = None

    def give_up_work(self) -> None:
        """Nobody knows the namespace: there are no blocks."""
        self._whole = self._walk = None
        self.below.clear()
        self.in_use.clear()
        self.assumed_s = NEVER
        self.is_filed = True

    def _file_all(self, namespace: Namespace, note: Callable[[bytes, int], None]) -> Iterator[None]:
        """All under ALL first: an entry there of what a prefix governs is outdated, and does no harm."""
        old, self.lanes = self.lanes, {rule: Lane(lane.ttl_s) for rule, lane in self.lanes.items()}
        own, times = self.lanes[ALL], self.times
        for at, block in enumerate(namespace.blocks.walk(), 1):
            stored_s = times.get(block.hash)
            if stored_s is None and block.where & HELD and self.assumed_s != NEVER:
                stored_s = times[block.hash] = int(self.assumed_s)
                note(block.hash, stored_s)
            if stored_s is not None:
                own.file(block.hash, stored_s)
            if at % EXPIRY_NOTE_BLOCKS == 0:
                yield
        self.assumed_s = NEVER
        self.is_filed = True
        self.below = dict.fromkeys(self.prefixes)
        for lane in old.values():
            yield from lane.emptied(EXPIRY_NOTE_BLOCKS)

    def _file_below(self, namespace: Namespace) -> Iterator[None]:
        looks = 0
        while self.below:
            top = namespace.blocks.get(self.below.popitem()[0])
            rule = self.rule_of(top) if top is not None else ALL
            stack = [top] if top is not None else []
            while (
                stack and rule in self.lanes
            ):  # where it went meanwhile, all below its prefix is to be filed
                block = stack.pop()
                if block is not top and block.hash in self.prefixes:
                    continue
                stored_s = self.times.get(block.hash)
                if stored_s is not None:
                    self.lanes[rule].file(block.hash, stored_s)
                stack.extend(block.each_child())
                looks += 1
                if looks % EXPIRY_NOTE_BLOCKS == 0:
                    yield

    def check(self, namespace: Namespace) -> list[str]:
        """One line per violated invariant."""
        held = {h for h, block in namespace.blocks.items() if block.where & HELD}
        if held != set(self.times):
            return ["times and held blocks disagree"]
        if not self.is_exact:
            return []
        known: dict[bytes, bytes] = {}
        filed = {
            block_hash
            for rule, lane in self.lanes.items()
            for block_hash, stored_s in lane.each()
            if self.times.get(block_hash) == stored_s
            and self.rule_of(namespace.blocks[block_hash], known) == rule
        }
        return ["a time that is in no lane"] if filed != held else []
