"""The door itself: health, reflection, what is limited, and what is answered in place of a result."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.errors import LimitExceeded
from kvstore.security.principals import local
from kvstore.tools.rpc import calls, reports, streams
from kvstore.tools.rpc.calls import ACCESS, OPEN_OF_ONE_MAX
from kvstore.tools.rpc.server import CALLS_MAX
from tests.rpc.raw import DATA, RST_STREAM, kinds_of_frames, opened
from tests.rpc.reflecting import Reflecting, reason
from tests.rpc.serving import Serving, child_of, door_here, door_of, resident_bytes, serving, target_of, until
from tests.rpc.spaces import Space, named
from tests.running import TIMEOUT_S, Place

ROUNDS = int(os.environ.get("ROUNDS", "1"))  # `make soak` asks for more
STREAMS_MAX, OF_ONE_MAX = 4, 3
AHEAD_BYTES = 1 << 20  # that a client takes of a stream before it reads it
GROWTH_BYTES_MAX = 64 << 20  # of the process, whatever is done to it


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A door with few streams, and a namespace with records of 1 MiB."""
    path = tmp_path_factory.mktemp("narrow")
    grant = f'token_sha256 = "{hashlib.sha256(b"another").hexdigest()}"\nlabel = "another"\nroles = ["write"]'
    (path / "access.toml").write_text(f"[[grant]]\n{grant}\n")
    settings = f"grpc.streams_max={STREAMS_MAX}", f"security.access_file={path / 'access.toml'}"
    with serving(Place(path), *settings) as found:
        yield found


@pytest.fixture
def few(narrow: Serving) -> Iterator[Reflecting]:
    known = Reflecting(narrow.target, ahead_bytes=AHEAD_BYTES)
    yield known
    known.close()


def large(client: Reflecting) -> tuple[Space, list[bytes]]:
    """Several times what the client takes ahead of its reader."""
    space = Space(client, "slow", 1 << 20)
    hashes = named(10, "slow")
    for number, block_hash in enumerate(hashes):
        space.put([block_hash], [space.record(number)], hashes[number - 1] if number else b"")
    return space, hashes


def test_every_method_has_an_access_class(client: Reflecting) -> None:
    """What is reflected is what the one table has, besides health and reflection themselves."""
    ours = {name for name in ACCESS if name.split("/")[0] not in ("Health", "ServerReflection")}
    assert set(client.methods()) == ours


