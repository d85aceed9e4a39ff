"""Records in pieces: as they were stored, or an error; a stream that breaks goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvstore import remote
from kvstore.remote import Namespace, Stored
from kvstore.remote.pieces import FIELDS_MAX, read, written
from kvstore.remote.records import PIECE_BYTES
from kvstore.v1 import cache_pb2
from tests.remote.servicer import Asked, Servicer, serving

COLUMNS = (PIECE_BYTES, PIECE_BYTES // 2)
RECORD_BYTES = sum(COLUMNS)
SPACE = Namespace(bytes(16), RECORD_BYTES, 8, 16, {"model": "m"}, COLUMNS)
HASHES = [bytes([number]) * 8 for number in range(5)]
RECORDS = [os.urandom(RECORD_BYTES) for _ in HASHES]


@pytest.fixture(params=["threads", "asyncio"])
def node(request: pytest.FixtureRequest, store: Store) -> Iterator[Asked]:
    with serving(store) as port:
        asked = Asked(str(request.param), f"127.0.0.1:{port}", timeout_s=20)
        yield asked
        asked.close()


class Store(Servicer):
    """Get and Put of a dictionary. breaks: after so many answers a stream breaks, once for each number. most: that one Put
    takes; room: for so many."""

    def __init__(self) -> None:
        super().__init__(CacheService__Get=self.get, CacheService__Put=self.put)
        self.held: dict[bytes, bytes] = {}
        self.breaks: list[int] = []
        self.parents: list[bytes] = []
        self.room = self.most = 1 << 30

    def get(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.parents.append(request.parent)
        left = self.breaks.pop(0) if self.breaks else -1
        for message in self._answers(request):
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            left -= 1
            yield message

    def _answers(self, request: Any) -> Iterator[Any]:
        hashes = [request.hashes[at : at + 8] for at in range(0, len(request.hashes), 8)]
        yield cache_pb2.GetResponse(held=sum(one in self.held for one in hashes))
        for index, one in enumerate(hashes):
            if one not in self.held:
                return
            for offset in range(0, RECORD_BYTES, PIECE_BYTES):
                data = self.held[one][offset : offset + PIECE_BYTES]
                checksums = b"" if offset else digests(RECORDS[HASHES.index(one)])
                yield cache_pb2.GetResponse(index=index, offset=offset, checksums=checksums, data=data)

    def put(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
        start = cache_pb2.PutRequest.FromString(next(requests)).start
        self.parents.append(start.parent)
        if self.breaks and self.breaks.pop(0) == 0:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        hashes = [start.hashes[at : at + 8] for at in range(0, len(start.hashes), 8)]
        missing = [index for index, one in enumerate(hashes) if one not in self.held]
        wanted = missing[: min(self.most, self.room - len(self.held))]
        is_full = len(wanted) < len(missing)
        yield cache_pb2.PutResponse(wanted=cache_pb2.PutResponse.Wanted(indexes=wanted, full=is_full))
        came: dict[int, bytes] = {}
        checksums: dict[int, bytes] = {}
        for message in requests:
            piece = cache_pb2.PutRequest.FromString(message)
            assert piece.offset == len(came.get(piece.index, b""))
            came[piece.index] = came.get(piece.index, b"") + piece.data
            checksums[piece.index] = checksums.get(piece.index) or piece.checksums
        true = [index for index in wanted if digests(came[index]) == checksums[index]]
        self.held |= {hashes[index]: came[index] for index in true}
        yield cache_pb2.PutResponse(stored=cache_pb2.PutResponse.Stored(blocks=len(true)))


def digests(record: bytes) -> bytes:
    return b"".join(map(xxhash.xxh3_128_digest, (record[: COLUMNS[0]], record[COLUMNS[0] :])))


@pytest.fixture
def store() -> Store:
    return Store()


def had(node: Asked, hashes: Any = HASHES, **options: Any) -> list[tuple[int, bytes]]:
    return [(index, bytes(record)) for index, record in node.get_records(SPACE, hashes, **options)]


def test_records_come_back_as_they_were_stored(node: Asked, store: Store) -> None:
    """What is put is held; what is held already is not sent again; get ends at the first that is not held."""
    store.held[HASHES[1]] = RECORDS[1]
    assert node.put_records(SPACE, HASHES[:3], [bytearray(r) for r in RECORDS[:3]]) == Stored(2, (), False)
    assert node.put_records(SPACE, b"".join(HASHES[:3]), RECORDS[:3]).blocks == 0
    assert had(node) == list(enumerate(RECORDS[:3]))
    store.room = 4
    assert node.put_records(SPACE, HASHES[3:], RECORDS[3:], parent=HASHES[2]) == Stored(1, (), True)
    assert store.parents[-2:] == [HASHES[2], HASHES[3]]
    store.room, store.most = 5, 2
    del store.held[HASHES[1]], store.held[HASHES[2]]
    assert node.put_records(SPACE, HASHES, RECORDS) == Stored(3, (), False)
    assert had(node) == list(enumerate(RECORDS))


def test_a_stream_that_breaks_goes_on_where_it_was(node: Asked, store: Store) -> None:
    """Nothing is lost, doubled or mixed where a stream breaks between two pieces, and it ends where it never gets on."""
    store.held = dict(zip(HASHES, RECORDS, strict=True))
    store.breaks = [4, 2]  # in the middle of the second record, and of the record after it
    assert had(node) == list(enumerate(RECORDS))
    assert store.parents == [b"", HASHES[0], HASHES[0]]
    store.held = {}
    store.breaks = [0]
    assert node.put_records(SPACE, HASHES, RECORDS).blocks == 5


def test_wrong_bytes_are_an_error(node: Asked, store: Store) -> None:
    """A record of which one bit is another is not handed out; those before it are."""
    store.held = dict(zip(HASHES, RECORDS, strict=True))
    flipped = bytearray(RECORDS[1])
    flipped[-1] ^= 1
    store.held[HASHES[1]] = bytes(flipped)
    with pytest.raises(remote.WrongBytes, match="block 1"):
        had(node)
    assert had(node, HASHES[:1]) == [(0, RECORDS[0])]


def test_wrong_sizes_are_refused_before_they_are_sent(node: Asked, store: Store) -> None:
    """Hashes and records of another size, or another number of them, never travel."""
    for hashes, records in (([b"short"], RECORDS[:1]), (HASHES[:2], RECORDS[:1]), (b"123456789", [])):
        with pytest.raises(remote.BadRequest):
            node.put_records(SPACE, hashes, records)
    assert store.calls == []
    with pytest.raises(remote.BadRequest, match=f"5 bytes, of {RECORD_BYTES}"):
        node.put_records(SPACE, HASHES[:1], [b"short"])


@given(
    held=st.none() | st.integers(0, 2**32 - 1),
    index=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**32 - 1),
    checksums=st.binary(max_size=300),
    data=st.binary(max_size=300),
    more=st.sampled_from((0, 1, FIELDS_MAX - 5)),
)
def test_messages_are_those_of_protobuf(
    held: int | None, index: int, offset: int, checksums: bytes, data: bytes, more: int
) -> None:
    """By hand a message is read and written as protobuf does it; with fields of a later version, too."""
    said = (index, offset, checksums, data)
    answer = cache_pb2.GetResponse(held=held, index=index, offset=offset, checksums=checksums, data=data)
    piece = read(answer.SerializeToString() + b"\xa2\x06\x03abc" * more)  # field 100
    assert (piece.record, piece.offset, piece.checksums, bytes(piece.data)) == said
    for kind in (cache_pb2.GetResponse, cache_pb2.PutRequest):
        one = kind.FromString(written(index, offset, checksums, memoryview(data)))
        assert (one.index, one.offset, one.checksums, one.data) == said


@given(message=st.binary(max_size=100))
def test_garbage_is_an_error_of_ours(message: bytes) -> None:
    """Whatever arrives is a piece as protobuf reads it, or an error."""
    try:
        piece, answer = read(message), cache_pb2.GetResponse.FromString(message)
    except (ValueError, DecodeError):
        return  # each is stricter somewhere: we know no groups; protobuf no number of more than 64 bits, no field 0
    assert (piece.checksums, bytes(piece.data)) == (answer.checksums, answer.data)
