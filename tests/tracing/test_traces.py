"""Traces: what a followed request did here arrives at a collector, as part of its trace; nobody else pays for it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client import Client, Namespace
from kvstore.daemon.beside.exporting import TRACES_WAITING_MAX
from kvstore.ledger.tracing import TRACES_REQUESTS_MAX, TRACES_SAVES_MAX, Span, Tracing
from kvstore.protocol import outcomes
from kvstore.protocol.frames import Lookup
from tests.region.regions import BLOCK_TOKENS, RECORD_BYTES, chain, content, space_of
from tests.running import Daemon, Place, environment, kvstore
from tests.tracing.collector import Collector, Told, until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FOLLOWED = f"00-{TRACE}-{PARENT}-01"
Serve = Callable[..., Daemon]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def settings(collector: Collector, *more: str) -> list[str]:
    return [f"--set=traces.endpoint={collector.url}", *more]


def save(client: Client, space: Namespace, hashes: list[bytes], ticket: int) -> None:
    """As an engine does it: slots of the request, filled by somebody, committed."""
    with client.reserve(space, hashes, b"", ticket=ticket) as lease:
        for slot in lease.slots:
            slot.view[:] = content(hashes[slot.index])
        assert lease.commit() == len(lease.slots)


def load(client: Client, space: Namespace, hashes: list[bytes], ticket: int) -> None:
    with client.acquire(space, hashes, 10.0, ticket=ticket) as lease:
        assert len(lease.leading()) == len(hashes)


def prompt(client: Client, hashes: list[bytes], ticket: int, trace: str = FOLLOWED) -> int:
    """A lookup of these blocks and half a one more."""
    space = space_of(client, "a tenant")
    tokens = len(hashes) * BLOCK_TOKENS + BLOCK_TOKENS // 2
    return client.lookup([space], hashes, ticket=ticket, tokens=tokens, trace=trace)


def test_a_followed_request_is_in_its_trace(place: Place, serve: Serve, collector: Collector) -> None:
    """Lookup, load with what NVMe brought, and save of a request are children of the span that its traceparent names, with
    tokens by outcome, bytes by tier, and the times in which they happened."""
    arguments = [*place.with_nvme(), "--set=dram.keep_on_stop=false", *settings(collector)]
    daemon = serve(place, *arguments)
    hashes = chain("a", 6)
    with Client(daemon.socket, 10, label="engine") as client:
        save(client, space_of(client, "a tenant"), hashes[:4], ticket=0)
    assert daemon.stop() == 0 and not collector.spans  # nobody followed
    daemon = serve(place, *arguments)
    begun_ns = time.time_ns()
    with Client(daemon.socket, 10, label="engine") as client:
        space = space_of(client, "a tenant")
        assert prompt(client, hashes, ticket=7) == 4
        assert prompt(client, hashes, ticket=7) == 4  # while it waits: nothing new
        load(client, space, hashes[:4], ticket=7)
        save(client, space, hashes, ticket=7)
        found = collector.until("kvstore.lookup", "kvstore.load", "kvstore.promote", "kvstore.save")
        instance = client.instance
    ended_ns = time.time_ns()
    assert len(collector.spans) == 4
    assert {span.trace for span in collector.spans} == {TRACE}
    assert len({span.span for span in collector.spans}) == 4
    assert {found[name].parent for name in ("kvstore.lookup", "kvstore.load", "kvstore.save")} == {PARENT}
    assert found["kvstore.promote"].parent == found["kvstore.load"].span
    for span in collector.spans:
        assert begun_ns - 1e6 <= span.begun_ns <= span.ended_ns <= ended_ns + 1e6, span
        assert span.resource["service.name"] == "kvstore" and span.resource["service.instance.id"] == instance
    names = {"kvstore.model": "a model", "kvstore.tenant": "a tenant"}
    assert found["kvstore.lookup"].facts == {
        **names,
        "kvstore.tokens": 6 * BLOCK_TOKENS + BLOCK_TOKENS // 2,
        "kvstore.tokens.nvme": 4 * BLOCK_TOKENS,
        "kvstore.tokens.never_seen": 2 * BLOCK_TOKENS,
        "kvstore.tokens.partial_block": BLOCK_TOKENS // 2,
        "kvstore.first_miss.reason": "never_seen",
        "kvstore.first_miss.token": 4 * BLOCK_TOKENS,
    }
    brought = {"kvstore.bytes.nvme": 4 * RECORD_BYTES}
    assert found["kvstore.promote"].facts == brought
    loaded = {"kvstore.blocks": 4, "kvstore.blocks.missed": 0, "kvstore.bytes": 4 * RECORD_BYTES}
    assert found["kvstore.load"].facts == {**names, **loaded, **brought}
    saved = {"kvstore.blocks": 2, "kvstore.blocks.stored": 2, "kvstore.bytes": 2 * RECORD_BYTES}
    assert found["kvstore.save"].facts == {**names, **saved}
    (path, headers), *_ = collector.requests
    assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"


def test_only_who_is_followed_is_told(place: Place, serve: Serve, collector: Collector) -> None:
    """Requests whose traceparent is not sampled, is none at all, is huge, or is missing leave no span, and are served."""
    daemon = serve(place, *place.arguments, *settings(collector))
    strangers = ["", f"00-{TRACE}-{PARENT}-00", f"ff-{TRACE}-{PARENT}-01", f"00-{TRACE.upper()}-{PARENT}-01"]
    strangers += [f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", "x" * 100_000, "é" * 55, "\0"]
    with Client(daemon.socket, 10, label="engine") as client:
        for number, trace in enumerate(strangers):
            assert prompt(client, chain(number, 3), 100 + number, trace) == 0
        later = f"cc-{TRACE}-{PARENT}-03-more that a later version says"
        assert prompt(client, chain("one", 3), 99, later) == 0
        collector.until("kvstore.lookup")
    assert daemon.stop() == 0
    assert [(span.trace, span.parent) for span in collector.spans] == [(TRACE, PARENT)]


def test_a_share_of_the_others_has_traces_of_its_own(
    place: Place, serve: Serve, collector: Collector
) -> None:
    """With traces.sample = 1, which may be set while serving, a request without a traceparent is a trace that begins with
    its lookup; one that says it is not sampled stays out."""
    daemon = serve(place, *place.arguments, *settings(collector))
    with Client(daemon.socket, 10, label="engine") as client:
        assert prompt(client, chain("before", 3), 1, "") == 0
        done = kvstore("config", "set", "traces.sample", "1", "--socket", daemon.socket)
        assert done.returncode == 0, done.stderr
        assert prompt(client, chain("not", 3), 2, f"00-{TRACE}-{PARENT}-00") == 0
        assert prompt(client, chain("it", 3), 3, "") == 0
        save(client, space_of(client, "a tenant"), chain("it", 3), 3)
        found = collector.until("kvstore.lookup", "kvstore.save")
    assert daemon.stop() == 0
    lookup, saved = found["kvstore.lookup"], found["kvstore.save"]
    assert len(collector.spans) == 2
    assert lookup.parent == "" and saved.parent == lookup.span
    assert lookup.trace == saved.trace not in ("0" * 32, TRACE)


def test_what_went_wrong_is_told(place: Place, serve: Serve, collector: Collector) -> None:
    """A load that brings less than was found, what the engine could not use of it, and a save whose client is gone."""
    daemon = serve(place, *place.arguments, *settings(collector))
    hashes = chain("a", 4)
    with Client(daemon.socket, 10, label="engine") as client:
        space = space_of(client, "a tenant")
        save(client, space, hashes[:3], ticket=0)
        assert prompt(client, hashes, ticket=1) == 3
        with client.acquire(space, hashes, 0.0, ticket=1) as lease:
            assert len(lease.leading()) == 3
        client.settle(1, BLOCK_TOKENS, space, hashes[1])
        lost = client.reserve(space, chain("b", 2), ticket=1)
        assert len(lost.slots) == 2
    found = collector.until("kvstore.lookup", "kvstore.load", "kvstore.settle", "kvstore.save")
    assert found["kvstore.lookup"].facts["kvstore.tokens.dram"] == 3 * BLOCK_TOKENS
    assert found["kvstore.load"].facts["kvstore.blocks.missed"] == 1
    settled = found["kvstore.settle"].facts
    assert settled["kvstore.tokens.dram"] == settled["kvstore.first_miss.token"] == BLOCK_TOKENS
    assert settled["kvstore.first_miss.reason"] == "unavailable"
    assert found["kvstore.save"].facts["kvstore.blocks"] == 2
    assert found["kvstore.save"].facts["kvstore.blocks.stored"] == 0


@pytest.mark.parametrize("sick", ["refuses", "hangs", "is not there"])
def test_a_sick_collector_costs_nothing(place: Place, serve: Serve, collector: Collector, sick: str) -> None:
    """Whatever a collector does, lookups are answered, the log has one warning, and the daemon stops in time; one that
    answers again gets what comes then."""
    collector.status = 503 if sick == "refuses" else 200
    if sick == "hangs":
        collector.answers.clear()
    elif sick == "is not there":
        collector.close()
    daemon = serve(place, *place.arguments, *settings(collector))
    with Client(daemon.socket, 1.0, label="engine") as client:
        for ticket in range(1, 500):
            assert prompt(client, chain(ticket, 2), ticket) == 0
        if sick == "refuses":
            until(lambda: "does not take spans" in daemon.log())
            collector.status = 200
            until(lambda: prompt(client, chain("x", 2), random.getrandbits(40)) or collector.spans)
            until(lambda: "takes spans" in daemon.log().replace("does not take spans", ""))
        elif sick == "hangs":
            until(lambda: collector.requests)
        else:
            until(lambda: "does not take spans" in daemon.log())
    begun_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begun_s < 10
    log = daemon.log()
    assert log.count("does not take spans") == (0 if sick == "hangs" else 1)
    assert "Traceback" not in log and "opentelemetry" not in log


def test_without_an_endpoint_nothing_is_imported(place: Place, serve: Serve) -> None:
    """A daemon that exports nothing has no module of OpenTelemetry, and makes nothing of a traceparent."""
    code = (
        "import sys, kvstore.daemon.service\n"
        "print(sorted(name for name in sys.modules if name.startswith(('opentelemetry', 'requests', 'google'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout.strip() == "[]"
    daemon = serve(place)
    with Client(daemon.socket, 10, label="engine") as client:
        assert prompt(client, chain("a", 3), 1) == 0


def test_without_the_extra_the_start_says_what_to_install(place: Place) -> None:
    """An endpoint without OpenTelemetry stops the start with one line, and leaves no arena."""
    code = "import sys; sys.modules['opentelemetry'] = None; from kvstore.tools.cli import main; sys.exit(main())"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "serve",
            *place.arguments,
            "--set=traces.endpoint=http://127.0.0.1:4318",
        ],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "pip install 'kvstore-llm[otel]'" in done.stderr
    assert not list((place.path / "shm").iterdir())


@pytest.mark.parametrize(
    "given",
    ["localhost:4318", "grpc://h:4317", "http://", "http://h:0", "http://h:99999", "http://u:p@h", "http://h/a b",
     "http://h?x=1", "http://[::1", "http://h\nx"],
)  # fmt: skip
def test_a_wrong_endpoint_is_refused(given: str) -> None:
    """What is no URL of a collector stops the program and says what is allowed; passwords belong elsewhere."""
    done = kvstore("config", "check", f"--set=traces.endpoint={given}")
    assert done.returncode == 2 and "traces.endpoint" in done.stderr and "https://HOST" in done.stderr


# -- without a daemon --


SPACE: Any = SimpleNamespace(record_bytes=10, spec=SimpleNamespace(fields={"model": "m", "tenant": ""}))


def test_of_a_long_answer_only_the_first_saves_are_told() -> None:
    """A request has at most so many spans of saves, and a lease that is not told takes no memory."""
    spans: list[Span] = []
    tracing = Tracing(0.0, lambda: 1.0, spans.append)
    tracing.looked_up(Lookup([1], b"", ticket=5, trace=FOLLOWED), SPACE, [(9, 3)], 0.0, 1.0)
    for lease in range(1, 200):
        tracing.reserved(5, lease, SPACE, 1, 0.0)
        tracing.closed(lease, 1)
    assert [span.name for span in spans].count("kvstore.save") == TRACES_SAVES_MAX
    assert not tracing._leases


def test_what_is_remembered_is_bounded_and_a_share_is_a_share() -> None:
    """Of many tickets in a row about the share asked for is chosen, the same whenever asked, and the latest are remembered."""
    spans: list[Span] = []
    tracing = Tracing(0.25, lambda: 1.0, spans.append)
    base = random.Random(1).getrandbits(40) << 20
    for _ in range(2):
        for ticket in range(base, base + 40_000):
            asked = Lookup([1], b"", ticket=ticket)
            tracing.looked_up(asked, SPACE, [(9, outcomes.NEVER_SEEN)], 0.0, 1.0)
            if ticket == base + 999:
                told = len(spans)
                tracing.looked_up(asked, SPACE, [(9, outcomes.NEVER_SEEN)], 0.0, 1.0)
                assert len(spans) == told
    assert len(tracing._requests) == TRACES_REQUESTS_MAX
    assert 9_500 < len(spans) / 2 < 10_500


def test_a_collector_that_is_slow_is_warned_of_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that takes every batch, and fewer than there are, loses spans as one that is away; one line says when it keeps up."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    from kvstore.daemon.beside.exporting import Exporter
    from kvstore.daemon.config.config import Config, Traces

    caplog.set_level("INFO", "kvstore.daemon.exporting")
    exporter = Exporter(Config(traces=Traces(endpoint=collector.url)), "here", time.time)
    taken = []

    def export(spans: list[Any]) -> SpanExportResult:
        taken.append(len(spans))
        for number in range(2 * TRACES_WAITING_MAX if len(taken) <= 3 else 0):
            exporter.take(Span("a span", 1, number + 1, 0, 0.0, 1.0, {}))
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(exporter._sender, "export", export)
    exporter.take(Span("a span", 1, 1, 0, 0.0, 1.0, {}))
    until(lambda: len(taken) > 3 and not exporter._waiting)
    exporter.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "takes spans too slowly" in caplog.text
    assert caplog.records[1].__dict__["lost"] == 3 * 2 * TRACES_WAITING_MAX + 1 - sum(taken)


def test_what_waits_is_bounded(collector: Collector) -> None:
    """A collector that hangs costs so many spans of memory; what comes then is lost, and counted."""
    from kvstore.daemon.beside.exporting import Exporter
    from kvstore.daemon.config.config import Config, Traces

    collector.answers.clear()
    exporter = Exporter(Config(traces=Traces(endpoint=collector.url)), "here", time.time)
    for number in range(3 * TRACES_WAITING_MAX):
        exporter.take(Span("a span", 1, number + 1, 0, 0.0, 1.0, {}))
    assert len(exporter._waiting) <= TRACES_WAITING_MAX < exporter._dropped
    collector.answers.set()
    until(lambda: not exporter._waiting)
    exporter.close()
    told: list[Told] = collector.spans
    assert {span.name for span in told} == {"a span"}