def test_health_is_told_of_each_service(client: Reflecting) -> None:
    """Check, List and Watch, for nobody in particular; a service that is none is not found."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    names = ["", *(f"kvstore.v1.{name}Service" for name in ("Cache", "Model", "Node", "Region", "Report"))]
    for name in names:
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
    assert set(stub.List(health_pb2.HealthListRequest()).statuses) == set(names)
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_not_serving_comes_before_the_end(node: Serving) -> None:
    """Who watches hears of it while the connection is still there."""
    with door_of(node.place.socket) as (door, target), grpc.insecure_channel(target) as channel:
        seen = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(seen).status == health_pb2.HealthCheckResponse.SERVING
        door.terminate()
        assert next(seen).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert door.wait(TIMEOUT_S) == 0  # before it is told once more


def test_a_killed_process_comes_back(place: Place) -> None:
    """kill -9: the daemon starts another one, and engines notice nothing."""
    with serving(place) as node:
        os.kill(node.process(), 9)
        again = Reflecting(target_of(node.daemon, lives=2))
        assert again("CacheService/ListNamespaces").more is False
        assert node.daemon.log().count("kvstore grpc ended (signal 9)") == 1
        again.close()


def test_streams_are_counted(narrow: Serving, few: Reflecting) -> None:
    """One too many is told to come again, of one who asks sooner than of all: another one has room. The end of one makes room.
    Lookups do not count."""
    space, hashes = large(few)
    asked = {"namespace": space.selector, "hashes": b"".join(hashes)}
    other = Reflecting(narrow.target, "another", ahead_bytes=AHEAD_BYTES)
    held = []
    for client, count_max in ((few, OF_ONE_MAX), (other, STREAMS_MAX - OF_ONE_MAX)):
        held += [client.start("CacheService/Get", [asked]) for _ in range(count_max)]
        assert [next(stream).held for stream in held[-count_max:]] == [10] * count_max
        with pytest.raises(grpc.RpcError) as refused:
            next(client.start("CacheService/Get", [asked]))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(refused.value) == "LIMIT_EXCEEDED, retry"
    assert (
        few("CacheService/Lookup", namespace=space.selector, blocks={"hashes": asked["hashes"]}).held_blocks
        == 10
    )
    for stream in held:
        stream.cancel()
    until(lambda: is_let_in(few, asked), "a place is free again")
    other.close()


def is_let_in(client: Reflecting, asked: dict[str, Any]) -> bool:
    stream = client.start("CacheService/Get", [asked])
    try:
        return bool(next(stream).held)
    except grpc.RpcError:
        return False
    finally:
        stream.cancel()


def test_slow_readers_hold_no_leases(narrow: Serving, few: Reflecting) -> None:
    """Who reads the first piece and no other holds a few MiB of the process, and no slot of the arena."""
    space, hashes = large(few)
    asked = {"namespace": space.selector, "hashes": b"".join(hashes)}
    until(lambda: is_let_in(few, asked), "no stream of another test is left")
    before = resident_bytes(narrow.process())
    readers = [Reflecting(narrow.target, ahead_bytes=AHEAD_BYTES) for _ in range(OF_ONE_MAX)]
    streams = [reader.start("CacheService/Get", [asked]) for reader in readers]
    for stream in streams:
        next(stream), next(stream)
    until(lambda: leases_of(narrow) == 0, "every lease is given back")
    assert resident_bytes(narrow.process()) - before < GROWTH_BYTES_MAX
    for stream, reader in zip(streams, readers, strict=True):
        stream.cancel()
        reader.close()


def test_who_writes_leaves_others_their_slots(narrow: Serving, few: Reflecting) -> None:
    """All Puts of one who asks hold a quarter of the arena at most, though they send nothing: another one may store meanwhile. The
    end of one makes room."""
    space, held, end = Space(few, "hoarded", 1 << 20), list[Any](), Event()
    other = Reflecting(narrow.target, "another")

    def messages(salt: str) -> Iterator[dict[str, Any]]:
        yield space.start(named(4, salt))
        end.wait(TIMEOUT_S)

    def wanted(client: Reflecting, salt: str) -> tuple[int, bool]:
        held.append(client.start("CacheService/Put", messages(salt)))
        answer = next(held[-1]).wanted
        return len(answer.indexes), answer.full

    assert [wanted(few, str(number)) for number in range(OF_ONE_MAX)] == [(2, True), (2, True), (0, True)]
    assert wanted(other, "another") == (2, True)
    for stream in held:
        stream.cancel()
    end.set()
    until(lambda: leases_of(narrow) == 0, "the slots are given back")
    assert space.put(named(2, "again"), [space.record(n) for n in range(2)])[1].blocks == 2
    other.close()


def leases_of(node: Serving) -> int:
    from kvstore.client import Client

    with Client(node.place.socket, 10, attach=False) as local:
        return sum(session["leases"] for session in local.status()["sessions"])


def test_a_stream_that_never_ends_is_over_at_its_deadline(narrow: Serving, few: Reflecting) -> None:
    """It held slots until then, and gives them back; nothing of it is stored."""
    space, _ = large(few)
    hashes = named(2, "endless")

    def messages() -> Iterator[dict[str, Any]]:
        yield space.start(hashes)
        yield {"index": 0, "data": b"x" * 1024, "checksums": b"s" * 16}
        for offset in count(1024):
            time.sleep(0.05)
            yield {"index": 0, "offset": offset, "data": b"x"}

    stream = few.start("CacheService/Put", messages(), timeout=1.0)
    assert len(next(stream).wanted.indexes) > 0
    assert leases_of(narrow) == 1
    with pytest.raises(grpc.RpcError) as ended:
        next(stream)
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: leases_of(narrow) == 0, "the slots are given back")
    assert space.get(hashes) == (0, [])


@pytest.mark.parametrize(
    ("way", "pause_s", "said"),
    [
        ("begins nothing", 0.5, "nothing came for 0.5 s"),
        ("stops", 0.5, "nothing came for 0.5 s"),
        ("trickles", 3.0, "not all came for 4 s"),
    ],
)
def test_who_is_too_slow_is_out(
    narrow: Serving, few: Reflecting, monkeypatch: pytest.MonkeyPatch, way: str, pause_s: float, said: str
) -> None:
    """A Put that begins nothing, stops, or sends less than its slots are worth is over, whatever deadline it has: in a line, and its
    slots are free."""
    monkeypatch.setattr(calls, "PAUSE_S", pause_s)
    monkeypatch.setattr(streams, "PAUSE_S", pause_s)
    space = Space(few, "slow", 1 << 20)
    with door_here(narrow.place.socket) as target:
        client, end = Reflecting(target), Event()

        def messages() -> Iterator[dict[str, Any]]:
            if way != "begins nothing":
                yield space.start(named(1, way))
                yield {"index": 0, "data": b"x", "checksums": b"s" * 16}
            for offset in count(1):
                if end.wait(0.1 if way == "trickles" else TIMEOUT_S):
                    return
                yield {"index": 0, "offset": offset, "data": b"x"}

        stream = client.start("CacheService/Put", messages())
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED and ended.value.details() == said
        until(lambda: leases_of(narrow) == 0, "the slots are given back")
        end.set()
        client.close()


def test_who_has_gone_holds_no_place_while_the_daemon_is_away(
    narrow: Serving, few: Reflecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Put whose client gave it up waits for no daemon, whatever time it had: its place is another one's, and its thread holds up
    no end of the process."""
    monkeypatch.setattr(streams, "CLIENT_S", 0.2)
    space = Space(few, "gone")
    with door_here(narrow.place.socket, streams_max=1) as target:
        client, end = Reflecting(target), Event()
        client("CacheService/ListNamespaces")  # it knows them for a while

        def is_taken() -> bool:
            stream = client.start("CacheService/Put", iter(end.wait, True), timeout=0.3)
            with pytest.raises(grpc.RpcError) as ended:
                next(stream)
            return bool(ended.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED)

        os.kill(narrow.daemon.process.pid, signal.SIGSTOP)
        try:
            put = client.start("CacheService/Put", [space.start(named(1, "gone"))])
            until(is_taken, "the Put has its place")
            put.cancel()
            until(lambda: not is_taken(), "its place is free")
        finally:
            end.set()
            os.kill(narrow.daemon.process.pid, signal.SIGCONT)
        client.close()


