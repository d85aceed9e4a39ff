"""Announced: a pack that is durable, as feeds, snapshots and catalogues say it.

Announced ─▶ Entry + NamespaceSpec          of many announced, each spec is stored once,
Announced ◀─ Entry + NamespaceSpec          and entries name it by its number
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from replication.errors import Damaged
from replication.formats.ranges import BlockHash, Id, Origin, StoredS, UnixS, UntilS, Word
from replication.formats.sealed import Heard, heard
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import (
    PACK_BYTES_MAX,
    PACK_HEADER_BYTES_MAX,
    PRELUDE_BYTES,
    Pack,
    PackHeader,
    data_bytes,
    wrong_of_header,
    wrong_of_spec,
)

_ENTRY_BYTES = 96  # of an entry, without what grows with its records
_SIZE_BYTES = 5  # of one stored size, at most


class Announced(msgspec.Struct, frozen=True):
    """pack: it is in the store. stored_s: when the oldest of its records was stored, unix seconds, 0: not known.
    origin: the region that made it, "": this one. kept_until_s: worth keeping until then, 0: for ever. said_s: when it was
    announced last, 0.0: not known; a segment says that for all of its entries."""

    pack: Pack
    stored_s: int = 0
    origin: str = ""
    kept_until_s: int = 0
    said_s: float = 0.0

    @property
    def blocks(self) -> int:
        return self.pack.header.count


def lasts_longer(one: Announced, other: Announced) -> bool:
    return other.kept_until_s != 0 and (one.kept_until_s == 0 or one.kept_until_s > other.kept_until_s)


def merged(known: Announced, other: Announced) -> Announced:
    """What two announcements say of one pack: the longer life, the later time, and that it was made here if one says so. `known`
    itself where the other one says nothing new."""
    origin = known.origin if other.origin else ""
    kept_until_s = other.kept_until_s if lasts_longer(other, known) else known.kept_until_s
    said_s = max(known.said_s, other.said_s)
    if (origin, kept_until_s, said_s) == (known.origin, known.kept_until_s, known.said_s):
        return known
    return msgspec.structs.replace(known, origin=origin, kept_until_s=kept_until_s, said_s=said_s)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An announced pack, with the number of its spec instead of the spec."""

    spec: Annotated[int, Meta(ge=0, lt=1 << 32)]
    stored_s: StoredS
    kept_until_s: UntilS
    origin: Origin
    id: Id
    start: Annotated[int, Meta(gt=0, le=PRELUDE_BYTES + PACK_HEADER_BYTES_MAX)]
    size_bytes: Annotated[int, Meta(gt=0, le=PACK_BYTES_MAX)]
    parent: BlockHash
    hashes: bytes
    checksums: bytes
    codec: Word = ""
    sizes: tuple[Annotated[int, Meta(gt=0, le=PACK_BYTES_MAX)], ...] = ()
    tags: bytes = b""
    said_s: UnixS = 0.0


class Table(NamedTuple):
    """Many announced packs, as they are stored."""

    specs: list[NamespaceSpec]
    entries: list[tuple[object, ...]]  # `fields_of` each `Entry`


def entry_of(announced: Announced, spec: int) -> Entry:
    pack = announced.pack
    header = pack.header
    return Entry(
        spec, announced.stored_s, announced.kept_until_s, announced.origin, pack.id, pack.start, pack.size_bytes,
        header.parent, header.hashes, header.checksums, header.codec, header.sizes, header.tags, announced.said_s,
    )  # fmt: skip


def fields_of(entry: Entry) -> tuple[object, ...]:
    """As it is written: fields at the end that say nothing are left out."""
    fields = msgspec.structs.astuple(entry)
    return fields if entry.said_s else fields[:-1] if entry.tags else fields[:-2]


def announced_of(entry: Entry, specs: Sequence[NamespaceSpec]) -> Announced:
    """Of a table whose specs are right. Raises ValueError where the entry is none of them, or its parts do not fit."""
    if entry.spec >= len(specs):
        raise ValueError("an entry of a namespace that is not in its table")
    header = PackHeader(
        specs[entry.spec], entry.parent, entry.hashes, entry.checksums, entry.codec, entry.sizes, entry.tags
    )
    if wrong := wrong_of_header(header):
        raise ValueError(f"a pack with {wrong}")
    if entry.size_bytes != entry.start + data_bytes(header):
        raise ValueError(f"an entry of {entry.size_bytes} bytes whose records end elsewhere")
    pack = Pack(entry.id, entry.start, entry.size_bytes, header)
    return Announced(pack, entry.stored_s, entry.origin, entry.kept_until_s, entry.said_s)


def tabled(entries: Iterable[Announced], is_said: bool = True) -> Table:
    """is_said: with when each was announced."""
    numbers: dict[bytes, int] = {}
    table = Table([], [])
    for announced in entries:
        spec = announced.pack.header.spec
        number = numbers.setdefault(msgspec.msgpack.encode(spec), len(table.specs))
        if number == len(table.specs):
            table.specs.append(spec)
        entry = entry_of(announced, number)
        table.entries.append(fields_of(entry if is_said else msgspec.structs.replace(entry, said_s=0.0)))
    return table


def untabled(specs: Sequence[NamespaceSpec], entries: Sequence[msgspec.Raw], where: str) -> Heard[Announced]:
    """All of a table that can be true: one bad entry takes none of the others with it. Raises Damaged where its specs are
    wrong; `where` names the object that said it."""
    for spec in specs:
        if wrong := wrong_of_spec(spec):
            raise Damaged(f"{where}: a namespace with {wrong}")
    return heard(entries, lambda raw: announced_of(_ENTRIES.decode(raw), specs), where)


_ENTRIES = msgspec.msgpack.Decoder(Entry)


def weight_bytes(announced: Announced) -> int:
    """About as many bytes as this takes in a table whose specs are there already."""
    header = announced.pack.header
    digests_bytes = len(header.hashes) + len(header.checksums) + len(header.tags)
    return _ENTRY_BYTES + digests_bytes + _SIZE_BYTES * len(header.sizes)
