"""Room: which blocks leave a tier so that others can come, and the books of where blocks are.

Everything that changes `Block.where` goes through here, so that index, arena, NVMe rows
and policies can never disagree.

    reserve/promote ──▶ slot(): free slot? ─ no ─▶ victims of the same size class
                                                └▶ else take over a whole slab of another

A block that waits to be written to NVMe is not dropped from DRAM while the NVMe tier is
working (`storing`): refusing a new block costs a recompute later, dropping this one costs the same
and the write besides. "No room" is answered at once; nothing here blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile

from kvstore import index, outcomes
from kvstore.blocks import IN_ANY, IN_DRAM, IN_NVME, PIN, Block
from kvstore.constants import (
    DELETING_MAX,
    DEMOTING_MAX,
    DOOMED_MAX,
    GONE_MAX,
    QUOTA_LOOKS_MAX,
    QUOTA_REQUEUE_BLOCKS,
    QUOTA_TRIM_BLOCKS,
    SLAB_TAKEOVER_EVERY,
    UNDEMOTED_MAX,
)
from kvstore.counters import Counters
from kvstore.departed import Departed
from kvstore.endurance import Endurance
from kvstore.expiry import Expiry
from kvstore.guards import Guards
from kvstore.namespaces import Namespace, NamespaceRegistry
from kvstore.places import Places
from kvstore.policies.base import Policies, Policy
from kvstore.prompts import Prompt
from kvstore.quotas import Holder, Quotas
from tiers.base import NAMESPACE_BYTES, Tier

Line = tuple[int, Namespace | None]  # who waits for room together: a size class, or a namespace under a quota


class Room:
    """Hands out arena slots and NVMe room, evicting where it must."""

    def __init__(
        self,
        arena: Places,
        nvme: Tier | None,
        namespaces: NamespaceRegistry,
        policies: Policies,
        counters: Counters,
        endurance: Endurance,
    ) -> None:
        self.arena = arena
        self.nvme = nvme
        self.nvme_ready = nvme is not None  # its free slots are known: it may be written
        self.storing = nvme is not None  # no breaker keeps blocks from being written
        self.demoting: OrderedDict[Block, None] = OrderedDict()  # in DRAM only, on the way to NVMe
        self.doomed: dict[bytes, None] = {}  # rows on NVMe that the index gave up, not yet deleted
        self.deleting: set[bytes] = set()  # … whose deletion is under way
        self.gone: set[bytes] = set()  # rows that went while the rows were being read at the start
        self.undemoted: OrderedDict[Block, None] = OrderedDict()  # NVMe refused them; may be dropped
        self.unverified: OrderedDict[Block, None] = OrderedDict()  # adopted, checksum not yet compared
        self._namespaces = namespaces
        self._family = policies
        self._bits = (IN_DRAM, IN_NVME) if nvme is not None else (IN_DRAM,)
        self._policies: dict[tuple[int, int], Policy] = {}
        self._by_namespace: dict[int, dict[int, Policy]] = {bit: {} for bit in self._bits}  # found faster
        self._counters = counters
        self._evictions = 0
        self._promised: set[Block] = set()  # of the budget of `endurance`, to be written or given back
        self.departed = Departed()
        self.endurance = endurance

        self.guards = Guards(self.slot_bytes, self.settle)
        self.expiry = Expiry()
        self.quotas = Quotas(self.slot_bytes)
        self.dropped_rows = False  # rows of dropped blocks are among the doomed
        self._no_room = outcomes.NOT_ADMITTED  # why the last slot was refused
        self._spared: Block | None = None  # what the latest new block hangs on: not displaced for it

    # -- where blocks are --

    def policy(self, bit: int, namespace: Namespace) -> Policy:
        """The policy of the size class that this namespace's records use in a tier."""
        known = self._by_namespace[bit].get(namespace.id)
        if known is not None:
            return known
        slot_bytes = self.slot_bytes(namespace, bit)
        policy = self._policies.get((bit, slot_bytes))
        if policy is None:
            policy = self._policies[bit, slot_bytes] = self._family.make(bit)
        self._by_namespace[bit][namespace.id] = policy
        return policy

    def slot_bytes(self, namespace: Namespace, bit: int) -> int:
        """What one record of this namespace takes in a tier."""
        if bit == IN_DRAM:
            return max(namespace.slot_bytes, self.arena.layout.slot_bytes_min)
        return max(namespace.slot_bytes, self.nvme.slot_bytes_min if self.nvme is not None else 0)

    def line(self, namespace: Namespace) -> Line:
        """Where loads of a namespace wait: one that its quota holds up must not hold up others."""
        limited = self.quotas and any(h.limits[IN_DRAM] is not None for h in self.quotas.holders(namespace))
        return namespace.slot_bytes, namespace if limited else None

    def touched(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        """A request used these blocks of one namespace, in prompt order, or has just brought them."""
        if not run:
            return
        self._family.observe(run, prompt, now_s)
        for bit in self._bits:
            here = [block for block in run if block.where & bit]
            if here:
                self.policy(bit, here[0].namespace).touched(here)

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        """A request brought these blocks, and they found no room or were not let in."""
        self.departed.note(namespace.names_of(hashes), self._no_room)
        self._family.refused(namespace, hashes, prompt, now_s)

    def settle(self, *run: Block) -> None:
        """Let the policies have those of these blocks, all of one namespace, that may leave now."""
        for bit in self._bits if run else ():
            may_leave = self.policy(bit, run[0].namespace).may_leave
            for block in run:
                children = block.children
                if block.where & bit and block.where < PIN and (children is None or not children.where & bit):
                    if not (self.guards and self.guards.guards(block, bit)):
                        may_leave(block)
        if self.quotas:
            for block in run:
                self.quotas.may_leave(block)

    def unpin(self, *run: Block) -> None:
        """Somebody is done with these blocks, all of one namespace."""
        for block in run:
            block.where -= PIN
        self.settle(*run)

    def arrived_in_dram(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes, slots: Sequence[int]
    ) -> list[Block]:
        """The slots are READY and hold the bytes of these blocks, each of which follows the one before; the
        first one follows `parent`. `touched` and `settle` are the caller's."""
        if self.guards and len(hashes) > 1:  # a guard looks at what hangs on a block when it comes
            alone = zip(hashes, [parent, *hashes], slots, strict=False)
            return [self.arrived_in_dram(namespace, [h], above, [slot])[0] for h, above, slot in alone]
        run = index.arrived_in_turn(namespace, hashes, parent, IN_DRAM)
        for block, slot in zip(run, slots, strict=True):
            block.put_in(slot)
        if self.expiry:
            for block in run:
                self.expiry.stored(block)
        self._came(*run)
        return run

    def adopted(self, block: Block, slot: int) -> None:
        """An earlier daemon's slot holds this block; not verified yet."""
        block.put_in(slot)
        self.unverified[block] = None
        self.quotas.used(block.namespace, IN_DRAM, 1)

    def promoted(self, block: Block, slot: int) -> None:
        """A known block was read into this slot, which is READY."""
        index.arrived(block.namespace, block.hash, b"", IN_DRAM)
        block.put_in(slot)
        self._came(block)
        self.settle(block)

    def arrived_in_nvme(self, block: Block) -> None:
        index.arrived(block.namespace, block.hash, b"", IN_NVME)
        self._came(block)
        self.settle(block)

    def _came(self, *run: Block) -> None:
        if self.guards:
            for block in run:
                self.guards.came(block)

    def queue_demotion(self, *run: Block) -> None:
        """Have blocks written down to NVMe, as far as they are in DRAM only and known to be true, and
        within what may be written."""
        if self.nvme is None:
            return
        queue = self.demoting if self.storing else self.undemoted
        for block in run:
            if block.where & IN_ANY != IN_DRAM or block in self.unverified:
                continue
            if block in self.demoting or block in self.undemoted:
                continue
            if self.endurance.admits(self._family.worth(block), block.namespace.slot_bytes):
                queue[block] = None
                if self.endurance.limited:
                    self._promised.add(block)
            else:
                self._counters.demote_not_admitted += 1
        self._shorten()

    def forget_written(self) -> None:
        """The rows are in the index: what they show to be on NVMe need not be written there."""
        for queue in (self.demoting, self.undemoted):
            for block in [block for block in queue if block.where & IN_NVME]:
                del queue[block]
                self._waive(block)
                self.settle(block)

    def offer_again(self, run: Sequence[Block]) -> None:
        """These blocks were used: those that were not let in to NVMe may be now."""
        if self.endurance.limited:
            self.queue_demotion(*run)

    def put_off(self, blocks: Sequence[Block]) -> None:
        """NVMe refused these blocks, or cannot be offered them now: they may leave DRAM."""
        for block in blocks:
            self.demoting.pop(block, None)
            self.undemoted[block] = None
        self._shorten()
        for block in blocks:
            self.settle(block)

    def requeue(self) -> None:
        """Queue again what NVMe refused, or could not be offered; under a quota, that may refuse them all, some."""
        if not self.quotas:
            self.demoting.update(self.undemoted)
            self.undemoted.clear()
        else:
            self._requeue_under_quotas()
        self._shorten()

    def _requeue_under_quotas(self) -> None:
        left = QUOTA_REQUEUE_BLOCKS
        limited: dict[Namespace, bool] = {}
        for block in list(self.undemoted):
            space = block.namespace
            if space not in limited:
                limited[space] = any(h.limits[IN_NVME] is not None for h in self.quotas.holders(space))
            left -= limited[space]
            if left >= 0 or not limited[space]:
                del self.undemoted[block]
                self.demoting[block] = None

    def _shorten(self) -> None:
        """Beyond their limits the oldest of these blocks stay in DRAM only, and may be evicted."""
        while len(self.demoting) > DEMOTING_MAX:
            block, _ = self.demoting.popitem(last=False)
            self._waive(block)
            self._counters.demotions_dropped += 1
            self.settle(block)
        while len(self.undemoted) > UNDEMOTED_MAX:
            block, _ = self.undemoted.popitem(last=False)
            self._waive(block)
            self._counters.demotions_dropped += 1

    def over_quota(self, block: Block) -> None:
        """The quotas of this block do not let it in to NVMe: it may leave DRAM. It is offered again, later; where
        writes have a budget, which others can use now, when it is used again."""
        self.demoting.pop(block, None)
        if self.endurance.limited:
            self._waive(block)
            self.settle(block)
        else:
            self.put_off([block])

    def wrote(self, block: Block) -> None:
        """The block is on NVMe: it waits in no queue, and what was promised of the budget is spent."""
        self.demoting.pop(block, None)
        self.undemoted.pop(block, None)  # dropped from the other one during its write, and offered again
        self.endurance.wrote(block.namespace.slot_bytes, block in self._promised)
        self._promised.discard(block)

    def _waive(self, block: Block) -> None:
        if block in self._promised:
            self._promised.discard(block)
            self.endurance.waive(block.namespace.slot_bytes)

    def left_dram(self, *run: Block, why: int = outcomes.EVICTED_DRAM) -> None:
        """Forget the DRAM copies of these blocks and give their slots back. They are one block, or several each
        of which is the parent of the one before. `why`: see `kvstore.outcomes`."""
        for waiting in (self.demoting, self.undemoted, self.unverified):
            if waiting:
                for block in run:
                    waiting.pop(block, None)
        if self._promised:
            for block in run:
                self._waive(block)
        free = self.arena.free
        for block in run:
            free(block.take_out())
        self._left(run, IN_DRAM, why)

    def left_nvme(self, *run: Block, why: int = outcomes.EVICTED_NVME) -> None:
        """The same of the NVMe copies; the caller deletes or dooms the rows, or knows that they are gone."""
        if not self.nvme_ready and len(self.gone) < GONE_MAX:
            self.gone.update(block.key for block in run)
        self._left(run, IN_NVME, why)

    def doom(self, block: Block) -> None:
        """NVMe could not read or write this block: whatever row it has is to be deleted."""
        key = block.key
        if block.where & IN_NVME:
            self.left_nvme(block, why=outcomes.UNAVAILABLE)
        if key not in self.deleting:
            self._to_doom([key])

    def _to_doom(self, keys: Sequence[bytes]) -> None:
        self.doomed.update(dict.fromkeys(keys))
        while len(self.doomed) > DOOMED_MAX:  # its record stays, and is found again at the next start
            del self.doomed[next(iter(self.doomed))]
            self._counters.dooms_dropped += 1

    def _left(self, run: Sequence[Block], bit: int, why: int) -> None:
        parent, namespace = run[-1].parent, run[0].namespace
        policy = self.policy(bit, namespace)
        policy.left(run)
        index.left(run, bit)
        self.quotas.used(namespace, bit, -len(run))
        limited, guarded = bool(self.quotas), bool(self.guards)
        if limited:
            for block in run:
                self.quotas.left(block, bit)
        if guarded:
            for block in run:
                self.guards.gone(block)
        if gone := [block for block in run if not block.where & IN_ANY]:
            if self.expiry:
                for block in gone:
                    self.expiry.gone(block)
            names = namespace.names_of([block.hash for block in gone])
            self.departed.note(names, why)
            self._family.forgotten(gone, names)
        if parent is not None and parent.where & bit and parent.where < PIN and not parent.has_child_in(bit):
            if not (guarded and self.guards.guards(parent, bit)):
                policy.may_leave(parent)
            if limited:
                self.quotas.may_leave(parent)

    # -- DRAM --

    def slots(
        self,
        namespace: Namespace,
        hashes: Sequence[bytes],
        parent: bytes,
        owner: int,
        prompt: Prompt | None = None,
    ) -> list[int]:
        """Arena slots in state WRITING for these blocks, up to the first that finds no room. Each follows the one
        before, the first one `parent`. With a `prompt` the policy may answer that one is not worth the room.
        """
        reserve, digest, size_bytes = self.arena.reserve, namespace.digest, namespace.record_bytes
        parent_key = digest + parent if parent else b""
        self._no_room = outcomes.NOT_ADMITTED
        found: list[int] = []
        limited = bool(self.quotas)
        if limited:
            self._spare(namespace, parent)
        for at, block_hash in enumerate(hashes):
            if limited and not self._displace_own(namespace, IN_DRAM):
                self._no_room = outcomes.OVER_QUOTA
                break
            key = digest + block_hash
            slot = reserve(key, parent_key, size_bytes, owner)
            if slot is None and self._evict_from_dram(namespace, block_hash, prompt, len(hashes) - at):
                slot = reserve(key, parent_key, size_bytes, owner)
            if slot is None:
                break
            found.append(slot)
            parent_key = key
            if limited:  # the next one must count it
                self.quotas.used(namespace, IN_DRAM, 1)
        if found and not limited:
            self.quotas.used(namespace, IN_DRAM, len(found))
        return found

    def _spare(self, namespace: Namespace, parent: bytes) -> None:
        """What comes next hangs on this one. Where that is being written, on what it hangs on itself."""
        above = namespace.blocks.get(parent)
        if above is not None or parent not in namespace.writing:
            self._spared = above

    def give_up(self, namespace: Namespace, slots: Sequence[int], free: bool = True) -> None:
        """Slots that nothing was committed to. Not `free`: somebody may write to them still."""
        self.quotas.used(namespace, IN_DRAM, -len(slots))
        if free:
            for slot in slots:
                self.arena.free(slot)

    def _evict_from_dram(
        self, namespace: Namespace, incoming: bytes, prompt: Prompt | None, wanted: int
    ) -> bool:
        """Free a slot of this namespace's class, or up to `wanted` at once; False if nothing may leave.

        In front of NVMe every new block is let in: DRAM is its way there.
        """
        policy = self.policy(IN_DRAM, namespace)
        if prompt is not None and self.nvme is None and policy.is_choosy():
            wanted = 1
            if not policy.admits(namespace, incoming, prompt):
                self._counters.not_admitted += 1
                return False
        self._evictions += 1
        if self._evictions % SLAB_TAKEOVER_EVERY == 0 and self._others_are_colder(policy):
            if self._take_over_slab(namespace):
                return True
        until_next_look = SLAB_TAKEOVER_EVERY - self._evictions % SLAB_TAKEOVER_EVERY
        may_stay = self.nvme is not None or bool(self.guards)
        why = outcomes.EVICTED_DRAM
        for victim in policy.victims(namespace.digest + incoming):
            if may_stay and self._stays(victim):
                continue  # comes back to the policy when it was written, or could not be; when no pin guards it
            run = policy.together(victim, min(wanted, until_next_look))
            if may_stay:
                why = self._why_evicted(victim)
                run = list(takewhile(partial(self._goes_too, why), run))
            self._evictions += len(run) - 1
            self._evict(run, why)
            return True
        return self._take_over_slab(namespace)

    def _goes_too(self, why: int, block: Block) -> bool:
        return not self._stays(block) and self._why_evicted(block) == why

    def _stays(self, block: Block) -> bool:
        return self._is_kept(block) or self.guards.guards(block, IN_DRAM)

    def _is_kept(self, block: Block) -> bool:
        """Whether only DRAM has it and it will be written to NVMe as soon as it can."""
        if block.where & IN_NVME or self.nvme is None:
            return False
        return block in self.demoting or block in self.unverified

    def _evict(self, run: Sequence[Block], why: int) -> None:
        self._counters.evicted_dram += len(run)
        if self.nvme is not None:
            self._counters.lost_before_demote += sum(not block.where & IN_NVME for block in run)
        self.left_dram(*run, why=why)

    def _why_evicted(self, block: Block) -> int:
        """What a later miss is told if this block leaves DRAM now: why it is not on NVMe at least."""
        if self.nvme is not None and not block.where & IN_NVME:
            if self.quotas and self.quotas.excess(block.namespace, IN_NVME):
                return outcomes.OVER_QUOTA
            if self.endurance.limited and block not in self.undemoted:
                return outcomes.NOT_ADMITTED
        return outcomes.EVICTED_DRAM

    def _others_are_colder(self, policy: Policy) -> bool:
        """Whether another size class holds something unused for longer than our next victim."""
        own_s = policy.coldest_s()
        others_s = [
            coldest_s
            for (bit, _), other in self._policies.items()
            if bit == IN_DRAM and other is not policy and (coldest_s := other.coldest_s()) is not None
        ]
        return own_s is not None and bool(others_s) and min(others_s) < own_s

    def _take_over_slab(self, namespace: Namespace) -> bool:
        """Empty the cheapest slab of another size class, if nothing in it is in use."""
        blocks = [
            self.block_of(self.arena.record(slot).key) for slot in self.arena.reclaim(namespace.record_bytes)
        ]
        if not blocks or any(b is None or b.pins or self._is_kept(b) for b in blocks):
            return False
        if self._must_spare(IN_DRAM, blocks, namespace):
            return False
        for block in blocks:
            if block is not None:
                self._counters.evicted_pinned += self.guards.guards(block, IN_DRAM)
                self._evict([block], self._why_evicted(block))
        return self.arena.has_room(namespace.record_bytes)

    def _must_spare(self, bit: int, slab: Sequence[Block | None], namespace: Namespace) -> bool:
        """Whether a pin guards some of this slab. Not for a record size without a slab of its own, or with
        pinned blocks only: it would find no room for ever, and pins must not stop all new blocks."""
        if not self.guards or not any(b is not None and self.guards.guards(b, bit) for b in slab):
            return False
        tier = self.arena if bit == IN_DRAM else self.nvme
        size = self.slot_bytes(namespace, bit)
        own = self.guards.records(namespace, bit)
        return tier is not None and any(c.slot_bytes == size and c.total > own for c in tier.stats().classes)

    def block_of(self, key: bytes) -> Block | None:
        """The block of a key that a tier named."""
        namespace = self._namespaces.of_key(key)
        return namespace.blocks.get(key[NAMESPACE_BYTES:]) if namespace is not None else None

    # -- NVMe --

    def nvme_victims(self, namespace: Namespace, count: int) -> list[bytes]:
        """Keys to delete from NVMe so that `count` records of this namespace find room.

        The index forgets them at once; the caller deletes their rows before it writes.
        """
        if len(self.deleting) >= DELETING_MAX:
            return []
        keys = list(islice(self.doomed, count))
        policy = self.policy(IN_NVME, namespace)
        while len(keys) < count and (victim := self._nvme_victim(policy)) is not None:
            run = list(takewhile(self._may_leave_nvme, policy.together(victim, count - len(keys))))
            keys += [block.key for block in run]
            self._counters.evicted_nvme += len(run)
            self.left_nvme(*run)
        return self._to_delete(keys or self._nvme_slab(namespace))

    def _nvme_victim(self, policy: Policy) -> Block | None:
        return next(filter(self._may_leave_nvme, policy.victims()), None)

    def _may_leave_nvme(self, block: Block) -> bool:
        return not self.guards.guards(block, IN_NVME)

    def deleted(self, keys: list[bytes], done: bool) -> None:
        """What became of keys that `nvme_victims` named; those that stay are tried again."""
        self.deleting.difference_update(keys)
        if not done:
            self._to_doom(keys)

    def _to_delete(self, keys: list[bytes]) -> list[bytes]:
        for key in keys:
            self.doomed.pop(key, None)
        self.deleting.update(keys)
        return keys

    def _nvme_slab(self, namespace: Namespace) -> list[bytes]:
        """Everything in the cheapest slab of another size class; nothing if any of it is in use."""
        keys = self.nvme.reclaim(namespace.record_bytes) if self.nvme is not None else []
        blocks = [self.block_of(key) for key in keys]
        if any(block is not None and block.pins for block in blocks) or not self.deleting.isdisjoint(keys):
            return []
        if self._must_spare(IN_NVME, blocks, namespace):
            return []
        for block in blocks:
            if block is not None and block.where & IN_NVME:
                self._counters.evicted_nvme += 1
                self._counters.evicted_pinned += self.guards.guards(block, IN_NVME)
                self.left_nvme(block)
        return keys

    # -- retention --

    def drop(self, block: Block, why: int) -> bool:
        """Forget a block in every tier; False if somebody uses it now."""
        if block.pins:
            return False
        self._counters.expired += 1
        if block.where & IN_NVME:
            self._give_up_row(block, why)
        if block.where & IN_DRAM:
            self.left_dram(block, why=why)
        return True

    def has_row_to_delete(self, key: bytes) -> bool:
        """Whether this record was given up and is on NVMe still."""
        return key in self.doomed or key in self.deleting

    def rows_to_delete(self, count: int) -> list[bytes]:
        """Doomed rows to delete now; `deleted` must be told. None while the rows are being read at the start."""
        if not self.nvme_ready:
            return []
        keys = self._to_delete(list(islice(self.doomed, count)))
        self.dropped_rows = bool(self.doomed)
        return keys

    def admit_to_nvme(self, batch: Sequence[Block]) -> tuple[int, list[bytes]]:
        """How many of these blocks of one namespace may be written, for its quotas, and the keys to delete
        before. They count as held from now on."""
        namespace = batch[0].namespace
        if not self.quotas:
            self.quotas.used(namespace, IN_NVME, len(batch))
            return len(batch), []
        keys: list[bytes] = []
        self._spared = batch[0].parent
        admitted = 0
        while admitted < len(batch) and self._displace_own(namespace, IN_NVME, keys):
            self.quotas.used(namespace, IN_NVME, 1)
            admitted += 1
        return admitted, self._to_delete(keys)

    def trim(self, holder: Holder, bit: int) -> None:
        """Bring a holder whose quota was lowered nearer to it."""
        keys: list[bytes] = []
        self._spared = None
        self._displace(holder, bit, 0, keys, QUOTA_TRIM_BLOCKS)
        self.not_deleted(keys)

    def not_deleted(self, keys: list[bytes]) -> None:
        """Rows that the index gave up, and that nobody deletes yet: `Retention` will."""
        if keys:
            self.deleted(keys, done=False)
            self.dropped_rows = True

    def _displace_own(self, namespace: Namespace, bit: int, keys: list[bytes] | None = None) -> bool:
        """Make room for one more record in the quotas of a namespace; False if they do not allow it. `keys`
        collects the rows to delete."""
        size = self.slot_bytes(namespace, bit)
        rows = [] if keys is None else keys
        holders = self.quotas.holders(namespace)
        return all(self._displace(holder, bit, size, rows, QUOTA_LOOKS_MAX) for holder in holders)

    def _displace(self, holder: Holder, bit: int, size_bytes: int, keys: list[bytes], looks: int) -> bool:
        """Let a holder's coldest blocks leave a tier until so many bytes more are within its quota."""
        coldest = holder.coldest[bit]
        if not holder.excess(bit, size_bytes) or coldest is None:
            return True
        spared = False
        for block in islice(coldest.victims(), looks):
            if block is self._spared:
                spared = True
            elif not self.guards.guards(block, bit) and not (bit == IN_DRAM and self._is_kept(block)):
                self._counters.displaced += 1
                if bit == IN_DRAM:
                    self.left_dram(block, why=outcomes.OVER_QUOTA)
                else:
                    keys.append(block.key)
                    self.left_nvme(block, why=outcomes.OVER_QUOTA)
            if not holder.excess(bit, size_bytes):
                break
        if spared and self._spared is not None:
            self.settle(self._spared)
        return not holder.excess(bit, size_bytes)

    def _give_up_row(self, block: Block, why: int) -> None:
        key = block.key
        self.left_nvme(block, why=why)
        self.dropped_rows = True
        if key not in self.deleting:
            self.doomed[key] = None

    def nvme_records(self) -> int:
        return self.nvme.stats().records if self.nvme is not None else 0
