"""Accounts: every looked-up token falls into exactly one outcome.

    prompt   │ engine's own │ hits, by tier │ held, not used │ why not, block by block │ tail │
             0            local          usable             held                    asked  tokens
                                      ▲
        settle: less came than promised ─┘ the rest becomes a miss, with its reason

A *ticket* is one request of an engine. Its account stays open for a while, so that it can
be asked again, lose what a further namespace does not hold, or be settled when a load
brought less than was promised; each of these moves tokens from one outcome to another, so
that their sum never changes. Totals are kept by hour, model and tenant (`kvstore.ledger.totals`).

Invariant (proven by `check`, and live by every report): for each total, tokens asked for =
the sum over all outcomes; no count is negative.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from kvstore.constants import PREFILL_TOKENS_PER_S_MIN, TICKETS_OPEN_MAX
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.index.evicted import Evicted
from kvstore.io_pool import Io
from kvstore.ledger.totals import Rows, Snapshot, Totals
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.steps import Background, Steps

# Blocks that booking a lookup looks at; of longer prompts every second, third and so on.
BOOK_LOOKS_MAX = 1024
JUDGE_STEP_BLOCKS = 250  # judged between two yields: why one is missing takes longer than a look
TOTALS_SAVE_INTERVAL_S = 5.0  # what a kill may lose

Piece = tuple[int, int]  # tokens, outcome
_OWNED, _MISSED = 0, 5  # parts of a prompt, see `_bounds`
_HIT_IN = {where: outcomes.hit_in(where) for where in range(1, IN_ANY + 1)}  # in no tier: no hit


class Asking(NamedTuple):
    """What a client says of the request behind a lookup.

    ticket: the request, 0 for one that is not mentioned again. more: a further lookup of the
    same round, for other namespaces; only what all of them hold is used. tokens: of the whole
    prompt. local_tokens: in the engine's own cache. prefill_tokens_per_s: how fast the engine
    computes them, 0 if it does not know. lasting: whether it may be worth keeping in a bucket.
    """

    ticket: int = 0
    more: bool = False
    tokens: int = 0
    local_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    lasting: bool = True


NOBODY_IN_PARTICULAR = Asking()


class Found(NamedTuple):
    """Answer of a lookup, in blocks. held: with an unbroken prefix, and alive; usable: of these, to be
    loaded; why: the outcome of the others. expired: those behind them that are there and have expired. shared: of
    those held, the last ones, which only shared levels have; far: of those, the last ones, which only other regions have.
    writing: those behind all that is held that are being written, or held behind such ones."""

    usable: int
    held: int
    why: int = outcomes.SLOWER
    expired: int = 0
    shared: int = 0
    far: int = 0
    writing: int = 0


@dataclass(slots=True, eq=False)
class Account:
    """One request's tokens, in prompt order, and the sums they are part of."""

    rows: Rows
    tokens: int
    pieces: list[Piece]
    prefill_tokens_per_s: float
    prefix: tuple[str, str] | None = None  # that has `credited` of our tokens as saved
    credited: int = 0

    def hit_tokens(self) -> int:
        return sum(tokens for tokens, outcome in self.pieces if outcome in outcomes.HITS)

    def book(self, sign: int) -> None:
        """Add this account to its sums, or take it out again."""
        is_known = self.prefill_tokens_per_s >= PREFILL_TOKENS_PER_S_MIN
        prefill_s = self.hit_tokens() / self.prefill_tokens_per_s if is_known else 0.0
        tokens, pieces = sign * self.tokens, self.pieces
        for sums in self.rows:  # not a method of theirs: this is done for every lookup
            sums.lookups += sign
            sums.tokens_asked += tokens
            by_outcome = sums.tokens
            for size, outcome in pieces:
                by_outcome[outcome] += sign * size
            if prefill_s:
                sums.prefill_s_saved += sign * prefill_s


