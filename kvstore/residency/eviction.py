"""Eviction: which blocks leave a level so that others can come.

    slots(DRAM)  ──▶ free slot? ─ no ─▶ victims of the same size class
    slot(device) ──▶                └─▶ else a whole slab of another size class (`takeover`)

Room is made when a transfer is submitted, and never before. "No room" is answered at once:
nothing here blocks. A block that waits to be written to NVMe is not dropped from DRAM while a
device can take it (`WriteQueue.keeps`), and a block that a user's pin guards is no victim.

A holder above its quota displaces only blocks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice, takewhile

from kvstore.constants import QUOTA_LOOKS_MAX
from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.policies.base import Policy
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Member
from kvstore.residency.residency import Residency
from kvstore.residency.takeover import Takeovers
from kvstore.retention.quotas import Holder

SLAB_TAKEOVER_EVERY = 64  # evictions between two looks at whether another size class is colder
EVICTED_IN_VAIN_MAX = 1024  # blocks that leave for one request beyond those that made room for it
QUOTA_TRIM_BLOCKS = 64  # blocks that leave between two yields after a quota was lowered

Line = tuple[int, Namespace | None]  # who waits for room together: a size class, or a namespace under a quota


class Eviction:
    """Hands out slots of the owned levels, evicting where it must."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._until_next_look = SLAB_TAKEOVER_EVERY  # of evictions
        self._spared: Block | None = None  # what the latest new block hangs on: not displaced for it
        self.no_room = outcomes.NOT_ADMITTED  # why the last slot of DRAM was refused
        self.takeovers = Takeovers(residency, self._leave_slab)

    def line(self, namespace: Namespace) -> Line:
        """Where loads of a namespace wait: one that its quota holds up must not hold up others."""
        quotas = self._residency.quotas
        limited = quotas and any(h.limits[IN_DRAM] is not None for h in quotas.holders(namespace))
        return namespace.slot_bytes, namespace if limited else None

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
        residency = self._residency
        self.no_room = outcomes.NOT_ADMITTED
        digest, size_bytes, columns = namespace.digest, namespace.record_bytes, namespace.columns
        keys = [digest + block_hash for block_hash in hashes]
        parents = [digest + parent if parent else b"", *keys[:-1]]
        limited = bool(residency.quotas)
        if limited:
            self._spare(namespace, parent)
        found: list[int] = []
        free = len(keys)  # slots to ask for: any number at first, then those that were freed
        in_vain = EVICTED_IN_VAIN_MAX  # victims in a slab that is being taken over make no room here
        while (at := len(found)) < len(keys) and in_vain > 0:
            if limited:
                if not self._displace_own(namespace, IN_DRAM):
                    self.no_room = outcomes.OVER_QUOTA
                    break
                free = 1  # the next one must count this one
            if free:
                end, free = at + free, 0
                got = residency.arena.reserve_run(keys[at:end], parents[at:end], size_bytes, owner, columns)
                residency.quotas.used(namespace, IN_DRAM, len(got))
                found += got
                if got:
                    in_vain += len(got)
                    continue
            wanted = hashes[at : at + 1 if limited else len(keys)]
            free = self._make_room(namespace, wanted, prompt)
            in_vain -= free
            if free < len(wanted):
                del keys[at + free :]  # nothing may leave for what is behind
        return found

    def _make_room(self, namespace: Namespace, incoming: Sequence[bytes], prompt: Prompt | None) -> int:
        """Free slots of DRAM for these blocks: returns how many, about; 0 if nothing may leave for the first one."""
        freed = 0
        while freed < len(incoming):
            more = self._evict_from_dram(namespace, incoming[freed], prompt, len(incoming) - freed)
            if not more:
                break
            freed += more
        return freed

    def _evict_from_dram(
        self, namespace: Namespace, incoming: bytes, prompt: Prompt | None, wanted: int
    ) -> int:
        """Free slots of this namespace's class: returns how many, about; up to `wanted`, 0 if nothing may leave.

        In front of NVMe every new block is let in: DRAM is its way there.
        """
        residency = self._residency
        policy, most = residency.dram_policy(namespace), wanted
        if prompt is not None and not residency.nvme and policy.is_choosy():
            most = 1
            if not policy.admits(namespace, incoming, prompt):
                residency.counters.not_admitted += 1
                return 0
        if self._until_next_look <= 0:
            self._until_next_look = SLAB_TAKEOVER_EVERY
            if self._others_are_colder(policy) and self._take_over_slab(namespace):
                return wanted
        may_stay = bool(residency.nvme) or bool(residency.guards)
        why = outcomes.EVICTED_DRAM
        for victim in policy.victims(namespace.digest + incoming):
            if may_stay and self._stays(victim):
                continue  # comes back to the policy when it was written, or could not be; when no pin guards it
            run = policy.together(victim, most)
            if may_stay:
                why = self._why_evicted(victim)
                run = list(takewhile(partial(self._goes_too, why), run))
            self._until_next_look -= len(run)
            self._evict(run, why)
            return len(run)
        return wanted if self._take_over_slab(namespace) else 0

    def _goes_too(self, why: int, block: Block) -> bool:
        return not self._stays(block) and self._why_evicted(block) == why

    def _stays(self, block: Block) -> bool:
        return self._residency.writes.keeps(block) or self._residency.guards.guards(block, IN_DRAM)

    def _evict(self, run: Sequence[Block], why: int) -> None:
        counters = self._residency.counters
        counters.evicted_dram += len(run)
        if self._residency.nvme:
            counters.lost_before_demote += sum(not block.where & IN_NVME for block in run)
        self._residency.left_dram(*run, why=why)

    def _why_evicted(self, block: Block) -> int:
        """The reason of a later miss if this block leaves DRAM now: why it is not on NVMe at least."""
        residency = self._residency
        if residency.nvme and not block.where & IN_NVME:
            if residency.quotas and residency.quotas.excess(block.namespace, IN_NVME):
                return outcomes.OVER_QUOTA
            if residency.writes.write_budget.limited and block not in residency.writes.refused:
                return outcomes.NOT_ADMITTED
        return outcomes.EVICTED_DRAM

    def _others_are_colder(self, policy: Policy) -> bool:
        """Whether another size class holds something unused for longer than our next victim."""
        own_s = policy.coldest_s()
        others_s = [
            coldest_s
            for other in self._residency.dram_policies()
            if other is not policy and (coldest_s := other.coldest_s()) is not None
        ]
        return own_s is not None and bool(others_s) and min(others_s) < own_s

    def _take_over_slab(self, namespace: Namespace) -> bool:
        """Begin to empty the cheapest slab of another size class, unless something in it is in use. Returns whether
        there is room now; a large slab takes a while."""
        self.takeovers.of_arena(namespace)
        return self._residency.arena.has_room(namespace.record_bytes)

    def _leave_slab(self, block: Block, bit: int) -> None:
        if bit == IN_DRAM:
            self._evict([block], self._why_evicted(block))
        else:
            self._residency.counters.evicted_nvme += 1
            self._residency.left_nvme(block)

    # -- devices --

    def slot_on(self, member: Member, namespace: Namespace, wanted: int) -> int | None:
        """A slot of this device for one more record, evicting up to `wanted` where it is full; None: no room."""
        slot = member.take(namespace.record_bytes)
        if slot is not None:
            return slot
        residency = self._residency
        policy = residency.nvme_policy(member, namespace)
        goes = partial(self._may_leave, member)
        victim = next(filter(goes, policy.victims()), None)
        if victim is None:
            return None
        run = list(takewhile(goes, policy.together(victim, wanted)))
        residency.counters.evicted_nvme += len(run)
        residency.left_nvme(*run)
        return member.take(namespace.record_bytes)

    def _may_leave(self, member: Member, block: Block) -> bool:
        return block.device == member.number and not self._residency.guards.guards(block, IN_NVME)

    # -- quotas --

    def admit_to_nvme(self, namespace: Namespace, parent: Block | None) -> bool:
        """Whether the quotas of a namespace let one more record in to NVMe; it counts as held from now on."""
        self._spared = parent
        if self._residency.quotas and not self._displace_own(namespace, IN_NVME):
            return False
        self._residency.quotas.used(namespace, IN_NVME, 1)
        return True

    def trim(self, holder: Holder, bit: int) -> bool:
        """Bring a holder whose quota was lowered nearer to it, by a few blocks. Returns whether some left."""
        self._spared = None
        before_bytes = holder.used[bit]
        self._displace(holder, bit, 0, QUOTA_TRIM_BLOCKS)
        return holder.used[bit] < before_bytes

    def _spare(self, namespace: Namespace, parent: bytes) -> None:
        """What comes next hangs on this one. Where that is being written, on what it hangs on itself."""
        above = namespace.blocks.get(parent)
        if above is not None or parent not in namespace.writing:
            self._spared = above

    def _displace_own(self, namespace: Namespace, bit: int) -> bool:
        """Make room for one more record in the quotas of a namespace; False if they do not allow it."""
        size = self._residency.slot_bytes(namespace, bit)
        holders = self._residency.quotas.holders(namespace)
        return all(self._displace(holder, bit, size, QUOTA_LOOKS_MAX) for holder in holders)

    def _displace(self, holder: Holder, bit: int, size_bytes: int, looks: int) -> bool:
        """Let a holder's coldest blocks leave a level until so many bytes more are within its quota."""
        coldest, residency = holder.coldest[bit], self._residency
        if not holder.excess(bit, size_bytes) or coldest is None:
            return True
        spared = False
        for block in islice(coldest.victims(), looks):
            if holder not in residency.quotas.holders(block.namespace):
                continue  # of a namespace whose tenant was named since
            if block is self._spared:
                spared = True
            elif not residency.guards.guards(block, bit) and not (
                bit == IN_DRAM and residency.writes.keeps(block)
            ):
                residency.counters.displaced += 1
                leave = residency.left_dram if bit == IN_DRAM else residency.left_nvme
                leave(block, why=outcomes.OVER_QUOTA)
            if not holder.excess(bit, size_bytes):
                break
        if spared and self._spared is not None:
            residency.settle(self._spared)
        return not holder.excess(bit, size_bytes)
