"""Quotas: how many bytes a tenant, or a namespace, may hold in each tier of this node.

    slot for tenant A ─▶ used + slot ≤ quota? ─ no ─▶ A's own coldest leaf leaves, again and again
                                                  └─▶ none may: refused (`over_quota`)

Bytes are whole slots. In DRAM a block counts from when its slot is handed out, on NVMe from
when its write is under way: so a quota holds at every moment, not only afterwards. A block
that is in both tiers counts in both. Usage is counted as blocks come and go, for everybody,
with or without a quota.

Who has a quota has an order of its own blocks, coldest first, beside the tier's policy: a
queue of leaves, put right when an entry surfaces, and swept a little at a time when most of it is outdated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest

from kvstore.constants import (
    NAMESPACES_MAX,
    QUOTA_SLICE_BLOCKS,
    QUOTA_STALE_ENTRIES_MIN,
    QUOTA_STALE_LOOKS_MAX,
    REUSE_SWEEP_LOOKS,
    STEP_BLOCKS,
    STEP_SLOW_BLOCKS,
)
from kvstore.index.block import PIN, Block, Namespace
from kvstore.policies.learned.leaves import Entry, Queue
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME

Records = Mapping[tuple[Namespace, int], int]  # how many, by namespace and tier bit


class Coldest:
    """The leaves of one holder in one tier, the one used longest ago first."""

    __slots__ = ("_bit", "_entries", "_entries_max", "_number", "_queue", "_sweep")

    def __init__(self, bit: int) -> None:
        self._bit = bit
        self._queue: Queue[Block] = Queue()
        self._number = 0
        self._entries = 0
        self._entries_max = QUOTA_STALE_ENTRIES_MIN
        self._sweep: Iterator[bool] | None = None

    def may_leave(self, block: Block) -> None:
        """The block is held here and could be displaced now. Telling it twice is harmless."""
        if self._is_leaf(block):
            self._push(block)

    def victims(self) -> Iterator[Block]:
        """A block that is passed over comes back with `may_leave`."""
        front = self._queue.front
        for _ in range(QUOTA_STALE_LOOKS_MAX):
            if not front:
                return
            stretch, block = front[-1].stretch, self._queue.pop()
            self._entries -= 1
            if not self._is_leaf(block):
                continue
            if block.stretch is not stretch:  # used since
                self._push(block)
                continue
            yield block

    def _push(self, block: Block) -> None:
        self._number += 1
        self._entries += 1
        self._queue.push(Entry(block.touched_s, self._number, block, block.stretch))
        if self._sweep is None and self._entries > self._entries_max:
            self._sweep = self._queue.sweep(self._is_true)
        for _ in range(REUSE_SWEEP_LOOKS if self._sweep is not None else 0):
            is_gone = next(self._sweep, None) if self._sweep is not None else None
            if is_gone is None:
                self._sweep, self._entries_max = None, 2 * self._entries + QUOTA_STALE_ENTRIES_MIN
                break
            self._entries -= is_gone

    def _is_true(self, entry: Entry[Block]) -> bool:
        return entry.item.stretch is entry.stretch and self._is_leaf(entry.item)

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

    def over(self, bit: int) -> Iterator[Holder]:
        """Holders that are above their quota now: it was lowered."""
        for holder in (*self._namespaces.values(), *self._tenants.values()):
            if holder.excess(bit, 0):
                yield holder

    def tenants(self, count: int) -> list[tuple[str, list[int]]]:
        """The tenants that hold most, and what they hold, in bytes by tier bit."""
        holding = [(name, holder.used) for name, holder in self._tenants.items() if any(holder.used)]
        return nlargest(count, holding, key=lambda item: sum(item[1]))

    def check_slices(
        self, namespaces: Iterable[Namespace], held: Records, coming: Records
    ) -> Iterator[list[str]]:
        """Usage compared with records counted anew, in slices: lines of what does not agree.

        held: in the index; coming: with a place in a tier and not in the index yet.
        """
        truth: dict[Holder, list[int]] = {}
        for number, namespace in enumerate(list(namespaces), 1):
            for holder in self.holders(namespace):
                sums = truth.setdefault(holder, [0] * (IN_NVME + 1))
                for bit in (IN_DRAM, IN_NVME):
                    records = held.get((namespace, bit), 0) + coming.get((namespace, bit), 0)
                    sums[bit] += records * self._slot_bytes(namespace, bit)
            if number % STEP_SLOW_BLOCKS == 0:
                yield []
        for number, (name, holder) in enumerate([*self._namespaces.items(), *self._tenants.items()], 1):
            counted = truth.get(holder, [0] * (IN_NVME + 1))
            if counted != holder.used:
                who = name.hex() if isinstance(name, bytes) else repr(name)
                yield [f"quotas: {who}: counted {holder.used[1:]} bytes, found {counted[1:]}"]
            elif number % STEP_BLOCKS == 0:
                yield []

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
