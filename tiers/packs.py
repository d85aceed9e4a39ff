"""Packs: one immutable object with a run of consecutive records of one prefix.

    pack     prelude │ header │ record 0 │ record 1 │ …
    prelude  magic (8) │ bytes of the header (4) │ zeros (4) │ xxh3_128 of the header (16)
    header   msgpack of `PackHeader`: whose records these are, behind which block, their hashes and checksums
    name     packs/<namespace>/<id>, the id being the xxh3_128 of the header

A pack says everything of itself: a catalogue can be made again from packs alone. Its id follows from its content, so
whoever packs the same bytes makes the same object, and putting it twice changes nothing. When a record was
stored is not in it: that is no content.

Records lie one after the other, so any of them is read by range. `sizes` says how long each is where a codec made
them shorter; without a codec they all have the size of their namespace.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise

import msgspec
import xxhash

from tiers.base import CHECKSUM_BYTES, KEY_BYTES_MAX, NAMESPACE_BYTES
from tiers.errors import PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Range

PACK_MAGIC = b"KVPACK1\n"
PACK_ID_BYTES = 16
PACK_RECORDS_MAX = 4096
PACK_HEADER_BYTES_MAX = 1 << 20
PACKS = "packs/"
_PRELUDE = struct.Struct("<8sII16s")
PRELUDE_BYTES = _PRELUDE.size


class PackHeader(msgspec.Struct, frozen=True, array_like=True):
    """Of n records, each of which follows the one before; the first one follows `parent` (b"": begins a prompt).

    hashes: n block hashes, one after the other; checksums: n × 16 bytes, of the records as an engine knows
    them; sizes: stored bytes of each, empty without a codec.
    """

    spec: NamespaceSpec
    parent: bytes
    hashes: bytes
    checksums: bytes
    codec: str = ""
    sizes: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.checksums) // CHECKSUM_BYTES

    def hash_at(self, index: int) -> bytes:
        size = self.spec.hash_bytes
        return self.hashes[index * size : (index + 1) * size]

    def checksum_at(self, index: int) -> bytes:
        return self.checksums[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]

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


def describe(header: PackHeader) -> tuple[Pack, bytes]:
    """The pack that begins with this header, and its first bytes, up to the first record. Raises PackDamaged."""
    validate(header)
    body = msgspec.msgpack.encode(header)
    if len(body) > PACK_HEADER_BYTES_MAX:
        raise PackDamaged(f"a pack with a header of {len(body)} bytes: allowed are {PACK_HEADER_BYTES_MAX}")
    pack_id = xxhash.xxh3_128_digest(body)
    first = _PRELUDE.pack(PACK_MAGIC, len(body), 0, pack_id) + body
    data_bytes = sum(header.sizes) if header.sizes else header.count * header.spec.record_bytes
    return Pack(pack_id, len(first), len(first) + data_bytes, header), first


def header_end(prelude: bytes | memoryview, where: str) -> int:
    """Where the header ends, from the first PRELUDE_BYTES of an object. Raises PackDamaged; `where`: its name."""
    if len(prelude) < PRELUDE_BYTES:
        raise PackDamaged(f"{where}: {len(prelude)} bytes: no pack")
    magic, header_bytes, zeros, _ = _PRELUDE.unpack_from(prelude)
    if magic != PACK_MAGIC:
        raise PackDamaged(f"{where}: begins with {bytes(magic)!r}: no pack of a format that is known here")
    if zeros or not 0 < header_bytes <= PACK_HEADER_BYTES_MAX:
        raise PackDamaged(
            f"{where}: a header of {header_bytes} bytes: allowed are 1 to {PACK_HEADER_BYTES_MAX}"
        )
    return PRELUDE_BYTES + int(header_bytes)


def parse(first: bytes | memoryview, where: str) -> Pack:
    """The pack that begins with these bytes, which reach to the end of its header at least. Raises PackDamaged."""
    end = header_end(first, where)
    body = bytes(first[PRELUDE_BYTES:end])
    *_, pack_id = _PRELUDE.unpack_from(first)
    if len(body) != end - PRELUDE_BYTES or xxhash.xxh3_128_digest(body) != pack_id:
        raise PackDamaged(f"{where}: its header is damaged")
    try:
        header = msgspec.msgpack.decode(body, type=PackHeader)
    except msgspec.MsgspecError as error:
        raise PackDamaged(f"{where}: a header that is not understood: {error}") from error
    validate(header)
    data_bytes = sum(header.sizes) if header.sizes else header.count * header.spec.record_bytes
    return Pack(pack_id, end, end + data_bytes, header)


def validate(header: PackHeader) -> None:
    """Whether the parts of a header fit together. Raises PackDamaged."""
    if wrong := _wrong(header, header.spec, header.count):
        raise PackDamaged(f"a pack with {wrong}")


def _wrong(header: PackHeader, spec: NamespaceSpec, count: int) -> str:
    """What does not fit, "" if all does. Every entry of every segment is asked: nothing is built in vain."""
    if len(spec.digest) != NAMESPACE_BYTES:
        return "a namespace digest of another length"
    if not 8 <= spec.hash_bytes <= KEY_BYTES_MAX - NAMESPACE_BYTES:
        return "block hashes of a length that is not allowed"
    if spec.record_bytes <= 0:
        return "records without bytes"
    if not 1 <= count <= PACK_RECORDS_MAX:
        return f"{count} records: allowed are 1 to {PACK_RECORDS_MAX}"
    if len(header.checksums) != count * CHECKSUM_BYTES:
        return "checksums that are cut off"
    if len(header.hashes) != count * spec.hash_bytes:
        return "another number of hashes than of checksums"
    if len(header.parent) not in (0, spec.hash_bytes):
        return "a parent of another length than its hashes"
    if len(header.sizes) not in (0, count) or not all(size > 0 for size in header.sizes):
        return "sizes that do not fit"
    if bool(header.sizes) != bool(header.codec):
        return "sizes without a codec, or a codec without sizes"
    return ""
