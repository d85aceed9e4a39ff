"""Expiry: blocks under a TTL are misses as soon as their time is over, and dropped soon after.

    stored ──── ttl ────▶ expired: no lookup hits it ── next ticks ──▶ dropped, its row deleted

A block's TTL is that of the nearest prefix at or above it that has one, else that of its
namespace, else that of its tenant. It counts from when the block was stored (using it does
not prolong it), or from when the TTL was set where the block was held already and nothing
had noted its time. Storing an expired block again makes it new.

Times are noted only in namespaces with a TTL, in a dict in the order of storing: about 40
bytes a block. A lookup there compares one number while nothing can be expired (the oldest
time, the shortest TTL), else it walks the found prefix. Other namespaces pay nothing.

The clock never goes backwards while the daemon runs (it is the monotonic one, started at the
wall clock), and starts where the last daemon had got to if the wall clock is behind that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile

from kvstore.blocks import IN_DRAM, IN_NVME, Block
from kvstore.constants import (
    EXPIRY_LOOKS_PER_TICK,
    EXPIRY_NOTE_BLOCKS,
    EXPIRY_ROWS_PER_SAVE,
    TOTALS_SAVE_INTERVAL_S,
)
from kvstore.index import split_hashes
from kvstore.namespaces import Namespace
from kvstore.stored_times import Changes, Row

NEVER = float("inf")
_HELD = IN_DRAM | IN_NVME


class Lifetimes:
    """The TTLs and times of one namespace. ttl_s: of blocks that no prefix of `prefixes` covers."""

    __slots__ = (
        *("assumed_s", "candidates", "least_s", "noted", "oldest_s"),
        *("prefixes", "since_s", "times", "ttl_s"),
    )

    def __init__(self) -> None:
        self.ttl_s = NEVER
        self.prefixes: dict[bytes, float] = {}
        self.least_s = NEVER  # the shortest of these
        self.times: dict[bytes, int] = {}
        self.assumed_s = NEVER  # the time of blocks whose time is still to be noted
        self.noted: dict[bytes, int] = {}  # times to be put before the others, when all are noted
        self.since_s = NEVER  # when the oldest of these rules was set
        self.oldest_s = NEVER  # no block here was stored before this
        self.candidates: Iterator[bytes] = iter(())  # those still to be looked at in this round

    @property
    def due_s(self) -> float:
        """Before this nothing here is expired."""
        return self.oldest_s + self.least_s

    def refresh(self) -> None:
        """Once a tick and when rules change: a dict finds its first entry slowly when many left before it."""
        self.least_s = min(self.ttl_s, NEVER, *self.prefixes.values())
        self.oldest_s = min(next(iter(self.times.values()), NEVER), self.assumed_s)


class Expiry:
    """TTLs in effect. Called from the engine's thread only."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, Lifetimes] = {}
        self._unsaved: dict[tuple[bytes, bytes], int | None] = {}
        self._forgotten: dict[bytes, None] = {}
        self._saved_s = 0.0  # of the file, when this daemon started
        self._saving_s = -NEVER
        self._is_adopting = True
        self._noting: deque[Iterator[None]] = deque()
        self._unnamed: set[bytes] = set()  # namespaces with adopted blocks whose tenant is not known yet
        self._clock: Callable[[], float] = lambda: 0.0

    def __bool__(self) -> bool:
        return bool(self._spaces)

    def start(
        self,
        times: dict[bytes, dict[bytes, int]],
        saved_s: int,
        latest_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Begin with what an earlier daemon noted; it was there at `latest_s` at least."""
        self._saved_s = saved_s
        began_s, ahead_s = clock(), max(wall_clock(), saved_s, latest_s)
        self._clock = lambda: ahead_s + clock() - began_s
        for digest, known in times.items():
            space = self._space(digest)
            space.times = known

    def now_s(self) -> float:
        """Unix seconds that do not go backwards."""
        return self._clock()

    # -- rules --

    def set_ttl(
        self, digest: bytes, namespace: Namespace | None, ttl_s: float | None, since_s: float
    ) -> None:
        """The TTL of a namespace, set then; None for none."""
        space = self._space(digest)
        had_rules = self._has_rules(space)
        space.ttl_s = NEVER if ttl_s is None else ttl_s
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
        had_rules = self._has_rules(space)
        space.since_s = min(space.since_s, since_s)
        if is_set:
            space.prefixes[block_hash] = NEVER if ttl_s is None else ttl_s
        else:
            space.prefixes.pop(block_hash, None)
        self._changed(digest, space, namespace, had_rules)

    def _changed(self, digest: bytes, space: Lifetimes, namespace: Namespace | None, had_rules: bool) -> None:
        space.candidates = iter(())
        if not self._has_rules(space):
            is_named = digest not in self._unnamed or (namespace is not None and namespace.registered)
            if not self._is_adopting and is_named:
                self._unnamed.discard(digest)
                self._forget(digest)
            return
        if self._is_adopting:
            space.assumed_s = self._unknown_s(space)
        elif not had_rules and namespace is not None:
            if digest in self._unnamed or space.times:
                self._note_unknown(space, namespace, self._unknown_s(space))
            else:
                self._begin_noting(space, namespace)
            self._unnamed.discard(digest)
        space.refresh()

    def _begin_noting(self, space: Lifetimes, namespace: Namespace) -> None:
        """The first rule of a namespace: all blocks that it holds have the time of now."""
        space.assumed_s = int(self.now_s())
        work = self._note_all(space, namespace)
        if next(work, work) is None:
            self._noting.append(work)

    def _note_all(self, space: Lifetimes, namespace: Namespace) -> Iterator[None]:
        """In slices. Until it is through, `assumed_s` says the same."""
        stored_s = int(space.assumed_s)
        for at, block in enumerate(namespace.blocks.walk(), 1):
            if block.where & _HELD and block.hash not in space.times:
                space.noted[block.hash] = stored_s
                self._unsaved[namespace.digest, block.hash] = stored_s
            if at % EXPIRY_NOTE_BLOCKS == 0:
                yield
                if self._spaces.get(namespace.digest) is not space:
                    return  # the rules are gone
        space.noted.update(space.times)
        space.times, space.noted = space.noted, {}
        space.assumed_s = NEVER
        space.candidates = iter(())

    def step(self) -> None:
        """Once a tick: a slice of noting what a new rule is about."""
        if self._noting and next(self._noting[0], self) is self:
            self._noting.popleft()

    def _unknown_s(self, space: Lifetimes) -> float:
        """The latest that a block can have been stored which an earlier daemon did not note."""
        return max(self._saved_s, space.since_s)

    def _note_unknown(self, space: Lifetimes, namespace: Namespace, at_s: float) -> None:
        """Blocks that are held and have no time get this one."""
        known, stored_s = space.times, int(at_s)
        new = [h for h, block in namespace.blocks.items() if block.where & _HELD and h not in known]
        if not new:
            return
        known.update(dict.fromkeys(new, stored_s))
        space.times = dict(sorted(known.items(), key=lambda item: item[1]))
        self._unsaved.update({(namespace.digest, h): stored_s for h in new})

    # -- blocks --

    def stored(self, block: Block) -> None:
        """The block was stored just now, or is offered again."""
        digest = block.namespace.spec.digest
        space = self._spaces.get(digest)
        if space is not None:
            stored_s = int(self.now_s())
            space.times.pop(block.hash, None)
            space.noted.pop(block.hash, None)
            space.times[block.hash] = stored_s
            space.oldest_s = min(space.oldest_s, stored_s)
            self._unsaved[digest, block.hash] = stored_s

    def gone(self, block: Block) -> None:
        """No tier has the block any more. While rows are read at a start, one that is still to come may be its."""
        if self._is_adopting:
            return
        digest = block.namespace.spec.digest
        space = self._spaces.get(digest)
        if space is not None:
            noted_s = space.noted.pop(block.hash, None)
            if space.times.pop(block.hash, noted_s) is not None:
                self._unsaved[digest, block.hash] = None

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
            get = namespace.blocks.get
            for block_hash in list(space.times):
                block = get(block_hash)
                if block is None or not block.where & _HELD:
                    del space.times[block_hash]
                    self._unsaved[namespace.digest, block_hash] = None
            space.assumed_s = NEVER
            if self._has_rules(space):
                self._note_unknown(space, namespace, self._unknown_s(space))
                space.refresh()
            elif namespace.digest not in self._unnamed:
                self._forget(namespace.digest)
        for digest, space in spaces.items():  # of namespaces that nobody knows
            if not self._has_rules(space):
                self._forget(digest)

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
        known: dict[bytes, float] = {}
        return {block for block in run if self._is_over(space, block, now_s, known)}

    def due(self, namespaces: Mapping[bytes, Namespace]) -> list[Block]:
        """Some blocks to drop now, in the order of storing; looks at a bounded number of blocks."""
        now_s = self.now_s()
        found: list[Block] = []
        looks_left = EXPIRY_LOOKS_PER_TICK
        for digest, space in self._spaces.items():
            namespace = namespaces.get(digest)
            space.refresh()
            if namespace is None or now_s < space.due_s:
                continue
            looks = list(islice(space.candidates, looks_left))
            if not looks:  # a new round
                oldest_s = now_s - space.least_s
                over = list(takewhile(lambda item: item[1] <= oldest_s, space.times.items()))  # noqa: B023 used at once
                space.candidates = iter([block_hash for block_hash, _ in over])
                looks = list(islice(space.candidates, looks_left))
            looks_left -= len(looks)
            known: dict[bytes, float] = {}
            blocks = [block for h in looks if (block := namespace.blocks.get(h)) is not None]
            found += [block for block in blocks if self._is_over(space, block, now_s, known)]
        return found

    def _is_over(self, space: Lifetimes, block: Block, now_s: float, known: dict[bytes, float]) -> bool:
        stored_s = space.times.get(block.hash, space.assumed_s)
        return stored_s + self._ttl_s(space, block, known) <= now_s

    def _ttl_s(self, space: Lifetimes, block: Block, known: dict[bytes, float]) -> float:
        """`known`: answers for blocks passed on the way up, which neighbours share."""
        if not space.prefixes:
            return space.ttl_s
        passed: list[bytes] = []
        above: Block | None = block
        ttl_s = space.ttl_s
        while above is not None:
            answer = space.prefixes.get(above.hash) or known.get(above.hash)
            if answer is not None:
                ttl_s = answer
                break
            passed.append(above.hash)
            above = above.parent
        known.update(dict.fromkeys(passed, ttl_s))
        return ttl_s

    # -- saving --

    def changes(
        self, is_counting: bool, has_row: Callable[[bytes], bool], is_last: bool = False
    ) -> Changes | None:
        """What is to be written now, a bounded number of rows unless they are the last; None if there is nothing.

        is_counting: there are TTLs, so that the file says now and then until when it is complete.
        has_row: whether the record of a key that left is still on NVMe. Its time stays until it is not: a
        start would find the record, and must know that it has expired.
        """
        while is_last and self._noting:
            self.step()
        now_s = self.now_s()
        is_due = is_counting and (is_last or now_s - self._saving_s >= TOTALS_SAVE_INTERVAL_S)
        if not is_due and not self._unsaved and not self._forgotten:
            return None
        keys = list(self._unsaved if is_last else islice(self._unsaved, EXPIRY_ROWS_PER_SAVE))
        rows: list[Row] = []
        later: dict[tuple[bytes, bytes], int | None] = {}
        for key in keys:
            stored_s = self._unsaved.pop(key)
            if stored_s is None and has_row(key[0] + key[1]):
                later[key] = None
            else:
                rows.append((*key, stored_s))
        forgotten = [digest for digest in self._forgotten if digest not in self._spaces]
        self._forgotten.clear()
        is_all = not (self._unsaved or self._noting or self._is_adopting)  # but for times of what is gone
        self._unsaved.update(later)
        if not is_all:
            return Changes(rows, forgotten, None) if rows or forgotten else None
        if not is_due and not rows and not forgotten:
            return None
        self._saving_s = now_s
        return Changes(rows, forgotten, int(now_s))

    def not_saved(self, changes: Changes) -> None:
        """They could not be written: with the next ones, then."""
        for digest, block_hash, stored_s in changes.rows:
            self._unsaved.setdefault((digest, block_hash), stored_s)
        self._forgotten.update(dict.fromkeys(changes.forgotten))

    def check(self, namespaces: dict[bytes, Namespace]) -> list[str]:
        """One line per violated invariant: every held block has a time, and only those."""
        problems: list[str] = []
        for digest, space in self._spaces.items():
            namespace = namespaces.get(digest)
            held = (
                {h for h, b in namespace.blocks.items() if b.where & _HELD}
                if namespace is not None
                else set()
            )
            if not self._has_rules(space) or space.assumed_s != NEVER:
                continue  # times wait for the name of their tenant, or to be noted
            if namespace is not None and held != set(space.times):
                problems.append(f"ttl: namespace {digest.hex()}: times and held blocks disagree")
            ages = list(space.times.values())
            if ages != sorted(ages):
                problems.append(f"ttl: namespace {digest.hex()}: times are out of order")
        return problems

    # -- helpers --

    def _space(self, digest: bytes) -> Lifetimes:
        space = self._spaces.get(digest)
        if space is None:
            space = self._spaces[digest] = Lifetimes()
        return space

    def _forget(self, digest: bytes) -> None:
        del self._spaces[digest]
        self._forgotten[digest] = None

    def _has_rules(self, space: Lifetimes) -> bool:
        return space.ttl_s != NEVER or bool(space.prefixes)
