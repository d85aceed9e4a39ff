"""Retention: what stays, what has to go, and who may hold how much.

    command ─▶ new book ─▶ on disk (I/O thread) ─▶ takes effect ─▶ answered
                                                     │
               guards (pins) ◀── expiry (TTLs) ◀─────┴────▶ quotas          each asked by `room`

The rules are `kvstore.rules`; what they do is in three modules of their own. This one takes
commands, puts rules into effect, and does the upkeep of each tick in bounded slices: dropping
what is expired, leaf first; bringing holders whose quota was lowered below it.

What wins: a TTL over a pin (time over is time over), a pin over a quota (pinned blocks count,
and new ones are refused). Blocks in use are dropped when they are given back; until then they
are misses all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvstore import outcomes
from kvstore.blocks import IN_DRAM, IN_NVME
from kvstore.constants import (
    AS_IT_IS,
    DEMOTE_RETRY_S,
    EXPIRY_ROWS_PER_SAVE,
    EXPIRY_SLICE_S,
    PINNED_BLOCKS_TOLD,
    RETENTION_DELETE_ROWS,
    RETENTION_ROWS_BEHIND_MAX,
    RETENTION_TOLD_BYTES,
    RULE_BYTES,
    RULE_COMMANDS_MAX,
    TENANT_CHARS_MAX,
    TENANTS_TOLD,
    TENANTS_TOLD_BYTES,
    TTL_S_MAX,
    require,
)
from kvstore.errors import BadRequest, LimitExceeded, NotFound, NotSaved, RequestError
from kvstore.iopool import Io
from kvstore.lifetimes import NEVER
from kvstore.namespaces import Namespace, NamespaceRegistry
from kvstore.quotas import tenant_of
from kvstore.room import Room
from kvstore.rules import Book, Pin, Quota, Rule, RuleFile, Ttl, name_bytes, rule_bytes
from kvstore.sizes import short_size
from kvstore.stored_times import Changes, StoredTimes
from kvstore.wire import FRAME_BYTES_MAX

Done = Callable[[RequestError | None, Sequence[Rule]], None]
require(RETENTION_TOLD_BYTES < FRAME_BYTES_MAX, "an answer fits a frame")
TIERS = ((IN_DRAM, "dram"), (IN_NVME, "nvme"))


class Command(NamedTuple):
    """Rules to set, or to remove; `done` is called once, with what went wrong or None, and the rules."""

    rules: Sequence[Rule]
    is_set: bool
    done: Done


class Words:
    """What rules are about, in words; model and tenant of a namespace as far as they fit the answer."""

    def __init__(self, known: Callable[[bytes], Namespace | None], left_bytes: int) -> None:
        self._known = known
        self._left_bytes = left_bytes

    def about(self, namespace: str, tenant: str | None = None) -> dict[str, object]:
        known = self._known(bytes.fromhex(namespace))
        fields = known.spec.fields if known is not None else {}
        model, own = fields.get("model"), fields.get("tenant")
        size = name_bytes(model) + name_bytes(own)
        if size > self._left_bytes:
            model = own = None
        else:
            self._left_bytes -= size
        return {"namespace": namespace or None, "model": model, "tenant": own if tenant is None else tenant}


class Retention:
    """All rules of one daemon, in effect. Called from the engine's thread only."""

    def __init__(
        self,
        room: Room,
        namespaces: NamespaceRegistry,
        io: Io,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        files: tuple[RuleFile, StoredTimes] | None = None,
        pinned_share_max: float = 0.5,
    ) -> None:
        self._room = room
        self._namespaces = namespaces
        self._io = io
        self._clock = clock
        self._file, self._times = files or (RuleFile(), StoredTimes())
        self._share_max = pinned_share_max
        self._commands: deque[Command] = deque()
        self._saving = False
        self._saving_times = False
        self._deleting = False
        self._delete_at_s = 0.0
        for bit, tier in ((IN_DRAM, room.arena), (IN_NVME, room.nvme)):
            capacity_bytes = tier.stats().capacity_bytes if tier is not None else 0
            room.guards.limits[bit] = int(capacity_bytes * pinned_share_max)
        self.book = Book()
        book = self._file.read()
        latest_s = max((rule.since_s for rule in book.rules()), default=0.0)
        room.expiry.start(*self._times.read(), latest_s, clock, wall_clock, self._known)
        for rule in book.rules():
            self._apply(book, rule, True)
        self.book = book

    # -- commands --

    def pin(self, selector: str, block_hash: bytes, is_set: bool, done: Done) -> None:
        """Pin a prefix, named by its last block, or unpin it. Raises BadRequest, NotFound, LimitExceeded."""
        digests = self._prefixes(selector, block_hash, [] if is_set else self.book.pins)
        if is_set:
            self._require_share(digests, block_hash)
        now_s = self._room.expiry.now_s()
        self._submit([Pin(d.hex(), block_hash.hex(), now_s) for d in digests], is_set, done)

    def ttl(
        self,
        selector: str,
        block_hash: bytes,
        tenant: str | None,
        ttl_s: float | None,
        is_set: bool,
        done: Done,
    ) -> None:
        """Set or remove the TTL of a prefix, a namespace or a tenant. Raises BadRequest, NotFound."""
        if ttl_s is not None and not 0 < ttl_s <= TTL_S_MAX:
            raise BadRequest(f"ttl of {ttl_s:g} s: allowed are more than 0 and at most {TTL_S_MAX} s")
        now_s = self._room.expiry.now_s()
        rules: list[Rule]
        if tenant is not None:
            _require_tenant(selector, block_hash, tenant)
            rules = [Ttl(ttl_s, now_s, tenant=tenant)]
        elif block_hash:
            digests = self._prefixes(selector, block_hash, [] if is_set else self.book.ttls)
            rules = [Ttl(ttl_s, now_s, d.hex(), block_hash.hex()) for d in digests]
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
            _require_tenant(selector, b"", tenant)
        name = "" if tenant is not None else self._one(selector).hex()
        before = next((q for q in self.book.quotas if q.about == (name, tenant)), None)
        if dram_bytes == AS_IT_IS:
            dram_bytes = before.dram_bytes if before is not None else None
        if nvme_bytes == AS_IT_IS:
            nvme_bytes = before.nvme_bytes if before is not None else None
        rule = Quota(dram_bytes, nvme_bytes, self._room.expiry.now_s(), name, tenant)
        self._submit([rule], dram_bytes is not None or nvme_bytes is not None, done)

    def report(self) -> dict[str, object]:
        """All rules and what they amount to; the fields are documented in docs/cli.md."""
        tenants = self._tenants_told()
        left = RETENTION_TOLD_BYTES - sum(map(rule_bytes, self.book.rules()))
        words = Words(self._known, left - sum(RULE_BYTES + name_bytes(name) for name, _ in tenants))
        blocks_left = PINNED_BLOCKS_TOLD
        pins = []
        for pin in self.book.pins:
            key = bytes.fromhex(pin.namespace), bytes.fromhex(pin.block_hash)
            facts = self._room.guards.held_of(key, self._known(key[0]), blocks_left)
            blocks_left -= facts["blocks"] or 0
            pins.append(
                {**words.about(pin.namespace), "block_hash": pin.block_hash, "since_s": pin.since_s, **facts}
            )
        quotas = []
        for quota in self.book.quotas:
            used = self._room.quotas.holder(quota.namespace, quota.tenant).used
            limits = {"dram_bytes": quota.dram_bytes, "nvme_bytes": quota.nvme_bytes}
            told = {f"{name}_used_bytes": used[bit] for bit, name in TIERS}
            quotas.append(
                {**words.about(quota.namespace, quota.tenant), **limits, **told, "since_s": quota.since_s}
            )
        guards = self._room.guards
        return {
            "pins": pins,
            "ttls": [
                {
                    **words.about(ttl.namespace, ttl.tenant),
                    "block_hash": ttl.block_hash or None,
                    "ttl_s": ttl.ttl_s,
                    "since_s": ttl.since_s,
                }
                for ttl in self.book.ttls
            ],
            "quotas": quotas,
            "pinned": [
                {"tier": name, "pinned_bytes": guards.guarded_bytes[bit], "limit_bytes": guards.limits[bit]}
                for bit, name in TIERS
                if bit == IN_DRAM or self._room.nvme is not None
            ],
            "tenants": [
                {"tenant": tenant, **{f"{name}_used_bytes": used[bit] for bit, name in TIERS}}
                for tenant, used in tenants
            ],
        }

    def _tenants_told(self) -> list[tuple[str, list[int]]]:
        """Those that hold most, as far as their names may be told."""
        tenants = self._room.quotas.tenants(TENANTS_TOLD)
        ends = accumulate(name_bytes(name) for name, _ in tenants)
        return tenants[: sum(end <= TENANTS_TOLD_BYTES for end in ends)]

    # -- what happens --

    def registered(self, namespace: Namespace) -> None:
        """A client registered this namespace: its tenant is known now."""
        self._room.quotas.named(namespace)
        self._set_ttl(self.book, namespace.digest)

    def adopted(self, all_rows: bool) -> None:
        """The arena's blocks, or the rows of NVMe as well, are in the index."""
        self._room.guards.rebuild(self._by_digest())
        if all_rows:
            for namespace in self._namespaces:
                self._set_ttl(self.book, namespace.digest)
            self._room.expiry.adopted(self._namespaces)

    def tick(self) -> None:
        """Upkeep, in bounded slices."""
        room = self._room
        room.expiry.tick()
        self.step()
        if room.quotas:
            room.quotas.step()
            for bit, _ in TIERS:
                for holder in room.quotas.over(bit):
                    if not self._is_behind():
                        room.trim(holder, bit)
        room.quotas.prune(self._namespaces)
        self._delete_rows()
        self._save_times()

    def step(self) -> bool:
        """A slice of dropping what is expired, about EXPIRY_SLICE_S long; whether there is more to do at once."""
        room, expiry = self._room, self._room.expiry
        if not expiry:
            return False
        until_s = self._clock() + EXPIRY_SLICE_S
        expiry.step()
        if not self._is_behind():
            for block in expiry.due():
                if block is not None and not room.drop(block, outcomes.EXPIRED):
                    expiry.in_use(block)
                if self._is_behind() or self._clock() >= until_s:
                    break
        self._delete_rows()
        return expiry.is_late or expiry.has_work

    def _is_behind(self) -> bool:
        """Whether so many rows are to be deleted that some could be forgotten, and come back with a start."""
        return len(self._room.doomed) + len(self._room.deleting) > RETENTION_ROWS_BEHIND_MAX

    def check(self) -> list[str]:
        """One line per violated invariant of pins and TTLs; those of quotas are in `kvstore.books`."""
        known = self._by_digest()
        return self._room.guards.check(known) + self._room.expiry.check(known)

    def last_changes(self) -> Callable[[], bool] | None:
        """At the end of the daemon: what writes the times not written yet, to be called in any thread."""
        changes = self._room.expiry.changes(bool(self.book.ttls), self._room.has_row_to_delete, is_last=True)
        return (lambda: self._times.write(changes)) if changes is not None else None

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
        """One at a time: each starts from the book that the one before it left."""
        while self._commands and not self._saving:
            command = self._commands.popleft()
            book = self.book
            try:
                for rule in command.rules:
                    book = book.with_rule(rule) if command.is_set else book.without(rule)
                if command.is_set:
                    book.require_fitting()
            except RequestError as error:
                command.done(error, command.rules)
                continue
            self._saving = True
            self._write(book, command)

    def _write(self, book: Book, command: Command) -> None:
        self._io.submit(
            lambda: self._file.write(book),
            lambda why: self._written(book, command, why),
            failed="the write failed; the daemon's log has more",
            urgent=True,
        )

    def _written(self, book: Book, command: Command, why: str) -> None:
        self._saving = False
        if why:
            command.done(NotSaved(f"nothing was changed, it could not be saved: {why}"), command.rules)
        else:
            self.book = book
            for rule in command.rules:
                self._apply(book, rule, command.is_set)
            command.done(None, command.rules)
        self._next_command()

    def _save_times(self) -> None:
        if self._saving_times:
            return
        changes = self._room.expiry.changes(bool(self.book.ttls), self._room.has_row_to_delete)
        if changes is None:
            self._compare_times()
            return
        self._saving_times = True
        self._io.submit(
            lambda: self._times.write(changes), lambda saved: self._times_saved(changes, saved), failed=False
        )

    def _times_saved(self, changes: Changes, saved: bool) -> None:
        self._saving_times = False
        if not saved:
            self._room.expiry.not_saved(changes)
        elif changes.anew or len(changes.rows) >= EXPIRY_ROWS_PER_SAVE:  # there may be more
            self._save_times()

    def _compare_times(self) -> None:
        """After a namespace was written anew: find rows in the file that it has too much, a page at a time."""
        wanted = self._room.expiry.unsaved.to_prune()
        if wanted is None:
            return
        self._saving_times = True
        self._io.submit(
            lambda: self._times.page(*wanted), lambda page: self._times_compared(wanted[0], page), failed=None
        )

    def _times_compared(self, digest: bytes, page: list[bytes] | None) -> None:
        self._saving_times = False
        if page is not None:
            self._room.expiry.pruned(digest, page, self._room.has_row_to_delete)
            if page:
                self._save_times()

    def _delete_rows(self) -> None:
        """Rows of what was dropped go soon, and not only when their room is needed."""
        room, nvme = self._room, self._room.nvme
        if self._deleting or nvme is None or not room.dropped_rows or self._clock() < self._delete_at_s:
            return
        keys = room.rows_to_delete(RETENTION_DELETE_ROWS)
        if not keys:
            return
        self._deleting = True
        self._io.submit(
            lambda: nvme.delete(keys) >= 0, lambda done: self._rows_deleted(keys, done), failed=False
        )

    def _rows_deleted(self, keys: list[bytes], done: bool) -> None:
        self._deleting = False
        self._room.deleted(keys, done)
        if not done:
            self._room.dropped_rows = True
            self._delete_at_s = self._clock() + DEMOTE_RETRY_S
        self._delete_rows()

    # -- taking effect --

    def _apply(self, book: Book, rule: Rule, is_set: bool) -> None:
        digest = bytes.fromhex(rule.namespace)
        known = self._known(digest)
        room = self._room
        if isinstance(rule, Pin):
            pinned = digest, bytes.fromhex(rule.block_hash)
            (room.guards.pin if is_set else room.guards.unpin)(pinned, known)
        elif isinstance(rule, Quota):
            limits = {IN_DRAM: rule.dram_bytes, IN_NVME: rule.nvme_bytes}
            if not is_set:
                limits = dict.fromkeys(limits)
            holder = room.quotas.holder(rule.namespace, rule.tenant)
            room.quotas.limit(holder, limits, self._namespaces)
            for bit in limits:
                room.trim(holder, bit)
        elif rule.block_hash:
            room.expiry.set_prefix(
                digest, known, bytes.fromhex(rule.block_hash), rule.ttl_s, rule.since_s, is_set
            )
        elif rule.tenant is None:
            self._set_ttl(book, digest)
        else:
            for namespace in self._namespaces:
                if tenant_of(namespace) == rule.tenant:
                    self._set_ttl(book, namespace.digest)

    def _set_ttl(self, book: Book, digest: bytes) -> None:
        """Put the TTL of a namespace into effect: its own, else that of its tenant."""
        namespace = self._known(digest)
        tenant = tenant_of(namespace) if namespace is not None else None
        own = tenants = None
        for ttl in book.ttls:
            if not ttl.block_hash and ttl.tenant is None and ttl.namespace == digest.hex():
                own = ttl
            elif tenant is not None and ttl.tenant == tenant:
                tenants = ttl
        rule = own or tenants
        if rule is not None or self._room.expiry:
            ttl_s, since_s = (rule.ttl_s, rule.since_s) if rule is not None else (None, NEVER)
            self._room.expiry.set_ttl(digest, namespace, ttl_s, since_s)

    # -- names --

    def _known(self, digest: bytes) -> Namespace | None:
        return self._namespaces.of_key(digest) if digest else None

    def _by_digest(self) -> dict[bytes, Namespace]:
        return {namespace.digest: namespace for namespace in self._namespaces}

    def _one(self, selector: str) -> bytes:
        """The namespace that a unique beginning of its digest names; the only one without. Raises BadRequest,
        NotFound."""
        known = [namespace.digest for namespace in self._namespaces]
        known += [bytes.fromhex(rule.namespace) for rule in self.book.rules() if rule.namespace]
        found = sorted({digest.hex() for digest in known if digest.hex().startswith(selector.lower())})
        if len(found) == 1:
            return bytes.fromhex(found[0])
        if not found:
            raise NotFound(
                f"namespace {selector or '(any)'}: none is known here; `kvstore status` lists them"
            )
        more = f"{len(found)} namespaces, as {found[0]} and {found[1]}"
        raise BadRequest(
            f"namespace {selector} may be any of {more}: name one"
            if selector
            else f"{more}, are known: name one with --namespace"
        )

    def _prefixes(self, selector: str, block_hash: bytes, set_before: Sequence[Pin | Ttl]) -> list[bytes]:
        """The namespaces of a prefix: the named one, else all that hold its last block or have such a rule, else
        the only one. Raises BadRequest, NotFound."""
        if not block_hash:
            raise BadRequest("an empty block hash: the hash of the last block of a prefix is required")
        ruled = [bytes.fromhex(rule.namespace) for rule in set_before if rule.block_hash == block_hash.hex()]
        if selector:
            found = [d for d in ruled if d.hex().startswith(selector.lower())] or [self._one(selector)]
        else:
            holding = [n.digest for n in self._namespaces if n.holds(block_hash)]
            found = ruled or holding or [self._one("")]
        for digest in found:
            namespace = self._known(digest)
            if namespace is not None and namespace.hash_bytes != len(block_hash):
                raise BadRequest(
                    f"block hash of {len(block_hash)} bytes: namespace {digest.hex()} has {namespace.hash_bytes}"
                )
        return found

    def _require_share(self, digests: Sequence[bytes], block_hash: bytes) -> None:
        """Raises LimitExceeded when what is held of this prefix does not fit into the share of pins."""
        guards = self._room.guards
        more = {IN_DRAM: 0, IN_NVME: 0}
        for digest in digests:
            namespace = self._known(digest)
            if namespace is not None:
                for bit, size in guards.unguarded_bytes(namespace, block_hash).items():
                    more[bit] += size
        for bit, name in TIERS:
            if more[bit] and guards.guarded_bytes[bit] + more[bit] > guards.limits[bit]:
                free = guards.limits[bit] - guards.guarded_bytes[bit]
                raise LimitExceeded(
                    f"this prefix would pin {short_size(more[bit])} more of {name}; of the "
                    f"{short_size(guards.limits[bit])} that pins may hold {short_size(free)} are left "
                    f"(retention.pinned_share_max = {self._share_max:g})"
                )


def _require_tenant(selector: str, block_hash: bytes, tenant: str) -> None:
    if selector or block_hash:
        raise BadRequest("a tenant together with a namespace or a prefix: only one of them is allowed")
    if len(tenant) > TENANT_CHARS_MAX:
        raise BadRequest(f"tenant of {len(tenant)} characters: at most {TENANT_CHARS_MAX} are allowed")
