"""Quotas: how many bytes a tenant, or a namespace, may hold in each tier of this node.

    slot for tenant A ─▶ used + slot ≤ quota? ─ no ─▶ A's own coldest leaf leaves, again and again
                                                  └─▶ none may: refused (`over_quota`)

Bytes are whole slots. In DRAM a block counts from when its slot is handed out, on NVMe from
when its write is under way: so a quota holds at every moment, not only afterwards. A block
that is in both tiers counts in both. Usage is counted as blocks come and go, for everybody,
with or without a quota.

Who has a quota has an order of its own blocks, coldest first, beside the tier's policy: a
heap of leaves, put right when an entry surfaces, and rebuilt when most of it is outdated.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest

from kvstore.blocks import IN_DRAM, IN_NVME, PIN, Block
from kvstore.constants import NAMESPACES_MAX, QUOTA_SLICE_BLOCKS, QUOTA_STALE_ENTRIES_MIN
from kvstore.namespaces import Namespace


class Coldest:
    """The leaves of one holder in one tier, the one used longest ago first."""

    __slots__ = ("_bit", "_heap", "_queued", "_sequence")

    def __init__(self, bit: int) -> None:
        self._bit = bit
        self._heap: list[tuple[float, int, Block]] = []
        self._queued: dict[Block, int] = {}  # block -> number of its valid entry
        self._sequence = 0

    def may_leave(self, block: Block) -> None:
        """The block is held here and could be displaced now. Telling it twice is harmless."""
        if block not in self._queued and self._is_leaf(block):
            self._push(block)

    def left(self, block: Block) -> None:
        self._queued.pop(block, None)

    def victims(self) -> Iterator[Block]:
        """A block that is passed over comes back with `may_leave`."""
        while self._heap:
            touched_s, number, block = heapq.heappop(self._heap)
            if self._queued.get(block) != number:
                continue
            del self._queued[block]
            if not self._is_leaf(block):
                continue
            if block.touched_s != touched_s:
                self._push(block)
                continue
            yield block

    def _push(self, block: Block) -> None:
        self._sequence += 1
        self._queued[block] = self._sequence
        heapq.heappush(self._heap, (block.touched_s, self._sequence, block))
        if len(self._heap) > 2 * len(self._queued) + QUOTA_STALE_ENTRIES_MIN:
            self._heap = [entry for entry in self._heap if self._queued.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _is_leaf(self, block: Block) -> bool:
        return bool(block.where & self._bit) and block.where < PIN and not block.has_child_in(self._bit)


class Holder:
    """A namespace or a tenant. used: bytes by tier bit; limits: the quota, None where there is none."""

    __slots__ = ("coldest", "limits", "used")

    def __init__(self) -> None:
        self.used = [0] * (IN_NVME + 1)
        self.limits: list[int | None] = [None] * (IN_NVME + 1)
        self.coldest: list[Coldest | None] = [None] * (IN_NVME + 1)

    def excess(self, bit: int, more_bytes: int) -> int:
        """Bytes above the quota if so many came."""
        limit = self.limits[bit]
        return 0 if limit is None else max(0, self.used[bit] + more_bytes - limit)


class Quotas:
    """Usage of all holders, and the quotas in effect. `slot_bytes` of a namespace in a tier."""

    def __init__(self, slot_bytes: Callable[[Namespace, int], int]) -> None:
        self._slot_bytes = slot_bytes
        self._namespaces: dict[bytes, Holder] = {}
        self._tenants: dict[str, Holder] = {}
        self._holders: dict[Namespace, tuple[str, Holder, Holder, Sequence[int]]] = {}  # sizes by tier bit
        self._limited = 0  # holders with a quota
        self._filling: deque[Iterator[None]] = deque()  # orders that are still being filled

    def __bool__(self) -> bool:
        return self._limited > 0

    def used(self, namespace: Namespace, bit: int, records: int) -> None:
        """So many records (less than 0: fewer) of this namespace are in the tier."""
        _, own, tenant, sizes = self._holders.get(namespace) or self._link(namespace)
        size = records * sizes[bit]
        own.used[bit] += size
        tenant.used[bit] += size

    def named(self, namespace: Namespace) -> None:
        """The tenant of a namespace may be known only now."""
        linked = self._holders.get(namespace)
        if linked is None or linked[0] == tenant_of(namespace):
            return
        _, own, before, _ = linked
        del self._holders[namespace]
        after = self._link(namespace)[2]
        for bit in (IN_DRAM, IN_NVME):
            before.used[bit] -= own.used[bit]
            after.used[bit] += own.used[bit]
        if any(after.coldest):
            self._fill(after, [namespace])

    def holders(self, namespace: Namespace) -> tuple[Holder, Holder]:
        """Who answers for the blocks of this namespace: itself, and its tenant."""
        _, own, tenant, _ = self._holders.get(namespace) or self._link(namespace)
        return own, tenant

    def excess(self, namespace: Namespace, bit: int) -> bool:
        """Whether one more record of this namespace would be above a quota."""
        size = self._slot_bytes(namespace, bit)
        return any(holder.excess(bit, size) for holder in self.holders(namespace))

    def fitting(self, namespaces: Sequence[Namespace], bit: int) -> int | None:
        """How many blocks a tier may hold in all of these namespaces at once, None where no quota says so."""
        sizes: dict[Holder, int] = {}
        for namespace in namespaces:
            for holder in self.holders(namespace):
                sizes[holder] = sizes.get(holder, 0) + self._slot_bytes(namespace, bit)
        limits = [(holder.limits[bit], size) for holder, size in sizes.items()]
        return min((limit // size for limit, size in limits if limit is not None), default=None)

    def holder(self, namespace: str, tenant: str | None) -> Holder:
        """The holder that a rule names (namespace: digest in hex)."""
        if tenant is not None:
            return self._tenants.setdefault(tenant, Holder())
        return self._namespaces.setdefault(bytes.fromhex(namespace), Holder())

    def limit(self, holder: Holder, limits: dict[int, int | None], namespaces: Iterable[Namespace]) -> None:
        """Set a quota by tier bit, None for none. `namespaces`: all there are."""
        before = any(limit is not None for limit in holder.limits)
        is_new = False
        for bit, limit in limits.items():
            holder.limits[bit] = limit
            if limit is None:
                holder.coldest[bit] = None
            elif holder.coldest[bit] is None:
                holder.coldest[bit] = Coldest(bit)
                is_new = True
        self._limited += any(limit is not None for limit in holder.limits) - before
        if is_new:
            self._fill(holder, [n for n in namespaces if holder in self.holders(n)])

    def _fill(self, holder: Holder, namespaces: list[Namespace]) -> None:
        def slices() -> Iterator[None]:
            for namespace in namespaces:
                for at, block in enumerate(namespace.blocks.walk(), 1):
                    for coldest in holder.coldest:
                        if coldest is not None:
                            coldest.may_leave(block)
                    if at % QUOTA_SLICE_BLOCKS == 0:
                        yield

        work = slices()
        if next(work, work) is None:
            self._filling.append(work)

    def step(self) -> None:
        """Once a tick: a slice of filling the orders of new quotas."""
        if self._filling and next(self._filling[0], self) is self:
            self._filling.popleft()

    def prune(self, namespaces: Iterable[Namespace]) -> None:
        """Forget namespaces that were given up, now and then."""
        if len(self._holders) <= 2 * NAMESPACES_MAX:
            return
        known = set(namespaces)
        self._holders = {n: linked for n, linked in self._holders.items() if n in known}
        linked_to = {id(linked[1]) for linked in self._holders.values()}
        self._namespaces = {
            digest: holder
            for digest, holder in self._namespaces.items()
            if id(holder) in linked_to or any(limit is not None for limit in holder.limits)
        }
        linked_to = {id(linked[2]) for linked in self._holders.values()}
        self._tenants = {
            name: holder
            for name, holder in self._tenants.items()
            if id(holder) in linked_to or any(limit is not None for limit in holder.limits)
        }

    def may_leave(self, block: Block) -> None:
        """The block may have become displaceable; see `Room.settle`."""
        for holder in self.holders(block.namespace):
            for coldest in holder.coldest:
                if coldest is not None:
                    coldest.may_leave(block)

    def left(self, block: Block, bit: int) -> None:
        """A tier lost the block."""
        for holder in self.holders(block.namespace):
            coldest = holder.coldest[bit]
            if coldest is not None:
                coldest.left(block)

    def over(self, bit: int) -> Iterator[Holder]:
        """Holders that are above their quota now: it was lowered."""
        for holder in (*self._namespaces.values(), *self._tenants.values()):
            if holder.excess(bit, 0):
                yield holder

    def tenants(self, count: int) -> list[tuple[str, list[int]]]:
        """The tenants that hold most, and what they hold, in bytes by tier bit."""
        holding = [(name, holder.used) for name, holder in self._tenants.items() if any(holder.used)]
        return nlargest(count, holding, key=lambda item: sum(item[1]))

    def check(
        self, namespaces: Iterable[Namespace], on_the_way: dict[tuple[Namespace, int], int]
    ) -> list[str]:
        """Usage counted anew. on_the_way: records of a namespace with a place in a tier and not yet in the index."""
        problems: list[str] = []
        truth: dict[int, list[int]] = {}
        for namespace in namespaces:
            for holder in self.holders(namespace):
                sums = truth.setdefault(id(holder), [0] * (IN_NVME + 1))
                for bit in (IN_DRAM, IN_NVME):
                    held = sum(1 for block in namespace.blocks.values() if block.where & bit)
                    records = held + on_the_way.get((namespace, bit), 0)
                    sums[bit] += records * self._slot_bytes(namespace, bit)
        for name, holder in (*self._namespaces.items(), *self._tenants.items()):
            counted = truth.get(id(holder), [0] * (IN_NVME + 1))
            if counted != holder.used:
                who = name.hex() if isinstance(name, bytes) else repr(name)
                problems.append(f"quotas: {who}: counted {holder.used[1:]} bytes, found {counted[1:]}")
        return problems

    def _link(self, namespace: Namespace) -> tuple[str, Holder, Holder, Sequence[int]]:
        tenant = tenant_of(namespace)
        own = self._namespaces.setdefault(namespace.digest, Holder())
        sizes = 0, *(self._slot_bytes(namespace, bit) for bit in (IN_DRAM, IN_NVME))
        linked = tenant, own, self._tenants.setdefault(tenant, Holder()), sizes
        self._holders[namespace] = linked
        return linked


def tenant_of(namespace: Namespace) -> str:
    """The tenant that a namespace belongs to, as its engine named it; "" where it named none."""
    return namespace.spec.fields.get("tenant", "")
