"""Orders: what is to be warmed in a region, in its own bucket, and how far everybody is with it.

    orders/<id>              Order      put by whoever orders; read by daemons and mirrors every 15 s
    warming/<id>/<who>       Progress   put by each daemon (its writer's id) and each mirror ("mirror-<source>")

The id follows from what is ordered: who orders the same twice has ordered it once, and looks at the same progress. An order
is in force until its time is over or it is cancelled; `made_s` tells one life of an order from the next, so that progress
of an earlier one counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
import xxhash
from msgspec import Meta

from replication.constants import KIB
from replication.deleting import delete_each
from replication.formats.keeping import ring
from replication.formats.members import HEX_ID, Members, key_of, read_members
from replication.formats.ranges import Count, Rate, Size, Text, UnixS
from replication.formats.rules import any_fits
from replication.formats.sealed import Sealed
from replication.problems import Problems
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectMissing
from tiers.namespace_spec import NamespaceSpec

ORDER_BYTES_MAX: Final = 64 * KIB  # of an order, and of progress
ORDER_PATTERNS_MAX: Final = 256  # of models, and of tenants

ORDERS = "orders/"
PROGRESS = "warming/"
MIRROR = "mirror-"  # before the name of its source

_WHO = re.compile(r"[A-Za-z0-9._=+-]{1,80}")

To = Literal["dram", "nvme"]
ModelWords = Annotated[str, Meta(max_length=200, pattern=r"^[a-z0-9][a-z0-9._-]*(@[a-z0-9][a-z0-9._-]*)?\Z")]
_Patterns = Annotated[tuple[Text, ...], Meta(max_length=ORDER_PATTERNS_MAX)]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """models, tenants: patterns with * and ?, empty: all. budget_bytes: of records, for each daemon, 0: what fits. to: the tier.
    made_s, until_s: unix seconds. weights: published models, each NAME or NAME@REVISION: the order is about these, and about no
    KV. Older versions refuse such an order, by its id."""

    models: _Patterns = ()
    tenants: _Patterns = ()
    budget_bytes: Size = 0
    to: To = "dram"
    made_s: UnixS
    until_s: UnixS
    weights: Annotated[tuple[ModelWords, ...], Meta(max_length=ORDER_PATTERNS_MAX)] = ()

    @property
    def id(self) -> str:
        said = (sorted(set(self.models)), sorted(set(self.tenants)), self.budget_bytes, self.to)
        weights = (sorted(set(self.weights)),) if self.weights else ()
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((*said, *weights)))

    def names(self, spec: NamespaceSpec) -> bool:
        """Whether it is about this namespace."""
        return self.names_of(spec.fields.get("model", ""), spec.fields.get("tenant", ""))

    def names_of(self, model: str, tenant: str) -> bool:
        """The same of all namespaces of a model and a tenant."""
        return not self.weights and any_fits(self.models, model) and any_fits(self.tenants, tenant)


class Progress(msgspec.Struct, kw_only=True):
    """Of one daemon, or of one mirror, which copies.

    made_s: of the order that it is about. at_s: when this was written, unix seconds. packs, total_bytes: chosen; done_…: of these, held
    or copied by now, moved_bytes being what had to be loaded or copied. bytes_per_s: of what was moved, 0: nothing was. failed: packs
    that could not be had. full: the tier had no room for the rest. problem: why it is not done as ordered, "" if it is.
    """

    who: Annotated[str, Meta(max_length=80)]
    made_s: UnixS
    at_s: UnixS = 0.0
    packs: Count = 0
    done_packs: Count = 0
    total_bytes: Size = 0
    done_bytes: Size = 0
    moved_bytes: Size = 0
    bytes_per_s: Rate = 0.0
    failed: Count = 0
    full: bool = False
    ended: bool = False
    problem: str = ""

    @property
    def is_mirror(self) -> bool:
        return self.who.startswith(MIRROR)


ORDER_FORMAT: Final = Sealed(b"KVORDR1\n", Order, ORDER_BYTES_MAX, lambda order: ORDERS + order.id)
PROGRESS_FORMAT: Final = Sealed(b"KVPROG1\n", Progress, ORDER_BYTES_MAX)


async def put_order(objects: Objects, order: Order) -> Order:
    """Order it; what is in force then: one that is there already is prolonged, and not begun anew. Raises FormatUnknown, ObjectError."""
    there = await ORDER_FORMAT.there(objects, ORDERS + order.id)
    if there is not None and there.until_s > order.made_s:
        if there.until_s >= order.until_s:
            return there
        order = msgspec.structs.replace(order, made_s=there.made_s)
    await ORDER_FORMAT.put(objects, order)
    await ring(objects)
    return order


async def read_orders(
    objects: Objects, known: Mapping[str, Order], problems: Problems | None = None
) -> Members[Order]:
    """All that are there; `known` ones, by their keys, are not read again. What cannot be read is a problem, and left out.
    Raises ObjectError where there is no list."""

    async def read(info: ObjectInfo) -> Order:
        return known.get(key_of(info)) or await ORDER_FORMAT.fetch(objects, info.name)

    return await read_members(
        objects, ORDERS, HEX_ID, read, Problems(objects.where) if problems is None else problems
    )


async def cancel_order(objects: Objects, order_id: str) -> bool:
    """Take an order back; False if there is none. Raises ObjectError."""
    name = ORDERS + order_id
    try:
        await objects.head(name)
    except ObjectMissing:
        return False
    await objects.delete([name])
    await ring(objects)
    await _forget(objects, order_id)
    return True


async def clear_over(objects: Objects, now_s: float) -> None:
    """Remove orders whose time is over, and progress of orders that are gone. Raises ObjectError."""
    told = await objects.folders(PROGRESS)  # first: an order is put before its progress
    orders = await read_orders(objects, {})
    over = {order.id for _, order in orders.found if order.until_s <= now_s}
    await delete_each(objects.delete, [ORDERS + order_id for order_id in sorted(over)])
    there = {info.name[len(ORDERS) :] async for page in objects.list(ORDERS) for info in page}
    for order_id in filter(HEX_ID.fullmatch, told):
        if order_id not in there:  # one that cannot be understood is none of ours to end
            await _forget(objects, order_id)


async def put_progress(objects: Objects, order: Order, progress: Progress) -> None:
    """Raises ObjectError."""
    await objects.put(f"{PROGRESS}{order.id}/{progress.who}", PROGRESS_FORMAT.seal(progress))


async def read_progress(objects: Objects, order: Order, who: str) -> Progress | None:
    """What was told of this life of an order; None if nothing was that can be understood. Raises ObjectError."""
    found = await PROGRESS_FORMAT.hint(objects, f"{PROGRESS}{order.id}/{who}")
    return found if found is not None and (found.who, found.made_s) == (who, order.made_s) else None


async def read_all_progress(objects: Objects, order: Order) -> list[Progress]:
    """Of everybody who took this order. Raises ObjectError."""
    folder = f"{PROGRESS}{order.id}/"

    async def read(info: ObjectInfo) -> Progress | None:
        return await read_progress(objects, order, info.name[len(folder) :])

    members = await read_members(objects, folder, _WHO, read, Problems(objects.where))
    return [progress for _, progress in members.found if progress is not None]


async def _forget(objects: Objects, order_id: str) -> None:
    async for page in objects.list(f"{PROGRESS}{order_id}/"):
        await delete_each(objects.delete, [info.name for info in page])
