"""Who has no right at all: what they begin and do not end keeps nobody else out, and holds nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.security.identity import Gate
from kvstore.tools.rpc import calls
from kvstore.tools.rpc.calls import ALL_CALLS_MAX, OPEN_CALLS_MAX, OPEN_OF_ONE_MAX, Calls
from kvstore.tools.rpc.server import CALLS_MAX, MESSAGE_BYTES_MAX
from tests.rpc.raw import HEADERS, kinds_of_frames, opened
from tests.rpc.reflecting import Reflecting, reason
from tests.rpc.serving import Serving, door_here, resident_bytes, until
from tests.running import TIMEOUT_S

CONNECTIONS = ALL_CALLS_MAX // CALLS_MAX + 1
GROWTH_BYTES_MAX = 64 << 20
HALF = b"\0" + (MESSAGE_BYTES_MAX - 1).to_bytes(4, "big") + bytes(400)  # of a message: its length, and a part


def connected(node: Serving, host: str = "127.0.0.1") -> socket.socket:
    """host: of the client."""
    address, port = node.target.rsplit(":", 1)
    return socket.create_connection((address, int(port)), TIMEOUT_S, (host, 0))


def health(client: Reflecting) -> str:
    """How a probe from 127.0.0.1 is answered."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    try:
        return str(stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status)
    except grpc.RpcError as error:
        return reason(error)


@pytest.mark.parametrize("sent", [b"", HALF], ids=["headers", "half a message"])
@pytest.mark.parametrize("method", ["NodeService/GetPrincipal", "CacheService/Get", "CacheService/Put"])
def test_who_is_not_known_is_refused_before_a_message_comes(
    node: Serving, client: Reflecting, method: str, sent: bytes
) -> None:
    """More calls than there may be, of which nothing or a part comes: each is refused as it begins, and others are answered while
    those connections stay."""
    before = resident_bytes(node.process())
    with ExitStack() as held:
        for _ in range(CONNECTIONS):
            peer = held.enter_context(connected(node))  # who says nothing for a while is out
            peer.sendall(opened(CALLS_MAX, f"/kvstore.v1.{method}", "nobody's", sent=sent))
            assert kinds_of_frames(peer, (HEADERS, CALLS_MAX))[HEADERS] == CALLS_MAX  # each is a refusal
        assert client("CacheService/ListNamespaces") is not None
    assert resident_bytes(node.process()) - before < GROWTH_BYTES_MAX


def test_who_takes_no_answer_has_a_small_share(node: Serving, client: Reflecting) -> None:
    """Of health, which needs no right: one address has its share, and probes from others are answered; all addresses together leave
    most calls to those who are known. Once they are gone, there is room."""
    said = opened(OPEN_OF_ONE_MAX, "/grpc.health.v1.Health/Check", window=0)
    with ExitStack() as held:
        for number in range(OPEN_CALLS_MAX // OPEN_OF_ONE_MAX):
            assert health(client) == "1"
            peer = held.enter_context(connected(node, f"127.0.0.{number + 2}"))
            peer.sendall(said)
            assert kinds_of_frames(peer, (HEADERS, OPEN_OF_ONE_MAX))[HEADERS] == OPEN_OF_ONE_MAX
        assert health(client) == "LIMIT_EXCEEDED, retry"
        assert client("CacheService/ListNamespaces") is not None
    until(lambda: health(client) == "1", "there is room again")
    with ExitStack() as held:

        def has_its_share() -> bool:
            """Some of these calls are refused while the last of the others are still leaving."""
            held.enter_context(connected(node)).sendall(said)
            return health(client) == "LIMIT_EXCEEDED, retry"

        until(has_its_share, "this address has its share")
        assert client("CacheService/ListNamespaces") is not None
    until(lambda: health(client) == "1", "there is room again")


def test_who_is_known_and_sends_no_message_is_out(node: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of one message that does not come is over, in a line, whatever deadline it has."""
    monkeypatch.setattr(calls, "PAUSE_S", 0.2)
    end = Event()

    def nothing() -> Iterator[bytes]:
        end.wait(TIMEOUT_S)
        yield from ()

    with door_here(node.place.socket) as target, grpc.insecure_channel(target) as channel:
        for method in ("Lookup", "Get"):
            with pytest.raises(grpc.RpcError) as ended:
                list(channel.stream_stream(f"/kvstore.v1.CacheService/{method}")(nothing()))
            assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert ended.value.details() == "nothing came for 0.2 s"
        end.set()


class Coming:
    """A call whose message comes when it is told to."""

    def __init__(self) -> None:
        self.is_read, self.has_come = asyncio.Event(), asyncio.Event()

    async def next(self) -> bytes:
        self.is_read.set()
        await self.has_come.wait()
        return b"whole"


def test_few_messages_of_one_who_asks_are_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be a large one: the next is read once one of them is whole. Those of others are read meanwhile."""
    monkeypatch.setattr(calls, "MESSAGES_OF_ONE_MAX", 1)

    async def work() -> None:
        known, coming = Calls(Gate(None)), [Coming() for _ in range(3)]
        whose: Any = zip(coming, ("one", "one", "another"), strict=True)
        reading = [asyncio.create_task(known._message(call, who, False)) for call, who in whose]
        first, second, other = coming
        await asyncio.gather(first.is_read.wait(), other.is_read.wait())
        assert not second.is_read.is_set()
        first.has_come.set()
        await second.is_read.wait()
        second.has_come.set(), other.has_come.set()
        assert await asyncio.gather(*reading) == [b"whole"] * 3

    asyncio.run(work())


def test_all_calls_are_counted(node: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of all together one is refused with the time to come again."""
    monkeypatch.setattr(calls, "ALL_CALLS_MAX", 1)
    with door_here(node.place.socket) as target, grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest())
        assert reason(refused.value) == "LIMIT_EXCEEDED, retry"
        watch.cancel()
