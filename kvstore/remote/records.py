"""Records over gRPC: in pieces (kvstore/remote/pieces.py), verified against the checksums that they were stored with.

What came in one piece is not copied. A stream that breaks is begun anew behind the last whole record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvstore.remote import pieces
from kvstore.remote.calls import SLOW_S, Emit, Hashes, Open, Patience, Read, Steps, Write
from kvstore.remote.errors import BadRequest, NodeError, WrongBytes, parsed
from kvstore.remote.pieces import Piece, Sums
from kvstore.remote.values import Namespace, joined, selector
from kvstore.v1 import cache_pb2

PIECE_BYTES: Final = 1 << 20
HASHES_MAX: Final = 65_536  # of one stream
PUT_MAX: Final = 512
AROUND_BYTES_MAX: Final = 16 << 10  # of a message, beside its data
Buffer = bytes | bytearray | memoryview


class Stored(NamedTuple):
    """What became of records: how many were stored now, the indexes of those that came otherwise than they were sent, and
    whether some were left out for want of room. Others were held already."""

    blocks: int
    refused: tuple[int, ...]
    full: bool


def digests(space: Namespace, record: memoryview) -> bytes:
    """The XXH3-128 of each column, joined."""
    sums = Sums(space.columns or (space.record_bytes,))
    sums.add(record)
    return b"".join(sums.digests)


class Assembly:
    """The pieces of one record after the other."""

    def __init__(self, space: Namespace) -> None:
        self._space = space
        self._index, self._size, self._checksums = -1, 0, b""
        self._came = bytearray()

    def add(self, piece: Piece, around_bytes: int) -> memoryview | None:
        """The record, once it is whole. around_bytes: of the piece's message, beside its data. Raises WrongBytes."""
        if not self._size:
            self._index, self._checksums = piece.record, piece.checksums
        self._size += len(piece.data)
        is_next = piece.record == self._index and piece.offset + len(piece.data) == self._size
        if not is_next or self._size > self._space.record_bytes:
            raise WrongBytes(f"block {piece.record}: a piece at {piece.offset} is not the next one", "PIECES")
        is_whole = self._size == self._space.record_bytes
        if is_whole and not piece.offset and around_bytes <= AROUND_BYTES_MAX:
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
                piece = _read(message)
                if not piece.data:
                    continue
                if piece.record != done - begun or done == len(wanted):
                    raise WrongBytes(f"block {piece.record}: it is not the next one", "PIECES")
                if (record := assembly.add(piece, len(message) - len(piece.data))) is not None:
                    patience, done = Patience(), done + 1
                    yield Emit((done - 1, record))
        except NodeError as error:
            yield patience.after(error)
            continue
        if done < begun + HASHES_MAX:
            return


def _read(message: bytes) -> Piece:
    """Raises WrongBytes."""
    try:
        return pieces.read(message)
    except ValueError as error:
        raise WrongBytes(str(error), "PIECES") from error


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
        yield pieces.written(index, offset, b"" if offset else checksums, view[offset : offset + PIECE_BYTES])
