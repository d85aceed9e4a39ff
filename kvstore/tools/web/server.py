"""What `kvstore web` serves: metrics, health, the page and what the page shows.

    GET /              the page: index.html of kvstore/tools/web/page, and the files beside it by their names
    GET /metrics       for Prometheus; names.py has every metric
    GET /healthz       200 while the daemon answers in time and is healthy itself, else 503; one line with what is wrong, ?o=json
    GET /readyz        200 while the daemon answers: it can serve, adopting or not
    GET /live.json     the newest answer of the daemon
    GET /nodes.json    nodes of the region, as `kvstore region nodes -o json` has them; found while somebody asks, once a minute at most
    GET /history.json  samples of the last hours; ?since=T: newer than T (unix s), all where T is later than the last

/live.json:

    {"up": bool,              whether the daemon answered; all below is from its last answer otherwise
     "problem": "",           why not, in a line
     "now_s": unix or null,   the daemon's clock now, carried on by ours while it is away; null: never answered
     "age_s": s or null,      of `live`
     "scrape_s": s,           how long that answer took
     "live": {…} or null,     frames.Live's answer as docs/cli.md has it, `minutes` left out
     "sample": {…} or null,   the newest sample, as below: rates are its counts over its seconds
     "kinds": {outcome: "engine"|"hit"|"miss"}, "meanings": {outcome: words}}      in the order to show them

/history.json, oldest first:

    {"now_s": …, "up": …, "kept_s": 21600, "instance": "…",
     "samples": [
       {"t": unix s at its end, "s": seconds that it is about,
        "gap": bool,          nothing is known of the time before it (no answer, or another daemon): draw no line across
        "minute": bool,       of the daemon's minutes, from before we looked: no "used", no latencies
        "lookups": n, "asked": tokens, "tokens": {outcome: n}     those that are not 0
        "bytes": {"stored": n, "loaded": n, "promoted": n, "demoted": n}, "saved_s": prefill seconds saved
        "used": {tier: bytes},
        "requests": {"lookup": [n, p50_s, p99_s], "acquire": […]},    those there were in the interval
        "loads": {level: [n, p50_s, p99_s]}, "stores": {level: […]}, "loop_delay": [n, p50_s, p99_s] or null}]}

"sample" and the last of "samples" are the same, and no older than five seconds while the daemon answers. Of a time in which
it did not answer for more than 15 there is none, even where it lived on: the first after it comes at the second answer.

Who has no right to view, as the daemon's user and root have on this machine, reads figures and no names (strangers.py), unless
`web.names` says "all".

Only GET and HEAD. Listening on a loopback address it answers only those who call it by one, so that no page of
somewhere else can read it through a browser. Nothing is asked of any other machine, and the page's content security
policy lets the browser ask nobody else either: scripts and styles are files, never inline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import hdrs, web

from kvstore.constants import WEB_HISTORY_S, WEB_SAMPLE_S
from kvstore.daemon.listening import Listen
from kvstore.errors import NotKnown
from kvstore.protocol import answers
from kvstore.protocol.outcomes import MEANINGS
from kvstore.security.tls import Tls
from kvstore.tools.web.asking import Answer, Asking
from kvstore.tools.web.collector import exposition, kind_of
from kvstore.tools.web.history import History
from kvstore.tools.web.nodes import Nodes
from kvstore.tools.web.strangers import Askers

WEB_CONNECTION_AGE_S = 600.0  # of one with a certificate, which may have expired meanwhile
WEB_PACKED_BYTES = 64 << 10  # more is compressed in a thread
WEB_SEND_S = 10.0  # until who has asked has taken the answer
WEB_HISTORIES_MAX = 16  # at once: each may be megabytes

log = logging.getLogger("kvstore.web")

PAGE = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_FILE = re.compile(r"/[a-z0-9_-]{1,64}\.[a-z]{1,8}", re.ASCII)
HEADERS = {
    "Server": "kvstore",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Web:
    """All that is served of one daemon."""

    def __init__(
        self,
        asking: Asking,
        listen: Listen,
        askers: Askers,
        tls: Tls | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._asking = asking
        self._nodes = nodes or Nodes()
        self._askers = askers
        self._tls = tls
        self._since_s: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # when a connection first asked
        self._names = names_of(listen)
        self._history = History()
        self._room = asyncio.Semaphore(WEB_HISTORIES_MAX)
        self._known: Answer | None = None  # the last that had a report
        self._routes: Mapping[str, Callable[[web.Request], Awaitable[web.Response]]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/live.json": self._live,
            "/history.json": self._samples,
            "/nodes.json": self._region,
        }

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        app.cleanup_ctx.append(self._sampling)
        return app

    # -- samples --

    async def _sampling(self, _app: web.Application) -> AsyncIterator[None]:
        task = asyncio.get_running_loop().create_task(self._sample())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _sample(self) -> None:
        clock = self._asking.clock
        next_s = clock()
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("no sample")
            next_s = max(next_s + WEB_SAMPLE_S, clock())
            await asyncio.sleep(next_s - clock())

    async def _look(self) -> None:
        answer = await self._asked()
        if answer.report is not None and self._history.is_new(answer.report, answer.at_s):
            answer = await self._asking.since(0.0)
        if answer.report is not None:
            self._history.note(answer.report, answer.at_s)

    async def _asked(self) -> Answer:
        answer = await self._asking.newest()
        if answer.report is not None:
            self._known = answer
        return answer

    # -- requests --

    async def _answer(self, request: web.Request) -> web.Response:
        if self._tls is not None and not self._is_current(self._tls, request.transport):
            if request.transport is not None:
                request.transport.abort()
            return _line(401, "the certificates have changed: connect again")
        async with self._room if request.path == "/history.json" else contextlib.nullcontext():
            try:
                response = await self._routed(request)
            except Exception:
                log.exception("%s failed", request.path)
                response = _line(500, "a bug of kvstore: its log has more")
            response.headers.update(HEADERS)
            if self._tls is not None and self._age_of(request.transport) > WEB_CONNECTION_AGE_S:
                response.force_close()
            await self._send(request, response)
        return response

    async def _send(self, request: web.Request, response: web.Response) -> None:
        """Who does not take what he has asked for is cut off: it would be held for him, megabytes of it, as long as he likes."""
        try:
            async with asyncio.timeout(WEB_SEND_S):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        response.body = None  # the connection keeps the response until the next one

    def _is_current(self, tls: Tls, transport: Any) -> bool:
        """Whether its certificate was verified by the authorities of now."""
        connection = transport.get_extra_info("ssl_object") if transport is not None else None
        return connection is not None and connection.context is tls.newest()[1]

    def _age_of(self, transport: Any) -> float:
        now_s = self._asking.clock()
        return 0.0 if transport is None else now_s - self._since_s.setdefault(transport, now_s)

    async def _routed(self, request: web.Request) -> web.Response:
        if (refused := refusal(request, self._names)) is not None:
            return refused
        handler = self._routes.get(request.path)
        if handler is not None:
            try:
                return await handler(request)
            except NotKnown as error:
                return _line(401, str(error))
        return _page_file("/index.html" if request.path == "/" else request.path)

    async def _metrics(self, request: web.Request) -> web.Response:
        answer = self._for(request, await self._asked())
        body, content_type = exposition(answer, request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    def _for(self, request: web.Request, answer: Answer) -> Answer:
        """As who asks may read it."""
        shown = {"report": answer.report, "problem": answer.problem}
        return replace(answer, **self._askers.as_read_by(self._askers.principal(request), shown))

    async def _healthz(self, request: web.Request) -> web.Response:
        answer = self._for(request, await self._asked())
        if answer.report is None:
            return _told(request, 503, "unreachable", [answer.problem])
        return told(request, answer.report["health"]["ok"], answer.report["problems"], answers.OF_HEALTH)

    async def _readyz(self, request: web.Request) -> web.Response:
        answer = self._for(request, await self._asked())
        if answer.report is None:
            return _told(request, 503, "unreachable", [answer.problem])
        notes = (
            ["still reading the rows of NVMe: what is not read yet is a miss"]
            if answer.report["adopting"]
            else []
        )
        return _told(request, 200, "ready", notes)

    async def _live(self, request: web.Request) -> web.Response:
        answer = self._for(request, await self._asked())
        known = self._for(request, self._known) if self._known is not None else None
        report = (
            {k: v for k, v in (known.report or {}).items() if k != "minutes"} if known is not None else None
        )
        head = {
            **self._head(answer),
            "problem": answer.problem,
            "age_s": self._age_s(),
            "scrape_s": round(known.took_s, 6) if known is not None else None,
            "live": report,
            "kinds": {outcome: kind_of(outcome) for outcome in MEANINGS},
            "meanings": MEANINGS,
        }
        return _json(_with(head, "sample", self._history.newest))

    async def _samples(self, request: web.Request) -> web.Response:
        try:
            since_s = float(request.query.get("since", "0"))
        except ValueError:
            since_s = -1.0
        if not 0 <= since_s < 1e12:
            return _line(400, "allowed is since=UNIX_SECONDS")
        answer = await self._asked()
        known = self._known
        head = {
            **self._head(answer),
            "kept_s": int(WEB_HISTORY_S),
            "instance": known.report["instance"] if known is not None and known.report is not None else "",
        }
        response = _json(_with(head, "samples", self._history.since(since_s)))
        response.enable_compression()  # for who takes it: a tenth of the bytes
        return response

    async def _region(self, request: web.Request) -> web.Response:
        """Its nodes."""
        found = self._askers.as_read_by(self._askers.principal(request), self._nodes.newest())
        return _json(msgspec.json.encode(found))

    def _head(self, answer: Answer) -> dict[str, Any]:
        known = self._known
        now_s = None
        if known is not None and known.report is not None:
            now_s = round(known.report["now_s"] + self._asking.clock() - known.at_s, 3)
        return {"up": answer.report is not None, "now_s": now_s}

    def _age_s(self) -> float | None:
        return None if self._known is None else round(self._asking.clock() - self._known.at_s, 3)


def names_of(listen: Listen) -> frozenset[object] | None:
    """By which those who ask may call it; None: by any."""
    names = ("localhost", "127.0.0.1", "::1", listen.host)
    return frozenset(map(_name, names)) if listen.is_loopback else None


def refusal(request: web.Request, names: frozenset[object] | None) -> web.Response | None:
    """Of who asks in another way than allowed. names: as of `names_of`."""
    if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
        response = _line(405, "allowed are GET and HEAD")
        response.headers["Allow"] = "GET, HEAD"
        return response
    if names is not None and not is_called(request.headers.get(hdrs.HOST), names):
        return _line(403, "this address answers to localhost, 127.0.0.1 and [::1] only (Host header)")
    return None


def is_called(host: str | None, names: frozenset[object]) -> bool:
    """Whether a Host header has one of these names, with any port or none. HTTP/1.0 has no such header, browsers do."""
    if host is None:
        return True
    found = re.fullmatch(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?", host.strip())
    return found is not None and _name(found[1] or found[2] or "") in names


def _name(host: str) -> object:
    """The same for every way to write it: browsers have ways of their own to write an address."""
    try:
        return ip_address(host)
    except ValueError:
        return host.lower()


def _page_file(path: str) -> web.Response:
    file = PAGE / path[1:]
    content_type = _TYPES.get(file.suffix)
    if not _FILE.fullmatch(path) or content_type is None or not file.is_file():
        return _line(
            404,
            "not here: there are /, /metrics, /healthz, /readyz, /live.json, /history.json and /nodes.json",
        )
    body = file.read_bytes()
    if content_type.startswith("text/") or content_type.endswith("xml"):
        return web.Response(body=body, content_type=content_type, charset="utf-8")
    return web.Response(body=body, content_type=content_type)


def told(
    request: web.Request, is_well: bool, problems: Sequence[answers.Problem], own: Collection[str]
) -> web.Response:
    """How a daemon or a mirror is. own: kinds of what it is to be 503 for; these are the first that the line names."""
    ordered = sorted(problems, key=lambda one: one["kind"] not in own or one["level"] != "problem")
    lines = [f"{one['kind']} {one['subject']}: {one['text']}" for one in ordered]
    return _told(request, 200 if is_well else 503, "ok" if is_well else "problems", lines, problems)


def _told(
    request: web.Request, status: int, word: str, lines: list[str], details: Sequence[Any] | None = None
) -> web.Response:
    """One line, or JSON, with the lines themselves where there are no details of them."""
    if request.query.get("o") == "json":
        told = lines if details is None else details
        body = msgspec.json.encode({"ok": status == 200, "status": word, "problems": told})
        return _json(body, status)
    return _line(
        status, ": ".join([word, *lines[:1]]) + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")
    )


def _line(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text + "\n", content_type="text/plain", charset="utf-8")


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=body,
        content_type="application/json",
        charset="utf-8",
        zlib_executor_size=WEB_PACKED_BYTES,
    )


def _with(head: Mapping[str, Any], name: str, value: bytes) -> bytes:
    """One more field, which is JSON already."""
    return msgspec.json.encode(head)[:-1] + f',"{name}":'.encode() + value + b"}"
