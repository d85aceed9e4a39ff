"""An OpenTelemetry collector for tests: takes OTLP over HTTP, decodes it, and can be told to be sick."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.running import TIMEOUT_S


@dataclass
class Told:
    """One span as it arrived. facts: its attributes."""

    name: str
    trace: str
    span: str
    parent: str
    begun_ns: int
    ended_ns: int
    facts: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """status: what every request is answered with. answers: while it is not set, nothing is answered."""

    spans: list[Told] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path, headers
    status: int = 200
    answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.answers.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                collector.answers.wait(TIMEOUT_S)
                if collector.status == 200:
                    collector.spans += decoded(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def until(self, *names: str) -> dict[str, Told]:
        """By name, once there is a span of each of these names; the latest of each."""
        until(lambda: {span.name for span in self.spans} >= set(names))
        return {span.name: span for span in self.spans}

    def close(self) -> None:
        self.answers.set()
        self.server.shutdown()
        self.server.server_close()


def until(true: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < give_up_s, "it did not happen"
        time.sleep(0.02)


def decoded(body: bytes) -> list[Told]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Told(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            plain(span.attributes),
            plain(of_one.resource.attributes),
        )
        for of_one in request.resource_spans
        for scope in of_one.scope_spans
        for span in scope.spans
    ]


def plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
