"""The trace of a request, as vLLM's scheduler knows it, goes with its lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.running import Daemon, Place
from tests.tracing.collector import Collector
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import World

pytestmark = pytest.mark.vllm

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"traceparent": TRACEPARENT, "tracestate": "a=b"}, TRACEPARENT),
        ({"tracestate": "a=b"}, ""),
        (None, ""),
    ],
)
def test_a_lookup_brings_the_trace_of_its_request(
    worlds: Callable[..., World], store: FakeStore, headers: dict[str, str] | None, told: str
) -> None:
    """The traceparent that came with a request over HTTP is that of each of its lookups, also when another request finds
    what it stored; without one there is none."""
    world = worlds()
    world.ask("first", prompt(1, 100), headers=headers)
    world.run()
    world.ask("second", prompt(1, 100), headers=headers)
    world.run()
    world.check_answers()
    asked: list[dict[str, Any]] = store.asked
    assert len({asking["ticket"] for asking in asked}) == 2
    assert {asking["trace"] for asking in asked} == {told}


def test_what_a_real_engine_does_is_told(
    host: EngineHost, place: Place, serve: Callable[..., Daemon]
) -> None:
    """A real engine stores a prompt and loads it again: lookup, save and load of it arrive at a collector, with the tokens
    that were hit and the bytes that were moved."""
    collector = Collector()
    tracing = [f"--set=traces.endpoint={collector.url}", "--set=traces.sample=1"]
    daemon = serve(place, *place.arguments, "--set=dram.capacity_bytes=64MiB", *tracing)
    host.start(daemon.socket, enable_prefix_caching=False)
    tokens = prompt(9, 6 * BLOCK_TOKENS + 1)
    host.generate([tokens], max_tokens=2)
    saved = collector.until("kvstore.lookup", "kvstore.save")
    assert saved["kvstore.lookup"].facts["kvstore.tokens"] == len(tokens)
    assert saved["kvstore.save"].facts["kvstore.blocks.stored"] == 6
    host.generate([tokens], max_tokens=2)
    found = collector.until("kvstore.load")
    lookup, load = found["kvstore.lookup"], found["kvstore.load"]
    assert lookup.facts["kvstore.tokens.dram"] == 6 * BLOCK_TOKENS
    assert load.facts["kvstore.bytes"] == saved["kvstore.save"].facts["kvstore.bytes"] > 0
    assert load.trace == lookup.trace != saved["kvstore.lookup"].trace and load.parent == lookup.span
    assert load.begun_ns <= load.ended_ns
    host.stop()
    collector.close()
