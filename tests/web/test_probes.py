"""What probes, browsers and strangers get: health, readiness, the page's files, and refusals of one line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from kvstore.daemon.listening import Listen
from kvstore.security.identity import Gate
from kvstore.tools.web import server as server_module
from kvstore.tools.web.asking import Answer, Asking
from kvstore.tools.web.history import History
from kvstore.tools.web.running import WEB_CONNECTIONS_MAX
from kvstore.tools.web.server import WEB_HISTORIES_MAX, Web
from kvstore.tools.web.strangers import Askers
from tests.running import Place
from tests.web.asked import Reply, Serve, Watching, get, until, url_of, with_web


class Scripted(Asking):
    """A daemon that says this."""

    def __init__(self, **said: Any) -> None:
        super().__init__(Path("/nowhere"))
        self.said = {
            "pid": 1,
            "uptime_s": 1.0,
            "now_s": 1e9,
            "instance": "i",
            "minutes": [],
            "tokens": [],
            **said,
        }
        self.said |= {"latencies": {}, "latency_bounds_s": [], "tiers": []}

    def _ask(self, minutes_since_s: float) -> Answer:
        return Answer(self.said, "", self.clock(), 0.0)


def said(path: str, **report: Any) -> tuple[int, str]:
    """Status and text of an answer about a daemon that says this."""

    async def ask() -> tuple[int, str]:
        web = Web(Scripted(**report), Listen("127.0.0.1", 0), Askers("user", Gate(None)))
        async with TestClient(TestServer(web.app())) as client, client.get(path) as response:
            return response.status, await response.text()

    return asyncio.run(ask())


def test_a_healthy_daemon_is_healthy_and_ready(place: Place, serve: Serve) -> None:
    """200 and one word each; ?o=json says the same to programs."""
    url = url_of(serve(place, *with_web(place)))
    assert (get(url, "/healthz").status, get(url, "/healthz").text) == (200, "ok\n")
    assert (get(url, "/readyz").status, get(url, "/readyz").text) == (200, "ready\n")
    assert get(url, "/healthz?o=json").json() == {"ok": True, "status": "ok", "problems": []}


def test_problems_make_it_unhealthy_and_leave_it_ready() -> None:
    """Books that do not balance are a 503 of /healthz, and its line names them first, whatever else is wrong for longer; a bucket
    that is away is a line of it, and no reason to be 503; it can serve all the same."""
    books, bucket = (
        {
            "kind": kind,
            "subject": kind,
            "level": "problem",
            "text": text,
            "fix": "",
            "since_s": 0.0,
            "count": 1,
        }
        for kind, text in (("books", "slot 1 has two owners"), ("bucket", "no answer"))
    )
    report = {"health": {"ok": False}, "problems": [bucket, books], "adopting": False}
    assert said("/healthz", **report) == (503, "problems: books books: slot 1 has two owners (and 1 more)\n")
    assert said("/readyz", **report) == (200, "ready\n")
    report = {"health": {"ok": True}, "problems": [bucket], "adopting": False}
    assert said("/healthz", **report) == (200, "ok: bucket bucket: no answer\n")


def test_adopting_is_ready_with_a_note() -> None:
    """A daemon that still reads its rows answers, so that it is ready; the line says what it does."""
    report = {"health": {"ok": True}, "problems": [], "adopting": True}
    assert said("/readyz", **report) == (
        200,
        "ready: still reading the rows of NVMe: what is not read yet is a miss\n",
    )
    assert said("/healthz", **report) == (200, "ok\n")


def test_a_daemon_that_hangs_is_seen(place: Place, serve: Serve) -> None:
    """The process is there and does not answer: 503 within seconds, and 200 again when it goes on."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    assert get(url, "/healthz").status == 200
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: get(url, "/healthz").status == 503, "the hang is seen", 10)
        assert get(url, "/readyz").text == "unreachable: kvstore daemon: live: no answer in time\n" or get(
            url, "/readyz"
        ).text.startswith("unreachable: kvstore daemon at ")
        assert get(url, "/metrics").text.count("kvstore_up 0.0\n") == 1
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    until(lambda: get(url, "/healthz").status == 200, "it goes on", 10)


def test_without_a_daemon_the_reason_is_told(tmp_path: Path) -> None:
    """No socket: 503 and why, in one line; the page and its data are served all the same."""
    with Watching(tmp_path / "s") as web:
        reply = get(web.url, "/healthz")
        assert reply.status == 503
        assert reply.text == f"unreachable: kvstore daemon at {tmp_path / 's'}: No such file or directory\n"
        live = get(web.url, "/live.json").json()
        assert (live["up"], live["live"], live["sample"], live["now_s"]) == (False, None, None, None)
        assert get(web.url, "/history.json").json()["samples"] == []
        assert get(web.url, "/").status == 200


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Watching(tmp_path_factory.mktemp("web") / "s") as web:
        yield web.url


