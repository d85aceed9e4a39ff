"""Expiry: blocks under a TTL are misses as soon as their time is over, and dropped soon after.

    stored ──── ttl ────▶ expired: no lookup hits it ── next ticks ──▶ dropped, its row deleted

A block's TTL is that of the nearest prefix at or above it that has one, else that of its
namespace, else that of its tenant. It counts from when the block was stored (using it does
not prolong it), or from when the TTL was set where the block was held already and nothing
had noted its time. Storing an expired block again makes it new.

What is over first is `kvstore.lifetimes`, what is to be written `kvstore.unsaved_times`.

Times are noted only in namespaces with a TTL: about 50 bytes a block. A lookup there compares one
number while nothing can be expired, else it walks the found prefix. Other namespaces pay nothing.

The clock never goes backwards while the daemon runs (it is the monotonic one, started at the
wall clock), and starts where the last daemon had got to if the wall clock is behind that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore.blocks import Block
from kvstore.constants import (
    EXPIRY_LOOKS_PER_SLICE,
    EXPIRY_LOOKS_PER_TURN,
    EXPIRY_REFILED_MAX,
    TOTALS_SAVE_INTERVAL_S,
)
from kvstore.index import split_hashes
from kvstore.lifetimes import HELD, NEVER, Lifetimes
from kvstore.namespaces import Namespace
from kvstore.stored_times import Changes
from kvstore.unsaved_times import Unsaved, Walk


class Expiry:
    """TTLs in effect. Called from the engine's thread only."""

    def __init__(self) -> None:
        self.unsaved = Unsaved()
        self.is_late = False  # the last round left something that is over
        self._spaces: dict[bytes, Lifetimes] = {}
        self._working: dict[bytes, Lifetimes] = {}  # those with work left
        self._turn = 0
        self._saved_s = 0.0  # of the file, when this daemon started
        self._saving_s = -NEVER
        self._is_adopting = True
        self._unnamed: set[bytes] = set()  # namespaces with adopted blocks whose tenant is not known yet
        self._clock: Callable[[], float] = lambda: 0.0
        self._known: Callable[[bytes], Namespace | None] = lambda digest: None

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def start(
        self,
        times: dict[bytes, dict[bytes, int]],
        saved_s: int,
        latest_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        known: Callable[[bytes], Namespace | None],
    ) -> None:
        """Begin with what an earlier daemon noted; it was there at `latest_s` at least. known: the namespace of
        a digest."""
        self._saved_s, self._known = saved_s, known
        began_s, ahead_s = clock(), max(wall_clock(), saved_s, latest_s)
        self._clock = lambda: ahead_s + clock() - began_s
        for digest, noted in times.items():
            self._space(digest).adopt(noted)

    def now_s(self) -> float:
        """Unix seconds that do not go backwards."""
        return self._clock()

    # -- rules --

    def set_ttl(
        self, digest: bytes, namespace: Namespace | None, ttl_s: float | None, since_s: float
    ) -> None:
        """The TTL of a namespace, set then; None for none."""
        space = self._space(digest)
        had_rules = space.has_rules
        space.set_ttl(NEVER if ttl_s is None else ttl_s)
        space.since_s = min(space.since_s, since_s)
        self._changed(digest, space, namespace, had_rules)

    def set_prefix(
        self,
        digest: bytes,
        namespace: Namespace | None,
        block_hash: bytes,
        ttl_s: float | None,
        since_s: float,
        is_set: bool,
    ) -> None:
        """The TTL of a prefix and everything below it, set then. ttl_s None: it never expires."""
        space = self._space(digest)
        had_rules = space.has_rules
        space.since_s = min(space.since_s, since_s)
        if is_set:
            space.set_prefix(block_hash, NEVER if ttl_s is None else ttl_s)
        else:
            space.unset_prefix(block_hash)
        self._changed(digest, space, namespace, had_rules)

    def _changed(self, digest: bytes, space: Lifetimes, namespace: Namespace | None, had_rules: bool) -> None:
        if not space.has_rules:
            is_named = digest not in self._unnamed or (namespace is not None and namespace.registered)
            if not self._is_adopting and is_named:
                self._unnamed.discard(digest)
                self._forget(digest)
            return
        if self._is_adopting:
            space.assumed_s = self._unknown_s(space)
        elif namespace is None:
            space.below.clear()  # there are no blocks
        elif not had_rules:
            if digest in self._unnamed or space.times:
                space.assumed_s = self._unknown_s(space)
            else:  # the first rule: all blocks that are held have the time of now
                space.assumed_s = int(self.now_s())
                self.unsaved.write_anew(digest)
            self._unnamed.discard(digest)
            self._begin(space, namespace)
        elif space.has_work:
            self._working[digest] = space
        space.refresh()

    def _begin(self, space: Lifetimes, namespace: Namespace) -> None:
        """Go through all blocks of a namespace: the first slice now, the others later."""
        digest, note = namespace.digest, self.unsaved.note
        space.begin(namespace, lambda block_hash, stored_s: note(digest, block_hash, stored_s))
        space.work(namespace)
        if space.has_work:
            self._working[digest] = space

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._working)

    def step(self) -> None:
        """A slice of the work that rules left behind; namespaces take turns."""
        if not self._working:
            return
        digest, space = next(iter(self._working.items()))
        del self._working[digest]
        namespace = self._known(digest)
        if namespace is None:
            space.give_up_work()
        else:
            space.work(namespace)
        if space.has_work:
            self._working[digest] = space
        else:
            space.refresh()

    def tick(self) -> None:
        """Once a second: what was in use may be dropped now, and outdated entries are cleaned up."""
        for digest, space in self._spaces.items():
            namespace = self._known(digest)
            if namespace is not None:
                space.put_back(namespace)
                if not self._is_adopting and space.is_littered and not space.has_work:
                    self._begin(space, namespace)
            space.refresh()

    def _unknown_s(self, space: Lifetimes) -> int:
        """The latest that a block can have been stored which an earlier daemon did not note."""
        return int(max(self._saved_s, space.since_s))

    # -- blocks --

    def stored(self, block: Block) -> None:
        """The block was stored just now, or is offered again."""
        namespace = block.namespace
        digest = namespace.spec.digest
        space = self._spaces.get(digest)
        if space is not None:
            stored_s = int(self.now_s())
            space.stored(block, stored_s)
            self.unsaved.note(digest, block.hash, stored_s)
            if space.below and not self._is_adopting:
                self._working[digest] = space
                if len(space.below) > EXPIRY_REFILED_MAX:
                    self._begin(space, namespace)

    def gone(self, block: Block) -> None:
        """No tier has the block any more. While rows are read at a start, one that is still to come may be its."""
        if self._is_adopting:
            return
        digest = block.namespace.spec.digest
        space = self._spaces.get(digest)
        if space is not None and space.times.pop(block.hash, None) is not None:
            self.unsaved.note(digest, block.hash, None)

    def in_use(self, block: Block) -> None:
        """Its time is over, and it could not be dropped: with the next tick, perhaps."""
        space = self._spaces.get(block.namespace.spec.digest)
        if space is not None:
            space.in_use[block.hash] = None
            space.due_s = min(space.due_s, space.oldest_s + space.least_s)

    def adopted(self, namespaces: Iterable[Namespace]) -> None:
        """Everything that tiers hold is in the index: times and blocks are made to agree."""
        self._is_adopting = False
        spaces = dict(self._spaces)
        for namespace in namespaces:
            if not namespace.spec.fields and namespace.blocks:
                self._unnamed.add(namespace.digest)
            space = spaces.pop(namespace.digest, None)
            if space is None:
                continue
            self._drop_times(namespace.digest, space, namespace)
            if space.has_rules:
                space.assumed_s = self._unknown_s(space)
                self._begin(space, namespace)
                space.refresh()
            elif namespace.digest not in self._unnamed:
                self._forget(namespace.digest)
            else:
                space.assumed_s = NEVER
        for digest, space in spaces.items():  # of namespaces that nobody knows
            self._drop_times(digest, space, None)
            space.give_up_work()
            if not space.has_rules:
                self._forget(digest)

    def _drop_times(self, digest: bytes, space: Lifetimes, namespace: Namespace | None) -> None:
        """Those of blocks that no tier holds."""
        for block_hash in list(space.times):
            block = namespace.blocks.get(block_hash) if namespace is not None else None
            if block is None or not block.where & HELD:
                del space.times[block_hash]
                self.unsaved.note(digest, block_hash, None)

    # -- what is expired --

    def live(self, namespace: Namespace, hashes: bytes, count: int) -> int:
        """How many of the first `count` blocks of a prompt come before the first expired one."""
        space = self._spaces.get(namespace.spec.digest)
        if space is None:
            return count
        now_s = self.now_s()
        if now_s < space.due_s:
            return count
        times, prefixes, ttl_s, assumed_s = space.times.get, space.prefixes, space.ttl_s, space.assumed_s
        asked = split_hashes(hashes[: count * namespace.hash_bytes], namespace.hash_bytes)
        if not prefixes:
            oldest_s = now_s - ttl_s
            return next((at for at, h in enumerate(asked) if times(h, assumed_s) <= oldest_s), count)
        for at, block_hash in enumerate(asked):
            ttl_s = prefixes.get(block_hash, ttl_s)
            if times(block_hash, assumed_s) + ttl_s <= now_s:
                return at
        return count

    def over(self, run: Sequence[Block]) -> set[Block]:
        """Those of these blocks of one namespace whose time is over."""
        space = self._spaces.get(run[0].namespace.spec.digest) if run else None
        now_s = self.now_s()
        if space is None or now_s < space.due_s:
            return set()
        known: dict[bytes, bytes] = {}
        return {block for block in run if space.is_over(block, now_s, known)}

    def due(self) -> Iterator[Block | None]:
        """Blocks to drop now, one at a time, and None for each look in vain. Rules take turns, so that none
        waits for what another governs. Whoever stops early goes on in the next slice."""
        now_s = self.now_s()
        turns: deque[tuple[Lifetimes, Namespace, dict[bytes, bytes], bytes]] = deque()
        for digest, space in self._spaces.items():
            if now_s < space.due_s or (namespace := self._known(digest)) is None:
                continue
            space.refresh()
            rules: dict[bytes, bytes] = {}
            turns.extend(
                (space, namespace, rules, r) for r, lane in space.lanes.items() if lane.due_s <= now_s
            )
        self.is_late = bool(turns)
        self._turn += 1
        turns.rotate(-(self._turn % max(1, len(turns))))
        left = EXPIRY_LOOKS_PER_SLICE
        while turns:
            space, namespace, rules, rule = turn = turns.popleft()
            for _ in range(EXPIRY_LOOKS_PER_TURN):
                if space.lanes[rule].due_s > now_s:
                    break
                if not left:
                    return
                left -= 1
                yield space.take(rule, namespace, rules)
            else:
                turns.append(turn)
        self.is_late = False

    # -- saving --

    def changes(
        self, is_counting: bool, has_row: Callable[[bytes], bool], is_last: bool = False
    ) -> Changes | None:
        """What is to be written now, a bounded number of rows unless they are the last; None if there is nothing.

        is_counting: there are TTLs, so that the file says now and then until when it is complete.
        has_row: whether the record of a key that left is still on NVMe. Its time stays until it is not: a
        start would find the record, and must know that it has expired.
        """
        while is_last and self._working:
            self.step()
        now_s = self.now_s()
        is_due = is_counting and (is_last or now_s - self._saving_s >= TOTALS_SAVE_INTERVAL_S)
        if not is_due and not self.unsaved:
            return None
        changes, is_all = self.unsaved.take(self._rows_of, self._spaces.__contains__, has_row, is_last)
        if not is_all or self._working or self._is_adopting:
            return changes if changes.rows or changes.forgotten else None
        if not is_due and not changes.rows and not changes.forgotten:
            return None
        self._saving_s = now_s
        return changes._replace(saved_s=int(now_s))

    def _rows_of(self, digest: bytes) -> Walk | None:
        """The times of a namespace, as they are when they are asked for; None while some are still to be noted."""
        space, namespace = self._spaces.get(digest), self._known(digest)
        if space is None or namespace is None:
            return iter(())
        if space.assumed_s != NEVER or self._is_adopting:
            return None
        times, walk = space.times, namespace.blocks.walk()
        return ((digest, b.hash, times[b.hash]) if b.hash in times else None for b in walk)

    def not_saved(self, changes: Changes) -> None:
        """They could not be written: with the next ones, then."""
        self.unsaved.not_saved(changes)

    def pruned(self, digest: bytes, page: list[bytes], has_row: Callable[[bytes], bool]) -> None:
        """These rows are in the file: those of blocks that are not held, and will not be found at a start, go."""
        space = self._spaces.get(digest)
        if space is not None and space.assumed_s == NEVER:
            self.unsaved.pruned(digest, page, lambda h: h in space.times or has_row(digest + h))

    def check(self, namespaces: dict[bytes, Namespace]) -> list[str]:
        """One line per violated invariant: every held block has a time that is found when it is over."""
        return [
            f"ttl: namespace {digest.hex()}: {problem}"
            for digest, space in self._spaces.items()
            if digest in namespaces and space.has_rules and space.assumed_s == NEVER
            for problem in space.check(namespaces[digest])
        ]

    # -- helpers --

    def _space(self, digest: bytes) -> Lifetimes:
        space = self._spaces.get(digest)
        if space is None:
            space = self._spaces[digest] = Lifetimes()
        return space

    def _forget(self, digest: bytes) -> None:
        del self._spaces[digest]
        self._working.pop(digest, None)
        self.unsaved.forget(digest)
