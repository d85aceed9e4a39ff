"""Nodes: what each daemon tells of itself in its region's bucket, every ten minutes, and soon when it has other problems.

    nodes/<writer>     Node: how much its tiers hold, how fast it loads from the bucket, and of the tokens that were asked for
                       lately, by model and tenant, how many the region had durable; how it is, by its own words; and which
                       tombstones it has carried out, at once

So whoever plans for a region, looks at all of its nodes, or waits until something is erased, needs nothing but its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from replication.constants import MIB, NODE_PROBLEMS_MAX, NODE_ROWS_MAX
from replication.errors import Damaged
from replication.formats.ranges import AgeS, Count, HexId, Rate, Size, Text, UnixS, Word
from replication.formats.sealed import Sealed
from replication.formats.segment import WRITER_NAME
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.together import together

NODE_READS_MAX: Final = 32  # at a time
TRAFFIC_TOKENS_MIN: Final = 10_000  # asked for: of less no share is stated
TRAFFIC_HALF_LIFE_S: Final = 24 * 3600.0  # after which a token that was asked for counts half

NODES = "nodes/"


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of prompts that were looked up, each counting half after TRAFFIC_HALF_LIFE_S; durable_tokens: of these, those whose
    prefix was in the bucket at that moment."""

    model: Text
    tenant: Text
    asked_tokens: Rate
    durable_tokens: Rate


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """A problem that a daemon knows of. level: problem or warning. since_s: unix seconds."""

    kind: Word
    subject: Text
    level: Word
    text: Text
    since_s: UnixS


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """How a daemon is. asked_tokens, hit_tokens: of the last quarter of an hour, engines' own caches aside."""

    host: Text
    version: Word
    up_s: AgeS
    sessions: Count
    dram_used_bytes: Size
    nvme_used_bytes: Size
    asked_tokens: Count
    hit_tokens: Count
    problems: Annotated[Sequence[Trouble], Meta(max_length=16 * NODE_PROBLEMS_MAX)] = ()


class NodeErased(msgspec.Struct, frozen=True, array_like=True):
    """How far a node is with a tombstone of this serial. in_use: blocks that go when they are given back. is_looking: not all was looked at."""

    tombstone: HexId
    serial: Count
    in_use: Count
    is_looking: bool

    @property
    def is_done(self) -> bool:
        return not self.in_use and not self.is_looking


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """writer: names the daemon, the same after each start. at_s: unix seconds, when this was written. …_bytes: capacity of the tier.
    load_bytes_per_s: from the bucket, 0: not known. erased: of the latest tombstones that are in force."""

    writer: Word
    at_s: UnixS
    dram_bytes: Size
    nvme_bytes: Size
    load_bytes_per_s: Rate = 0.0
    asked: Annotated[Sequence[Asked], Meta(max_length=16 * NODE_ROWS_MAX)] = ()
    condition: Condition | None = None
    erased: Annotated[Sequence[NodeErased], Meta(max_length=16 * NODE_ROWS_MAX)] = ()

    def holds_bytes(self, to: str) -> int:
        return self.dram_bytes if to == "dram" else self.nvme_bytes


class Unread(NamedTuple):
    """A node that told of itself, and what it said cannot be read. at_s: unix seconds, when it was written, by the store's clock."""

    writer: str
    at_s: float
    reason: str
    is_away: bool  # the store did not answer


class Nodes(NamedTuple):
    """All that ever told of themselves. unread: of those nothing is known, so nothing is right with them either."""

    read: list[Node]
    unread: list[Unread]


NODE_FORMAT: Final = Sealed(b"KVNODE1\n", Node, 1 * MIB, lambda node: NODES + node.writer)


async def read_nodes(objects: Objects) -> Nodes:
    """Raises ObjectError where there is no list, or the store answers for none of them."""
    infos = [info async for page in objects.list(NODES) for info in page]
    infos = [info for info in infos if WRITER_NAME.fullmatch(info.name[len(NODES) :])]
    found = list[Node | Unread | None]()

    async def one(info: ObjectInfo) -> Node | Unread | None:
        writer = info.name[len(NODES) :]
        try:
            return await NODE_FORMAT.fetch(objects, info.name)
        except ObjectMissing:
            return None
        except (ObjectUnavailable, ObjectRefused, Damaged) as error:
            return Unread(writer, info.modified_s, str(error), isinstance(error, ObjectUnavailable))

    for at in range(0, len(infos), NODE_READS_MAX):
        found += await together(map(one, infos[at : at + NODE_READS_MAX]))
    read = [node for node in found if isinstance(node, Node)]
    unread = [node for node in found if isinstance(node, Unread)]
    away = next((node for node in unread if node.is_away), None)
    if away is not None and not read:
        raise ObjectUnavailable(f"{NODES}{away.writer}: {away.reason}")
    return Nodes(read, unread)


async def silent_nodes(objects: Objects, before_s: float) -> list[ObjectInfo]:
    """What nodes have told last before then, by the clock of the store, but for those of a later version. Raises ObjectError."""
    infos = [info async for page in objects.list(NODES) for info in page]
    return [
        info
        for info in infos
        if info.modified_s < before_s and WRITER_NAME.fullmatch(info.name[len(NODES) :])
        if not await NODE_FORMAT.is_later(objects, info.name)
    ]


def durable_share(
    nodes: Iterable[Node],
    counts: Callable[[str, str], bool],
    is_here: Callable[[str, str], bool],
    now_s: float,
) -> float | None:
    """Of the tokens that these nodes were asked for lately, how many were durable; None where too little was asked for.

    counts: whether a model and a tenant count. is_here: whether anything of them is durable where it is asked for from now
    on. now_s: unix seconds.
    """
    asked_tokens = durable_tokens = 0.0
    for node in nodes:
        weight = faded(now_s - node.at_s)
        for row in node.asked:
            if counts(row.model, row.tenant):
                asked_tokens += weight * row.asked_tokens
                if is_here(row.model, row.tenant):
                    durable_tokens += weight * row.durable_tokens
    return durable_tokens / asked_tokens if asked_tokens >= TRAFFIC_TOKENS_MIN else None


def faded(age_s: float) -> float:
    """What is left of a count after so long."""
    return float(2.0 ** (-max(0.0, age_s) / TRAFFIC_HALF_LIFE_S))
