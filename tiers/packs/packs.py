"""Packs: one immutable object with a run of consecutive records of one prefix.

    pack     prelude │ header │ record 0 │ record 1 │ …
    prelude  magic (8) │ bytes of the header (4) │ zeros (4) │ xxh3_128 of the header (16)
    header   msgpack of `PackHeader`: whose records these are, behind which block, their hashes and checksums
    name     packs/<namespace>/<id>, the id being the xxh3_128 of the header

A pack says everything of itself: a catalogue can be made again from packs alone. Its id follows from its content, so
the same bytes always make the same object, and putting it twice changes nothing. When a record was
stored is not in it: that is no content.

Records lie one after the other, so any of them is read by range. `sizes` says how long each is where a codec made
them shorter; without a codec they all have the size of their namespace.

Where the deployment has a key the magic is another one, the zeros are the number of the key, the header is sealed, and its tag
is the id (tiers/bucket/seals.py). The header has a tag of each record then, and only readers with the key see whose they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec
import xxhash

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES
from tiers.bucket.objects import Range
from tiers.bucket.seals import Sealed, Seals, Unsealed
from tiers.checksum import column_sizes
from tiers.constants import KEY_ID_BYTES, TAG_BYTES
from tiers.errors import ObjectKeyUnknown, PackDamaged, PackUnknown
from tiers.namespace_spec import FIELDS_MAX, NamespaceSpec
from tiers.packs.codecs import may_be
from tiers.parsing import ParserErrors, is_later, parser_failure

PACK_MAGIC = b"KVPACK1\n"
SEALED_PACK_MAGIC: Final = b"KVPACK2\n"
PACK_RECORDS_MAX = 4096
PACK_HEADER_BYTES_MAX = 1 << 20
PACK_BYTES_MAX = (4 << 30) + PACK_HEADER_BYTES_MAX  # of one object: a record may have as many bytes as a slab
RECORD_BYTES_MAX = 4 << 30
BLOCK_TOKENS_MAX = (1 << 32) - 1
FIELD_CHARS_MAX = 4096
CODEC_CHARS_MAX = 32
PACKS = "packs/"
_BOUND_TO: Final = "pack"  # of any region: mirrors copy packs as they are
_PRELUDE = struct.Struct("<8sII16s")
PRELUDE_BYTES = _PRELUDE.size


class PackHeader(msgspec.Struct, frozen=True, array_like=True):
    """Of n records, each of which follows the one before; the first one follows `parent` (b"": begins a prompt).

    hashes: n block hashes, one after the other; checksums: n × 16 bytes, of the records as an engine knows
    them; sizes: stored bytes of each, empty without a codec. tags: the id of a key, 16 bytes that follow from what a codec made of
    the records, and n × 16 bytes, a tag of each; empty without a key.
    """

    spec: NamespaceSpec
    parent: bytes
    hashes: bytes
    checksums: bytes
    codec: str = ""
    sizes: tuple[int, ...] = ()
    tags: bytes = b""

    @property
    def count(self) -> int:
        return len(self.checksums) // CHECKSUM_BYTES

    def hash_at(self, index: int) -> bytes:
        size = self.spec.hash_bytes
        return self.hashes[index * size : (index + 1) * size]

    def checksum_at(self, index: int) -> bytes:
        return self.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]

    @property
    def key_id(self) -> bytes:
        """Of the tags."""
        return self.tags[:KEY_ID_BYTES]

    def tag_at(self, index: int) -> bytes:
        start = KEY_ID_BYTES + (1 + index) * TAG_BYTES
        return self.tags[start : start + TAG_BYTES]

    def each_hash(self) -> Iterator[bytes]:
        return map(self.hash_at, range(self.count))


class Pack(msgspec.Struct, frozen=True, array_like=True):
    """A pack as an announcement names it. start: where the records begin; size_bytes: of the whole object."""

    id: bytes
    start: int
    size_bytes: int
    header: PackHeader

    @property
    def name(self) -> str:
        return pack_name(self.header.spec.digest, self.id)

    def ranges(self) -> list[Range]:
        """Where each record lies in the object."""
        header = self.header
        sizes = header.sizes or (header.spec.record_bytes,) * header.count
        ends = list(accumulate(sizes, initial=self.start))
        return list(pairwise(ends))


def pack_name(namespace: bytes, pack_id: bytes) -> str:
    return f"{PACKS}{namespace.hex()}/{pack_id.hex()}"


def pack_identity(name: str) -> tuple[bytes, bytes] | None:
    """Namespace and id in the name of a pack; None if it is no such name."""
    folder, slash, last = name.removeprefix(PACKS).partition("/")
    if len(folder) != 32 or len(last) != 32 or not slash:
        return None
    try:
        return bytes.fromhex(folder), bytes.fromhex(last)
    except ValueError:
        return None


def encoded(header: PackHeader, with_tags: bool = True) -> bytes:
    """Without tags, these are the bytes of versions that know none."""
    fields = msgspec.structs.astuple(header)
    return msgspec.msgpack.encode(fields if header.tags and with_tags else fields[:-1])


def describe(header: PackHeader, seals: Seals | None = None) -> tuple[Pack, bytes]:
    """The pack that begins with this header, and its first bytes, up to the first record. Raises PackDamaged."""
    validate(header)
    magic, body, key_number = PACK_MAGIC, encoded(header), 0
    pack_id = xxhash.xxh3_128_digest(body)
    if seals is not None:
        key_id, pack_id, body = seals.seal(_BOUND_TO, body)
        magic, key_number = SEALED_PACK_MAGIC, int.from_bytes(key_id, "little")
    if len(body) > PACK_HEADER_BYTES_MAX:
        raise PackDamaged(f"a pack with a header of {len(body)} bytes: allowed are {PACK_HEADER_BYTES_MAX}")
    first = _PRELUDE.pack(magic, len(body), key_number, pack_id) + body
    return Pack(pack_id, len(first), len(first) + data_bytes(header), header), first


def header_end(prelude: bytes | memoryview, where: str) -> int:
    """Where the header ends, from the first PRELUDE_BYTES of an object. Raises PackDamaged, PackUnknown; `where`: its name."""
    if len(prelude) < PRELUDE_BYTES:
        raise PackDamaged(f"{where}: {len(prelude)} bytes: no pack")
    magic, header_bytes, zeros, _ = _PRELUDE.unpack_from(prelude)
    if is_later(magic, SEALED_PACK_MAGIC):
        raise PackUnknown(f"{where}: of a later version: begins with {bytes(magic)!r}")
    if magic not in (PACK_MAGIC, SEALED_PACK_MAGIC):
        raise PackDamaged(f"{where}: begins with {bytes(magic)!r}: no pack of a format that is known here")
    if (zeros and magic == PACK_MAGIC) or not 0 < header_bytes <= PACK_HEADER_BYTES_MAX:
        raise PackDamaged(
            f"{where}: a header of {header_bytes} bytes: allowed are 1 to {PACK_HEADER_BYTES_MAX}"
        )
    return PRELUDE_BYTES + int(header_bytes)


def parse(first: bytes | memoryview, where: str, seals: Seals | None = None) -> Pack:
    """The pack that begins with these bytes, which reach to the end of its header at least. Raises PackDamaged, and ObjectKeyUnknown
    where it says that it was sealed with a key that is not known here."""
    end = header_end(first, where)
    body = bytes(first[PRELUDE_BYTES:end])
    magic, _, key_number, pack_id = _PRELUDE.unpack_from(first)
    if (magic == SEALED_PACK_MAGIC) != (seals is not None):
        raise PackDamaged(
            f"{where}: it has no seal" if seals else f"{where}: sealed: key_file is missing here"
        )
    if seals is not None:
        body = _opened(seals, key_number, pack_id, body, where)
    elif len(body) != end - PRELUDE_BYTES or xxhash.xxh3_128_digest(body) != pack_id:
        raise PackDamaged(f"{where}: its header is damaged")
    try:
        header = msgspec.msgpack.decode(body, type=PackHeader)
    except ParserErrors as error:
        raise PackDamaged(f"{where}: a header that is not understood: {parser_failure(error)}") from error
    validate(header)
    return Pack(pack_id, end, end + data_bytes(header), header)


def _opened(seals: Seals, key_number: int, pack_id: bytes, body: bytes, where: str) -> bytes:
    try:
        return seals.open(_BOUND_TO, Sealed(key_number.to_bytes(KEY_ID_BYTES, "little"), pack_id, body))
    except Unsealed as error:
        kind = ObjectKeyUnknown if error.is_of_other_key else PackDamaged
        raise kind(f"{where}: {error}") from error


def data_bytes(header: PackHeader) -> int:
    """Of all its records, as stored."""
    return sum(header.sizes) if header.sizes else header.count * header.spec.record_bytes


def validate(header: PackHeader) -> None:
    """Whether the parts of a header fit together, and each number is in its range. Raises PackDamaged."""
    if wrong := wrong_of_spec(header.spec) or wrong_of_header(header):
        raise PackDamaged(f"a pack with {wrong}")


def wrong_of_spec(spec: NamespaceSpec) -> str:
    """What cannot be true of a namespace, "" if all can."""
    if len(spec.digest) != NAMESPACE_BYTES:
        return "a namespace digest of another length"
    if not 8 <= spec.hash_bytes <= KEY_BYTES_MAX - NAMESPACE_BYTES:
        return "block hashes of a length that is not allowed"
    if not 0 < spec.record_bytes < RECORD_BYTES_MAX:
        return f"records of {spec.record_bytes} bytes: allowed are 1 to {RECORD_BYTES_MAX - 1}"
    if not 0 <= spec.block_tokens <= BLOCK_TOKENS_MAX:
        return f"blocks of {spec.block_tokens} tokens: allowed are 0 to {BLOCK_TOKENS_MAX}"
    if len(spec.fields) > FIELDS_MAX:
        return f"{len(spec.fields)} fields: at most {FIELDS_MAX} are allowed"
    if any(max(len(name), len(value)) > FIELD_CHARS_MAX for name, value in spec.fields.items()):
        return f"a field of more than {FIELD_CHARS_MAX} characters"
    try:
        column_sizes(spec.columns, spec.record_bytes)
    except ValueError as error:
        return str(error)
    return ""


def wrong_of_header(header: PackHeader) -> str:
    """What does not fit in a header whose spec is right, "" if all does. Every entry of every segment is asked: nothing is
    built in vain."""
    spec, count = header.spec, header.count
    if not 1 <= count <= PACK_RECORDS_MAX:
        return f"{count} records: allowed are 1 to {PACK_RECORDS_MAX}"
    if len(header.checksums) != count * CHECKSUM_BYTES:
        return "checksums that are cut off"
    if len(header.hashes) != count * spec.hash_bytes:
        return "another number of hashes than of checksums"
    if len(header.tags) not in (0, KEY_ID_BYTES + (1 + count) * TAG_BYTES):
        return "tags that are cut off"
    if len(header.parent) not in (0, spec.hash_bytes):
        return "a parent of another length than its hashes"
    if len(header.codec) > CODEC_CHARS_MAX:
        return f"a codec of more than {CODEC_CHARS_MAX} characters"
    if bool(header.sizes) != bool(header.codec):
        return "sizes without a codec, or a codec without sizes"
    if header.sizes and wrong_of_sizes(header.sizes, count, spec.record_bytes):
        return "sizes that do not fit"
    if data_bytes(header) > PACK_BYTES_MAX - PACK_HEADER_BYTES_MAX:
        return f"records of {data_bytes(header)} bytes together"
    return ""


def wrong_of_sizes(sizes: Sequence[int], count: int, record_bytes: int) -> bool:
    """Whether these cannot be the stored bytes of so many records: a codec makes shorter, and not without end."""
    least = min(sizes)
    return len(sizes) != count or least < 1 or max(sizes) > record_bytes or not may_be(least, record_bytes)
