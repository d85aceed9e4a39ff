"""Tombstones: what is erased, in the region's own bucket, so that nobody keeps it, brings it back or copies it.

    tombstones/<id>         a tenant │ namespaces │ in them the prefixes that go on behind a block     + until when it is watched for
    behind/<id>/<checksum>  of a prefix: blocks behind it that were found, so that what hangs on them is known when they are gone

Deletes are never copied between regions; a tombstone is. It forbids what it names until its grace is over, whatever
the clocks of those say who stored it: so nothing that was erased comes back from a node that was away, or from a
region that was. What is computed anew meanwhile is served by the tiers of its node, and is not persisted.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import xxhash

from replication.constants import BEHIND_BLOCKS_MAX, TOMBSTONE_BYTES_MAX
from replication.errors import Damaged
from replication.sealed import seal, unseal
from tiers.errors import ObjectMissing
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Objects

TOMBSTONES = "tombstones/"
BEHIND = "behind/"
_MAGIC = b"KVTOMB1\n"
_BEHIND_MAGIC = b"KVBEHD1\n"


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """tenant: "" for any. namespaces: their digests, empty for all of the tenant. block_hash: of the last block of
    a prefix, that block and all behind it are erased; b"" for everything. watched_until_s: unix seconds."""

    tenant: str = ""
    namespaces: tuple[bytes, ...] = ()
    block_hash: bytes = b""
    watched_until_s: int

    @property
    def id(self) -> str:
        """Follows from what is erased, so that erasing it twice is erasing it once."""
        said = msgspec.msgpack.encode((self.tenant, sorted(self.namespaces), self.block_hash))
        return xxhash.xxh3_128_hexdigest(said)

    def names(self, spec: NamespaceSpec) -> bool:
        """Whether it is about this namespace, or a part of it."""
        if self.namespaces and spec.digest not in self.namespaces:
            return False
        return bool(self.namespaces or self.tenant) and (
            not self.tenant or spec.fields.get("tenant", "") == self.tenant
        )


async def bury(objects: Objects, tombstone: Tombstone) -> bool:
    """Put a tombstone; False, and nothing changed, if one is there that is watched for as long. Raises ObjectError."""
    name = TOMBSTONES + tombstone.id
    try:
        there = _parse(await objects.get(name), name)
        if there.watched_until_s >= tombstone.watched_until_s:
            return False
    except (ObjectMissing, Damaged):
        pass
    await objects.put(name, seal(_MAGIC, tombstone))
    return True


async def read_tombstones(objects: Objects, known: Collection[str] = ()) -> dict[str, Tombstone]:
    """By name, those whose ETags are not known: "name etag". Damaged ones are left out. Raises ObjectError."""
    found = {}
    async for page in objects.list(TOMBSTONES):
        for info in page:
            key = f"{info.name} {info.e_tag}"
            if key in known:
                continue
            try:
                found[key] = _parse(await objects.get(info.name), info.name)
            except (Damaged, ObjectMissing):
                continue
    return found


class _Blocks(msgspec.Struct, array_like=True):
    tombstone: str
    blocks: list[bytes]


async def put_behind(objects: Objects, tombstone_id: str, blocks: Collection[bytes]) -> None:
    """Put down blocks that are behind the prefix of a tombstone; the same blocks are the same object. Raises ObjectError."""
    ordered = sorted(blocks)
    for at in range(0, len(ordered), BEHIND_BLOCKS_MAX):
        content = seal(_BEHIND_MAGIC, _Blocks(tombstone_id, ordered[at : at + BEHIND_BLOCKS_MAX]))
        await objects.put(f"{BEHIND}{tombstone_id}/{xxhash.xxh3_128_hexdigest(content)}", content)


async def read_behind(objects: Objects, known: set[str]) -> dict[str, set[bytes]]:
    """By tombstone, the blocks in objects whose names are not known yet; the names are added. Damaged ones are left
    for the next time. Raises ObjectError."""
    found: dict[str, set[bytes]] = {}
    async for page in objects.list(BEHIND):
        for info in page:
            if info.name in known:
                continue
            try:
                content = await objects.get(info.name)
                said = unseal(_BEHIND_MAGIC, content, _Blocks, info.name, TOMBSTONE_BYTES_MAX)
            except (Damaged, ObjectMissing):
                continue
            found.setdefault(said.tombstone, set()).update(said.blocks)
            known.add(info.name)
    return found


def _parse(content: memoryview, name: str) -> Tombstone:
    found = unseal(_MAGIC, content, Tombstone, name, TOMBSTONE_BYTES_MAX)
    if name != TOMBSTONES + found.id:
        raise Damaged(f"{name}: a tombstone of another name")
    return found
