"""Packs to announce, made of nothing but names."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.formats.announced import Announced
from replication.formats.removed import Reason, removed
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader, describe


def spec_of(number: int = 0, hash_bytes: int = 32, record_bytes: int = 4096) -> NamespaceSpec:
    return NamespaceSpec(
        digest(f"namespace {number}".encode()), record_bytes, hash_bytes, 16, {"model": f"model-{number}"}
    )


def hash_of(name: object, hash_bytes: int = 32) -> bytes:
    """A block hash, the same for the same name."""
    found = b""
    while len(found) < hash_bytes:
        found += digest(f"{name} {len(found)}".encode())
    return found[:hash_bytes]


def pack_of(
    names: Sequence[object],
    spec: NamespaceSpec | None = None,
    stored_s: int = 0,
    origin: str = "",
    parent: bytes = b"",
) -> Announced:
    """A pack with a block for each name, behind the block `parent`."""
    spec = spec or spec_of()
    hashes = b"".join(hash_of(name, spec.hash_bytes) for name in names)
    checksums = b"".join(digest(f"record {name}".encode()) for name in names)
    return Announced(describe(PackHeader(spec, parent, hashes, checksums))[0], stored_s, origin)


def keys_of(announced: Announced) -> list[bytes]:
    header = announced.pack.header
    return [header.spec.digest + block for block in header.each_hash()]


def forget(catalogue: Catalogue, pack_id: bytes, reason: Reason = Reason.OVER) -> bool:
    """Whether it was known; it is not any more."""
    [known] = catalogue.packs([pack_id])
    return known is not None and catalogue.remove([removed(known, reason)]) == 1


def random_pack(chance: random.Random, blocks_max: int = 4, kinds: int = 3) -> Announced:
    """Packs of few blocks out of many, so that some share some."""
    spec = spec_of(kind := chance.randrange(kinds), hash_bytes=(8, 20, 32)[kind % 3])
    names = [chance.randrange(64) for _ in range(chance.randint(1, blocks_max))]
    made = pack_of(names, spec, chance.randrange(10**9), chance.choice(("", "eu")))
    return msgspec.structs.replace(made, kept_until_s=chance.choice((0, chance.randrange(1, 1000))))
