"""A node in hostile hands: whatever it answers is an error of ours, and costs no more memory than what was asked for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import xxhash
from google.protobuf.any_pb2 import Any as Packed
from google.rpc.status_pb2 import Status

from kvstore.remote import Namespace, NodeError
from kvstore.remote.calls import NAMESPACES_BYTES_MAX
from kvstore.v1 import cache_pb2, nodes_pb2, types_pb2
from tests.remote.servicer import Asked, Servicer, serving

RECORD_BYTES, AROUND_BYTES = 64, 1 << 20
SPACE = Namespace(bytes(16), RECORD_BYTES, 8, 16, {"model": "m"}, (RECORD_BYTES,))
HASHES = [bytes([number]) * 8 for number in range(4)]
RECORD = bytes(RECORD_BYTES)
SUM = xxhash.xxh3_128_digest(RECORD)


@pytest.fixture(params=["threads", "asyncio"])
def node(request: pytest.FixtureRequest, servicer: Servicer) -> Iterator[Asked]:
    with serving(servicer) as port:
        asked = Asked(str(request.param), f"127.0.0.1:{port}", timeout_s=30)
        yield asked
        asked.close()


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


def get_of(*messages: Any) -> Any:
    return lambda request, context: iter(messages)


def endless(_request: Any, _context: Any) -> Iterator[Any]:
    """More than was asked for, each of it with the checksum that it has."""
    index = 0
    while True:
        yield cache_pb2.GetResponse(index=index, checksums=SUM, data=RECORD)
        index += 1


@pytest.mark.parametrize(
    "answer",
    [
        endless,
        get_of(cache_pb2.GetResponse(index=1 << 31, data=RECORD, checksums=SUM)),
        get_of(cache_pb2.GetResponse(index=0, offset=1 << 31, data=RECORD, checksums=SUM)),
        get_of(cache_pb2.GetResponse(index=0, data=RECORD * 2, checksums=SUM)),
        get_of(cache_pb2.GetResponse(index=0, data=RECORD, checksums=b"\0" * 16)),
        get_of(b"\xff" * 40),
    ],
)
def test_a_stream_of_records_that_lies_is_an_error(node: Asked, servicer: Servicer, answer: Any) -> None:
    """More than was asked for, places out of range, other bytes: an error, and not one byte of it handed out as a record too many."""
    servicer.answers["CacheService/Get"] = answer
    with pytest.raises(NodeError):
        node.get_records(SPACE, HASHES)


def test_small_pieces_in_large_messages_cost_no_memory(servicer: Servicer) -> None:
    """A byte of a record in each message of a MiB: what is held is the record, and not all that came around it."""

    def answer(_request: Any, _context: Any) -> Iterator[bytes]:
        for offset in range(RECORD_BYTES):
            piece = cache_pb2.GetResponse(offset=offset, checksums=SUM, data=bytes(AROUND_BYTES))
            yield piece.SerializeToString() + b"\x7a\x01\0"  # the field again, which counts

    servicer.answers["CacheService/Get"] = answer
    with serving(servicer) as port:
        asked = Asked("threads", f"127.0.0.1:{port}", timeout_s=30)
        asked.get_records(SPACE, HASHES[:1])
        tracemalloc.start()
        try:
            ((_, record),) = asked.get_records(SPACE, HASHES[:1])
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            asked.close()
    assert bytes(record) == RECORD and most < RECORD_BYTES // 2 * AROUND_BYTES


@pytest.mark.parametrize("indexes", [[7], [0, 0], [0] * 100_000])
def test_no_record_is_sent_twice_or_that_is_none(node: Asked, servicer: Servicer, indexes: list[int]) -> None:
    """Whatever a node says that it wants."""
    came: list[bytes] = []

    def answer(requests: Iterator[bytes], _context: Any) -> Iterator[Any]:
        next(requests)
        yield cache_pb2.PutResponse(wanted=cache_pb2.PutResponse.Wanted(indexes=indexes))
        came.extend(requests)

    servicer.answers["CacheService/Put"] = answer
    with pytest.raises(NodeError):
        node.put_records(SPACE, HASHES, [RECORD] * 4)
    assert not came


def failing(_request: Any, context: grpc.ServicerContext) -> Any:
    """With details that are none."""
    packed = Packed(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    details = ("grpc-status-details-bin", Status(details=[packed]).SerializeToString())
    context.set_trailing_metadata((details,))
    context.abort(grpc.StatusCode.NOT_FOUND, "x")


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("NodeService/GetNode", b"\xff\xff"),
        ("NodeService/GetNode", nodes_pb2.GetNodeResponse(document_json="[" * 100_000)),
        ("NodeService/GetNode", nodes_pb2.GetNodeResponse(document_json="")),
        ("NodeService/GetNode", failing),
        ("CacheService/Pin", b"\x0a\xff"),
        ("CacheService/Lookup", failing),
    ],
)
def test_an_answer_that_is_none_is_an_error_of_ours(
    node: Asked, servicer: Servicer, method: str, answer: Any
) -> None:
    """No protobuf, no JSON, JSON without a bottom, an error whose details are no details."""
    servicer.answers[method] = answer if callable(answer) else lambda request, context: answer
    names = {"NodeService/GetNode": "status", "CacheService/Pin": "pin", "CacheService/Lookup": "lookup"}
    with pytest.raises(NodeError):
        getattr(node, names[method])()


def test_a_word_of_a_later_node_is_no_error(node: Asked, servicer: Servicer) -> None:
    """A tier that this client does not know is its number."""
    run = types_pb2.Run(blocks=1)
    run.MergeFromString(b"\x10\x63")  # tier 99
    servicer.answers["CacheService/Lookup"] = lambda request, context: cache_pb2.LookupResponse(runs=[run])
    assert node.lookup(hashes=b"").runs[0].tier == "99"


def test_pages_without_an_end_have_one(servicer: Servicer) -> None:
    """A node that always has more namespaces is asked no longer once they are more than any node has."""
    fields = {"x": "x" * (NAMESPACES_BYTES_MAX // 8)}

    def answer(_request: Any, _context: Any) -> Any:
        return cache_pb2.ListNamespacesResponse(namespaces=[types_pb2.Namespace(fields=fields)], more=True)

    servicer.answers["CacheService/ListNamespaces"] = answer
    with serving(servicer) as port:
        asked = Asked("threads", f"127.0.0.1:{port}", timeout_s=30)
        with pytest.raises(NodeError, match="of namespaces"):
            asked.namespaces()
        asked.close()
    assert len(servicer.calls) == 8
