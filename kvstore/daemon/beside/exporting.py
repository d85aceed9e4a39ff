"""Traces to an OpenTelemetry collector: spans wait here until a thread of its own sends them (OTLP over HTTP).

    daemon's thread ── Span ─▶ waiting, bounded ── batches ─▶ thread ── POST, protobuf ─▶ collector
                                   └─ full: lost, counted        └─ no answer: lost

Whichever way spans are lost, there is one warning until the collector keeps up again.

OpenTelemetry is imported when there is an endpoint, and never before. What the collector wants besides (headers, a CA
of its own, compression) is told to its exporter as everywhere, by OTEL_EXPORTER_OTLP_* in the environment.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvstore import __version__
from kvstore.daemon.config.config import Config
from kvstore.errors import StartSettingError
from kvstore.ledger.tracing import Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

TRACES_WAITING_MAX = 8192  # spans that wait for the collector; beyond it they are lost
TRACES_BATCH_SPANS = 32  # sent at once: encoding them takes the interpreter for about a millisecond
TRACES_INTERVAL_S = 1.0  # between two looks at what waits
TRACES_TIMEOUT_S = 5.0  # of one request to the collector, tries included
TRACES_CLOSE_S = 1.0  # at a stop, for what is not sent yet

log = logging.getLogger("kvstore.daemon.exporting")


class Exporter:
    """Sends what `take` is given, in a thread that runs until `close`. wall_clock: unix seconds."""

    def __init__(self, config: Config, instance: str, wall_clock: Callable[[], float]) -> None:
        """Raises StartSettingError where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise StartSettingError(
                f"traces.endpoint: OpenTelemetry is not installed ({error.name} is missing): "
                "pip install 'kvstore-llm[otel]', or leave traces.endpoint empty"
            ) from error
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it has a line for every try
        self._endpoint, self._wall_clock = config.traces.endpoint, wall_clock
        self._sender = OTLPSpanExporter(endpoint=config.traces.endpoint, timeout=TRACES_TIMEOUT_S)
        told = {"service.name": "kvstore", "service.version": __version__, "service.instance.id": instance}
        if config.region:
            told["kvstore.region"] = config.region
        self._resource = Resource.create(told)
        self._scope = InstrumentationScope("kvstore", __version__)
        self._waiting: deque[Span] = deque()
        self._dropped = 0  # by `take` alone
        self._dropped_known = self._lost = 0  # by the thread alone; lost: since the warning
        self._is_behind = False
        self.problem = ""  # why spans are lost now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="kvstore-traces", daemon=True)
        self._thread.start()

    def take(self, span: Span) -> None:
        """Have it sent, or lose it: never waits. Called from one thread."""
        if len(self._waiting) < TRACES_WAITING_MAX:
            self._waiting.append(span)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Send what waits, if that is soon done. Idempotent."""
        self._stop.set()
        self._thread.join(TRACES_CLOSE_S)
        self._sender.shutdown()  # type: ignore[no-untyped-call]  # a try that waits for another one ends, too

    def _send_all(self) -> None:
        while True:
            is_last = self._stop.wait(TRACES_INTERVAL_S)
            while self._waiting:
                batch = [self._waiting.popleft() for _ in range(min(TRACES_BATCH_SPANS, len(self._waiting)))]
                if not self._send(batch) and is_last:
                    return
            if is_last:
                return

    def _send(self, spans: list[Span]) -> bool:
        """Whether the collector took them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            shift_s = self._wall_clock() - time.monotonic()
            is_sent = self._sender.export([self._made(s, shift_s) for s in spans]) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - nothing of a foreign library may end the thread
            log.debug("sending traces failed: %r", error)
            is_sent = False
        dropped = self._dropped - self._dropped_known
        self._dropped_known += dropped
        self._lost += dropped + (0 if is_sent else len(spans))
        was_behind, self._is_behind = self._is_behind, dropped > 0 or not is_sent
        if self._is_behind and not was_behind:
            how = "takes spans too slowly" if is_sent else "does not take spans"
            self.problem = f"it {how}; they are lost until it does"
            log.warning("traces.endpoint %s %s; they are lost until it does", self._endpoint, how)
        elif was_behind and not self._is_behind:
            log.info("traces.endpoint takes spans", extra={"lost": self._lost})
            self._lost, self.problem = 0, ""
        return is_sent

    def _made(self, span: Span, shift_s: float) -> ReadableSpan:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan

        def named(span_id: int, is_remote: bool) -> Any:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            return trace.SpanContext(span.trace_id, span_id, is_remote, flags)

        return ReadableSpan(
            span.name,
            named(span.span_id, False),
            parent=named(span.parent_id, True) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            start_time=int((span.begun_s + shift_s) * 1e9),
            end_time=int((span.ended_s + shift_s) * 1e9),
            instrumentation_scope=self._scope,
        )
