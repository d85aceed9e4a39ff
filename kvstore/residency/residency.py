"""Residency: which block is in which level. The only writer of a block's state.

    arrived_in_dram ─┐                              ┌─▶ forest: bits, prefixes, ghosts
    arrived_on_nvme ─┼─▶ Block.where ── together ───┼─▶ policies: who may leave now
    left_dram, left_nvme, drop ─┘  with             ├─▶ quotas, pins of users, TTLs
    pin, unpin ──────┘                              ├─▶ what was evicted, and why
                                                    └─▶ journal, for KV events

Index, slots, policies and rules can never disagree, because nothing else changes a block. A caller
that needs one to stay calls `pin`, and `unpin` with the same blocks when it is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial

from kvstore.events.journal import Journal
from kvstore.health.write_budget import WriteBudget
from kvstore.index import forest
from kvstore.index.block import PIN, Block, Namespace
from kvstore.index.evicted import Evicted
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.index.prompts import Prompt
from kvstore.index.slots import Slots
from kvstore.ledger.counters import Counters
from kvstore.policies.base import Policies, Policy
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.levels import Member, Nvme
from kvstore.residency.write_queue import WriteQueue
from kvstore.retention.expiry import Expiry
from kvstore.retention.pins import Pins
from kvstore.retention.quotas import Quotas
from kvstore.steps import Background, Steps
from tiers.base import NAMESPACE_BYTES

AdoptedRow = tuple[bytes, bytes, int, int]  # hash, parent hash, slot, when it was stored


class Residency:
    """Where every block is. Called from the engine's thread only; nothing here blocks."""

    def __init__(
        self,
        arena: Slots,
        nvme: Nvme,
        namespaces: NamespaceRegistry,
        policies: Policies,
        counters: Counters,
        write_budget: WriteBudget,
    ) -> None:
        self.arena = arena
        self.nvme = nvme
        self.namespaces = namespaces
        self.counters = counters
        self.background = Background()
        self._spreading: set[Namespace] = set()  # whose blocks are being updated, because others came or went
        self.evicted = Evicted()
        self.guards = Pins(self.slot_bytes, self.settle, self.background)
        self.expiry = Expiry()
        self.quotas = Quotas(self.slot_bytes, self.background)
        self.policies = policies
        self.writes = WriteQueue(self, write_budget)
        self.unverified: OrderedDict[Block, None] = OrderedDict()  # adopted, checksum not yet compared
        self.journal: Journal | None = None  # of what comes and goes, where KV events are published
        self._dram_policies: dict[int, Policy] = {}  # by slot size
        self._of_namespace: dict[int, Policy] = {}  # the same, found faster

    # -- sizes and policies --

    def slot_bytes(self, namespace: Namespace, bit: int) -> int:
        """What one record of this namespace takes in a level."""
        if bit == IN_DRAM:
            return max(namespace.slot_bytes, self.arena.layout.slot_bytes_min)
        return self.nvme.slot_bytes(namespace)

    def dram_policy(self, namespace: Namespace) -> Policy:
        """The policy of the size class that this namespace's records use in DRAM."""
        known = self._of_namespace.get(namespace.id)
        if known is None:
            size = self.slot_bytes(namespace, IN_DRAM)
            known = self._dram_policies.get(size)
            if known is None:
                known = self._dram_policies[size] = self.policies.make(IN_DRAM)
            self._of_namespace[namespace.id] = known
        return known

    def nvme_policy(self, member: Member, namespace: Namespace) -> Policy:
        """The same of one device."""
        size = self.nvme.slot_bytes(namespace)
        policy = member.policies.get(size)
        if policy is None:
            policy = member.policies[size] = self.policies.make(IN_NVME)
        return policy

    def dram_policies(self) -> Sequence[Policy]:
        return list(self._dram_policies.values())

    def block_of(self, key: bytes) -> Block | None:
        """The block of a key that a tier named."""
        namespace = self.namespaces.of_key(key)
        return namespace.blocks.get(key[NAMESPACE_BYTES:]) if namespace is not None else None

    # -- uses --

    def touched(self, run: Sequence[Block], prompt: Prompt, now_s: float) -> None:
        """A request used these blocks of one namespace, in prompt order, or has just brought them."""
        if not run:
            return
        self.policies.observe(run, prompt, now_s)
        here = [block for block in run if block.where & IN_DRAM]
        if here:
            self.dram_policy(here[0].namespace).touched(here)
        for member in self.nvme.members:
            number = member.number
            there = [block for block in run if block.where & IN_NVME and block.device == number]
            if there:
                self.nvme_policy(member, there[0].namespace).touched(there)

    def pin(self, *run: Block) -> None:
        """The bytes of these blocks are in use: they stay where they are until `unpin`."""
        for block in run:
            block.where += PIN

    def unpin(self, *run: Block) -> None:
        """A use of these blocks, all of one namespace, is over."""
        for block in run:
            block.where -= PIN
        self.settle(*run)

    def settle(self, *run: Block) -> None:
        """Let the policies have those of these blocks, all of one namespace, that may leave now."""
        if not run:
            return
        guards = self.guards
        may_leave = self.dram_policy(run[0].namespace).may_leave
        for block in run:
            where, children = block.where, block.children
            if where >= PIN:
                continue
            below = children.where if children is not None else 0
            if where & IN_DRAM and not below & IN_DRAM and not (guards and guards.guards(block, IN_DRAM)):
                may_leave(block)
            if where & IN_NVME and not below & IN_NVME and not (guards and guards.guards(block, IN_NVME)):
                self.nvme_policy(self.nvme.members[block.device], block.namespace).may_leave(block)
        if self.quotas:
            for block in run:
                self.quotas.may_leave(block)

    def renewed(self, run: Collection[Block]) -> None:
        """The bytes of these blocks, whose time was over, are offered again: as if stored now, and so after a restart."""
        stored_s = int(self.expiry.now_s())
        for block in run:
            self.expiry.stored(block)
        self.arena.restamp([block.slot for block in run if block.where & IN_DRAM], stored_s)
        for member in self.nvme.members:
            there = [block for block in run if block.where & IN_NVME and block.device == member.number]
            if there and member.writable:
                keys = {block.place[1]: block.key for block in there}
                member.io.submit(partial(member.device.restamp, keys, stored_s), lambda _: None, failed=None)

    # -- coming --

    def arrived_in_dram(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes, slots: Sequence[int]
    ) -> list[Block]:
        """The slots are READY and hold the bytes of these blocks, each of which follows the one before; the
        first one follows `parent`. Slots of blocks that are in DRAM already are given back: readers of those
        go on. `touched` and `settle` are the caller's."""
        if self.guards and len(hashes) > 1:  # a guard looks at what hangs on a block when it comes
            alone = zip(hashes, [parent, *hashes], slots, strict=False)
            return [self.arrived_in_dram(namespace, [h], above, [slot])[0] for h, above, slot in alone]
        run, spare = forest.arrived_in_turn(namespace, hashes, parent, slots)
        self._update_below(namespace)
        self.give_up(namespace, spare)
        if self.expiry:
            for block in run:
                self.expiry.stored(block)
        came = [b for b, slot in zip(run, slots, strict=True) if slot not in spare] if spare else run
        self._came(came, IN_DRAM)
        return run

    def adopted_in_dram(
        self, namespace: Namespace, block_hash: bytes, parent: bytes, slot: int, stored_s: int
    ) -> None:
        """An earlier daemon's slot holds this block, stored at that time; not verified yet."""
        block = forest.arrived(namespace, block_hash, parent, IN_DRAM)
        block.put_in(slot)
        self._update_below(namespace)
        self.unverified[block] = None
        if self.expiry:
            self.expiry.adopted(block, stored_s)
        self.quotas.used(namespace, IN_DRAM, 1)
        if self.journal is not None:
            self.journal.came(IN_DRAM, [block])

    def promoted(self, block: Block, slot: int) -> None:
        """A known block was read into this slot, which is READY."""
        forest.arrived(block.namespace, block.hash, b"", IN_DRAM)
        block.put_in(slot)
        self._update_below(block.namespace)
        self._came([block], IN_DRAM)
        self.settle(block)

    def arrived_on_nvme(self, block: Block, member: Member, slot: int) -> None:
        """A known block was written to this slot of a device."""
        forest.arrived(block.namespace, block.hash, b"", IN_NVME)
        block.put_on(member.number, slot)
        self._update_below(block.namespace)
        self._came([block], IN_NVME)
        self.settle(block)

    def adopted_on_nvme(self, member: Member, namespace: Namespace, rows: Sequence[AdoptedRow]) -> None:
        """An earlier daemon's rows. A slot whose block has another one is given back. Policies hear of leaves that
        may get children with later rows, too: who chooses a victim looks at it again."""
        filed, ends = forest.load(namespace, rows, member.number)
        self._update_below(namespace)
        if self.expiry or None in filed:
            for block, (block_hash, _, slot, stored_s) in zip(filed, rows, strict=True):
                held = block or namespace.blocks[block_hash]
                is_new = block is not None and not block.where & IN_DRAM  # else the later row is right
                if self.expiry and (is_new or stored_s > self.expiry.stored_s(held)):
                    self.expiry.adopted(held, stored_s)
                if block is None:
                    member.give(slot)
        self.quotas.used(namespace, IN_NVME, len(filed) - filed.count(None))
        if self.journal is not None:
            self.journal.came(IN_NVME, [block for block in filed if block is not None])
        self.settle(*ends)

    def _update_below(self, namespace: Namespace) -> None:
        """Blocks below one that came or went learn whether they are ROOTED; many of them in the background."""
        if namespace.is_behind and namespace not in self._spreading:
            self._spreading.add(namespace)
            self.background.begin(self._update_steps(namespace))

    def _update_steps(self, namespace: Namespace) -> Steps[None]:
        yield from forest.spread_steps(namespace, self._hung)
        self._spreading.discard(namespace)

    def _hung(self, block: Block) -> None:
        """A block that came before hangs on another one now."""
        if self.expiry:
            self.expiry.hung(block)
        if self.guards:
            self.guards.came(block)

    def _came(self, run: Sequence[Block], bit: int) -> None:
        if self.journal is not None:
            self.journal.came(bit, run)
        if self.guards:
            for block in run:
                self.guards.came(block)

    # -- going --

    def left_dram(self, *run: Block, why: int = outcomes.EVICTED_DRAM) -> None:
        """Forget the DRAM copies of these blocks and give their slots back. They are one block, or several each
        of which is the parent of the one before. `why`: see `kvstore.protocol.outcomes`."""
        self.writes.forget(run)
        if self.unverified:
            for block in run:
                self.unverified.pop(block, None)
        self.arena.free_run([block.slot for block in run])
        self._left(run, IN_DRAM, self.dram_policy(run[0].namespace), why)

    def left_nvme(self, *run: Block, why: int = outcomes.EVICTED_NVME, for_good: bool = False) -> None:
        """The same of the NVMe copies, all on one device. for_good: a restart must not find them again."""
        member = self.nvme.members[run[0].device]
        for block in run:
            (member.drop if for_good else member.give)(block.place[1])
        self._left(run, IN_NVME, self.nvme_policy(member, run[0].namespace), why)

    def drop(self, block: Block, why: int) -> bool:
        """Forget a block in every level, for good; False if it is in use."""
        if block.pins:
            return False
        if why == outcomes.CLEARED:
            self.counters.cleared += 1
        else:
            self.counters.expired += 1
        if block.where & IN_NVME:
            self.left_nvme(block, why=why, for_good=True)
        if block.where & IN_DRAM:
            self.left_dram(block, why=why)
        return True

    def refused(
        self, namespace: Namespace, hashes: Sequence[bytes], prompt: Prompt, why: int, now_s: float
    ) -> None:
        """A request brought these blocks, and they found no room or were not let in."""
        self.evicted.note(namespace.names_of(hashes), why)
        self.policies.refused(namespace, hashes, prompt, now_s)

    def give_up(self, namespace: Namespace, slots: Sequence[int], is_lost: bool = False) -> None:
        """Slots of DRAM that nothing was committed to. is_lost: their writer may be writing still."""
        if slots:
            self.quotas.used(namespace, IN_DRAM, -len(slots))
            (self.arena.abandon_run if is_lost else self.arena.free_run)(slots)

    def _left(self, run: Sequence[Block], bit: int, policy: Policy, why: int) -> None:
        parent, namespace = run[-1].parent, run[0].namespace
        policy.left(run)
        forest.left(run, bit)
        self._update_below(namespace)
        if self.journal is not None:
            self.journal.left(bit, run)
        self.quotas.used(namespace, bit, -len(run))
        if self.guards:
            for block in run:
                self.guards.gone(block)
        if gone := [block for block in run if not block.where & IN_ANY]:
            if self.expiry:
                for block in gone:
                    self.expiry.gone(block)
            names = namespace.names_of([block.hash for block in gone])
            self.evicted.note(names, why)
            self.policies.forgotten(gone, names)
        if parent is not None and parent.where & bit:
            self.settle(parent)
