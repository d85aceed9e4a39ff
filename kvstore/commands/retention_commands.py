"""Retention: what stays, what has to go, and who may hold how much.

    command ─▶ new book ─▶ on disk (I/O thread) ─▶ takes effect ─▶ answered
                                                     │
               guards (pins) ◀── expiry (TTLs) ◀─────┴────▶ quotas          each asked by `residency`

The rules are `kvstore.retention.rules`; what they do is in three modules of their own. This one takes
commands, puts rules into effect, and does the upkeep of each tick in bounded slices: the sweeps that drop
what is over; bringing holders whose quota was lowered below it.

What wins: a TTL over a pin (time over is time over), a pin over a quota (pinned blocks count,
and new ones are refused). Blocks in use are dropped by a sweep after they were given back; until then they
are misses all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.commands.retention_report import TIERS, report_steps
from kvstore.commands.rule_names import one_namespace, prefix_steps, require_tenant_alone
from kvstore.constants import (
    AS_IT_IS,
    EXPIRY_SLICE_S,
    PINNED_SHARE_DEFAULT,
    RULE_COMMANDS_MAX,
    STEP_SLOW_BLOCKS,
    TTL_S_MAX,
)
from kvstore.errors import BadRequest, LimitExceeded, NotSaved, RequestError
from kvstore.index.block import Block, Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.io_pool import Io
from kvstore.protocol import answers, outcomes
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.eviction import Eviction
from kvstore.residency.residency import Residency
from kvstore.retention.clock import Clock, boot_id
from kvstore.retention.quotas import tenant_of
from kvstore.retention.rules import Book, Pin, Quota, Rule, RuleFile, Ttl, pieces
from kvstore.steps import Steps, finish
from kvstore.units import format_bytes

RETENTION_ROWS_BEHIND_MAX = 32_768  # rows still to be deleted: beyond it nothing more is dropped

Done = Callable[[RequestError | None, Sequence[Rule]], None]
RULES_APPLIED = 8  # put into effect between two yields: some look at hundreds of blocks at once
CLOCK_DRIFT_S = 1.0  # of the clock that is on disk; less is not worth a write


class Command(NamedTuple):
    """Rules to set, or to remove; `done` is called once, with what went wrong or None, and the rules."""

    rules: Sequence[Rule]
    is_set: bool
    done: Done


class Retention:
    """All rules of one daemon, in effect. Called from the engine's thread only."""

    def __init__(
        self,
        blocks: Residency,
        eviction: Eviction,
        namespaces: NamespaceRegistry,
        io: Io,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        file: RuleFile | None = None,
    ) -> None:
        self._blocks = blocks
        self._eviction = eviction
        self._namespaces = namespaces
        self._io = io
        self._clock = clock
        self._file = file or RuleFile()
        self._commands: deque[Command] = deque()
        self._saving = self._is_trimming = False
        self.set_share(PINNED_SHARE_DEFAULT)
        self.book = self._file.read()
        self._ttls: dict[tuple[str, str, str | None], Ttl] = {}  # of namespaces and tenants, in effect
        self._boot_id = boot_id()
        blocks.expiry.start(self._begin_clock(wall_clock), self._known, self._expired)
        for rule in self.book.rules():
            finish(self._apply_steps(rule, True))

    def set_share(self, pinned_share_max: float) -> None:
        """What pins may hold of each tier from now on: not less than they do, see `allows_share`."""
        self._share_max = pinned_share_max
        self._blocks.guards.limit(self._limits(pinned_share_max))

    def allows_share(self, pinned_share_max: float) -> bool:
        """Whether what is pinned now fits such a share."""
        held = self._blocks.guards.guarded_bytes
        return all(held[bit] <= limit for bit, limit in self._limits(pinned_share_max).items())

    def _limits(self, share: float) -> dict[int, int]:
        tiers = ((IN_DRAM, self._blocks.arena), (IN_NVME, self._blocks.nvme))
        return {bit: int(level.stats().capacity_bytes * share) for bit, level in tiers}

    def _begin_clock(self, wall_clock: Callable[[], float]) -> Clock:
        """Time goes on where the last daemon was in the same boot of the machine; see `kvstore.retention.clock`."""
        clock = Clock(self._clock)
        clock.move_to(wall_clock())
        for rule in self.book.rules():
            clock.move_to(rule.since_s)
        if self.book.boot_id and self.book.boot_id == self._boot_id:
            clock.move_to(self._clock() + self.book.clock_ahead_s)
        return clock

    # -- commands --

    def pin(self, selector: str, block_hash: bytes, is_set: bool, done: Done) -> None:
        """Pin a prefix, named by its last block, or unpin it. `done` may get BadRequest, NotFound, LimitExceeded."""
        now_s = self._blocks.expiry.now_s()
        before = () if is_set else self.book.pins

        def rule(digest: bytes) -> Pin:
            return Pin(digest.hex(), block_hash.hex(), now_s)

        self._blocks.background.begin(self._prefix_steps(selector, block_hash, before, rule, is_set, done))

    def _prefix_steps(
        self,
        selector: str,
        block_hash: bytes,
        set_before: Sequence[Pin | Ttl],
        rule: Callable[[bytes], Pin | Ttl],
        is_set: bool,
        done: Done,
    ) -> Steps[None]:
        """A rule for each namespace of a prefix; pins, where they fit into their share."""
        rules: list[Pin | Ttl] = []
        try:
            names = yield from prefix_steps(selector, block_hash, set_before, self._namespaces, self.book)
            for number, some in enumerate(pieces(names)):
                if number:
                    yield
                rules += map(rule, some)
            if is_set:
                yield from self._require_share([rule for rule in rules if isinstance(rule, Pin)])
            self._submit(rules, is_set, done)
        except RequestError as error:
            done(error, rules)

    def ttl(
        self,
        selector: str,
        block_hash: bytes,
        tenant: str | None,
        ttl_s: float | None,
        is_set: bool,
        done: Done,
    ) -> None:
        """Set or remove the TTL of a prefix, a namespace or a tenant. Raises BadRequest, NotFound; of a prefix, `done` gets them."""
        if ttl_s is not None and not 0 < ttl_s <= TTL_S_MAX:
            raise BadRequest(f"ttl of {ttl_s:g} s: allowed are more than 0 and at most {TTL_S_MAX} s")
        now_s = self._blocks.expiry.now_s()
        rules: list[Rule]
        if tenant is not None:
            require_tenant_alone(tenant, selector, block_hash)
            rules = [Ttl(ttl_s, now_s, tenant=tenant)]
        elif block_hash:
            before = () if is_set else self.book.ttls

            def rule(digest: bytes) -> Ttl:
                return Ttl(ttl_s, now_s, digest.hex(), block_hash.hex())

            begin = self._blocks.background.begin
            begin(self._prefix_steps(selector, block_hash, before, rule, is_set, done))
            return
        else:
            rules = [Ttl(ttl_s, now_s, self._one(selector).hex())]
        self._submit(rules, is_set, done)

    def quota(
        self, selector: str, tenant: str | None, dram_bytes: int | None, nvme_bytes: int | None, done: Done
    ) -> None:
        """Set the quota of a namespace or a tenant; None: no limit in that tier, AS_IT_IS: the one set before.

        Raises BadRequest, NotFound.
        """
        if tenant is not None:
            require_tenant_alone(tenant, selector)
        name = "" if tenant is not None else self._one(selector).hex()
        before = next((q for q in self.book.quotas if q.about == (name, tenant)), None)
        if dram_bytes == AS_IT_IS:
            dram_bytes = before.dram_bytes if before is not None else None
        if nvme_bytes == AS_IT_IS:
            nvme_bytes = before.nvme_bytes if before is not None else None
        rule = Quota(dram_bytes, nvme_bytes, self._blocks.expiry.now_s(), name, tenant)
        self._submit([rule], dram_bytes is not None or nvme_bytes is not None, done)

    def report_steps(self) -> Steps[answers.Retention]:
        """All rules and what they amount to; the fields are documented in docs/cli.md."""
        return report_steps(self.book, self._blocks, self._known)

    # -- what happens --

    def registered(self, namespace: Namespace) -> None:
        """A client registered this namespace: its tenant is known now."""
        self._blocks.quotas.named(namespace)
        self._set_ttl(namespace.digest, self._blocks.expiry.now_s())

    def adopted(self, all_rows: bool) -> None:
        """The arena's blocks, or the rows of NVMe as well, are in the index."""
        self._blocks.guards.rebuild(self._by_digest())
        self._trim()  # rows of blocks that were evicted may have come back

    def tick(self) -> None:
        """Upkeep, in bounded slices."""
        blocks = self._blocks
        blocks.expiry.tick()
        self.step()
        self._trim()
        blocks.quotas.prune(self._namespaces)
        self._keep_clock()

    def _trim(self) -> None:
        """Bring those below their quota that are above it."""
        if self._blocks.quotas and not self._is_trimming:
            self._is_trimming = True
            self._blocks.background.begin(self._trim_steps())

    def _trim_steps(self) -> Steps[None]:
        try:
            for holder, bit in (yield from self._blocks.quotas.over_steps()):
                while not self.is_behind and self._eviction.trim(holder, bit):
                    yield
        finally:
            self._is_trimming = False

    def step(self) -> bool:
        """Work for TTLs, about EXPIRY_SLICE_S long. Returns whether there is more to do at once."""
        expiry, until_s = self._blocks.expiry, self._clock() + EXPIRY_SLICE_S
        if expiry.has_work:
            expiry.step(lambda: self._clock() < until_s and not self.is_behind)
        return expiry.has_work and not self.is_behind

    def _expired(self, block: Block) -> bool:
        return self._blocks.drop(block, outcomes.EXPIRED)

    @property
    def is_behind(self) -> bool:
        """Whether so many rows are still to be cleared that nothing more is dropped for now. A device that is dead holds up nothing."""
        members = self._blocks.nvme.members
        return sum(member.dropped for member in members if member.writable) > RETENTION_ROWS_BEHIND_MAX

    def check_slices(self) -> Iterator[list[str]]:
        """One line per violated invariant of pins and TTLs, in slices; those of quotas are in `kvstore.engine.audit`."""
        known = self._by_digest()
        yield from self._blocks.guards.check_slices(known)
        yield from self._blocks.expiry.check_slices(known)

    # -- saving --

    @property
    def commands_waiting(self) -> int:
        return len(self._commands)

    def _submit(self, rules: Sequence[Rule], is_set: bool, done: Done) -> None:
        if len(self._commands) >= RULE_COMMANDS_MAX:
            raise LimitExceeded(f"{RULE_COMMANDS_MAX} commands wait to be saved: no more are allowed")
        self._commands.append(Command(rules, is_set, done))
        self._next_command()

    def _next_command(self) -> None:
        if self._commands and not self._saving:
            self._saving = True
            self._blocks.background.begin(self._next_steps())

    def _next_steps(self) -> Steps[None]:
        """One at a time: each starts from the book that the one before it left."""
        while self._commands:
            command = self._commands.popleft()
            try:
                book = yield from self._changed_steps(command)
            except RequestError as error:
                command.done(error, command.rules)
            else:
                self._write(book, command)
                return
        self._saving = False

    def _changed_steps(self, command: Command) -> Steps[Book]:
        book = self.book
        if command.rules:
            change = book.with_steps if command.is_set else book.without_steps
            book = yield from change(command.rules)
        book = book.with_clock(self._boot_id, self._blocks.expiry.clock.ahead_s)
        if command.is_set:
            yield from book.fitting_steps()
        return book

    def _write(self, book: Book, command: Command) -> None:
        self._io.submit(
            lambda: self._file.write(book),
            lambda why: self._written(book, command, why),
            failed="the write failed; the daemon's log has more",
            urgent=True,
        )

    def _written(self, book: Book, command: Command, why: str) -> None:
        if not why:
            self.book = book
        self._blocks.background.begin(self._written_steps(command, why))

    def _written_steps(self, command: Command, why: str) -> Steps[None]:
        if why:
            error = NotSaved(f"nothing was changed, it could not be saved: {why}")
            command.done(error, command.rules)
        else:
            for number, rule in enumerate(command.rules, 1):
                yield from self._apply_steps(rule, command.is_set)
                if number % RULES_APPLIED == 0:
                    yield
            command.done(None, command.rules)
        yield from self._next_steps()

    def _keep_clock(self) -> None:
        """A start in this boot is to go on with the time of now: where there are TTLs it must be on disk."""
        book, ahead_s = self.book, self._blocks.expiry.clock.ahead_s
        is_kept = book.boot_id == self._boot_id and abs(book.clock_ahead_s - ahead_s) < CLOCK_DRIFT_S
        if book.ttls and not is_kept and not self._saving:
            self._submit((), True, lambda error, rules: None)

    # -- taking effect --

    def _apply_steps(self, rule: Rule, is_set: bool) -> Steps[None]:
        digest = bytes.fromhex(rule.namespace)
        known = self._known(digest)
        blocks = self._blocks
        if isinstance(rule, Pin):
            pinned = digest, bytes.fromhex(rule.block_hash)
            (blocks.guards.pin if is_set else blocks.guards.unpin)(pinned, known)
        elif isinstance(rule, Quota):
            limits = {IN_DRAM: rule.dram_bytes, IN_NVME: rule.nvme_bytes}
            if not is_set:
                limits = dict.fromkeys(limits)
            holder = blocks.quotas.holder(rule.namespace, rule.tenant)
            blocks.quotas.limit(holder, limits, self._namespaces)
            self._trim()
        elif rule.block_hash:
            blocks.expiry.set_prefix(digest, bytes.fromhex(rule.block_hash), rule.ttl_s, rule.since_s, is_set)
        else:
            self._ttls.pop(rule.about, None)
            if is_set:
                self._ttls[rule.about] = rule
            if rule.tenant is None:
                self._set_ttl(digest, rule.since_s)
            else:
                yield from self._tenants_ttl_steps(rule.tenant, rule.since_s)

    def _tenants_ttl_steps(self, tenant: str, since_s: float) -> Steps[None]:
        for number, namespace in enumerate(list(self._namespaces), 1):
            if tenant_of(namespace) == tenant:
                self._set_ttl(namespace.digest, since_s)
            if number % STEP_SLOW_BLOCKS == 0:
                yield

    def _set_ttl(self, digest: bytes, since_s: float) -> None:
        """Put the TTL of a namespace into effect: its own, else that of its tenant."""
        namespace = self._known(digest)
        rule = self._ttls.get((digest.hex(), "", None))
        if rule is None and namespace is not None:
            rule = self._ttls.get(("", "", tenant_of(namespace)))
        self._blocks.expiry.set_ttl(digest, rule.ttl_s if rule is not None else None, since_s)

    # -- names --

    def _known(self, digest: bytes) -> Namespace | None:
        return self._namespaces.of_key(digest) if digest else None

    def _by_digest(self) -> dict[bytes, Namespace]:
        return {namespace.digest: namespace for namespace in self._namespaces}

    def _one(self, selector: str) -> bytes:
        return one_namespace(selector, self._namespaces, self.book)

    def _require_share(self, pins: Sequence[Pin]) -> Steps[None]:
        """Raises LimitExceeded when what is held of these prefixes does not fit into the share of pins."""
        guards = self._blocks.guards
        more = {IN_DRAM: 0, IN_NVME: 0}
        for number, pin in enumerate(pins):
            if number:
                yield
            namespace = self._known(bytes.fromhex(pin.namespace))
            if namespace is not None:
                sizes = yield from guards.unguarded_steps(namespace, bytes.fromhex(pin.block_hash))
                for bit, size in sizes.items():
                    more[bit] += size
        for bit, name in TIERS:
            if more[bit] and guards.guarded_bytes[bit] + more[bit] > guards.limits[bit]:
                free = guards.limits[bit] - guards.guarded_bytes[bit]
                raise LimitExceeded(
                    f"this prefix would pin {format_bytes(more[bit])} more of {name}; of the "
                    f"{format_bytes(guards.limits[bit])} that pins may hold {format_bytes(free)} are left "
                    f"(retention.pinned_share_max = {self._share_max:g})"
                )
