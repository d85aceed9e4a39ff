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
from itertools import islice

from kvstore import index, outcomes
from kvstore.blocks import IN_ANY, IN_DRAM, IN_NVME, NO_SLOT, Block
from kvstore.constants import (
    DELETING_MAX,
    DEMOTING_MAX,
    DOOMED_MAX,
    GONE_MAX,
    SLAB_TAKEOVER_EVERY,
    UNDEMOTED_MAX,
)
from kvstore.counters import Counters
from kvstore.departed import Departed
from kvstore.endurance import Endurance
from kvstore.namespaces import Namespace, NamespaceRegistry
from kvstore.places import Places
from kvstore.policies.base import Policies, Policy
from kvstore.prompts import Prompt
from tiers.base import NAMESPACE_BYTES, Tier


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
        self.departed = Departed()
        self.endurance = endurance

    # -- where blocks are --

    def policy(self, bit: int, namespace: Namespace) -> Policy:
        """The policy of the size class that this namespace's records use in a tier."""
        known = self._by_namespace[bit].get(namespace.id)
        if known is not None:
            return known
        slot_bytes = namespace.slot_bytes
        if bit == IN_DRAM:
            slot_bytes = max(slot_bytes, self.arena.layout.slot_bytes_min)
        policy = self._policies.get((bit, slot_bytes))
        if policy is None:
            policy = self._policies[bit, slot_bytes] = self._family.make(bit)
        self._by_namespace[bit][namespace.id] = policy
        return policy

    def touched(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        """A request used these blocks of one namespace, in prompt order, or has just brought them."""
        if not run:
            return
        self._family.observe(run, prompt, now_s)
        for block in run:
            block.touched_s = now_s
        for bit in self._bits:
            here = [block for block in run if block.where & bit]
            if here:
                self.policy(bit, here[0].namespace).touched(here)

    def refused(self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, now_s: float) -> None:
        """A request brought these blocks, and they found no room or were not let in."""
        for block_hash in hashes:
            self.departed.note(namespace, block_hash, outcomes.NOT_ADMITTED)
        self._family.refused(namespace, hashes, prompt, now_s)

    def settle(self, *run: Block) -> None:
        """Let the policies have those of these blocks, all of one namespace, that may leave now."""
        for bit in self._bits if run else ():
            may_leave = self.policy(bit, run[0].namespace).may_leave
            for block in run:
                if block.where & bit and not block.pins and not block.has_child_in(bit):
                    may_leave(block)

    def unpin(self, *run: Block) -> None:
        """Somebody is done with these blocks, all of one namespace."""
        for block in run:
            block.pins -= 1
        self.settle(*run)

    def arrived_in_dram(self, namespace: Namespace, block_hash: bytes, parent: bytes, slot: int) -> Block:
        """The slot is READY and holds this block's bytes. `touched` and `settle` are the caller's."""
        block = index.arrived(namespace, block_hash, parent, IN_DRAM)
        block.slot = slot
        return block

    def promoted(self, block: Block, slot: int) -> None:
        """A known block was read into this slot, which is READY."""
        index.arrived(block.namespace, block.hash, b"", IN_DRAM)
        block.slot = slot
        self.settle(block)

    def arrived_in_nvme(self, block: Block) -> None:
        index.arrived(block.namespace, block.hash, b"", IN_NVME)
        self.settle(block)

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
            if self.deleting and block.key in self.deleting:  # the late delete would take the new row
                continue
            if self.endurance.admits(self._family.worth(block), block.namespace.slot_bytes):
                queue[block] = None
            else:
                self._counters.demote_not_admitted += 1
        self._shorten()

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
        """Queue again what NVMe refused, or could not be offered."""
        self.demoting.update(self.undemoted)
        self.undemoted.clear()
        self._shorten()

    def _shorten(self) -> None:
        """Beyond their limits the oldest of these blocks stay in DRAM only, and may be evicted."""
        while len(self.demoting) > DEMOTING_MAX:
            block, _ = self.demoting.popitem(last=False)
            self._counters.demotions_dropped += 1
            self.settle(block)
        while len(self.undemoted) > UNDEMOTED_MAX:
            self.undemoted.popitem(last=False)
            self._counters.demotions_dropped += 1

    def left_dram(self, block: Block, why: int = outcomes.EVICTED_DRAM) -> None:
        """Forget the DRAM copy and give its slot back. `why`: see `kvstore.outcomes`."""
        for waiting in (self.demoting, self.undemoted, self.unverified):
            if waiting:
                waiting.pop(block, None)
        slot, block.slot = block.slot, NO_SLOT
        self.arena.free(slot)
        self._left(block, IN_DRAM, why)

    def left_nvme(self, block: Block, why: int = outcomes.EVICTED_NVME) -> None:
        """Forget the NVMe copy; the caller deletes or dooms the row, or knows that it is gone."""
        if not self.nvme_ready and len(self.gone) < GONE_MAX:
            self.gone.add(block.key)
        self._left(block, IN_NVME, why)

    def doom(self, block: Block) -> None:
        """NVMe could not read or write this block: whatever row it has is to be deleted."""
        key = block.key
        if block.where & IN_NVME:
            self.left_nvme(block, outcomes.UNAVAILABLE)
        if key not in self.deleting:
            self._to_doom([key])

    def _to_doom(self, keys: Sequence[bytes]) -> None:
        self.doomed.update(dict.fromkeys(keys))
        while len(self.doomed) > DOOMED_MAX:  # its record stays, and is found again at the next start
            del self.doomed[next(iter(self.doomed))]
            self._counters.dooms_dropped += 1

    def _left(self, block: Block, bit: int, why: int) -> None:
        parent = block.parent
        policy = self.policy(bit, block.namespace)
        policy.left(block)
        index.left(block, bit)
        if not block.where:
            self.departed.note(block.namespace, block.hash, why)
            self._family.forgotten(block)
        if parent is not None and parent.where & bit and not parent.pins and not parent.has_child_in(bit):
            policy.may_leave(parent)

    # -- DRAM --

    def slot(
        self, namespace: Namespace, block_hash: bytes, parent: bytes, owner: int, prompt: Prompt | None = None
    ) -> int | None:
        """An arena slot in state WRITING, or None when there is no room.

        With a `prompt` the policy may answer that the block is not worth the room.
        """
        digest = namespace.digest
        parent_key = digest + parent if parent else b""
        slot = self.arena.reserve(digest + block_hash, parent_key, namespace.record_bytes, owner)
        if slot is None and self._evict_from_dram(namespace, block_hash, prompt):
            slot = self.arena.reserve(digest + block_hash, parent_key, namespace.record_bytes, owner)
        return slot

    def _evict_from_dram(self, namespace: Namespace, incoming: bytes, prompt: Prompt | None) -> bool:
        """Free one slot of this namespace's class; False if nothing may leave.

        In front of NVMe every new block is let in: DRAM is its way there.
        """
        policy = self.policy(IN_DRAM, namespace)
        if prompt is not None and self.nvme is None and not policy.admits(namespace, incoming, prompt):
            self._counters.not_admitted += 1
            return False
        self._evictions += 1
        if self._evictions % SLAB_TAKEOVER_EVERY == 0 and self._others_are_colder(policy):
            if self._take_over_slab(namespace):
                return True
        for block in policy.victims(namespace.digest + incoming):
            if self._is_kept(block):
                continue  # comes back to the policy when it was written, or could not be
            self._evict(block)
            return True
        return self._take_over_slab(namespace)

    def _is_kept(self, block: Block) -> bool:
        """Whether only DRAM has it and it will be written to NVMe as soon as it can."""
        if block.where & IN_NVME or self.nvme is None:
            return False
        return block in self.demoting or block in self.unverified

    def _evict(self, block: Block) -> None:
        self._counters.evicted_dram += 1
        why = outcomes.EVICTED_DRAM
        if not block.where & IN_NVME and self.nvme is not None:
            self._counters.lost_before_demote += 1
            if self.endurance.limited and block not in self.undemoted:
                why = outcomes.NOT_ADMITTED
        self.left_dram(block, why)

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
        for block in blocks:
            if block is not None:
                self._evict(block)
        return self.arena.has_room(namespace.record_bytes)

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
        while len(keys) < count and (block := next(policy.victims(), None)) is not None:
            keys.append(block.key)
            self._counters.evicted_nvme += 1
            self.left_nvme(block)
        return self._to_delete(keys or self._nvme_slab(namespace))

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
        for block in blocks:
            if block is not None and block.where & IN_NVME:
                self._counters.evicted_nvme += 1
                self.left_nvme(block)
        return keys

    def nvme_records(self) -> int:
        return self.nvme.stats().records if self.nvme is not None else 0
