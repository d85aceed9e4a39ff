"""Reads of S3 that go straight into memory: the same answers as by way of obstore, and nothing is written afterwards."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from tests.objects import S3Server
from tests.region.proxy import Proxy
from tiers.base import Get
from tiers.bucket.direct_reads import DIRECT_FAILURES_MAX
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import StoredObjects, open_objects
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import fetch_records, put_pack
from tiers.packs.packs import Pack, PackHeader

BODY = random.Random(0).randbytes(3 << 20)
RECORD_BYTES = 256 * 1024
SPEC = NamespaceSpec(b"reads into place", RECORD_BYTES, 32, 16)
RECORDS = [random.Random(number).randbytes(RECORD_BYTES) for number in range(24)]


def opened(s3: S3Server, endpoint: str = "", **times: Any) -> StoredObjects:
    s3.make_bucket("direct-reads")  # again: no error
    options = s3.options(backoff_s_max=0.1, **times)
    objects = open_objects(
        "s3://direct-reads/x", replace(options, endpoint=endpoint) if endpoint else options
    )
    assert isinstance(objects, StoredObjects)
    return objects


def options_for(port: int) -> ObjectOptions:
    return ObjectOptions(
        endpoint=f"http://127.0.0.1:{port}", region="us-east-1", allow_http=True,
        access_key_id="key", secret_access_key="secret", timeout_s=30.0,
    )  # fmt: skip


async def put(objects: StoredObjects) -> Pack:
    hashes = random.Random(1).randbytes(32 * len(RECORDS))
    return await put_pack(objects, PackHeader(SPEC, b"", hashes, b"".join(map(digest, RECORDS))), RECORDS)


def views_for(indexes: Sequence[int]) -> list[tuple[int, memoryview]]:
    return [(index, memoryview(bytearray(RECORD_BYTES))) for index in indexes]


def test_a_run_is_received_in_place(s3_server: S3Server) -> None:
    """The same bytes as by way of obstore, for runs, parts of them, and what is no run."""

    async def check() -> None:
        objects = opened(s3_server)
        pack = await put(objects)
        direct = objects._direct
        assert direct is not None
        for indexes in (range(24), range(3, 9), range(20, 24)):
            wanted = views_for(indexes)
            assert await fetch_records(objects, pack, wanted) == [Get.HIT] * len(indexes)
            assert [bytes(view) for _, view in wanted] == [RECORDS[index] for index in indexes]
        assert (direct.reads, direct.failures) == (3, 0)
        for others in ([5, 3, 4, 6], [1, 3, 5, 7, 9], [7]):
            wanted = views_for(others)
            assert await fetch_records(objects, pack, wanted) == [Get.HIT] * len(others)
        assert direct.reads == 3

    asyncio.run(check())


@pytest.mark.parametrize("size_bytes", [1, 100, 5_000, 9_000, 200_000])
def test_a_few_bytes_that_come_with_the_head_are_asked_for_once(s3_server: S3Server, size_bytes: int) -> None:
    """From a server that closes: all of them may be there before anything is received."""

    async def check() -> None:
        objects = opened(s3_server)
        direct = objects._direct
        assert direct is not None
        await objects.put("few", BODY[:size_bytes])
        for views in (
            [bytearray(size_bytes)],
            [bytearray(size_bytes // 2), bytearray(size_bytes - size_bytes // 2)],
        ):
            assert await direct.read("few", 0, list(map(memoryview, views)))
            assert b"".join(views) == BODY[:size_bytes]
        assert (direct.reads, direct.failures) == (2, 0)

    asyncio.run(check())


class Keeping(BaseHTTPRequestHandler):
    """Any object is BODY. Connections are kept."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[socket.socket]] = []

    def setup(self) -> None:
        super().setup()
        self.connections.append(self.connection)

    def do_GET(self) -> None:
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.send_response(206)
        self.send_header("Content-Length", str(end + 1 - start))
        self.end_headers()
        self.wfile.write(BODY[start : end + 1])

    def log_message(self, *_: object) -> None:
        pass


