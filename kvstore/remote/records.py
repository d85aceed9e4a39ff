"""Records over gRPC: in pieces, verified against the checksums that they were stored with.

    GetResponse   │ index │ offset │ checksums │ data …      read by hand: `data` is a view of what came, and is copied once,
                                                             where a record has several pieces; another form: protobuf
    PutRequest    the same fields, written by hand: `data` is copied once

A stream that breaks is begun anew behind the last whole record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from kvstore.remote.calls import SLOW_S, Emit, Hashes, Open, Patience, Read, Steps, Write
from kvstore.remote.errors import BadRequest, NodeError, WrongBytes, parsed
from kvstore.remote.values import Namespace, joined, selector
from kvstore.v1 import cache_pb2

PIECE_BYTES: Final = 1 << 20
HASHES_MAX: Final = 65_536  # of one stream
PUT_MAX: Final = 512
AROUND_BYTES_MAX: Final = 16 << 10  # of a message, beside its data
DIGEST_BYTES: Final = 16
Buffer = bytes | bytearray | memoryview
FIELDS_MAX: Final = 64  # that are read by hand
_VARINT_BYTES_MAX: Final = 10
_INDEX, _OFFSET, _CHECKSUMS, _DATA = 0x10, 0x18, 0x22, 0x7A  # tags of the wire: field * 8 + type
_HELD: Final = 0x08


class Stored(NamedTuple):
    """What became of records: how many were stored now, the indexes of those that came otherwise than they were sent, and
    whether some were left out for want of room. Others were held already."""

    blocks: int
    refused: tuple[int, ...]
    full: bool


class Piece(NamedTuple):
    number: int  # of the block among those asked for
    offset: int
    checksums: bytes
    data: memoryview
    around: int = 0  # bytes of the message beside it


def piece_of(message: bytes) -> Piece:
    """What a GetResponse says, without copying its data."""
    view, at, end = memoryview(message), 0, len(message)
    index = offset = 0
    checksums, data = b"", view[:0]
    for _ in range(FIELDS_MAX):
        if at >= end:
            return Piece(index, offset, checksums, data, end - len(data))
        tag = view[at]
        number, at = _varint(view, at + 1, end)
        if tag == _INDEX:
            index = number
        elif tag == _OFFSET:
            offset = number
        elif tag in (_CHECKSUMS, _DATA) and at + number <= end:
            if tag == _CHECKSUMS:
                checksums = bytes(view[at : at + number])
            else:
                data = view[at : at + number]
            at += number
        elif tag != _HELD or at > end:
            break
    return _parsed(message)


def _parsed(message: bytes) -> Piece:
    """Of a form that is none of ours."""
    answer = parsed(cache_pb2.GetResponse, message)
    return Piece(answer.index, answer.offset, answer.checksums, memoryview(answer.data))


def _varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends; behind the end where there is none."""
    number = shift = 0
    for position in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = view[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
        shift += 7
    return 0, end + 1


def put_request(index: int, offset: int, checksums: bytes, data: Buffer) -> bytes:
    """A PutRequest of a piece."""
    view = memoryview(data).cast("B")
    words = [bytes([_INDEX]), varint(index), bytes([_OFFSET]), varint(offset)]
    if checksums:
        words += [bytes([_CHECKSUMS]), varint(len(checksums)), checksums]
    return b"".join((*words, bytes([_DATA]), varint(len(view)), view))


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def digests(space: Namespace, record: memoryview) -> bytes:
    """The XXH3-128 of each column, joined."""
    at, found = 0, []
    for size in space.columns or (space.record_bytes,):
        found.append(xxhash.xxh3_128_digest(record[at : at + size]))
        at += size
    return b"".join(found)


class Assembly:
    """The pieces of one record after the other."""

    def __init__(self, space: Namespace) -> None:
        self._space = space
        self._index, self._size, self._checksums = -1, 0, b""
        self._came = bytearray()

    def add(self, piece: Piece) -> memoryview | None:
        """The record, once it is whole. Raises WrongBytes."""
        if not self._size:
            self._index, self._checksums = piece.number, piece.checksums
        self._size += len(piece.data)
        is_next = piece.number == self._index and piece.offset + len(piece.data) == self._size
        if not is_next or self._size > self._space.record_bytes:
            raise WrongBytes(f"block {piece.number}: a piece at {piece.offset} is not the next one", "PIECES")
        is_whole = self._size == self._space.record_bytes
        if is_whole and not piece.offset and piece.around <= AROUND_BYTES_MAX:
            record = piece.data
        else:  # a view would keep all of its message, which may be far larger
            self._came += piece.data
            record = memoryview(self._came).toreadonly()
        if not is_whole:
            record.release()
            return None
        self._came, self._size = bytearray(), 0
        if digests(self._space, record) != self._checksums:
            raise WrongBytes(f"block {self._index}: other bytes than were stored", "CHECKSUM")
        return record


def split(space: Namespace, hashes: Hashes) -> list[bytes]:
    """One for each block. Raises BadRequest."""
    if not isinstance(hashes, bytes):
        if any(len(one) != space.hash_bytes for one in hashes):
            raise BadRequest(f"every hash must have {space.hash_bytes} bytes", "HASHES")
        return list(hashes)
    if len(hashes) % space.hash_bytes:
        raise BadRequest(f"hashes of {len(hashes)} bytes: each must have {space.hash_bytes}", "HASHES")
    return [hashes[at : at + space.hash_bytes] for at in range(0, len(hashes), space.hash_bytes)]


def get_records(space: Namespace, hashes: Hashes, parent: bytes = b"", wait_s: float = 0.0) -> Steps:
    """(index, record) of consecutive blocks, as far as they are held; each is what was stored. parent: the hash before the
    first; wait_s: how long to wait for slower tiers, 0: as long as the call has. Raises WrongBytes."""
    wanted, done, patience = split(space, hashes), 0, Patience()
    while done < len(wanted):
        begun = done
        request = cache_pb2.GetRequest(
            namespace=selector(space),
            hashes=joined(wanted[begun : begun + HASHES_MAX]),
            parent=wanted[begun - 1] if begun else parent,
            wait_ms=round(1e3 * wait_s),
        )
        assembly = Assembly(space)
        try:
            yield Open("CacheService/Get", request, SLOW_S)
            while (message := (yield Read())) is not None:
                piece = piece_of(message)
                if not piece.data:
                    continue
                if piece.number != done - begun or done == len(wanted):
                    raise WrongBytes(f"block {piece.number}: it is not the next one", "PIECES")
                if (record := assembly.add(piece)) is not None:
                    patience, done = Patience(), done + 1
                    yield Emit((done - 1, record))
        except NodeError as error:
            yield patience.after(error)
            continue
        if done < begun + HASHES_MAX:
            return


def put_records(space: Namespace, hashes: Hashes, records: Sequence[Buffer], parent: bytes = b"") -> Steps:
    """Store consecutive blocks; those that are held already are not sent."""
    wanted = split(space, hashes)
    if len(wanted) != len(records):
        raise BadRequest(f"{len(wanted)} hashes and {len(records)} records: as many are needed", "RECORDS")
    blocks, at, refused, patience = 0, 0, list[int](), Patience()
    while at < len(wanted):
        start = cache_pb2.PutRequest.Start(
            namespace=selector(space),
            hashes=joined(wanted[at : at + PUT_MAX]),
            parent=wanted[at - 1] if at else parent,
        )
        try:
            sent, answer, is_full = yield from _put(space, start, records[at : at + PUT_MAX])
        except NodeError as error:
            yield patience.after(error)
            continue
        patience = Patience()
        blocks += answer.blocks
        refused += [at + index for index in answer.refused]
        if not is_full:
            at += PUT_MAX
        elif sent:
            at += sent[-1] + 1
        else:
            return Stored(blocks, tuple(refused), full=True)
    return Stored(blocks, tuple(refused), full=False)


def _put(space: Namespace, start: cache_pb2.PutRequest.Start, records: Sequence[Buffer]) -> Steps:
    yield Open("CacheService/Put", None, SLOW_S)
    yield Write(cache_pb2.PutRequest(start=start).SerializeToString())
    wanted = _answer((yield Read())).wanted
    if max(wanted.indexes, default=0) >= len(records) or len(set(wanted.indexes)) < len(wanted.indexes):
        raise NodeError("wanted is a record that was not offered, or one twice", "ANSWER")
    for index in wanted.indexes:
        for request in _pieces(space, index, records[index]):
            yield Write(request)
    yield Write(None)
    return sorted(wanted.indexes), _answer((yield Read())).stored, wanted.full


def _answer(message: bytes | None) -> cache_pb2.PutResponse:
    if message is None:
        raise NodeError("the stream ended without an answer", "ANSWER")
    return parsed(cache_pb2.PutResponse, message)  # type: ignore[no-any-return]


def _pieces(space: Namespace, index: int, record: Buffer) -> Iterator[bytes]:
    view = memoryview(record).cast("B")
    if len(view) != space.record_bytes:
        raise BadRequest(f"record {index}: {len(view)} bytes, of {space.record_bytes}", "RECORDS")
    checksums = digests(space, view)
    for offset in range(0, len(view), PIECE_BYTES):
        yield put_request(index, offset, b"" if offset else checksums, view[offset : offset + PIECE_BYTES])
