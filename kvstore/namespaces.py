"""Namespaces: whose bytes can be reused for whom.

Nothing about the model is in an engine's block hash, so two models share hashes. A
namespace is the digest of everything that must be equal for bytes to be reusable; the
client computes it (see `connectors`), and we keep its readable fields for reports.

The registry survives restarts in one small file, `namespaces.json`, rewritten by
write-to-temp, sync, rename, sync-directory soon after a namespace was added. Losing it
loses only names: digests and sizes come back from the tiers' own rows. When the registry
is full, a namespace without blocks makes room: first one that nobody asked for in this
daemon's life, then the one asked for longest ago.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvstore.blocks import IN_ANY
from kvstore.blocktable import BlockTable
from kvstore.constants import NAMESPACES_MAX
from kvstore.durable import replace_file
from kvstore.errors import NamespaceConflict, UnknownNamespace
from tiers.base import NAMESPACE_BYTES
from tiers.slots import slot_bytes_for

KEY_NAME_MASK = (1 << 56) - 1

log = logging.getLogger("kvstore.namespaces")


class NamespaceSpec(msgspec.Struct, frozen=True):
    """What a client says of a namespace. digest: 16 bytes; fields: readable identity."""

    digest: bytes
    record_bytes: int
    hash_bytes: int
    block_tokens: int = 0
    fields: dict[str, str] = {}


class Namespace:
    """A registered namespace and the blocks this node knows of it."""

    __slots__ = (
        "blocks",
        "digest",
        "hash_bytes",
        "id",
        "record_bytes",
        "registered",
        "salt",
        "slot_bytes",
        "spec",
        "writing",
    )

    def __init__(self, number: int, spec: NamespaceSpec) -> None:
        self.id = number
        self.registered = False  # by a client, in this daemon's life
        self.salt = int.from_bytes(spec.digest[:8], "little")  # tells equal hashes of two namespaces apart
        self.spec = spec
        self.digest = spec.digest
        self.hash_bytes = spec.hash_bytes
        self.record_bytes = spec.record_bytes
        self.slot_bytes = slot_bytes_for(spec.record_bytes)
        self.blocks = BlockTable()
        self.writing: set[bytes] = set()  # reserved and not yet committed

    def names_of(self, hashes: Iterable[bytes]) -> list[int]:
        """Short names of these blocks' keys, for tables of this process that may be wrong once in 2**56 times.
        Python keeps the hash of bytes that were looked up."""
        salt = self.salt
        return [(hash(block_hash) ^ salt) & KEY_NAME_MASK for block_hash in hashes]

    def name_of(self, block_hash: bytes) -> int:
        """The same of one block."""
        return (hash(block_hash) ^ self.salt) & KEY_NAME_MASK

    def as_dict(self) -> dict[str, object]:
        """As it is in answers; the fields are documented in docs/cli.md."""
        return {
            "digest": self.digest.hex(),
            "record_bytes": self.record_bytes,
            "block_tokens": self.spec.block_tokens,
            "blocks": len(self.blocks),
            "fields": self.spec.fields,
        }

    def holds(self, block_hash: bytes) -> bool:
        """Whether some tier has this block."""
        block = self.blocks.get(block_hash)
        return block is not None and block.where & IN_ANY != 0


class NamespaceRegistry:
    """All namespaces of this node, by id and by digest. `path` None keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_id: dict[int, Namespace] = {}
        self._next_id = 0
        self.changed = False  # `save` has something to do
        for spec in self._read()[-NAMESPACES_MAX:]:
            self._add(spec)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, number: int) -> Namespace:
        """Raises UnknownNamespace."""
        namespace = self._by_id.get(number)
        if namespace is not None:
            return namespace
        raise UnknownNamespace(f"namespace {number}: not registered on this connection's daemon")

    def register(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of this digest, added if new. Raises NamespaceConflict."""
        known = self._by_digest.get(spec.digest)
        if known is None:
            self._make_room()
            known = self._add(spec)
            self.changed = True
        known.registered = True
        if (known.record_bytes, known.hash_bytes) != (spec.record_bytes, spec.hash_bytes):
            raise NamespaceConflict(
                f"namespace {spec.digest.hex()}: registered with record_bytes={known.record_bytes} "
                f"hash_bytes={known.hash_bytes}, asked for {spec.record_bytes} and {spec.hash_bytes}"
            )
        adopted = known.spec  # of a namespace that only a tier knew, there is no more than its sizes
        if (spec.fields and not adopted.fields) or (spec.block_tokens and not adopted.block_tokens):
            known.spec = spec
            self.changed = True
        return known

    def found(self, key: bytes, record_bytes: int) -> Namespace | None:
        """The namespace of a key that a tier holds; added if only the tier knows it.

        None if the key cannot belong to it (another record size), or no more namespaces fit.
        """
        known = self._by_digest.get(key[:NAMESPACE_BYTES])
        if known is None:
            try:
                self._make_room()
            except NamespaceConflict:
                return None
            digest, hash_bytes = key[:NAMESPACE_BYTES], len(key) - NAMESPACE_BYTES
            known = self._add(NamespaceSpec(digest, record_bytes, hash_bytes))
        return known if known.record_bytes == record_bytes else None

    def of_key(self, key: bytes) -> Namespace | None:
        """The namespace a key belongs to, None if it is not known."""
        return self._by_digest.get(key[:NAMESPACE_BYTES])

    def _add(self, spec: NamespaceSpec) -> Namespace:
        namespace = Namespace(self._next_id, spec)
        self._next_id += 1
        self._by_id[namespace.id] = namespace
        self._by_digest[spec.digest] = namespace
        return namespace

    def _make_room(self) -> None:
        """Raises NamespaceConflict when NAMESPACES_MAX of them have blocks."""
        if len(self._by_id) < NAMESPACES_MAX:
            return
        empty = [n for n in self._by_id.values() if not n.blocks and not n.writing]
        if not empty:
            raise NamespaceConflict(f"too many namespaces: {NAMESPACES_MAX} have blocks, no more are allowed")
        namespace = min(empty, key=lambda n: (n.registered, n.id))
        del self._by_id[namespace.id], self._by_digest[namespace.digest]

    def _read(self) -> list[NamespaceSpec]:
        if self._path is None or not self._path.exists():
            return []
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[NamespaceSpec])
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("namespace names are lost, bytes are not: %s: %s", self._path, error)
            return []

    def snapshot(self) -> bytes | None:
        """What is to be saved, if anything changed since the last time; for `save`."""
        if self._path is None or not self.changed:
            return None
        self.changed = False
        return msgspec.json.encode([namespace.spec for namespace in self._by_id.values()])

    def save(self, content: bytes) -> None:
        """Write a snapshot; blocks on the disk, so from an I/O thread. Never raises."""
        if self._path is None:
            return
        try:
            replace_file(self._path, content)
        except OSError as error:
            log.warning("namespace names are not saved: %s: %s", self._path, error)