def test_connections_are_kept_and_a_closed_one_is_noticed() -> None:
    """Eight reads one after the other take one connection; then the server closes it, and no read fails."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Keeping) as server:
        threading.Thread(target=server.serve_forever).start()
        Keeping.connections.clear()

        async def check() -> None:
            objects = open_objects("s3://any-bucket/x", options_for(server.server_port))
            assert isinstance(objects, StoredObjects) and objects._direct is not None
            view = memoryview(bytearray(2 << 20))
            for connections in (1, 2):
                for number in range(8):
                    view[:] = bytes(len(view))
                    assert await objects.read_into("name", number, [view[:100], view[100:]])
                    assert view == BODY[number : number + len(view)]
                assert len(Keeping.connections) == connections
                Keeping.connections[-1].shutdown(socket.SHUT_RDWR)
            assert objects._direct.failures == 0

        try:
            asyncio.run(check())
        finally:
            server.shutdown()


@pytest.mark.parametrize("damage", ["missing", "cut off", "flipped", "503", "hang", "cut", "flip"])
def test_what_goes_wrong_is_the_same_answer(s3_server: S3Server, damage: str) -> None:
    """As without, of the object and on its way; and never a wrong byte."""
    proxy = Proxy(s3_server.port)

    async def answers(is_direct: bool) -> set[Get]:
        objects = opened(s3_server, proxy.endpoint)
        pack = await put(objects)
        if damage in ("503", "hang", "cut"):  # they take all the time there is
            objects = opened(s3_server, proxy.endpoint, timeout_s=1.0, deadline_s=2.0)
        if not is_direct:
            objects._direct = None
        if damage == "missing":
            await objects.delete([pack.name])
        elif damage == "cut off":
            await objects.put(pack.name, bytes((await objects.get(pack.name))[: pack.size_bytes - 5]))
        elif damage == "flipped":
            content = bytearray(await objects.get(pack.name))
            content[-1] ^= 1
            await objects.put(pack.name, bytes(content))
        else:
            proxy.mode = damage
        wanted = views_for(range(24))
        found = await fetch_records(objects, pack, wanted)
        proxy.mode = "pass"
        for (index, view), answer in zip(wanted, found, strict=True):
            assert answer is not Get.HIT or view == RECORDS[index]
        return set(found)

    try:
        direct, plain = asyncio.run(answers(True)), asyncio.run(answers(False))
    finally:
        proxy.close()
    assert direct == plain or damage == "flip"  # where a bit is flipped is chance
    assert direct != {Get.HIT}


@contextmanager
def halting(body: bytes, sent_bytes: int) -> Iterator[tuple[int, threading.Event, threading.Event]]:
    """A server that answers any GET with the beginning of `body`, says so, and sends the rest when it is told to."""
    listener = socket.create_server(("127.0.0.1", 0))
    begun, go_on = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body[:sent_bytes])
            begun.set()
            go_on.wait(30)
            try:
                connection.sendall(body[sent_bytes:])
            except OSError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], begun, go_on
    finally:
        go_on.set()
        thread.join(30)
        listener.close()


@pytest.mark.parametrize("sent_bytes", [0, 1, 3 << 20])
def test_nobody_writes_after_a_cancel(sent_bytes: int) -> None:
    """In the middle of the body, too; and the cancelled call ends at once."""
    size_bytes = 8 << 20
    view = memoryview(bytearray(size_bytes))

    async def check(port: int, begun: threading.Event, go_on: threading.Event) -> None:
        objects = open_objects("s3://any-bucket/x", options_for(port))
        reading = asyncio.create_task(objects.read_into("name", 0, [view]))
        await asyncio.to_thread(begun.wait, 30)
        while sent_bytes and not view[0]:
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(reading, 10)
        kept = bytes(view)
        go_on.set()
        await asyncio.sleep(0.2)
        assert bytes(view) == kept

    with halting(b"\x01" * size_bytes, sent_bytes) as (port, begun, go_on):
        asyncio.run(check(port, begun, go_on))


def test_it_stays_away_after_some_failures(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes back: a store that it cannot read is not asked twice for everything."""

    async def check() -> None:
        objects = opened(s3_server)
        direct = objects._direct
        assert direct is not None
        view = memoryview(bytearray(2 << 20))
        for _ in range(DIRECT_FAILURES_MAX + 2):
            assert not await objects.read_into("not-there", 0, [view])
        assert direct.failures == DIRECT_FAILURES_MAX
        pack = await put(objects)
        assert await fetch_records(objects, pack, views_for(range(24))) == [Get.HIT] * 24
        assert direct.reads == 0
        direct._again_s = 0.0
        assert await fetch_records(objects, pack, views_for(range(24))) == [Get.HIT] * 24
        assert direct.reads == 1

    asyncio.run(check())


def test_a_proxy_is_left_to_obstore(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the environment names one, nothing is read without it."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")

    async def check() -> None:
        assert not await opened(s3_server).read_into("any", 0, [memoryview(bytearray(2 << 20))])

    asyncio.run(check())
