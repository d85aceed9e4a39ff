"""Layout: how the rows of a catalogue are named, and what is in them; see catalogue.py for what each says."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import xxhash

from replication.catalogue.rows import PREFIX_BYTES, Rows
from replication.constants import CATALOGUE_CHUNK_PACKS
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced
from tiers.base import NAMESPACE_BYTES
from tiers.packs.packs import PACK_RECORDS_MAX
from tiers.parsing import ParserErrors, parser_failure

T = TypeVar("T")
ID, PACK, KEY, WRITER, SPEC, COUNT, UNTIL = b"i", b"p", b"k", b"w", b"n", b"c", b"t"
MODEL, FORMAT, FORMAT_NOW = b"m", b"v", b"3"
GONE, RETIRED, COMPARED, VOID, UNDER = b"g", b"r", b"s", b"x", b"u"
NUMBER_BYTES = 6  # of a pack
INDEX_BYTES = 2
SPEC_BYTES = 4
POSITION_BYTES = 8
WORD_BYTES = 8
UNTIL_BYTES = 5  # unix seconds
INDEXES = tuple(index.to_bytes(INDEX_BYTES, "big") for index in range(PACK_RECORDS_MAX))
KEY_ROW = struct.Struct(f">{len(KEY)}xQ{NUMBER_BYTES + INDEX_BYTES}x")
digest = xxhash.xxh3_64_digest

assert len(KEY) + WORD_BYTES == PREFIX_BYTES


def seed_of(namespace: bytes) -> int:
    return int.from_bytes(namespace[:WORD_BYTES], "little")


def digest_word(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key[NAMESPACE_BYTES:], seed_of(key[:NAMESPACE_BYTES]))


def word(row: bytes) -> int:
    return int.from_bytes(row[len(KEY) : PREFIX_BYTES], "big")


def behind(prefix: bytes) -> bytes:
    """The first key behind all that begin with this."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def keys_of(announced: Announced, number_bytes: bytes) -> list[bytes]:
    """The key rows of a pack."""
    header = announced.pack.header
    hashes, size, seed = header.hashes, header.spec.hash_bytes, seed_of(header.spec.digest)
    return [
        KEY + digest(hashes[at : at + size], seed) + number_bytes + index
        for at, index in zip(range(0, len(hashes), size), INDEXES, strict=False)
    ]


def until_key(announced: Announced, number_bytes: bytes) -> list[bytes]:
    """The row by which a pack is found when its life is over; none if that never is."""
    if not announced.kept_until_s:
        return []
    return [UNTIL + announced.kept_until_s.to_bytes(UNTIL_BYTES, "big") + number_bytes]


def under_key(announced: Announced, number_bytes: bytes) -> list[bytes]:
    """The row by which a pack is found that follows on a block; none of one that begins a prompt."""
    header = announced.pack.header
    return (
        [UNDER + digest(header.parent, seed_of(header.spec.digest)) + number_bytes] if header.parent else []
    )


def all_rows(rows: Rows, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    start, end = prefix, behind(prefix)
    while found := rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
        yield from found
        start = found[-1][0] + b"\0"


def numbers(rows: Rows, prefix: bytes) -> dict[str, int]:
    """By writer."""
    try:
        return {key[1:].decode(): int.from_bytes(value, "big") for key, value in all_rows(rows, prefix)}
    except UnicodeDecodeError as error:
        raise CatalogueDamaged(f"a row of a writer that is none: {error}") from error


def position_bytes(number: int) -> bytes:
    return number.to_bytes(POSITION_BYTES, "big")


def decoded(value: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except ParserErrors as error:
        raise CatalogueDamaged(f"a row that is not understood: {parser_failure(error)}") from error