def test_head_is_get_without_a_body(url: str) -> None:
    """Same status and length."""
    for path in ("/", "/healthz", "/live.json", "/nowhere"):
        head, full = get(url, path, "HEAD"), get(url, path)
        assert (head.status, head.body) == (full.status, b"")
        assert head.headers["content-type"] == full.headers["content-type"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_can_be_written(url: str, method: str) -> None:
    """405 and which methods there are."""
    reply = get(url, "/live.json", method)
    assert (reply.status, reply.text) == (405, "allowed are GET and HEAD\n")
    assert reply.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/nowhere",
        "/server.py",
        "/page/index.html",
        "/../server.py",
        "/%2e%2e/server.py",
        "/..%2fserver.py",
        "//etc/passwd",
        "/index.html/",
        "/.index.html",
        "/index.html%00.js",
        "/metrics/",
        "/" + "a" * 5000 + ".js",
    ],
)
def test_only_the_files_of_the_page_are_served(url: str, path: str) -> None:
    """Whatever else is asked for is a line, and none of our files."""
    reply = get(url, path)
    assert reply.status == 404
    assert (
        reply.text
        == "not here: there are /, /metrics, /healthz, /readyz, /live.json, /history.json and /nodes.json\n"
    )


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:9471", "[::1]", "[::1]:9471", "localhost:"]
)
def test_it_answers_to_its_own_names(url: str, host: str) -> None:
    """With any port, because of tunnels."""
    assert get(url, "/live.json", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9471", "localhost.evil.example", "127.0.0.1@evil.example", "", "a:b:c"],
)
def test_a_page_of_elsewhere_cannot_read_it(url: str, host: str) -> None:
    """A name that was made to point to loopback (DNS rebinding) is refused, for every path."""
    for path in ("/", "/live.json", "/metrics", "/nowhere"):
        reply = get(url, path, Host=host)
        assert (reply.status, reply.text.count("\n")) == (403, 1)


def test_every_answer_lets_a_browser_ask_nobody_else(url: str) -> None:
    """The headers that say so are there on pages, data and refusals; nothing says which software serves it."""
    for reply in (get(url, "/"), get(url, "/live.json"), get(url, "/nowhere"), get(url, "/", "POST")):
        policy = reply.headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        )
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["server"] == "kvstore"
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("query", ["since=x", "since=-1", "since=nan", "since=inf"])
def test_a_wrong_question_says_what_is_allowed(url: str, query: str) -> None:
    """400 and one line."""
    reply = get(url, f"/history.json?{query}")
    assert (reply.status, reply.text) == (400, "allowed is since=UNIX_SECONDS\n")


def test_no_http_is_no_line_in_the_log(tmp_path: Path) -> None:
    """A port scanner costs a 400, and no traceback in the daemon's log."""
    with Watching(tmp_path / "s") as web:
        parts = urlsplit(web.url)
        for noise in (
            b"\x16\x03\x01\x02\x00\x01\n\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: \x00\r\n\r\n",
            b"A" * 100_000,
        ):
            with socket.create_connection((parts.hostname, parts.port), 10) as peer:
                peer.sendall(noise)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass
        assert get(web.url, "/").status == 200
    assert web.errors.count("\n") == 1, web.errors  # that it serves


def test_who_only_connects_shuts_nobody_out(tmp_path: Path) -> None:
    """Of connections that never finish their request only the newest stay open, and probes are answered."""
    with Watching(tmp_path / "s") as web, contextlib.ExitStack() as peers:
        parts = urlsplit(web.url)
        begun = []
        for _ in range(WEB_CONNECTIONS_MAX + 20):
            peer = peers.enter_context(socket.create_connection((parts.hostname, parts.port), 10))
            peer.sendall(b"GET / HTTP/1.1\r\n")
            begun.append(peer)
            assert get(web.url, "/readyz").status == 503
        assert all(peer.recv(1) == b"" for peer in begun[:20])
        for peer in begun[30:]:
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
        held = 0
        for path in Path(f"/proc/{web.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                held += os.readlink(path).startswith("socket:")
        assert held <= WEB_CONNECTIONS_MAX + 10


def test_many_who_ask_cost_the_daemon_one_answer(place: Place, serve: Serve) -> None:
    """Fifty requests at once, and the daemon is asked a few times: by the first, and for samples."""
    daemon = serve(place)
    with Watching(place.socket) as web:
        host, port = urlsplit(web.url).hostname, urlsplit(web.url).port

        async def ask() -> str:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer.decode()

        async def all_at_once() -> list[str]:
            return await asyncio.gather(*(ask() for _ in range(50)))

        begun = _lives(get(web.url, "/live.json"))
        assert all(answer.startswith("HTTP/1.1 200 ") for answer in asyncio.run(all_at_once()))
        until(lambda: get(web.url, "/live.json").json()["age_s"] < 0.2, "a new answer")
        assert _lives(get(web.url, "/live.json")) - begun <= 10
    assert daemon.process.poll() is None


def _lives(reply: Reply) -> int:
    found: int = reply.json()["live"]["door"]["frames"].get("Live", 0)
    return found


def test_who_does_not_take_the_history_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for it and read nothing, no more than a few histories are held, nor is one that was sent; who reads gets it."""
    size, held, most, bodies = 16 << 20, 0, 0, list[object]()
    send = Web._send

    async def counted(self: Web, request: web.Request, response: web.Response) -> None:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await send(self, request, response)
        held -= 1
        bodies.append(response.body)

    async def asked() -> None:
        served = Web(Scripted(), Listen("127.0.0.1", 0), Askers("user", Gate(None)))
        async with TestServer(served.app()) as server, ClientSession() as client:
            lazy = []
            for _ in range(2 * WEB_HISTORIES_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
                writer.write(b"GET /history.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                lazy.append((reader, writer))
            while len(bodies) < len(lazy):
                await asyncio.sleep(0.01)
            monkeypatch.setattr(server_module, "WEB_SEND_S", 60.0)
            async with client.get(server.make_url("/history.json")) as response:
                assert len(await response.read()) > size
            for _, writer in lazy:
                writer.close()

    monkeypatch.setattr(server_module, "WEB_SEND_S", 0.3)
    monkeypatch.setattr(History, "since", lambda *_: b'"' + b"x" * size + b'"')
    monkeypatch.setattr(Web, "_send", counted)
    asyncio.run(asked())
    assert 1 < most <= WEB_HISTORIES_MAX and len(bodies) == 2 * WEB_HISTORIES_MAX + 1 and not any(bodies)
