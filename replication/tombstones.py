"""Tombstones: what is erased, in the region's own bucket, so that nobody keeps it, brings it back or copies it.

    tombstones/<id>     a tenant │ namespaces │ in them the prefixes that go on behind a block     + until when it is watched for

Deletes are never copied between regions; a tombstone is. It forbids what it names until its grace is over, whatever
the clocks of those say who stored it: so nothing that was erased comes back from a node that was away, or from a
region that was. What is computed anew meanwhile is served by the tiers of its node, and is not persisted.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import xxhash

from replication.constants import TOMBSTONE_BYTES_MAX
from replication.errors import Damaged
from replication.sealed import seal, unseal
from tiers.errors import ObjectMissing
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Objects

TOMBSTONES = "tombstones/"
_MAGIC = b"KVTOMB1\n"


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


def _parse(content: memoryview, name: str) -> Tombstone:
    found = unseal(_MAGIC, content, Tombstone, name, TOMBSTONE_BYTES_MAX)
    if name != TOMBSTONES + found.id:
        raise Damaged(f"{name}: a tombstone of another name")
    return found
