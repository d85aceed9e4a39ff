"""The engine: the one object that knows all tiers, and what every door asks for.

              lookup  reserve/commit  acquire/release  prefetch
                 │          │               │
                 ▼          ▼               ▼
              index ◀──── room ────▶ arena (DRAM)        ┌─ promotion: NVMe → DRAM, urgent
             (where)        │                            │
                            └──────▶ NVMe rows ◀─────────┴─ demotion: DRAM → NVMe, when idle

One thread calls everything here (the daemon's event loop), and nothing blocks: bytes are
moved by clients, in shared memory, and by the I/O pool.

Invariants:

* a block is handed out only from a READY slot whose bytes were committed in this daemon's
  life, or whose checksum matched since;
* every slot in use is READY (index: in DRAM), or WRITING (a write lease, or a load under
  way), or quarantined by the arena; `check` counts them;
* a lease ends with its session, at the latest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from heapq import nlargest
from itertools import accumulate, islice, pairwise

from kvstore import index, outcomes
from kvstore.accounts import NOBODY_IN_PARTICULAR, Accounts, Asking, Found
from kvstore.adoption import Adoption
from kvstore.blocks import IN_ANY, IN_DRAM, IN_NVME, PIN, ROOTED, Block
from kvstore.breakeven import slow_blocks
from kvstore.constants import (
    PINNED_SHARE_DEFAULT,
    PREFIXES_TOLD,
    STALL_S,
    STATUS_NAMESPACES_MAX,
    TOTALS_ROW_BYTES,
    TOTALS_TOLD,
    TOTALS_TOLD_BYTES,
)
from kvstore.counters import Counters
from kvstore.demotion import Demoter
from kvstore.endurance import Endurance
from kvstore.endurance_file import EnduranceFile
from kvstore.errors import BadRequest, IndexNotReserved, UnknownLease
from kvstore.iopool import Io
from kvstore.leases import (
    Acquired,
    LeaseWaiter,
    ReadLease,
    ReadSlot,
    Reserved,
    Session,
    WriteLease,
    WriteSlot,
)
from kvstore.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from kvstore.nvme_watch import NvmeWatch
from kvstore.places import Places
from kvstore.policies.base import Policies
from kvstore.policies.lru import LeafLru
from kvstore.promotion import Promoter
from kvstore.prompts import Prompt, Prompts
from kvstore.queues import queues
from kvstore.retention import Retention
from kvstore.room import Room
from kvstore.rules import RuleFile
from kvstore.stored_times import StoredTimes
from kvstore.totals import LOADED, STORED, Prefix, Total, Totals
from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES, Tier, TierStats
from tiers.constants import OWNER_DAEMON

log = logging.getLogger("kvstore.engine")


class Engine:
    """All tiers of one node. `jobs_max` bounds the loads, and the demotions, under way at once."""

    def __init__(
        self,
        arena: Places,
        nvme: Tier | None,
        namespaces: NamespaceRegistry,
        io: Io,
        policies: Policies | None = None,
        clock: Callable[[], float] = time.monotonic,
        jobs_max: int = 4,
        totals: Totals | None = None,
        wall_clock: Callable[[], float] = time.time,
        endurance: Endurance | None = None,
        endurance_file: EnduranceFile | None = None,
        stall_s: float = STALL_S,
        prefill_tokens_per_s: float = 0.0,
        rules: tuple[RuleFile, StoredTimes] | None = None,
        pinned_share_max: float = PINNED_SHARE_DEFAULT,
    ) -> None:
        self.arena = arena
        self.nvme = nvme
        self.namespaces = namespaces
        self.counters = Counters()
        self.sessions: list[Session] = []
        self.endurance = endurance or Endurance(0, clock)
        self.room = Room(
            arena, nvme, namespaces, policies or Policies(LeafLru), self.counters, self.endurance
        )
        self.prompts = Prompts()
        self.accounts = Accounts(totals or Totals(), self.room.departed, wall_clock, dram_only=nvme is None)
        self.watch = NvmeWatch(self.room, io, clock, self.counters, stall_s, prefill_tokens_per_s)
        self.promoter = Promoter(self.room, io, self.counters, self.accounts, jobs_max, self.watch)
        self.demoter = Demoter(
            self.room, io, clock, self.counters, self.accounts, jobs_max, self.promoter.feed, self.watch
        )
        self.watch.on_change = self._nvme_changed
        self.watch.on_missed = self.promoter.missed
        self.retention = Retention(self.room, namespaces, io, clock, wall_clock, rules, pinned_share_max)
        self.adoption = Adoption(self.room, namespaces, self.counters, self.retention.adopted)
        self._clock = clock
        self._io = io
        self._lease_number = 0
        self._endurance_file = endurance_file
        self._saving_names = False

    # -- sessions --

    def open_session(self, owner: int, label: str = "") -> Session:
        """A client attached; owner is its number in the arena, 0 if it has none."""
        session = Session(owner, label)
        self.sessions.append(session)
        return session

    def close_session(self, session: Session) -> None:
        """Take everything back from a client that is gone. Idempotent.

        Slots it was writing stay WRITING until the arena sees that its process cannot
        write any more.
        """
        if session not in self.sessions:
            return
        self.sessions.remove(session)
        for lease in list(session.leases.values()):
            if isinstance(lease, WriteLease):
                self._abort(lease, free=session.owner == OWNER_DAEMON)
            else:
                self._let_go(lease)
        session.leases.clear()
        if session.owner != OWNER_DAEMON:
            self.arena.abandon_owner(session.owner)
        self.promoter.feed()

    def register(self, spec: NamespaceSpec) -> int:
        """The id of a namespace. Raises NamespaceConflict, BadRequest."""
        if len(spec.digest) != NAMESPACE_BYTES:
            raise BadRequest(f"namespace digest of {len(spec.digest)} bytes: {NAMESPACE_BYTES} are required")
        if not 8 <= spec.hash_bytes <= KEY_BYTES_MAX - NAMESPACE_BYTES:
            raise BadRequest(
                f"hash_bytes {spec.hash_bytes}: allowed are 8 to {KEY_BYTES_MAX - NAMESPACE_BYTES}"
            )
        if not 0 < spec.record_bytes <= self.arena.layout.slab_bytes:
            raise BadRequest(
                f"record_bytes {spec.record_bytes}: allowed are 1 to {self.arena.layout.slab_bytes} (dram.slab_bytes)"
            )
        namespace = self.namespaces.register(spec)
        self.retention.registered(namespace)
        return namespace.id

    # -- reading --

    def lookup(self, namespaces: list[int], hashes: bytes) -> int:
        """How many leading blocks are present in all namespaces with an unbroken prefix."""
        return self.find(namespaces, hashes).usable

    def find(self, namespaces: list[int], hashes: bytes, asking: Asking = NOBODY_IN_PARTICULAR) -> Found:
        """The same for a client that is told about: `book` the answer when it is on its way."""
        spaces, asked = self._asked(namespaces, hashes)
        found = self._find(spaces, hashes, asking)
        self.watch.note(spaces, hashes, found, asking)
        for namespace in spaces:
            self.prompts.remember(namespace.id, hashes, namespace.hash_bytes, found.usable)
        self.counters.lookups += 1
        self.counters.lookup_blocks += asked
        self.counters.lookup_hit_blocks += found.usable
        return found

    def book(
        self, namespaces: list[int], hashes: bytes, found: Found, asking: Asking = NOBODY_IN_PARTICULAR
    ) -> None:
        """Account for the tokens of a lookup that was answered."""
        spaces = [self.namespaces.get(number) for number in namespaces]
        rate = self.watch.break_even.rate(spaces[0], asking)
        self.accounts.book(spaces, hashes, found, asking._replace(prefill_tokens_per_s=rate))

    def settle(self, ticket: int, tokens: int, number: int, block_hash: bytes) -> None:
        """A client could use only so many tokens of what its ticket found; see `Accounts.settle`."""
        namespace = self.namespaces.get(number) if block_hash else None
        self.accounts.settle(ticket, tokens, namespace, block_hash)

    def explain(self, namespaces: list[int], hashes: bytes) -> tuple[list[bytes], list[int]]:
        """Where each block is in each namespace, and the outcome it would have now. Counts nothing."""
        spaces, _ = self._asked(namespaces, hashes)
        places = [index.residency(namespace, hashes) for namespace in spaces]
        found = self._find(spaces, hashes, NOBODY_IN_PARTICULAR)
        return places, self.accounts.judge(spaces, hashes, found)

    def report(self, since_s: float, skip: int = 0) -> dict[str, object]:
        """Totals since then, TOTALS_TOLD rows after the first `skip`; see `kvstore.totals`."""
        rows = self.accounts.totals.since(since_s)
        told = _fitting(rows[skip : skip + TOTALS_TOLD])
        return {
            "region": self.accounts.totals.region,
            "rows": [row.as_dict() for row in told],
            "rows_left": max(0, len(rows) - skip - len(told)),
            "prefixes": [self._prefix(p) for p in self.accounts.totals.heaviest(PREFIXES_TOLD, since_s)],
        }

    def residency(self, number: int, hashes: bytes) -> bytes:
        """One byte a hash: `blocks.IN_DRAM | IN_NVME | BROKEN_PREFIX`, 0 where absent."""
        namespace = self.namespaces.get(number)
        self._count(namespace, hashes)
        return index.residency(namespace, hashes)

    def acquire(
        self, session: Session, number: int, hashes: bytes, on_ready: Callable[[Acquired], None]
    ) -> ReadLease:
        """Pin blocks for reading, promoting what is not in DRAM; `on_ready` is called once.

        It may be called before this returns. `expire` on the lease makes it answer at once
        with what is ready.
        """
        namespace = self.namespaces.get(number)
        asked = self._split(namespace, hashes)
        lease = ReadLease(
            self._next_lease(), namespace, len(asked), lambda lease: self._answer(session, lease, on_ready)
        )
        session.leases[lease.number] = lease
        lease.outstanding = 1  # so that it cannot finish before all are asked for
        found = index.chain(namespace, asked)
        run = [block for block in found if block is not None and block.where & IN_ANY]
        if self.room.expiry and (over := self.room.expiry.over(run)):
            found = [None if block in over else block for block in found]
            run = [block for block in run if block not in over]
        if run:
            self.room.touched(run, self._prompt(number, run[-1].hash, len(asked)), self._clock())
            self.room.offer_again(run)
        unverified, blocks, tiers = self.room.unverified, lease.blocks, lease.tiers
        for position, block in enumerate(found):
            if block is None or not (where := block.where) & IN_ANY:
                continue
            tiers[position] = IN_DRAM if where & IN_DRAM else IN_NVME
            if where & IN_DRAM and block not in unverified:  # as `Promoter.is_ready` and `ReadLease.hold`
                block.where = where + PIN
                blocks[position] = block
            else:
                lease.outstanding += 1
                self.promoter.want(block, LeaseWaiter(lease, position))
        lease.outstanding -= 1
        if lease.outstanding == 0:
            lease.expire()
        return lease

    def prefetch(self, number: int, hashes: bytes) -> int:
        """Start bringing blocks into DRAM; answers how many are on the way."""
        namespace = self.namespaces.get(number)
        coming = 0
        for block_hash in self._split(namespace, hashes):
            block = namespace.blocks.get(block_hash)
            if block is None or not block.where & IN_ANY or self.promoter.is_ready(block):
                continue
            if not self.promoter.prefetch(block):
                break  # no room: nor for those behind it
            coming += 1
        return coming

    # -- writing --

    def reserve(self, session: Session, number: int, hashes: bytes, parent: bytes) -> Reserved:
        """Slots for the blocks of this run that are not held yet. `parent` is the hash before it."""
        namespace = self.namespaces.get(number)
        asked = self._split(namespace, hashes)
        if parent and len(parent) != namespace.hash_bytes:
            raise BadRequest(f"parent of {len(parent)} bytes: 0 or {namespace.hash_bytes} are allowed")
        if len({parent, *asked}) != len(asked) + 1:
            raise BadRequest("reserve: a block hash is repeated; a prefix has each block once")
        known = list(map(namespace.blocks.get, asked))
        if index.would_cycle(namespace, parent, known):
            raise BadRequest("reserve: a block of this run is an ancestor of its own parent")
        prompt = self._prompt(number, asked[0], len(asked)) if asked else Prompt(0)
        lease = WriteLease(self._next_lease(), namespace, asked, parent, prompt)
        end = self._reserve(lease, known, session.owner)
        refused = index.not_held(namespace, asked[end:])
        self.counters.reserve_no_room += len(asked) - end
        self.counters.reserve_held += end - len(lease.slots)
        if lease.slots:
            session.leases[lease.number] = lease
        now_s = self._clock()
        # What came later in this run may have taken the place of one that was held.
        held = [block for block in known[:end] if block is not None and block.where & IN_ANY]
        if self.room.expiry:
            for block in self.room.expiry.over(held):  # its bytes are offered again: as if stored now
                self.room.expiry.stored(block)
        self.room.touched(held, prompt, now_s)
        self.room.offer_again(held)
        if refused:
            self.room.refused(namespace, refused, prompt, now_s)
        place = self.arena.place
        slots = [WriteSlot(position, *place(slot)) for position, slot in lease.slots.items()]
        return Reserved(lease.number if slots else 0, slots, end < len(asked))

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
                found = self.room.slots(lease.namespace, new, before, owner, lease.prompt)
                lease.slots.update(enumerate(found, start))
                writing.update(new[: len(found)])
                if len(found) < len(new):
                    return start + len(found)
            start = end + 1
        return len(hashes)

    def commit(self, session: Session, number: int, indexes: list[int], checksums: bytes) -> int:
        """Make these blocks of a write lease visible; the others of it are given up."""
        lease = session.leases.get(number)
        if not isinstance(lease, WriteLease):
            raise UnknownLease(f"write lease {number}: not held by this connection")
        if len(checksums) != CHECKSUM_BYTES * len(indexes):
            raise BadRequest(f"commit: {len(checksums)} bytes of checksums for {len(indexes)} blocks")
        if len(set(indexes)) != len(indexes) or not lease.slots.keys() >= set(indexes):
            raise IndexNotReserved("commit: an index that is repeated or was not reserved by this lease")
        now_s = self._clock()
        run: list[Block] = []
        namespace, hashes = lease.namespace, lease.hashes
        slots = list(map(lease.slots.pop, indexes))
        ready = self.arena.commit
        for at, slot in enumerate(slots):
            ready(slot, checksums[at * CHECKSUM_BYTES : (at + 1) * CHECKSUM_BYTES])
        for start, end in _in_turn(indexes):
            first, last = indexes[start], indexes[end - 1]
            before = hashes[first - 1] if first else lease.parent
            piece = hashes[first : last + 1]
            run += self.room.arrived_in_dram(namespace, piece, before, slots[start:end])
            namespace.writing.difference_update(piece)
        self.room.touched(run, lease.prompt, now_s)
        self.room.queue_demotion(*run)
        self.room.settle(*run)
        self.counters.committed += len(indexes)
        self.accounts.moved(lease.namespace, STORED, len(indexes) * lease.namespace.record_bytes)
        self._drop_write_lease(session, lease)
        self.demoter.pump()
        return len(indexes)

    def release(self, session: Session, number: int) -> None:
        """Give a lease back: unpin what was read, give up what was not committed."""
        lease = session.leases.pop(number, None)
        if lease is None:
            raise UnknownLease(f"lease {number}: not held by this connection")
        if isinstance(lease, WriteLease):
            self._drop_write_lease(session, lease)
        else:
            self._let_go(lease)
        self.promoter.feed()

    # -- upkeep --

    def tick(self) -> None:
        """Once a second or so: quarantined slots, adopted records, waiting demotions."""
        self.arena.sweep()
        self.watch.look()
        self.promoter.verify_next()
        self.retention.tick()
        self.demoter.retry()
        self.promoter.feed()
        self._save_names()
        if self._endurance_file is not None:
            self._endurance_file.keep(self.endurance, self._io)
        self.accounts.save(self._io, self._clock())

    def _save_names(self) -> None:
        """One write at a time: all go through the same temporary file."""
        names = self.namespaces.snapshot() if not self._saving_names else None
        if names is None:
            return

        def saved(_: None) -> None:
            self._saving_names = False

        self._saving_names = True
        self._io.submit(lambda: self.namespaces.save(names), saved, failed=None)

    def adopt(self, wait: bool = True) -> None:
        """Start from what the tiers hold, once, before the first session.

        With `wait` off, call `adoption.step` until it answers False; requests are
        answered right meanwhile.
        """
        self.adoption.start()
        while wait and self.adoption.step():
            pass

    def status(self) -> dict[str, object]:
        """Figures for people and machines; the fields are documented in docs/cli.md."""
        tiers = [_tier_status(self.arena.stats())]
        if self.nvme is not None:
            tiers.append(_tier_status(self.nvme.stats()))
        return {
            "tiers": tiers,
            "counters": self.counters.as_dict(),
            "sessions": [
                {"owner": s.owner, "label": s.label, "leases": len(s.leases)} for s in self.sessions
            ],
            "loading_blocks": self.promoter.underway,
            "demoting_blocks": len(self.room.demoting),
            "unverified_blocks": len(self.room.unverified),
            "adopting": not self.adoption.done,
            "endurance": self._endurance_status(),
            **self.watch.status(),
            "queues": queues(self),
            "namespaces_total": len(self.namespaces),
            "namespaces": [
                n.as_dict()
                for n in nlargest(STATUS_NAMESPACES_MAX, self.namespaces, key=lambda n: len(n.blocks))
            ],
        }

    def list_namespaces(self, skip: int) -> dict[str, object]:
        """A page of all namespaces, behind the first `skip`."""
        page = list(islice(self.namespaces, skip, skip + STATUS_NAMESPACES_MAX))
        left = max(0, len(self.namespaces) - skip - len(page))
        return {"namespaces": [namespace.as_dict() for namespace in page], "namespaces_left": left}

    def _endurance_status(self) -> dict[str, object] | None:
        if self.nvme is None or not self.endurance.limited:
            return None
        return {
            "write_bytes_per_day": self.endurance.bytes_per_day,
            "spent_bytes": self.endurance.spent_bytes,
            "allowance_bytes": int(self.endurance.allowance_bytes(self._clock())),
            "worth_min": round(self.endurance.threshold, 4),
        }

    def io_lengths(self) -> tuple[int, int]:
        """Jobs that wait for an I/O thread: urgent ones, others."""
        return self._io.lengths()

    def check(self) -> list[str]:
        """Prove that the books balance; one line per violation."""
        from kvstore.books import check

        return check(self)

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

    def _find(self, namespaces: list[Namespace], hashes: bytes, asking: Asking) -> Found:
        count = len(hashes) // namespaces[0].hash_bytes
        for namespace in namespaces:
            count = index.rooted_prefix(namespace, hashes, count)
        live = count
        if self.room.expiry:
            live = min(self.room.expiry.live(namespace, hashes, count) for namespace in namespaces)
        found = self.watch.find(namespaces, hashes, live, asking)
        if self.room.quotas and self.nvme is not None:
            found = self._within_quotas(namespaces, hashes, found, asking)
        return found._replace(expired=count - live)

    def _within_quotas(
        self, namespaces: list[Namespace], hashes: bytes, found: Found, asking: Asking
    ) -> Found:
        """No more than may be in DRAM at once: waiting for the rest would be in vain."""
        fitting = self.room.quotas.fitting(namespaces, IN_DRAM)
        skip = asking.local_tokens // max(1, namespaces[0].spec.block_tokens)
        if fitting is None or found.usable <= skip + fitting:
            return found
        slow = slow_blocks(namespaces, hashes, found.usable, skip)
        end = max(skip + fitting, slow[0][0]) if slow else found.usable
        return found._replace(usable=end, why=outcomes.OVER_QUOTA) if end < found.usable else found

    def _nvme_changed(self) -> None:
        """A breaker of NVMe changed its state."""
        storing = self.watch.loads.closed and self.watch.stores.closed
        if storing != self.room.storing:
            self.room.storing = storing
            if storing:
                self.demoter.resume()
            else:
                self.demoter.pause()
        if not self.watch.loads.closed:
            self.promoter.give_up()

    def _prefix(self, prefix: Prefix) -> dict[str, object]:
        """A prefix as it is told, with the tiers that have its last block now."""
        namespace = self.namespaces.of_key(bytes.fromhex(prefix.namespace))
        block = namespace.blocks.get(bytes.fromhex(prefix.block_hash)) if namespace is not None else None
        where = block.where if block is not None and block.where & ROOTED else 0
        tiers = [name for bit, name in ((IN_DRAM, "dram"), (IN_NVME, "nvme")) if where & bit]
        return {**asdict(prefix), "tiers": tiers}

    def _prompt(self, number: int, block_hash: bytes, blocks: int) -> Prompt:
        """The prompt that a lookup named, or what is known of it: this many blocks."""
        return self.prompts.recall(number, block_hash) or Prompt(blocks)

    def _answer(self, session: Session, lease: ReadLease, on_ready: Callable[[Acquired], None]) -> None:
        place = self.arena.place
        slots = [
            ReadSlot(*place(block.slot), tier) if block is not None else None
            for block, tier in zip(lease.blocks, lease.tiers, strict=True)
        ]
        tiers = [slot.tier for slot in slots if slot is not None]
        in_dram = tiers.count(IN_DRAM)
        self.counters.acquired_dram += in_dram
        self.counters.acquired_nvme += len(tiers) - in_dram
        self.counters.acquire_missed += len(slots) - len(tiers)
        if tiers:
            self.accounts.moved(lease.namespace, LOADED, len(tiers) * lease.namespace.record_bytes)
        else:
            session.leases.pop(lease.number, None)
        pending = lease.outstanding > 0
        self.counters.expired_acquires += pending
        on_ready(Acquired(lease.number if tiers else 0, slots, pending))

    def _let_go(self, lease: ReadLease) -> None:
        lease.finished = True
        self.room.unpin(*[block for block in lease.blocks if block is not None])

    def _drop_write_lease(self, session: Session, lease: WriteLease) -> None:
        session.leases.pop(lease.number, None)
        self._abort(lease, free=True)

    def _abort(self, lease: WriteLease, free: bool) -> None:
        """Give up what the lease did not commit; not `free`: its process may write still."""
        lease.namespace.writing.difference_update(lease.hashes[position] for position in lease.slots)
        self.counters.reservations_aborted += len(lease.slots)
        self.room.give_up(lease.namespace, list(lease.slots.values()), free)

    def _count(self, namespace: Namespace, hashes: bytes) -> int:
        count, rest = divmod(len(hashes), namespace.hash_bytes)
        if rest:
            raise BadRequest(
                f"hashes of {len(hashes)} bytes: not a multiple of hash_bytes {namespace.hash_bytes}"
            )
        if not self.adoption.done:
            self.adoption.materialise(namespace, hashes)
        return count

    def _split(self, namespace: Namespace, hashes: bytes) -> list[bytes]:
        self._count(namespace, hashes)
        return index.split_hashes(hashes, namespace.hash_bytes)

    def _next_lease(self) -> int:
        self._lease_number += 1
        return self._lease_number


def _in_turn(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Where the pieces of a list begin and end in which each number is one more than the one before."""
    gaps = (at for at, (before, number) in enumerate(pairwise(numbers), 1) if number != before + 1)
    return pairwise([0, *gaps, len(numbers)]) if numbers else iter(())


def _fitting(rows: list[Total]) -> list[Total]:
    """As many of these rows as fit an answer, one at least."""
    ends = accumulate(TOTALS_ROW_BYTES + 4 * (len(row.model) + len(row.tenant)) for row in rows)
    return rows[: max(1, sum(end <= TOTALS_TOLD_BYTES for end in ends))]


def _tier_status(stats: TierStats) -> dict[str, object]:
    return {
        "name": stats.name,
        "capacity_bytes": stats.capacity_bytes,
        "used_bytes": stats.used_bytes,
        "free_bytes": stats.free_bytes,
        "records": stats.records,
        "classes": [{"slot_bytes": c.slot_bytes, "total": c.total, "used": c.used} for c in stats.classes],
    }
