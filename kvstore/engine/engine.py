"""The engine: the one object that knows all levels, and what every door asks for.

      lookup          reserve/commit        acquire/release/prefetch
        │                   │                     │
        ▼                   ▼                     ▼
     Lookups ─────────▶ Residency ◀── Eviction    Loader ◀─ devices of NVMe, shared levels
                    (index, slots)      ▲         Writer ─▶ devices of NVMe
                                        ╰─ room is made when a transfer is submitted

One thread calls everything here (the daemon's event loop), and nothing blocks: bytes are
moved by clients, in shared memory, and by I/O threads.

Invariants:

* a block is handed out only from a READY slot whose bytes were committed in this daemon's
  life, or whose checksum matched since;
* every slot in use is READY (index: in DRAM), or WRITING (a write lease, or a load under
  way), or quarantined by the arena; `check` counts them;
* a lease ends with its session, at the latest;
* slabs that models have are no slots of blocks (kvstore/residency/models.py).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import cast

from kvstore.commands.clearing import Cleared, Clearing, cleared_spaces
from kvstore.commands.erasing import Erasing
from kvstore.commands.prefix_names import prefixes_steps
from kvstore.commands.retention_commands import Retention
from kvstore.commands.rule_names import one_namespace
from kvstore.constants import MIB, STEP_BLOCKS
from kvstore.durable.persister import Persister, Persisting
from kvstore.engine import audit
from kvstore.engine.fitting import fitting, namespace_bytes, session_bytes, total_bytes
from kvstore.engine.holdings import Holdings
from kvstore.engine.lookups import Lookup, Lookups
from kvstore.engine.parts import Parts
from kvstore.engine.queues import queues
from kvstore.engine.sessions import LeaseWaiter, Peer, ReadLease, Session, WriteLease
from kvstore.errors import BadRequest, IndexNotReserved, UnknownLease
from kvstore.health.breakeven import BreakEven
from kvstore.health.write_budget import WriteBudget
from kvstore.index import forest
from kvstore.index.block import ROOTED, Block, Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.index.prompts import Prompts
from kvstore.index.slots import Slots
from kvstore.io_pool import Io
from kvstore.ledger.accounts import NOBODY_IN_PARTICULAR, Accounts, Asking, Found
from kvstore.ledger.counters import Counters
from kvstore.ledger.sums import LOADED, STORED
from kvstore.ledger.totals import Prefix, Totals
from kvstore.movement.adoption import Adoption
from kvstore.movement.loading import Loader
from kvstore.movement.prefetching import prefetch_steps
from kvstore.movement.shared import SharedLevel
from kvstore.movement.sources import DeviceSource, Reach, SharedSource
from kvstore.movement.stored_times import stored_times
from kvstore.movement.verification import Verifier
from kvstore.movement.waiting import Prefetch
from kvstore.movement.watch import Watch
from kvstore.movement.writing import Writer
from kvstore.policies.base import Policies
from kvstore.policies.lru import LeafLru
from kvstore.protocol import answers, outcomes
from kvstore.protocol.frames import Acquired, Extents, Reserved
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME, IN_SHARED
from kvstore.residency.eviction import Eviction
from kvstore.residency.levels import Drive, Member, Nvme
from kvstore.residency.models import Models
from kvstore.residency.residency import Residency
from kvstore.retention.rules import RuleFile
from kvstore.steps import Steps, finish
from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES, TierStats
from tiers.checksum import joined
from tiers.constants import OWNER_ANY, OWNER_DAEMON
from tiers.dram.model_slabs import is_models
from tiers.namespace_spec import NamespaceSpec
from tiers.slots import neighbours

STATUS_NAMESPACES_MAX = 256  # namespaces that a status lists, those with most blocks first
STATUS_SESSIONS_MAX = 64  # sessions that a status lists, those that came first: `clients` lists all, and a status takes a millisecond
STATUS_BYTES = 1 * MIB  # of the namespaces in a status; its sessions have as much
LEASE_BYTES = 8  # of randomness in the number of a lease
REPORT_ROWS_MAX = 500  # rows of one answer: a client asks for page after page
REPORT_ROWS_BYTES = 2 * MIB  # of one answer, if its names are long
REPORT_PREFIXES_MAX = 50  # heaviest prefixes that a report lists

log = logging.getLogger("kvstore.engine")


class Engine(Parts):
    """All levels of one node."""

    def __init__(
        self,
        arena: Slots,
        drives: Sequence[Drive],
        namespaces: NamespaceRegistry,
        io: Io,
        policies: Policies | None = None,
        clock: Callable[[], float] = time.monotonic,
        totals: Totals | None = None,
        wall_clock: Callable[[], float] = time.time,
        write_budget: WriteBudget | None = None,
        rules: RuleFile | None = None,
        shared: Sequence[SharedLevel] = (),
        persisting: Persisting | None = None,
        boot_clock: Callable[[], float] | None = None,
    ) -> None:
        """io: threads for everything but drives. boot_clock: as `clock`, if another one counts a machine's sleep. Settings that may change while it serves have their defaults at first."""
        self.arena = arena
        self.io = io
        self.clock = clock
        self.namespaces = namespaces
        self.counters = Counters()
        self.sessions: list[Session] = []
        self.write_budget = write_budget or WriteBudget(0, clock)
        names = [f"nvme{number}" if len(drives) > 1 else "nvme" for number in range(len(drives))]
        self.nvme = Nvme(
            [
                Member(number, names[number], drive, clock, self._sources_changed)
                for number, drive in enumerate(drives)
            ]
        )
        policies = policies or Policies(LeafLru)
        self.blocks = Residency(arena, self.nvme, namespaces, policies, self.counters, self.write_budget)
        self.background = self.blocks.background
        self.eviction = Eviction(self.blocks)
        self.models = Models(self.blocks, self.eviction.takeovers, io, clock)
        self.prompts = Prompts()
        self.accounts = Accounts(
            totals or Totals(), self.blocks.evicted, wall_clock, dram_only=not drives and not shared
        )
        self.verifier = Verifier(self.blocks, io)
        sources = [DeviceSource(member, arena, clock) for member in self.nvme.members]
        far = [SharedSource(level, arena, clock, self._sources_changed) for level in shared]
        self.loader = Loader(self.blocks, self.eviction, self.accounts, self.verifier, sources, far)
        self.eviction.takeovers.freed = self.loader.feed
        self.watches = [Watch(source, self.blocks, clock, self.loader.missed) for source in sources]
        self.writer = Writer(self.blocks, self.eviction, self.accounts, clock, self.loader.feed)
        self.lookups = Lookups(self.blocks, BreakEven(), sources, far)
        self.persister = self._persister(persisting, wall_clock) if persisting is not None else None
        self.blocks.expiry.rows = partial(stored_times, self.blocks, io)
        lasting = boot_clock or clock
        self.retention = Retention(self.blocks, self.eviction, namespaces, io, lasting, wall_clock, rules)
        self.holdings = Holdings(namespaces, self.blocks.quotas, self.background)
        self.adoption = Adoption(self.blocks, namespaces, self.writer.changed, self.retention.adopted, clock)
        self.erasing = Erasing(self.blocks, namespaces, lambda: self.adoption.done)
        self.clearing = self._clearing()
        self.erasing.erased = lambda namespace: self.clearing.forget_rows([namespace.digest])

    def _persister(self, persisting: Persisting, wall_clock: Callable[[], float]) -> Persister:
        rate = self.lookups.break_even.rate
        return Persister(
            self.blocks,
            persisting,
            lambda namespace: rate(namespace, NOBODY_IN_PARTICULAR),
            lambda: self.loader.underway,
            self.io,
            self.clock,
            wall_clock,
        )

    def _clearing(self) -> Clearing:
        return Clearing(
            self.blocks, self.namespaces, self.adoption, lambda: self.retention.is_behind, self.io, self.clock
        )

    # -- sessions --

    def open_session(self, owner: int, label: str = "", peer: Peer | None = None) -> Session:
        """A client attached; owner: its number in the arena, OWNER_ANY for one that leases slots for others."""
        session = Session(owner, label, peer or Peer(label, since_s=self.clock()))
        self.sessions.append(session)
        return session

    def close_session(self, session: Session) -> None:
        """Take everything back from a client that is gone, some leases at a time. Idempotent.

        Slots it was writing are handed out again when the arena sees that it cannot write any more.
        """
        if session not in self.sessions or session.is_closing:
            return
        session.is_closing = True
        lost = self.models.left(session)
        for lease in session.leases.values():
            if isinstance(lease, ReadLease):
                lease.finished = True  # what arrives from now on is not for it
        self.background.begin(self._close_steps(session, lost))

    def _close_steps(self, session: Session, lost: Sequence[int]) -> Steps[None]:
        """lost: slots of models that it was writing."""
        yield from self.models.lost_steps(lost)
        looks = 0
        while session.leases:
            _, lease = session.leases.popitem()
            if isinstance(lease, WriteLease):
                self._abort(lease, is_lost=True)
            else:
                self._let_go(lease)
            looks += lease.size
            if looks >= STEP_BLOCKS:
                looks = 0
                yield
        self.sessions.remove(session)
        if session.owner > OWNER_DAEMON:
            self.arena.let_go_owner(session.owner)
        self.loader.feed()

    def register(self, spec: NamespaceSpec) -> int:
        """The id of a namespace. Raises NamespaceConflict, BadRequest."""
        if len(spec.digest) != NAMESPACE_BYTES:
            raise BadRequest(f"namespace digest of {len(spec.digest)} bytes: {NAMESPACE_BYTES} are required")
        if is_models(spec.digest):
            raise BadRequest(f"namespace digest {spec.digest!r}: that of models' slabs in the arena")
        if not 8 <= spec.hash_bytes <= KEY_BYTES_MAX - NAMESPACE_BYTES:
            raise BadRequest(
                f"hash_bytes {spec.hash_bytes}: allowed are 8 to {KEY_BYTES_MAX - NAMESPACE_BYTES}"
            )
        if not 0 < spec.record_bytes <= self.arena.layout.slab_bytes:
            raise BadRequest(
                f"record_bytes {spec.record_bytes}: allowed are 1 to {self.arena.layout.slab_bytes} (dram.slab_bytes, or less in a small arena)"
            )
        namespace = self.namespaces.register(spec)
        self.retention.registered(namespace)
        return namespace.id

    def end_namespace(self, number: int) -> None:
        """This namespace will not be used again: unknown from now on; `drop_ended` drops its blocks."""
        self.namespaces.end(number)

    def drop_ended(self) -> bool:
        """Drop some blocks of ended namespaces, for about a millisecond; whether there is more to do at once."""
        return not self.retention.is_behind and self.namespaces.drop_some(
            lambda block: self.blocks.drop(block, outcomes.EXPIRED)
        )

    # -- reading --

    def find(self, namespaces: list[int], hashes: bytes, asking: Asking = NOBODY_IN_PARTICULAR) -> Found:
        """As `find_steps`, all at once."""
        return finish(self.find_steps(namespaces, hashes, asking))

    def find_steps(
        self, namespaces: list[int], hashes: bytes, asking: Asking = NOBODY_IN_PARTICULAR
    ) -> Steps[Found]:
        """How many leading blocks are present in all namespaces with an unbroken prefix; `book` it afterwards."""
        spaces, count = self._asked(namespaces, hashes)
        asked = Lookup(spaces, hashes, asking)
        found = yield from self.lookups.find_steps(asked)
        self.lookups.note(asked, found)
        for namespace in spaces:
            self.prompts.remember(namespace.id, asking.ticket, hashes, namespace.hash_bytes)
        self.counters.lookups += 1
        self.counters.lookup_blocks += count
        self.counters.lookup_hit_blocks += found.usable
        return found

    def book(
        self, namespaces: list[int], hashes: bytes, found: Found, asking: Asking = NOBODY_IN_PARTICULAR
    ) -> None:
        """Account for the tokens of a lookup that was answered."""
        spaces = [self.namespaces.get(number) for number in namespaces]
        rate = self.lookups.break_even.rate(spaces[0], asking)
        self.accounts.book(spaces, hashes, found, asking._replace(prefill_tokens_per_s=rate))
        if self.persister is not None and asking.lasting:
            self.persister.asked(spaces, hashes, asking.ticket)

    def settle(self, ticket: int, tokens: int, number: int, block_hash: bytes) -> None:
        """A client could use only so many tokens of what its ticket found; see `Accounts.settle`."""
        namespace = self.namespaces.get(number) if block_hash else None
        self.accounts.settle(ticket, tokens, namespace, block_hash)

    def explain_steps(
        self, namespaces: list[int], hashes: bytes, leading: bool = False
    ) -> Steps[tuple[list[bytes], list[int], float]]:
        """Where each block is in each namespace, the outcome it would have now, and how long loading those that would hit
        takes. leading: up to the first that misses, and without the places. Counts nothing."""
        spaces, _ = self._asked(namespaces, hashes)
        places: list[bytes] = []
        for namespace in () if leading else spaces:
            places.append((yield from forest.residency_steps(namespace, hashes)))
        asked = Lookup(spaces, hashes, NOBODY_IN_PARTICULAR)
        found = yield from self.lookups.find_steps(asked)
        load_s = yield from self.lookups.load_steps(asked, found)
        judged = hashes[: (found.usable + 1) * spaces[0].hash_bytes] if leading else hashes
        return places, (yield from self.accounts.judge_steps(spaces, judged, found)), load_s

    def report_steps(
        self, since_s: float, skip: int = 0, until_s: float = math.inf
    ) -> Steps[answers.EngineReport]:
        """Totals of this time, REPORT_ROWS_MAX rows after the first `skip`; see `kvstore.ledger.totals`."""
        totals, now_s = self.accounts.totals, self.accounts.wall_clock()
        rows, begin_s, end_s = yield from totals.span_steps(since_s, until_s, now_s)
        page = fitting(rows[skip : skip + REPORT_ROWS_MAX], total_bytes, REPORT_ROWS_BYTES)
        yield
        return {
            "region": totals.region,
            "since_s": begin_s,
            "until_s": end_s,
            "rows": [row.as_dict() for row in page],
            "rows_left": max(0, len(rows) - skip - len(page)),
            "prefixes": self.heaviest(REPORT_PREFIXES_MAX, since_s),
            "holdings": self.holdings.latest,
        }

    def heaviest(self, count: int, since_s: float = 0.0) -> list[answers.Prefix]:
        """The prefixes that saved most, of those hit since then."""
        return [self._prefix(prefix) for prefix in self.accounts.totals.heaviest(count, since_s)]

    def residency_steps(self, number: int, hashes: bytes) -> Steps[bytes]:
        """One byte a hash: `blocks.IN_DRAM | IN_NVME | BROKEN_PREFIX`, 0 where absent."""
        namespace = self.namespaces.get(number)
        self._count(namespace, hashes)
        return (yield from forest.residency_steps(namespace, hashes))

    def acquire(
        self,
        session: Session,
        number: int,
        hashes: bytes,
        on_ready: Callable[[Acquired], None],
        parent: bytes = b"",
        ticket: int = 0,
        patience_s: float = math.inf,
        sums: bool = False,
    ) -> ReadLease:
        """Pin blocks for reading, promoting what is not in DRAM; `on_ready` is called once. parent: see `reserve`.
        What cannot be there before `patience_s` is over is not loaded.

        It may be called before this returns, and before the policies know of the use: the client does
        not wait for them. `expire` on the lease makes it answer at once with what is ready.
        """
        namespace = self.namespaces.get(number)
        asked = self._split(namespace, hashes, parent)
        finish = partial(self._answer, session, on_ready)
        lease = ReadLease(self._next_lease(), namespace, len(asked), finish, sums)
        session.leases[lease.number] = lease
        lease.outstanding = 1  # so that it cannot finish before all are asked for
        blocks = self.blocks
        found = forest.chain(namespace, asked)
        end = forest.shown(namespace, asked, parent)
        found[end:] = [None] * (len(asked) - end)
        run = [block for block in found if block is not None and block.where & IN_ANY]
        over = blocks.expiry.over(run) if blocks.expiry else ()
        if over:
            found = [None if block in over else block for block in found]
            run = [block for block in run if block not in over]
        unverified, tiers = blocks.unverified, lease.tiers
        ready: list[Block] = []
        slow: list[tuple[int, Block]] = []
        for position, block in enumerate(found):
            if block is None or not (where := block.where) & IN_ANY:
                continue
            tiers[position] = IN_DRAM if where & IN_DRAM else IN_NVME
            if where & IN_DRAM and block not in unverified:
                lease.blocks[position] = block
                ready.append(block)
            else:
                slow.append((position, block))
        blocks.pin(*ready)
        reach = Reach(patience_s)
        for position, block in slow:
            if not self.loader.comes(block, reach):
                break  # nor is what is behind it of any use
            lease.outstanding += 1
            self.loader.want(block, LeaseWaiter(lease, position, blocks.pin))
        if self.loader.shared and len(run) < end == len(asked) and not over:
            self._fetch(lease, hashes, found, parent, reach)
        self.loader.pump()
        lease.outstanding -= 1
        if lease.outstanding == 0:
            lease.expire()
        if run := [block for block in run if block.where & IN_ANY]:
            blocks.touched(run, self.prompts.recall(number, ticket, len(asked)), self.clock())
            blocks.writes.offer_again(run)
        if ready:
            self.verifier.handed_out(ready)
        return lease

    def _fetch(
        self, lease: ReadLease, hashes: bytes, found: list[Block | None], parent: bytes, reach: Reach
    ) -> None:
        """Ask shared levels for what no owned level has, behind the owned part of this run."""
        namespace, size = lease.namespace, lease.namespace.hash_bytes
        start = next(at for at, block in enumerate(found) if block is None or not block.where & IN_ANY)
        for source in self.loader.shared:
            end = source.held(namespace, hashes, start) if source.loads.closed else start
            for position in range(start, end):
                block = found[position]
                if block is not None and block.where & IN_ANY:
                    continue  # held behind a gap
                if not reach.has(source, namespace.record_bytes):
                    return
                above = hashes[(position - 1) * size : position * size] if position else parent
                block_hash = hashes[position * size : (position + 1) * size]
                lease.outstanding += 1
                lease.tiers[position] = IN_SHARED
                waiter = LeaseWaiter(lease, position, self.blocks.pin)
                self.loader.fetch(namespace, block_hash, above, source, waiter)
            start = max(start, end)

    def prefetch_steps(self, number: int, hashes: bytes, parent: bytes = b"") -> Steps[int]:
        """Start bringing blocks into DRAM; returns how many are on the way. parent: see `acquire`."""
        namespace = self.namespaces.get(number)
        self._count(namespace, hashes, parent)
        return prefetch_steps(self.loader, namespace, hashes, parent, Prefetch())

    # -- writing --

    def reserve(
        self, session: Session, number: int, hashes: bytes, parent: bytes, ticket: int = 0
    ) -> Reserved:
        """Slots for the blocks of this run that are not held yet. `parent` is the hash before it."""
        namespace = self.namespaces.get(number)
        asked = self._split(namespace, hashes, parent)
        if len({parent, *asked}) != len(asked) + 1:
            raise BadRequest("reserve: a block hash is repeated; a prefix has each block once")
        known = namespace.blocks.get_run(asked)
        if forest.would_cycle(namespace, parent, known):
            raise BadRequest("reserve: a block of this run is an ancestor of its own parent")
        before = session.prompt_before(namespace, parent) if not ticket else None
        if before is not None and not before.last:  # no lookup said how long it is
            before.blocks += len(asked)
        prompt = before or self.prompts.recall(number, ticket, len(asked))
        lease = WriteLease(self._next_lease(), namespace, asked, parent, prompt)
        end = self._reserve(lease, known, session.owner)
        refused = forest.not_held(namespace, asked[end:])
        self.counters.reserve_no_room += len(asked) - end
        self.counters.reserve_held += end - len(lease.slots)
        if lease.slots:
            session.leases[lease.number] = lease
        now_s = self.clock()
        # What came later in this run may have taken the place of one that was held.
        held = [block for block in known[:end] if block is not None and block.where & IN_ANY]
        blocks = self.blocks
        if blocks.expiry:
            blocks.renewed(blocks.expiry.over(held))
        blocks.touched(held, prompt, now_s)
        blocks.settle(*held)  # policies have outdated entries of those among them that may leave
        blocks.writes.offer_again(held)
        if refused:
            blocks.refused(namespace, refused, prompt, self.eviction.no_room, now_s)
        granted = bytearray(len(asked))
        for position in lease.slots:
            granted[position] = 1
        extents = self._extents(namespace, list(lease.slots.values()))
        return Reserved(lease.number if lease.slots else 0, bytes(granted), extents, end < len(asked))

    def _reserve(self, lease: WriteLease, known: list[Block | None], owner: int) -> int:
        """Have slots for what is not held of the run of a lease; `known`: its blocks. Answers where room ended."""
        hashes, writing = lease.hashes, lease.namespace.writing
        start = 0  # of the blocks that are neither held nor being written, behind the latest one that is
        for end, block in enumerate((*known, None)):
            if (
                end < len(hashes)
                and not (block is not None and block.where & IN_ANY)
                and hashes[end] not in writing
            ):
                continue
            if new := hashes[start:end]:
                before = hashes[start - 1] if start else lease.parent
                found = self.eviction.slots(lease.namespace, new, before, owner, lease.prompt)
                lease.slots.update(enumerate(found, start))
                writing.update(new[: len(found)])
                if len(found) < len(new):
                    return start + len(found)
            start = end + 1
        return len(hashes)

    def commit(self, session: Session, number: int, indexes: list[int], checksums: bytes) -> int:
        """Make these blocks of a write lease visible; the others of it are given up. None are that may have been erased since it began.
        Returns how many are visible."""
        lease = session.leases.get(number)
        if not isinstance(lease, WriteLease):
            raise UnknownLease(f"write lease {number}: not held by this connection")
        if len(checksums) != CHECKSUM_BYTES * len(indexes):
            raise BadRequest(f"commit: {len(checksums)} bytes of checksums for {len(indexes)} blocks")
        if len(set(indexes)) != len(indexes) or not lease.slots.keys() >= set(indexes):
            raise IndexNotReserved("commit: an index that is repeated or was not reserved by this lease")
        if lease.erasures != lease.namespace.erasures:
            self._drop_write_lease(session, lease)
            return 0
        now_s = self.clock()
        run: list[Block] = []
        namespace, hashes = lease.namespace, lease.hashes
        slots = list(map(lease.slots.pop, indexes))
        self.arena.commit_run(slots, checksums, int(self.blocks.expiry.now_s()))
        for start, end in neighbours(indexes):
            first, last = indexes[start], indexes[end - 1]
            before = hashes[first - 1] if first else lease.parent
            piece = hashes[first : last + 1]
            run += self.blocks.arrived_in_dram(namespace, piece, before, slots[start:end])
            namespace.writing.difference_update(piece)
        self.blocks.touched(run, lease.prompt, now_s)
        self.blocks.writes.offer(*run)
        self.blocks.settle(*run)
        self.counters.committed += len(indexes)
        size_bytes = len(indexes) * lease.namespace.record_bytes
        session.peer.stored_bytes += size_bytes
        self.accounts.moved(lease.namespace, STORED, size_bytes)
        self._drop_write_lease(session, lease)
        self.writer.pump()
        return len(indexes)

    def fill(self, session: Session, number: int, column: int, checksums: bytes) -> int:
        """A column of this session's write lease is written; the last one commits it. Returns how many blocks it
        committed. Without checksums the lease is given up."""
        lease = session.leases.get(number)
        if not isinstance(lease, WriteLease):
            return 0
        if not checksums:
            self._drop_write_lease(session, lease)
            return 0
        count, size = lease.namespace.column_count, CHECKSUM_BYTES * len(lease.slots)
        if column >= count or column in lease.columns or len(checksums) != size:
            raise BadRequest(
                f"fill: column {column} with {len(checksums)} bytes of checksums: allowed are columns below {count}, "
                f"each once, with {size} bytes"
            )
        lease.columns[column] = checksums
        if len(lease.columns) < count:
            return 0
        columns = [lease.columns[each] for each in range(count)]
        records = (
            joined([each[at : at + CHECKSUM_BYTES] for each in columns])
            for at in range(0, size, CHECKSUM_BYTES)
        )
        return self.commit(session, number, list(lease.slots), checksums if count == 1 else b"".join(records))

    def release(self, session: Session, number: int) -> None:
        """Give a lease back: unpin what was read, give up what was not committed."""
        lease = session.leases.pop(number, None)
        if lease is None:
            raise UnknownLease(f"lease {number}: not held by this connection")
        if isinstance(lease, WriteLease):
            self._drop_write_lease(session, lease)
        else:
            self._let_go(lease)
        self.loader.feed()

    def expire(self, session: Session, number: int) -> None:
        """A lease was held for too long: taken back from a client that may be copying still."""
        lease = session.leases.pop(number, None)
        if isinstance(lease, WriteLease):
            self._abort(lease, is_lost=True)
        elif lease is not None:
            self._let_go(lease)
        self.loader.feed()

    # -- by hand --

    def clear(
        self,
        selector: str,
        block_hash: bytes,
        tenant: str | None,
        everything: bool,
        dry: bool,
        done: Callable[[dict[str, object]], None],
    ) -> None:
        """Drop what is held of a prefix, a namespace, a tenant, or everything; `done` gets the answer, whose fields are
        documented in docs/cli.md. Raises BadRequest, NotFound, NotReady, LimitExceeded."""
        book = self.retention.book
        spaces = cleared_spaces(self.namespaces, book, selector, block_hash, tenant, everything)
        digests = [namespace.digest.hex() for namespace in spaces]

        def answer(cleared: Cleared) -> None:
            if not dry:
                log.info("cleared by hand", extra=cleared._asdict())
            done({"namespaces": digests, **cleared._asdict()})

        self.clearing.clear(spaces, block_hash, everything, dry, answer)

    def prefixes_steps(self, selector: str, beginning: str) -> Steps[list[str]]:
        """Block hashes in hex that begin so; see `kvstore.commands.prefix_names`. Raises NotFound."""
        book = self.retention.book
        shown = [(pin.namespace, pin.block_hash) for pin in book.pins]
        shown += [(ttl.namespace, ttl.block_hash) for ttl in book.ttls if ttl.block_hash]
        shown += [(p.namespace, p.block_hash) for p in self.accounts.totals.heaviest(REPORT_PREFIXES_MAX)]
        spaces = [n for n in self.namespaces if n.digest.hex().startswith(selector.lower())]
        names = [name for digest, name in shown if digest.startswith(selector.lower())]
        if not spaces and selector:
            one_namespace(selector, self.namespaces, book)  # or there is none
        return prefixes_steps(beginning, spaces, names)

    # -- upkeep --

    def tick(self) -> None:
        """Once a second or so: quarantined slots, adopted records, waiting demotions."""
        if self.arena.sweep():
            self.background.begin(self._sweep_steps())
        self.look()
        self.verifier.next_ones()
        self.models.tick()
        self.retention.tick()
        self.holdings.tick(self.clock())
        self.writer.tick()
        self.loader.feed()
        self.namespaces.keep(self.io, self.clock())
        self.accounts.save(self.io, self.clock(), self.blocks.background)
        self.background.step()

    def _sweep_steps(self) -> Steps[None]:
        """The rest of the slots that no client can be writing any more."""
        yield
        while self.arena.sweep():
            yield

    def look(self) -> None:
        """Several times a stall: look for I/O that hangs."""
        for watch in self.watches:
            watch.look()
        for source in self.loader.shared:
            source.look()

    def _sources_changed(self) -> None:
        """A breaker changed its state."""
        for source in (*self.loader.devices, *self.loader.shared):
            if not source.loads.closed:
                source.speed.drop()
                self.loader.give_up(source)
        self.writer.changed()

    def adopt(self) -> None:
        """Start from what the levels hold, once, before the first session. Devices are read in the background."""
        self.models.adopt()
        self.adoption.start()

    def status(self) -> answers.EngineStatus:
        """Figures for people and machines; the fields are documented in docs/cli.md."""
        largest = nlargest(STATUS_NAMESPACES_MAX, self.namespaces, key=lambda n: len(n.blocks))
        sessions = fitting(self.sessions[:STATUS_SESSIONS_MAX], session_bytes, STATUS_BYTES)
        now_s = self.clock()
        return {
            **self.figures(),
            "sessions": [session.as_dict(now_s) for session in sessions],
            "namespaces": list(map(self.holdings.namespace, fitting(largest, namespace_bytes, STATUS_BYTES))),
            "holdings": self.holdings.latest,
        }

    def figures(self) -> answers.Figures:
        """The same without sessions and namespaces."""
        tiers = [_tier_status(self.arena.stats())]
        if self.nvme:
            tiers.append(_tier_status(self.nvme.stats()))
        sources = (*self.loader.devices, *self.loader.shared)
        return {
            "tiers": tiers,
            "counters": self.counters.as_dict(),
            "loading_blocks": self.loader.underway + self.verifier.underway,
            "demoting_blocks": len(self.blocks.writes.waiting),
            "unverified_blocks": len(self.blocks.unverified),
            "adopting": not self.adoption.done,
            "write_budget": self.write_budget_status(),
            "breakers": self.breakers(),
            "speeds": [source.speed_status() for source in sources],
            "queues": queues(self),
            "namespaces_total": len(self.namespaces),
            "models": self.models.status(),
        }

    def breakers(self) -> list[answers.Breaker]:
        """Of each directory and each bucket."""
        sources = (*self.loader.devices, *self.loader.shared)
        return [breaker.status() for source in sources for breaker in source.breakers()]

    def list_namespaces(self, skip: int) -> answers.Namespaces:
        """A page of all namespaces, behind the first `skip`."""
        found = list(islice(self.namespaces, skip, skip + STATUS_NAMESPACES_MAX))
        page = fitting(found, namespace_bytes, STATUS_BYTES)
        left = max(0, len(self.namespaces) - skip - len(page))
        return {"namespaces": list(map(self.holdings.namespace, page)), "namespaces_left": left}

    def write_budget_status(self) -> answers.WriteBudget | None:
        """None without one."""
        if not self.nvme or not self.write_budget.limited:
            return None
        return {
            "write_bytes_per_day": self.write_budget.bytes_per_day,
            "spent_bytes": self.write_budget.spent_bytes,
            "allowance_bytes": int(self.write_budget.allowance_bytes(self.clock())),
            "worth_min": round(self.write_budget.threshold, 4),
        }

    def check(self) -> list[str]:
        """Prove the invariants of `kvstore.engine.audit`; one line per violation. All at once."""
        return finish(audit.check_steps(self))

    def check_steps(self) -> Steps[list[str]]:
        """The same in steps."""
        return audit.check_steps(self)

    # -- helpers --

    def _asked(self, numbers: list[int], hashes: bytes) -> tuple[list[Namespace], int]:
        """The namespaces of a lookup, and of how many blocks. Raises UnknownNamespace, BadRequest."""
        if not numbers:
            raise BadRequest("lookup: at least one namespace is required")
        spaces = [self.namespaces.get(number) for number in numbers]
        if len({namespace.hash_bytes for namespace in spaces}) > 1:
            raise BadRequest(
                "lookup: namespaces with block hashes of different sizes have no block in common"
            )
        counts = [self._count(namespace, hashes) for namespace in spaces]
        return spaces, counts[0]

    def _prefix(self, prefix: Prefix) -> answers.Prefix:
        """A prefix as reports have it, with the tiers that have its last block now."""
        namespace = self.namespaces.of_key(bytes.fromhex(prefix.namespace))
        block = namespace.blocks.get(bytes.fromhex(prefix.block_hash)) if namespace is not None else None
        where = block.where if block is not None and block.where & ROOTED else 0
        tiers = [name for bit, name in ((IN_DRAM, "dram"), (IN_NVME, "nvme")) if where & bit]
        return cast(answers.Prefix, asdict(prefix) | {"tiers": tiers})

    def _answer(self, session: Session, on_ready: Callable[[Acquired], None], lease: ReadLease) -> None:
        slots = [block.slot for block in lease.blocks if block is not None]
        tiers = lease.tiers
        if len(slots) < len(tiers):
            tiers = bytearray(
                tier if block is not None else 0 for block, tier in zip(lease.blocks, tiers, strict=True)
            )
        in_dram = tiers.count(IN_DRAM)
        self.counters.acquired_dram += in_dram
        shared = tiers.count(IN_SHARED)
        self.counters.acquired_shared += shared
        self.counters.acquired_nvme += len(slots) - in_dram - shared
        self.counters.acquire_missed += len(tiers) - len(slots)
        if slots:
            size_bytes = len(slots) * lease.namespace.record_bytes
            session.peer.loaded_bytes += size_bytes
            self.accounts.moved(lease.namespace, LOADED, size_bytes)
        else:
            session.leases.pop(lease.number, None)
        pending = lease.outstanding > 0
        self.counters.expired_acquires += pending
        extents = self._extents(lease.namespace, slots)
        sums = b"".join(self.arena.record(slot).checksum for slot in slots) if lease.sums else b""
        on_ready(Acquired(lease.number if slots else 0, bytes(tiers), extents, pending, sums))

    def _extents(self, namespace: Namespace, slots: Sequence[int]) -> Extents:
        slot_bytes = max(namespace.slot_bytes, self.arena.layout.slot_bytes_min)
        return Extents(slot_bytes, *self.arena.extents(slots))

    def _let_go(self, lease: ReadLease) -> None:
        lease.finished = True
        self.blocks.unpin(*[block for block in lease.blocks if block is not None])

    def _drop_write_lease(self, session: Session, lease: WriteLease) -> None:
        session.leases.pop(lease.number, None)
        self._abort(lease, is_lost=session.owner == OWNER_ANY)

    def _abort(self, lease: WriteLease, is_lost: bool = False) -> None:
        """Give up what the lease did not commit. is_lost: its client may be writing still."""
        lease.namespace.writing.difference_update(lease.hashes[position] for position in lease.slots)
        self.counters.reservations_aborted += len(lease.slots)
        self.blocks.give_up(lease.namespace, list(lease.slots.values()), is_lost)

    def _count(self, namespace: Namespace, hashes: bytes, parent: bytes = b"") -> int:
        """How many hashes. Raises BadRequest for what are none."""
        count, rest = divmod(len(hashes), namespace.hash_bytes)
        if rest:
            raise BadRequest(
                f"hashes of {len(hashes)} bytes: not a multiple of hash_bytes {namespace.hash_bytes}"
            )
        if parent and len(parent) != namespace.hash_bytes:
            raise BadRequest(f"parent of {len(parent)} bytes: 0 or {namespace.hash_bytes} are allowed")
        return count

    def _split(self, namespace: Namespace, hashes: bytes, parent: bytes = b"") -> list[bytes]:
        self._count(namespace, hashes, parent)
        return forest.split_hashes(hashes, namespace.hash_bytes)

    def _next_lease(self) -> int:
        """A number that cannot be guessed: only the holder of the lease and those with a grant of it know it."""
        return int.from_bytes(os.urandom(LEASE_BYTES), "little") or self._next_lease()


def _tier_status(stats: TierStats) -> answers.Tier:
    return cast(answers.Tier, asdict(stats) | {"free_bytes": stats.free_bytes})
