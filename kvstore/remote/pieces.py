"""Records in pieces, of which GetResponse and PutRequest are the messages, by hand: protobuf would copy their bytes once more each way.

    written   fields but data, as protobuf writes them │ tag of data │ its length │ bytes, copied once
    read      field by field; data is a view of the message

The fields of a piece have the same numbers in both. What is written and read here is valid protobuf: who knows only the .proto
understands it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import xxhash

from kvstore.v1 import cache_pb2
from tiers import copying
from tiers.checksum import joined

FIELDS_MAX = 64  # of a message, known or not: each takes time that others wait

_START, _INDEX, _OFFSET, _CHECKSUMS, _DATA = (
    cache_pb2.PutRequest.DESCRIPTOR.fields_by_name[name].number
    for name in ("start", "index", "offset", "checksums", "data")
)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DATA_TAG: Final = bytes([cache_pb2.GetResponse.DESCRIPTOR.fields_by_name["data"].number << 3 | _BYTES])


class Piece(NamedTuple):
    """start: of a PutRequest, serialized; b"" where there is none. record: its index."""

    start: bytes
    record: int
    offset: int
    checksums: bytes
    data: memoryview


def written(record: int, offset: int, checksums: bytes, data: memoryview) -> bytes:
    """A GetResponse, or a PutRequest."""
    fields = cache_pb2.GetResponse(index=record, offset=offset, checksums=checksums).SerializeToString()
    return copying.behind(fields + _DATA_TAG + _varint(len(data)), data)


def read(message: bytes) -> Piece:
    """Raises ValueError."""
    view, at, fields = memoryview(message), 0, 0
    numbers, texts = {_INDEX: 0, _OFFSET: 0}, {_START: view[:0], _CHECKSUMS: view[:0], _DATA: view[:0]}
    try:
        while at < len(view):
            if (fields := fields + 1) > FIELDS_MAX:
                raise ValueError(f"more than {FIELDS_MAX} fields with a piece")
            tag, at = _number(view, at)
            field, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                numbers[field], at = _number(view, at)
            elif kind == _BYTES:
                size, at = _number(view, at)
                texts[field] = view[at : at + size]
                at += size
            elif kind in (_FIXED64, _FIXED32):  # of a field that we do not know
                at += 8 if kind == _FIXED64 else 4
            else:
                raise IndexError
        if at > len(view):
            raise IndexError
    except IndexError as error:
        raise ValueError("no piece of a record") from error
    index, offset = numbers[_INDEX] & 0xFFFFFFFF, numbers[_OFFSET] & 0xFFFFFFFF
    return Piece(bytes(texts[_START]), index, offset, bytes(texts[_CHECKSUMS]), texts[_DATA])


def _varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(view: memoryview, at: int) -> tuple[int, int]:
    """A varint, and where it ends. Raises IndexError."""
    number = shift = 0
    while shift < 64:
        byte = view[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise IndexError


class Sums:
    """The checksums of the columns of a record whose bytes come piece by piece, in order."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.digests: list[bytes] = []
        self._sizes = sizes
        self._left = sizes[0]
        self._hash = xxhash.xxh3_128()

    def add(self, view: memoryview) -> None:
        """The next bytes; not more than there are left."""
        while view:
            part = view[: self._left]
            self._hash.update(part)
            self._left -= len(part)
            view = view[len(part) :]
            if not self._left:
                self.digests.append(self._hash.digest())
                self._hash.reset()
                self._left = self._sizes[len(self.digests)] if len(self.digests) < len(self._sizes) else 0

    @property
    def record(self) -> bytes:
        """The checksum of the whole record."""
        return joined(self.digests)
