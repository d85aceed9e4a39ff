"""Quotas: how many bytes a tenant, or a namespace, may hold in each tier of this node.

    slot for tenant A ─▶ used + slot ≤ quota? ─ no ─▶ A's own coldest leaf leaves, again and again
                                                  └─▶ none may: refused (`over_quota`)

Bytes are whole slots. In DRAM a block counts from when its slot is handed out, on NVMe from
when its write is under way: so a quota holds at every moment, not only afterwards. A block
that is in both tiers counts in both. Usage is counted as blocks come and go, for all tenants,
with or without a quota.

A holder with a quota has an order of its own blocks, coldest leaf first, besides the tier's policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import chain

from kvstore.constants import NAMESPACES_MAX, STEP_BLOCKS, STEP_SLOW_BLOCKS
from kvstore.index.block import Block, Namespace
from kvstore.policies.lru import LeafLru
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.steps import Background, Steps

Records = Mapping[tuple[Namespace, int], int]  # how many, by namespace and tier bit


class Holder:
    """A namespace or a tenant. used: bytes by tier bit; limits: the quota, None where there is none."""

    __slots__ = ("coldest", "limits", "used")

    def __init__(self) -> None:
        self.used = [0] * (IN_NVME + 1)
        self.limits: list[int | None] = [None] * (IN_NVME + 1)
        self.coldest: list[LeafLru | None] = [None] * (IN_NVME + 1)

    @property
    def is_limited(self) -> bool:
        """Whether it has a quota."""
        return any(limit is not None for limit in self.limits)

    def excess(self, bit: int, more_bytes: int) -> int:
        """Bytes above the quota if so many came."""
        limit = self.limits[bit]
        return 0 if limit is None else max(0, self.used[bit] + more_bytes - limit)

    def may_leave(self, block: Block) -> None:
        """The block may have become displaceable. A second call is harmless."""
        for coldest in self.coldest:
            if coldest is not None and coldest.is_leaf(block, block.stretch):
                coldest.may_leave(block)


class Quotas:
    """Usage of all holders, and the quotas in effect. `slot_bytes` of a namespace in a tier."""

    def __init__(self, slot_bytes: Callable[[Namespace, int], int], background: Background) -> None:
        self._background = background
        self._slot_bytes = slot_bytes
        self._namespaces: dict[bytes, Holder] = {}
        self._tenants: dict[str | None, Holder] = {}  # None: not known yet whose
        self._holders: dict[
            Namespace, tuple[str | None, Holder, Holder, Sequence[int]]
        ] = {}  # sizes by tier bit
        self._limited = 0  # holders with a quota

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
        before = holder.is_limited
        is_new = False
        for bit, limit in limits.items():
            holder.limits[bit] = limit
            if limit is None:
                holder.coldest[bit] = None
            elif holder.coldest[bit] is None:
                holder.coldest[bit] = LeafLru(bit)
                is_new = True
        self._limited += holder.is_limited - before
        if is_new:
            self._fill(holder, list(namespaces))

    def _fill(self, holder: Holder, namespaces: list[Namespace]) -> None:
        """Put into order what is held already in those of these that are the holder's."""

        def steps() -> Steps[None]:
            looks = 0
            for namespace in namespaces:
                looks += 2 * STEP_BLOCKS // STEP_SLOW_BLOCKS  # for which a namespace counts
                for block in namespace.blocks.walk() if holder in self.holders(namespace) else ():
                    holder.may_leave(block)
                    looks += 1
                    if looks >= STEP_BLOCKS:
                        looks = 0
                        yield
                if looks >= STEP_BLOCKS:
                    looks = 0
                    yield

        self._background.begin(steps())

    def prune(self, namespaces: Iterable[Namespace]) -> None:
        """Forget namespaces that were given up, now and then."""
        if len(self._holders) <= 2 * NAMESPACES_MAX:
            return
        known = set(namespaces)
        self._holders = {n: linked for n, linked in self._holders.items() if n in known}
        linked = {holder for _, own, tenant, _ in self._holders.values() for holder in (own, tenant)}
        linked.update(holder for holder in self._all() if holder.is_limited)
        self._namespaces = {name: holder for name, holder in self._namespaces.items() if holder in linked}
        self._tenants = {name: holder for name, holder in self._tenants.items() if holder in linked}

    def may_leave(self, block: Block) -> None:
        """The block may have become displaceable; see `Room.settle`."""
        for holder in self.holders(block.namespace):
            holder.may_leave(block)

    def over_steps(self) -> Steps[list[tuple[Holder, int]]]:
        """Holders, and tiers, that are above their quota now: it was lowered, or rows were found."""
        over = []
        for at, holder in enumerate(list(self._all()), 1):
            over += [(holder, bit) for bit in (IN_DRAM, IN_NVME) if holder.excess(bit, 0)]
            if at % STEP_BLOCKS == 0:
                yield
        return over

    def tenants(self, count: int) -> list[tuple[str, list[int]]]:
        """The tenants that hold most, and what they hold, in bytes by tier bit."""
        all_of = self._tenants.items()
        holding = [(name, holder.used) for name, holder in all_of if name is not None and any(holder.used)]
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

    def _all(self) -> Iterator[Holder]:
        return chain(self._namespaces.values(), self._tenants.values())

    def _link(self, namespace: Namespace) -> tuple[str | None, Holder, Holder, Sequence[int]]:
        tenant = tenant_of(namespace)
        own = self._namespaces.setdefault(namespace.digest, Holder())
        sizes = 0, *(self._slot_bytes(namespace, bit) for bit in (IN_DRAM, IN_NVME))
        linked = tenant, own, self._tenants.setdefault(tenant, Holder()), sizes
        self._holders[namespace] = linked
        return linked


def tenant_of(namespace: Namespace) -> str | None:
    """The tenant that a namespace belongs to, as its engine named it; "" where it named none, None where only a tier knows the
    namespace: whose it is shows when its engine comes."""
    spec = namespace.spec
    return spec.fields.get("tenant", "") if spec.fields or spec.block_tokens else None
