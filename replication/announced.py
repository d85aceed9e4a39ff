"""Announced: a pack that is durable, as feeds, snapshots and catalogues say it.

Announced ─▶ Entry + NamespaceSpec          of many announced, each spec is stored once,
Announced ◀─ Entry + NamespaceSpec          and entries name it by its number
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from replication.errors import Damaged
from tiers.errors import PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs import PACK_ID_BYTES, Pack, PackHeader, validate

_ENTRY_BYTES = 96  # of an entry, without what grows with its records
_SIZE_BYTES = 5  # of one stored size, at most


class Announced(msgspec.Struct, frozen=True):
    """pack: it is in the store. stored_s: when the oldest of its records was stored, unix seconds, 0: not known.
    origin: the region that made it, "": this one. kept_until_s: worth keeping until then, 0: for ever."""

    pack: Pack
    stored_s: int = 0
    origin: str = ""
    kept_until_s: int = 0

    @property
    def blocks(self) -> int:
        return self.pack.header.count


def lasts_longer(one: Announced, other: Announced) -> bool:
    return other.kept_until_s != 0 and (one.kept_until_s == 0 or one.kept_until_s > other.kept_until_s)


def merged(known: Announced, other: Announced) -> Announced:
    """What two announcements say of one pack: the longer life, and that it was made here if one says so. `known`
    itself where the other one says nothing new."""
    origin = known.origin if other.origin else ""
    kept_until_s = other.kept_until_s if lasts_longer(other, known) else known.kept_until_s
    if (origin, kept_until_s) == (known.origin, known.kept_until_s):
        return known
    return msgspec.structs.replace(known, origin=origin, kept_until_s=kept_until_s)


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """An announced pack, with the number of its spec instead of the spec."""

    spec: int
    stored_s: int
    kept_until_s: int
    origin: str
    id: bytes
    start: int
    size_bytes: int
    parent: bytes
    hashes: bytes
    checksums: bytes
    codec: str = ""
    sizes: tuple[int, ...] = ()


class Table(NamedTuple):
    """Many announced packs, as they are stored."""

    specs: list[NamespaceSpec]
    entries: list[Entry]


def entry_of(announced: Announced, spec: int) -> Entry:
    pack = announced.pack
    header = pack.header
    return Entry(
        spec, announced.stored_s, announced.kept_until_s, announced.origin, pack.id, pack.start, pack.size_bytes,
        header.parent, header.hashes, header.checksums, header.codec, header.sizes,
    )  # fmt: skip


def announced_of(entry: Entry, spec: NamespaceSpec) -> Announced:
    """Not validated."""
    header = PackHeader(spec, entry.parent, entry.hashes, entry.checksums, entry.codec, entry.sizes)
    pack = Pack(entry.id, entry.start, entry.size_bytes, header)
    return Announced(pack, entry.stored_s, entry.origin, entry.kept_until_s)


def tabled(entries: Iterable[Announced]) -> Table:
    numbers: dict[bytes, int] = {}
    table = Table([], [])
    for announced in entries:
        spec = announced.pack.header.spec
        number = numbers.setdefault(msgspec.msgpack.encode(spec), len(table.specs))
        if number == len(table.specs):
            table.specs.append(spec)
        table.entries.append(entry_of(announced, number))
    return table


def untabled(specs: Sequence[NamespaceSpec], entries: Sequence[Entry], where: str) -> list[Announced]:
    """All of a table, validated. Raises Damaged; `where` names the object that said it."""
    found = []
    for entry in entries:
        if not 0 <= entry.spec < len(specs):
            raise Damaged(f"{where}: an entry of a namespace that is not in its table")
        if len(entry.id) != PACK_ID_BYTES or not 0 < entry.start < entry.size_bytes:
            raise Damaged(f"{where}: an entry that names no pack")
        announced = announced_of(entry, specs[entry.spec])
        try:
            validate(announced.pack.header)
        except PackDamaged as error:
            raise Damaged(f"{where}: {error}") from error
        found.append(announced)
    return found


def weight_bytes(announced: Announced) -> int:
    """About as many bytes as this takes in a table whose specs are there already."""
    header = announced.pack.header
    return _ENTRY_BYTES + len(header.hashes) + len(header.checksums) + _SIZE_BYTES * len(header.sizes)
