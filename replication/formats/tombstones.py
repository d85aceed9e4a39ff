"""Tombstones: what is erased, in the region's own bucket, so that nobody keeps it, brings it back or copies it.

    tombstones/<id>         a tenant │ namespaces │ in them the prefixes that go on behind a block     + until when it is watched for
    behind/<id>/<checksum>  of a prefix: blocks behind it that were found, so that what hangs on them is known when they are gone;
                            and links: which blocks of packs that went stay alive, and on what these hang

Deletes are never copied between regions; a tombstone is. It forbids what it names until its grace is over, whatever
the clocks of those say who stored it: so nothing that was erased comes back from a node that was away, or from a
region that was. What is computed anew meanwhile is served by the tiers of its node, and is not persisted.

The same is erased again by the same tombstone with a higher serial: whoever knows a lower one erases again. Of two of the same
the one with the higher serial holds, wherever they meet. It is taken back the same way, by one that is watched for until 0; none is
ever deleted, for a mirror would bring it again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Final, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from replication.constants import MIB
from replication.formats.keeping import ring
from replication.formats.members import HEX_ID, Members, key_of, read_members
from replication.formats.ranges import BlockHash, Count, HexId, Id, Text, UntilS
from replication.formats.region import require_place
from replication.formats.sealed import Sealed
from replication.problems import Problems
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing
from tiers.namespace_spec import NamespaceSpec

T = TypeVar("T")
BEHIND_BLOCKS_MAX: Final = (
    8192  # in one object: of 64 bytes at most, and less than what such an object may have
)

TOMBSTONES = "tombstones/"
BEHIND = "behind/"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """tenant: "" for any. namespaces: their digests, empty for all of the tenant. block_hash: of the last block of
    a prefix, that block and all behind it are erased; b"" for everything. watched_until_s: unix seconds. serial: grows each
    time that it is erased; unix milliseconds, so that a bucket which was restored does not count again."""

    tenant: Text = ""
    namespaces: tuple[Id, ...] = ()
    block_hash: BlockHash = b""
    watched_until_s: UntilS
    serial: Count = 0

    @property
    def id(self) -> str:
        """Follows from what is erased."""
        said = msgspec.msgpack.encode((self.tenant, sorted(self.namespaces), self.block_hash))
        return xxhash.xxh3_128_hexdigest(said)

    @property
    def is_taken_back(self) -> bool:
        return not self.watched_until_s

    def outranks(self, other: Tombstone) -> bool:
        """Whether it holds, and not the other one of the same."""
        return (self.serial, self.watched_until_s) > (other.serial, other.watched_until_s)

    def names(self, spec: NamespaceSpec) -> bool:
        """Whether it is about this namespace, or a part of it."""
        if self.namespaces and spec.digest not in self.namespaces:
            return False
        return bool(self.namespaces or self.tenant) and (
            not self.tenant or spec.fields.get("tenant", "") == self.tenant
        )


TOMBSTONE_FORMAT: Final = Sealed(b"KVTOMB1\n", Tombstone, 1 * MIB, lambda one: TOMBSTONES + one.id)


async def bury(objects: Objects, tombstone: Tombstone) -> Tombstone:
    """Erase what it names, once more if it was erased before. Returns the tombstone that was put: it is watched for as long as the one
    that was there, and has a higher serial. Raises FormatUnknown, ObjectError."""
    there = await TOMBSTONE_FORMAT.there(objects, TOMBSTONES + tombstone.id)
    if there is not None:
        tombstone = msgspec.structs.replace(
            tombstone,
            watched_until_s=max(tombstone.watched_until_s, there.watched_until_s),
            serial=max(tombstone.serial, there.serial + 1),
        )
    await TOMBSTONE_FORMAT.put(objects, tombstone)
    await ring(objects)
    return tombstone


async def take_back(objects: Objects, tombstone_id: str) -> Tombstone | None:
    """From now on what it names is kept again. Returns the one that was there, None for none. Raises Damaged, ObjectError."""
    try:
        there = await TOMBSTONE_FORMAT.fetch(objects, TOMBSTONES + tombstone_id)
    except ObjectMissing:
        return None
    if not there.is_taken_back:
        back = msgspec.structs.replace(there, watched_until_s=0, serial=there.serial + 1)
        await TOMBSTONE_FORMAT.put(objects, back)
        await ring(objects)
    return there


async def bring(objects: Objects, tombstone: Tombstone) -> bool:
    """Put one that another region has, unless the same or a later one is there; whether it was put. Raises FormatUnknown, ObjectError."""
    there = await TOMBSTONE_FORMAT.there(objects, TOMBSTONES + tombstone.id)
    if there is not None and not tombstone.outranks(there):
        return False
    await TOMBSTONE_FORMAT.put(objects, tombstone)
    await ring(objects)
    return True


async def read_tombstones(
    objects: Objects, known: Collection[str] = (), problems: Problems | None = None
) -> Members[Tombstone]:
    """Those whose keys are not known. Raises ObjectError where there is no list, or there are none and the place is away.

    One that cannot be read erases nothing, and is a problem for as long as it is there.
    """
    members = await read_members(
        objects,
        TOMBSTONES,
        HEX_ID,
        lambda info: TOMBSTONE_FORMAT.fetch(objects, info.name),
        Problems(objects.where) if problems is None else problems,
        lambda info: key_of(info) in known,
    )
    if members.is_empty:
        await require_place(objects)
    return members


class Behind(msgspec.Struct, array_like=True):
    """What was found when a prefix was erased. links: a block, and one that follows on it, which is not erased itself."""

    tombstone: HexId
    blocks: Annotated[list[BlockHash], Meta(max_length=BEHIND_BLOCKS_MAX)]
    links: Annotated[list[tuple[BlockHash, BlockHash]], Meta(max_length=BEHIND_BLOCKS_MAX // 2)] = []


BEHIND_FORMAT: Final = Sealed(b"KVBEHD1\n", Behind, 1 * MIB)
_BEHIND_NAME = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}")


async def put_behind(
    objects: Objects,
    tombstone_id: str,
    blocks: Collection[bytes],
    links: Collection[tuple[bytes, bytes]] = (),
) -> None:
    """Put down what was found when a prefix was erased; the same is the same object. Raises ObjectError."""
    size = BEHIND_BLOCKS_MAX
    said = [Behind(tombstone_id, part) for part in _parts(sorted(blocks), size)]
    said += [Behind(tombstone_id, [], part) for part in _parts(sorted(links), size // 2)]
    for one in said:
        content = BEHIND_FORMAT.seal(one)
        await objects.put(f"{BEHIND}{tombstone_id}/{xxhash.xxh3_128_hexdigest(content)}", content)
    if said:
        await ring(objects)


def _parts(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[at : at + size] for at in range(0, len(items), size))


async def read_behind(objects: Objects, known: set[str], problems: Problems | None = None) -> list[Behind]:
    """What objects say whose names are not known yet; the names are added. What cannot be read is left for the next time.
    Raises ObjectError where there is no list."""
    members = await read_members(
        objects,
        BEHIND,
        _BEHIND_NAME,
        lambda info: BEHIND_FORMAT.fetch(objects, info.name),
        Problems(objects.where) if problems is None else problems,
        lambda info: info.name in known,
    )
    known.update(info.name for info, _ in members.found)
    return [said for _, said in members.found]
