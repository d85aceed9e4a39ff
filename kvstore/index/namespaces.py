"""Namespaces: the registry of all groups of blocks whose bytes are interchangeable.

Nothing about the model is in an engine's block hash, so two models share hashes. A
namespace is the digest of everything that must be equal for bytes to be reusable; the
client computes it (see `connectors`), and we keep its readable fields for reports.

The registry survives restarts in one small file, `namespaces.json`, rewritten by
write-to-temp, sync, rename, sync-directory soon after a namespace was added. Losing it
loses only names: digests and sizes come back from the tiers' own rows. When the registry
is full, a namespace that has no blocks and that no connection has registered makes room: first
one that was not asked for in this daemon's life, then the one asked for longest ago. Of those that the last
connection has let go without a block, the latest stay known for reports; the digest of such a
one can be registered again, also with other sizes.

A namespace that is *ended* is unknown to requests at once; it stays here, and its digest
cannot be registered again, until its last block is dropped. The file keeps the digests of the last
ones, with sizes of 0: rows that a kill left behind are dropped at the next start, not adopted. Nor are rows of
one that is *erased* (kvstore/commands/erasing.py), who is called, too, when it becomes known whose a namespace is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvstore.constants import EXPIRY_LOOKS, MIB, NAMESPACES_MAX
from kvstore.errors import NamespaceConflict, UnknownNamespace
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.io_pool import Io
from kvstore.protocol.residency_bits import IN_ANY
from tiers.base import KEY_BYTES_MAX, NAMESPACE_BYTES
from tiers.checksum import column_sizes, described
from tiers.files import replace_in_parts
from tiers.namespace_spec import NamespaceSpec
from tiers.reading import Unreadable, as_json, read_json, require_damaged

NAMESPACES_FILE_BYTES_MAX = 512 * MIB  # as many with as long names as may be registered: never so much
NAMESPACE_DROP_BLOCKS = 50  # of an ended namespace, dropped in one go: one or two milliseconds
NAMESPACE_DROP_LOOKS = 1000  # blocks that are looked at in one go
NAMESPACES_PART = 32  # encoded at a time
NAMESPACES_ENDED_MAX = 1024  # of the last that were ended: a start does not adopt what is left of them
NAMESPACES_UNUSED_MAX = (
    64  # without a block, and registered by no connection any more: the last ones stay known
)

NAMESPACES_RETRY_S = 10.0  # between two writes of the file, while they fail

log = logging.getLogger("kvstore.index.namespaces")


class NamespaceRegistry:
    """All namespaces of this node, by id and by digest. `path` None keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._by_digest: dict[bytes, Namespace] = {}
        self._by_id: dict[int, Namespace] = {}
        self._next_id = 0
        self._ended: deque[Namespace] = deque()
        self._dropping: tuple[Namespace, Iterator[Block | None]] | None = None
        self._unused: dict[int, Namespace] = {}  # by id, those that were let go last; the longest ago first
        self._never_adopted: dict[bytes, None] = {}  # digests of the last that were ended, in this order
        self.changed = False  # `save` has something to do
        self.saving = False
        self.problem = ""  # why the last write of the file failed
        self._retry_at_s = 0.0  # then
        self.is_erased: Callable[[NamespaceSpec], bool] = lambda spec: False
        self.named: Callable[[Namespace], None] = lambda namespace: None
        specs = self._read()
        self._never_adopted.update((spec.digest, None) for spec in specs if not spec.record_bytes)
        for spec in [spec for spec in specs if spec.record_bytes][-NAMESPACES_MAX:]:
            self._add(spec)

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, number: int) -> Namespace:
        """Raises UnknownNamespace."""
        namespace = self._by_id.get(number)
        if namespace is not None and not namespace.is_ended:
            return namespace
        raise UnknownNamespace(f"namespace {number}: not registered on this connection's daemon")

    def register(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of this digest, added if new. Raises NamespaceConflict."""
        known = self._by_digest.get(spec.digest)
        if known is not None and _shape(known.spec) != _shape(spec) and self.forget(known):
            known = None  # it held nothing, and is not in use
        if known is None:
            self._make_room()
            known = self._add(spec)
            self._never_adopted.pop(spec.digest, None)
            self.changed = True
        if known.is_ended:
            raise NamespaceConflict(
                f"namespace {spec.digest.hex()}: was ended, and its blocks are being dropped"
            )
        known.registered = True
        registered, asked = _shape(known.spec), _shape(spec)
        if registered != asked:
            raise NamespaceConflict(
                f"namespace {spec.digest.hex()}: registered with {registered}, not {asked}"
            )
        adopted = known.spec  # of a namespace that only a tier knew, there is no more than its sizes
        if (spec.fields and not adopted.fields) or (spec.block_tokens and not adopted.block_tokens):
            known.spec = spec
            self.changed = True
            self.named(known)
        return known

    def used(self, namespace: Namespace) -> None:
        """One more connection has it registered."""
        namespace.users += 1
        self._unused.pop(namespace.id, None)

    def let_go(self, namespace: Namespace) -> None:
        """One user less. A namespace without users and blocks does not stay for ever."""
        namespace.users -= 1
        if namespace.users == 0 and not namespace.is_ended:
            self._unused[namespace.id] = namespace
        while len(self._unused) > NAMESPACES_UNUSED_MAX:
            self.forget(self._unused.pop(next(iter(self._unused))))

    def end(self, number: int) -> None:
        """It will not be used again: to be dropped with all its blocks. Raises UnknownNamespace."""
        namespace = self.get(number)
        namespace.is_ended = self.changed = True
        self._ended.append(namespace)
        self._never_adopted[namespace.digest] = None
        if len(self._never_adopted) > NAMESPACES_ENDED_MAX:
            del self._never_adopted[next(iter(self._never_adopted))]

    def forget(self, namespace: Namespace) -> bool:
        """One that holds nothing is not known any more. False for one that is used, or that holds something."""
        if not namespace.is_empty or namespace.users or namespace.is_ended:
            return False
        if self._by_id.pop(namespace.id, None) is None:
            return False
        del self._by_digest[namespace.digest]
        self._unused.pop(namespace.id, None)
        namespace.is_ended = self.changed = True
        return True

    def ended(self) -> Namespace | None:
        """One that is to be dropped, and still has blocks, or to which some are coming."""
        while self._ended:
            namespace = self._ended[0]
            if not namespace.is_empty:
                return namespace
            self._ended.popleft()
            del self._by_id[namespace.id], self._by_digest[namespace.digest]
        return None

    def drop_some(self, drop: Callable[[Block], bool]) -> bool:
        """Drop some blocks of an ended namespace; whether there is more to do at once. drop: forgets a block, or says that it is
        in use. Leaves go first, because a block that others hang on costs a walk over all of them."""
        namespace = self.ended()
        if namespace is None:
            return False
        if self._dropping is None or self._dropping[0] is not namespace:
            self._dropping = namespace, forest.all_leaves_first(namespace)
        dropped = looks = 0
        for block in self._dropping[1]:
            looks += 1 if block is not None else EXPIRY_LOOKS
            dropped += (
                block is not None and block.children is None and bool(block.where & IN_ANY) and drop(block)
            )
            if dropped == NAMESPACE_DROP_BLOCKS or looks >= NAMESPACE_DROP_LOOKS:
                return True
        self._dropping = None
        if not dropped:  # what is left is in use now: the next one's turn
            self._ended.rotate(-1)
        return dropped > 0

    def found(self, key: bytes, record_bytes: int, columns: bytes = b"") -> Namespace | None:
        """The namespace of a key that a tier holds; added if only the tier knows it.

        None if it was ended or erased, if the key cannot belong to it (another size or other columns), or if no more fit.
        """
        if key[:NAMESPACE_BYTES] in self._never_adopted:
            return None
        known = self._by_digest.get(key[:NAMESPACE_BYTES])
        if known is None:
            try:
                self._make_room()
            except NamespaceConflict:
                return None
            digest, hash_bytes = key[:NAMESPACE_BYTES], len(key) - NAMESPACE_BYTES
            known = self._add(NamespaceSpec(digest, record_bytes, hash_bytes, columns=columns))
        if self.is_erased(known.spec):
            return None
        return known if (known.record_bytes, known.columns) == (record_bytes, columns) else None

    def of_key(self, key: bytes) -> Namespace | None:
        """The namespace a key belongs to, None if it is not known."""
        return self._by_digest.get(key[:NAMESPACE_BYTES])

    def _add(self, spec: NamespaceSpec) -> Namespace:
        namespace = Namespace(self._next_id, spec)
        self._next_id += 1
        self._by_id[namespace.id] = namespace
        self._by_digest[spec.digest] = namespace
        self.named(namespace)
        return namespace

    def _make_room(self) -> None:
        """Raises NamespaceConflict when NAMESPACES_MAX of them have blocks, or are registered now."""
        if len(self._by_id) < NAMESPACES_MAX:
            return
        empty = [n for n in self._by_id.values() if n.is_empty and not n.users and not n.is_ended]
        if not empty:
            raise NamespaceConflict(
                f"too many namespaces: {NAMESPACES_MAX} have blocks or are in use, no more are allowed"
            )
        self.forget(min(empty, key=lambda n: (n.registered, n.id)))

    def _read(self) -> list[NamespaceSpec]:
        """What an earlier daemon saved; what is damaged in it is left out, one by one. Raises OpenError."""
        if self._path is None:
            return []
        try:
            members = read_json(self._path, NAMESPACES_FILE_BYTES_MAX, list[msgspec.Raw])
        except Unreadable as error:
            require_damaged(error)
            if not error.is_missing:
                log.warning("namespace names are lost, bytes are not: %s", error)
            return []
        specs = [spec for member in members if (spec := _spec(self._path, member)) is not None]
        if len(specs) < len(members):
            log.warning(
                "%d namespace names are lost, bytes are not: %s", len(members) - len(specs), self._path
            )
        return specs

    @property
    def is_saved(self) -> bool:
        """Whether a restart finds the namespaces of now, and no others; not so for long after a change."""
        return self._path is None or not (self.changed or self.saving)

    def snapshot(self) -> list[NamespaceSpec] | None:
        """What is to be saved, if anything changed since the last time; for `save`."""
        if self._path is None or not self.changed:
            return None
        self.changed, self.saving = False, True
        ended = [NamespaceSpec(digest, 0, 0) for digest in self._never_adopted]
        return [*ended, *(n.spec for n in self._by_id.values() if not n.is_ended)]

    def keep(self, io: Io, now_s: float) -> None:
        """Have what changed saved: one write at a time, as all go through the same temporary file. One that failed is tried again
        in a while."""
        if self.saving or now_s < self._retry_at_s or (specs := self.snapshot()) is None:
            return

        def saved(is_saved: bool) -> None:
            self.saving = False
            self.changed |= not is_saved
            self._retry_at_s = 0.0 if is_saved else now_s + NAMESPACES_RETRY_S

        io.submit(lambda: self.save(specs), saved, failed=False)

    def save(self, specs: Sequence[NamespaceSpec]) -> bool:
        """Write a snapshot; blocks on the disk, so from an I/O thread. Never raises. Whether it is there."""
        if self._path is None:
            return True
        try:
            replace_in_parts(self._path, _parts(specs))
        except OSError as error:
            log.warning("namespace names are not saved: %s: %s", self._path, error)
            self.problem = error.strerror or str(error)
            return False
        self.problem = ""
        return True


def _parts(specs: Sequence[NamespaceSpec]) -> Iterator[tuple[int, bytes]]:
    """The file, a few namespaces at a time: thousands with long names at once would hold up the loop, in whichever thread."""
    at = 0
    for start in range(0, len(specs) or 1, NAMESPACES_PART):
        members = map(msgspec.json.encode, specs[start : start + NAMESPACES_PART])
        content = (b"," if start else b"[") + b",".join(members)
        yield at, content
        at += len(content)
    yield at, b"]"


def _spec(path: Path, member: msgspec.Raw) -> NamespaceSpec | None:
    """None for what could not have been registered; an ended one has no sizes."""
    try:
        spec = as_json(path, member, NamespaceSpec)
        if spec.record_bytes or spec.hash_bytes:
            column_sizes(spec.columns, spec.record_bytes)
            is_possible = (
                0 < spec.record_bytes < 1 << 40 and 0 < spec.hash_bytes <= KEY_BYTES_MAX - NAMESPACE_BYTES
            )
        else:
            is_possible = True
        is_possible &= len(spec.digest) == NAMESPACE_BYTES and 0 <= spec.block_tokens < 1 << 32
    except (Unreadable, ValueError):
        return None
    return spec if is_possible else None


def _shape(spec: NamespaceSpec) -> str:
    """What all registrations of a namespace must agree on, for people too."""
    columns = described(spec.columns, spec.record_bytes)
    return f"record_bytes={spec.record_bytes} hash_bytes={spec.hash_bytes} columns={columns}"
