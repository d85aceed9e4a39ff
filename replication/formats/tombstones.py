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
from replication.errors import Damaged, FormatUnknown
from replication.formats.keeping import ring
from replication.formats.members import HEX_ID, Members, read_members
from replication.formats.ranges import BlockHash, Count, HexId, Id, Text, UntilS
from replication.formats.region import require_place
from replication.formats.sealed import fetch, seal
from replication.problems import Problems
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectMissing, ObjectRefused
from tiers.namespace_spec import NamespaceSpec

T = TypeVar("T")
TOMBSTONE_BYTES_MAX: Final = 1 * MIB
BEHIND_BLOCKS_MAX: Final = 8192  # in one object: of 64 bytes at most, and less than TOMBSTONE_BYTES_MAX

TOMBSTONES = "tombstones/"
BEHIND = "behind/"
_MAGIC = b"KVTOMB1\n"
_BEHIND_MAGIC = b"KVBEHD1\n"


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


async def bury(objects: Objects, tombstone: Tombstone) -> Tombstone:
    """Erase what it names, once more if it was erased before. Returns the tombstone that was put: it is watched for as long as the one
    that was there, and has a higher serial. Raises FormatUnknown, ObjectError."""
    there = await _there(objects, tombstone)
    if there is not None:
        tombstone = msgspec.structs.replace(
            tombstone,
            watched_until_s=max(tombstone.watched_until_s, there.watched_until_s),
            serial=max(tombstone.serial, there.serial + 1),
        )
    await objects.put(TOMBSTONES + tombstone.id, seal(_MAGIC, tombstone))
    await ring(objects)
    return tombstone


async def take_back(objects: Objects, tombstone_id: str) -> Tombstone | None:
    """From now on what it names is kept again. Returns the one that was there, None for none. Raises Damaged, ObjectError."""
    try:
        there = await _read(objects, TOMBSTONES + tombstone_id)
    except ObjectMissing:
        return None
    if not there.is_taken_back:
        back = msgspec.structs.replace(there, watched_until_s=0, serial=there.serial + 1)
        await objects.put(TOMBSTONES + tombstone_id, seal(_MAGIC, back))
        await ring(objects)
    return there


async def bring(objects: Objects, tombstone: Tombstone) -> bool:
    """Put one that another region has, unless the same or a later one is there; whether it was put. Raises FormatUnknown, ObjectError."""
    there = await _there(objects, tombstone)
    if there is not None and not tombstone.outranks(there):
        return False
    await objects.put(TOMBSTONES + tombstone.id, seal(_MAGIC, tombstone))
    await ring(objects)
    return True


async def _there(objects: Objects, tombstone: Tombstone) -> Tombstone | None:
    """The one of the same that is there, if anybody can read it. Raises FormatUnknown, ObjectError."""
    try:
        return await _read(objects, TOMBSTONES + tombstone.id)
    except FormatUnknown:
        raise  # who knows more has erased it
    except (ObjectMissing, ObjectRefused, Damaged):
        return None


async def read_tombstones(
    objects: Objects, known: Collection[str] = (), problems: Problems | None = None
) -> dict[str, Tombstone]:
    """By name, those whose ETags are not known: "name etag". Raises ObjectError where there is no list.

    One that cannot be read erases nothing, and is a problem for as long as it is there.
    """
    return by_key(
        await look_for_tombstones(objects, known, Problems(objects.where) if problems is None else problems)
    )


async def look_for_tombstones(
    objects: Objects, known: Collection[str], problems: Problems
) -> Members[Tombstone]:
    """The same, and whether there are some that may be read later. Raises ObjectError, too, where there are none and the place is away."""
    members = await read_members(
        objects,
        TOMBSTONES,
        HEX_ID,
        lambda info: _read(objects, info.name),
        problems,
        lambda info: _key(info) in known,
    )
    if members.is_empty:
        await require_place(objects)
    return members


def by_key(members: Members[Tombstone]) -> dict[str, Tombstone]:
    return {_key(info): tombstone for info, tombstone in members.found}


def _key(info: ObjectInfo) -> str:
    return f"{info.name} {info.e_tag}"


class Behind(msgspec.Struct, array_like=True):
    """What was found when a prefix was erased. links: a block, and one that follows on it, which is not erased itself."""

    tombstone: HexId
    blocks: Annotated[list[BlockHash], Meta(max_length=BEHIND_BLOCKS_MAX)]
    links: Annotated[list[tuple[BlockHash, BlockHash]], Meta(max_length=BEHIND_BLOCKS_MAX // 2)] = []


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
        content = seal(_BEHIND_MAGIC, one)
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
        lambda info: fetch(objects, _BEHIND_MAGIC, Behind, info.name, TOMBSTONE_BYTES_MAX),
        Problems(objects.where) if problems is None else problems,
        lambda info: info.name in known,
    )
    known.update(info.name for info, _ in members.found)
    return [said for _, said in members.found]


async def _read(objects: Objects, name: str) -> Tombstone:
    """Raises Damaged, ObjectError."""
    found = await fetch(objects, _MAGIC, Tombstone, name, TOMBSTONE_BYTES_MAX)
    if name != TOMBSTONES + found.id:
        raise Damaged(f"{name}: a tombstone of another name")
    return found