def test_figures_of_a_daemon_that_hangs_are_waited_for_as_long_as_a_status(
    narrow: Serving, few: Reflecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever watches has no deadline worth the name: he hears soon that there are none."""
    monkeypatch.setattr(reports, "STATUS_TIMEOUT_S", 0.3)
    with door_here(narrow.place.socket) as target:
        client = Reflecting(target)
        client("CacheService/ListNamespaces")
        os.kill(narrow.daemon.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(grpc.RpcError) as ended:
                next(client.start("ReportService/WatchFigures", [{}], timeout=TIMEOUT_S))
        finally:
            os.kill(narrow.daemon.process.pid, signal.SIGCONT)
        assert reason(ended.value) == "TIMEOUT"
        client.close()


def test_large_answers_are_bounded(narrow: Serving, few: Reflecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large answers only so many bytes are on their way at a time; what was taken counts no more, and small ones never do."""
    monkeypatch.setattr(calls, "LARGE_BYTES", 1 << 10)
    monkeypatch.setattr(calls, "LARGE_BYTES_MAX", 100 << 10)
    with door_here(narrow.place.socket) as target:
        client, space = Reflecting(target), Space(few, "large")
        asked = {"namespace": space.selector, "blocks": {"hashes": b"".join(named(200, "large"))}}
        size = client("CacheService/Explain", **asked).ByteSize()
        assert 10 << 10 < size < 100 << 10
        for _ in range(2 * (100 << 10) // size):
            client("CacheService/Explain", **asked)
        monkeypatch.setattr(calls, "LARGE_BYTES_MAX", size - 1)
        with pytest.raises(grpc.RpcError) as refused:
            client("CacheService/Explain", **asked)
        assert reason(refused.value) == "LIMIT_EXCEEDED, retry"
        assert client("CacheService/ListNamespaces").namespaces
        client.close()


def test_large_answers_of_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count until they are taken, as those of other calls do; records have limits of their own."""
    monkeypatch.setattr(calls, "LARGE_BYTES", 10)
    monkeypatch.setattr(calls, "LARGE_BYTES_MAX", 100)

    async def write() -> None:
        taken = asyncio.Event()
        context = SimpleNamespace(write=lambda content: taken.wait())
        call = calls.Call("WatchOperation", local(0, 0), 0.0, context)
        message = health_pb2.HealthCheckRequest(service="x" * 60)
        slow = [asyncio.ensure_future(call.write(one)) for one in (message, bytes(1000))]
        await asyncio.sleep(0)
        with pytest.raises(LimitExceeded):
            await call.write(message)
        taken.set()
        await asyncio.gather(*slow, call.write(message))

    asyncio.run(write())


def test_a_message_that_is_too_large_is_refused(narrow: Serving, few: Reflecting) -> None:
    """By its length, before it is read; the connection goes on."""
    with pytest.raises(grpc.RpcError) as refused:
        few("CacheService/Lookup", blocks={"hashes": bytes(5 << 20)})
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert few("CacheService/ListNamespaces") is not None


def test_a_bomb_is_not_inflated(narrow: Serving, few: Reflecting) -> None:
    """A compressed message, small as it comes and large as it would be, is refused as it comes."""
    before = resident_bytes(narrow.process())
    for size in (1000, 256 << 20):
        bomb = gzip.compress(bytes(size))
        call = few.channel.unary_unary("/kvstore.v1.CacheService/Lookup")
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(size), compression=grpc.Compression.Gzip, timeout=60)
        assert refused.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL), (
            len(bomb),
            refused.value,
        )
    assert resident_bytes(narrow.process()) - before < GROWTH_BYTES_MAX


def test_garbage_ends_its_own_connection(narrow: Serving, few: Reflecting) -> None:
    """Bytes that are no HTTP/2, frames that lie about their length, and messages that are no protobuf: others notice nothing."""
    host, port = narrow.target.rsplit(":", 1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    lies = [
        os.urandom(4096),
        preface + os.urandom(4096),
        preface + struct.pack(">I", 0xFFFFFF)[1:] + bytes(6) + os.urandom(1 << 16),
        b"GET / HTTP/1.1\r\n\r\n",
        preface[:7],
    ]
    for number in range(5 * ROUNDS):
        with socket.create_connection((host, int(port)), 10) as peer:
            peer.settimeout(10)
            try:
                peer.sendall(lies[number % len(lies)])
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass
            except OSError:
                pass
    for method in ("Lookup", "Pin", "Get", "Put"):
        kind = few.channel.stream_stream if method == "Put" else few.channel.unary_unary
        call: Any = kind(f"/kvstore.v1.CacheService/{method}")
        for _ in range(3 * ROUNDS):
            sent = b"\x0a\xff\xff\x7f" + os.urandom(100)  # a field that is longer than all there is
            with pytest.raises(grpc.RpcError) as refused:  # noqa: PT012 a stream says it when it is read
                if method == "Put":
                    list(call(iter([sent]), timeout=30))
                elif method == "Get":
                    list(few.channel.unary_stream("/kvstore.v1.CacheService/Get")(sent, timeout=30))
                else:
                    call(sent, timeout=30)
            assert refused.value.code() != grpc.StatusCode.UNKNOWN, refused.value
    assert child_of(narrow.daemon) and "Traceback" not in narrow.daemon.log()
    assert few("CacheService/ListNamespaces") is not None


def test_more_streams_than_a_connection_may_have(narrow: Serving, few: Reflecting) -> None:
    """A thousand on each of some connections, `make soak`: of 10,000: those beyond the limits are refused, memory is bounded, and
    others are answered meanwhile and afterwards."""
    count = 10_000 if ROUNDS > 1 else 4
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    before, address = resident_bytes(narrow.process()), narrow.target.rsplit(":", 1)
    said, refused = opened(1000), 0
    with ExitStack() as held, socket.create_connection((address[0], int(address[1])), 5.0) as one:
        one.settimeout(TIMEOUT_S)
        one.sendall(said)
        frames = kinds_of_frames(one, (DATA, OPEN_OF_ONE_MAX), quiet_s=1.0)
        assert frames[DATA] == OPEN_OF_ONE_MAX and 0 < frames[RST_STREAM] <= 1000 - CALLS_MAX
        for _ in range(count):
            try:
                peer = held.enter_context(socket.create_connection((address[0], int(address[1])), 5.0))
                peer.settimeout(5.0)
                peer.sendall(said)
                refused += peer.recv(1 << 16) == b""
            except OSError:  # it is closed, or not taken
                refused += 1
        assert refused or ROUNDS == 1
        grown = resident_bytes(narrow.process()) - before
        assert grown < GROWTH_BYTES_MAX * (8 if ROUNDS > 1 else 1)
        if ROUNDS == 1:
            assert few("CacheService/ListNamespaces") is not None
    until(lambda: few("CacheService/ListNamespaces") is not None, "others are answered")
    assert child_of(narrow.daemon) and "Traceback" not in narrow.daemon.log()


def test_records_come_from_slower_tiers(place: Place) -> None:
    """What DRAM has no room for comes from NVMe: Lookup says so, Prefetch begins it, and Get has every byte in order."""
    with serving(place, nvme=True) as node:
        client = Reflecting(node.target)
        space, hashes = Space(client, "slower", 1 << 20), named(24, "slower")
        for number, block_hash in enumerate(hashes):
            parent = hashes[number - 1] if number else b""
            until(
                lambda n=number, h=block_hash, p=parent: space.put([h], [space.record(n)], p)[1].blocks == 1,
                "there is room for one more",
            )
        found = client("CacheService/Lookup", namespace=space.selector, blocks={"hashes": b"".join(hashes)})
        tiers = {run.outcome: run.blocks for run in found.runs}
        assert found.held_blocks == 24 and tiers["nvme"] >= 8 and tiers["dram"] >= 1
        asked = {"namespace": space.selector, "hashes": b"".join(hashes)}
        assert client("CacheService/Prefetch", **asked).blocks > 0
        assert space.get(hashes) == (24, [space.record(n) for n in range(24)])
        again = client("CacheService/Lookup", namespace=space.selector, blocks={"hashes": b"".join(hashes)})
        assert again.predicted_load_s > 0
        client.close()