class Accounts:
    """Counts lookups; called by the engine's thread after each answer, so that no client waits for it.

    dram_only: there is no other tier: every hit is in DRAM.
    """

    def __init__(
        self, totals: Totals, evicted: Evicted, wall_clock: Callable[[], float], dram_only: bool = False
    ) -> None:
        self.totals = totals
        self._dram_only = dram_only
        self._evicted = evicted
        self.wall_clock = wall_clock
        self._open: OrderedDict[int, Account] = OrderedDict()
        self._saving: Snapshot | None = None
        self._save_at_s = 0.0

    @property
    def tickets(self) -> int:
        """Requests whose account can still change."""
        return len(self._open)

    def book(self, namespaces: list[Namespace], hashes: bytes, found: Found, asking: Asking) -> None:
        """A lookup of these namespaces was answered."""
        first = namespaces[0]
        pieces = self._pieces(namespaces, hashes, found, asking)
        if asking.ticket and asking.more and asking.ticket in self._open:
            self._lose(self._open[asking.ticket], pieces)
            return
        before = self._open.pop(asking.ticket, None) if asking.ticket else None
        if before is not None:  # asked again: only the last answer counts
            before.book(-1)
            self.totals.changed(before.rows)
        now_s = self.wall_clock()
        rows = self.totals.of(first, now_s)
        account = Account(rows, _tokens(first, hashes, asking), pieces, asking.prefill_tokens_per_s)
        account.book(1)
        if before is not None:
            account.prefix, account.credited = before.prefix, before.credited
            self._credit_no_more(account)
        if found.usable and account.prefix is None:
            self._note_prefix(account, first, hashes, found.usable, now_s)
        if asking.ticket:
            self._open[asking.ticket] = account
            if len(self._open) > TICKETS_OPEN_MAX:
                self._open.popitem(last=False)

    def pieces(self, ticket: int) -> Sequence[Piece]:
        """What became of a ticket's tokens until now, in prompt order; nothing of one that is forgotten."""
        account = self._open.get(ticket)
        return account.pieces if account is not None else ()

    def moved(self, namespace: Namespace, move: int, size_bytes: int) -> None:
        """Bytes of a namespace went from one place to another; `move` is an index into `sums.MOVES`."""
        for sums in self.totals.of(namespace, self.wall_clock()):
            sums.bytes_moved[move] += size_bytes

    def settle(self, ticket: int, tokens: int, namespace: Namespace | None, block_hash: bytes) -> None:
        """Only the first `tokens` of the ticket's prompt could be used: not the block `block_hash`.

        Without a hash the engine could not use what was found.
        """
        account = self._open.get(ticket)
        if account is None:
            return
        why = outcomes.UNUSABLE
        if namespace is not None and block_hash:
            block = namespace.blocks.get(block_hash)
            held = block is not None and block.where & IN_ANY
            why = outcomes.UNAVAILABLE if held else self.why_missing(namespace, block_hash)
        self._take(account, tokens, why)

    def why_missing(self, namespace: Namespace, block_hash: bytes) -> int:
        """The outcome of a block that no tier holds."""
        if block_hash in namespace.writing:
            return outcomes.WRITING
        return self._evicted.whys(namespace, [block_hash])[0] or outcomes.NEVER_SEEN

    def judge_steps(self, namespaces: list[Namespace], hashes: bytes, found: Found) -> Steps[list[int]]:
        """The outcome of each block of a lookup, exactly; `book` takes a sample of long ones."""
        judged: list[int] = []
        size, count = namespaces[0].hash_bytes, len(hashes) // namespaces[0].hash_bytes
        piece = max(1, JUDGE_STEP_BLOCKS // len(namespaces))
        why = outcomes.NEVER_SEEN
        for part, (first, end) in enumerate(pairwise(_bounds(found, count))):
            for start in range(first, end, piece):
                asked = _every(hashes, size, start, min(end, start + piece), 1)
                judged += self._judge(namespaces, part, asked, found, why)
                why = judged[-1]
                yield
        return judged

    def _sampled(
        self, namespaces: list[Namespace], hashes: bytes, found: Found, skip: int
    ) -> Iterator[tuple[int, int]]:
        """(outcome, how many blocks in a row have it) for the blocks of a lookup but the first `skip`.

        Of a long prompt only every n-th block is looked at, and speaks for those behind it. Neighbours
        nearly always share one outcome, and a lookup must not cost more than a millisecond or two.
        """
        size, count = namespaces[0].hash_bytes, len(hashes) // namespaces[0].hash_bytes
        every = max(1, -(-(count - skip) * len(namespaces) // BOOK_LOOKS_MAX))
        for part, (first, end) in enumerate(pairwise(_bounds(found, count))):
            start = max(first, skip)
            why = outcomes.NEVER_SEEN
            if (known := self._known(part, found)) is not None:
                if start < end:
                    yield known, end - start
                continue
            if part == _MISSED and first < start < end:  # what is held behind a gap is missed because of it
                why = self._misses(namespaces, _every(hashes, size, first, first + 1, 1), why)[0]
            looks = self._judge(namespaces, part, _every(hashes, size, start, end, every), found, why)
            for outcome, run in _runs(looks):
                blocks = min(end - start, run * every)
                start += blocks
                yield outcome, blocks

    def _known(self, part: int, found: Found) -> int | None:
        """The outcome of all blocks of a part of a prompt, see `_bounds`; None where each has its own."""
        if part == _MISSED or (part == _OWNED and not self._dram_only):
            return None
        hits = (outcomes.HIT_DRAM, outcomes.HIT_SHARED, outcomes.READ_THROUGH)
        return (*hits, found.why, outcomes.EXPIRED)[part]

    def _judge(
        self, namespaces: list[Namespace], part: int, hashes: list[bytes], found: Found, why: int
    ) -> list[int]:
        """The outcomes of these blocks, all of one part."""
        if (known := self._known(part, found)) is not None:
            return [known] * len(hashes)
        return self._misses(namespaces, hashes, why) if part == _MISSED else self._owned(namespaces, hashes)

    def _owned(self, namespaces: list[Namespace], hashes: list[bytes]) -> list[int]:
        """The outcomes of blocks that all namespaces hold: but of hashes that form no chain one may be missing
        before one that is held, and between two steps one may have left."""
        try:
            return _hits(namespaces, hashes)
        except KeyError:
            judged = []
            for block_hash in hashes:
                missing = next((n for n in namespaces if not _held(n, block_hash)), None)
                judged += (
                    _hits(namespaces, [block_hash])
                    if missing is None
                    else [self.why_missing(missing, block_hash)]
                )
            return judged

    def _misses(self, namespaces: list[Namespace], hashes: list[bytes], why: int) -> list[int]:
        """The outcomes of blocks behind the first one that not all namespaces hold. why: of the one before."""
        if len(namespaces) == 1 and hashes and not forest.knows_below(namespaces[0], hashes[0]):
            return [why or outcomes.NEVER_SEEN for why in self._evicted.whys(namespaces[0], hashes)]
        judged: list[int] = []
        for block_hash in hashes:
            missing = next((n for n in namespaces if not _held(n, block_hash)), None)
            if missing is not None:  # else it is held behind a gap, and missed because of that
                why = self.why_missing(missing, block_hash)
            judged.append(why)
        return judged

    def save(self, io: Io, now_s: float, background: Background) -> None:
        """Have the totals written, now and then; one write at a time, however long it takes."""
        if self._saving is not None or now_s < self._save_at_s:
            return
        snapshot = self.totals.begin_snapshot(self.wall_clock())
        if snapshot is not None:
            self._saving, self._save_at_s = snapshot, now_s + TOTALS_SAVE_INTERVAL_S
            background.begin(self._save_steps(io, snapshot))

    def _save_steps(self, io: Io, snapshot: Snapshot) -> Steps[None]:
        yield from self.totals.fill_steps(snapshot)
        io.submit(
            lambda: self.totals.save(snapshot), lambda saved: self._saved(snapshot, saved), failed=False
        )

    def _saved(self, snapshot: Snapshot, saved: bool) -> None:
        self._saving = None
        if not saved:
            self.totals.unsaved(snapshot)

    def save_again(self) -> None:
        """What is being written may never be, at a stop: it is part of the next snapshot, too."""
        if self._saving is not None:
            self.totals.unsaved(self._saving)

    def check_slices(self) -> Iterator[list[str]]:
        """One line per violated invariant, in slices."""
        return self.totals.check_slices()

    # -- helpers --

    def _pieces(
        self, namespaces: list[Namespace], hashes: bytes, found: Found, asking: Asking
    ) -> list[Piece]:
        block_tokens = max(1, namespaces[0].spec.block_tokens)
        asked_tokens = len(hashes) // namespaces[0].hash_bytes * block_tokens
        tokens = _tokens(namespaces[0], hashes, asking)
        local = min(asking.local_tokens, tokens)
        pieces: list[Piece] = []
        _add(pieces, local, outcomes.ENGINE)
        skip = local // block_tokens  # blocks the engine holds: it does not matter where else they are
        at = skip * block_tokens
        for outcome, blocks in self._sampled(namespaces, hashes, found, skip):
            begin, at = max(at, local), at + blocks * block_tokens
            _add(pieces, at - begin, outcome)
        _add(pieces, tokens - max(local, asked_tokens), outcomes.PARTIAL_BLOCK)
        return pieces

    def _lose(self, account: Account, pieces: list[Piece]) -> None:
        """A further lookup of the round answered: what it does not hold is lost, for its reasons."""
        at = 0
        for tokens, outcome in pieces:
            if outcome not in outcomes.HITS and outcome != outcomes.ENGINE:
                self._take(account, at, outcome)
                return
            at += tokens

    def _note_prefix(
        self, account: Account, namespace: Namespace, hashes: bytes, count: int, now_s: float
    ) -> None:
        """The longest hit of a lookup is a prefix worth knowing."""
        size = namespace.hash_bytes
        saved = account.hit_tokens()
        if saved:
            tokens = count * max(1, namespace.spec.block_tokens)
            last = hashes[(count - 1) * size : count * size]
            account.prefix, account.credited = self.totals.used(namespace, last, tokens, saved, now_s), saved

    def _credit_no_more(self, account: Account) -> None:
        """A prefix has saved no token that was lost since."""
        lost = account.credited - account.hit_tokens()
        if account.prefix is not None and lost > 0:
            account.credited -= lost
            self.totals.unused(account.prefix, lost)

    def _take(self, account: Account, tokens: int, why: int) -> None:
        """Turn the hits behind the first `tokens` into misses."""
        account.book(-1)
        changed: list[Piece] = []
        at = 0
        for size, outcome in account.pieces:
            if outcome in outcomes.HITS and at + size > tokens:
                kept = max(0, tokens - at)
                _add(changed, kept, outcome)
                _add(changed, size - kept, why)
            else:
                _add(changed, size, outcome)
            at += size
        account.pieces = changed
        account.book(1)
        self._credit_no_more(account)
        self.totals.changed(account.rows)


def _bounds(found: Found, count: int) -> list[int]:
    """Where the parts of a prompt begin (owned, shared, far, held and not used, expired, missed), and where it ends."""
    owned = min(found.usable, found.held - found.shared)
    near = min(found.usable, found.held - found.far)
    return [0, owned, near, found.usable, found.held, found.held + found.expired, count]


def _every(hashes: bytes, hash_bytes: int, start: int, end: int, every: int) -> list[bytes]:
    """Every n-th hash of those from `start` to `end`, the first one included."""
    return [hashes[at * hash_bytes : (at + 1) * hash_bytes] for at in range(start, end, every)]


def _tokens(namespace: Namespace, hashes: bytes, asking: Asking) -> int:
    """Of the prompt: as the client says, and not less than its blocks."""
    return max(asking.tokens, len(hashes) // namespace.hash_bytes * max(1, namespace.spec.block_tokens))


def _hits(namespaces: list[Namespace], hashes: list[bytes]) -> list[int]:
    """For each block the slowest tier that one of the namespaces needs. All hold it, else KeyError. In one sweep
    for each namespace: this is done for every block that was ever hit."""
    of_all = [
        [_HIT_IN[blocks[h].where & IN_ANY] for h in hashes] for blocks in (n.blocks for n in namespaces)
    ]
    return of_all[0] if len(of_all) == 1 else list(map(max, *of_all))


def _runs(judged: list[int]) -> Iterator[tuple[int, int]]:
    """Outcomes, and how many blocks in a row have it. Most lookups are one run."""
    if judged and judged.count(judged[0]) == len(judged):
        yield judged[0], len(judged)
        return
    for outcome, run in groupby(judged):
        yield outcome, sum(1 for _ in run)


def _held(namespace: Namespace, block_hash: bytes) -> int:
    block: Block | None = namespace.blocks.get(block_hash)
    return block.where & IN_ANY if block is not None else 0


def _add(pieces: list[Piece], tokens: int, outcome: int) -> None:
    if tokens <= 0:
        return
    if pieces and pieces[-1][1] == outcome:
        tokens += pieces.pop()[0]
    pieces.append((tokens, outcome))
