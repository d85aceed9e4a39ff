"""Real vLLM engines and a real daemon: what one engine computed, another does not compute again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.running import Daemon
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = prompt(1, 400)
FULL_TOKENS = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def expected(host: EngineHost) -> list[list[int]]:
    """What the model says without any connector."""
    host.start(None)
    return host.generate([PROMPT, prompt(2, 300), prompt(3, 200)]).tokens


def saved(host: EngineHost, blocks: int, timeout_s: float = 10) -> dict[str, float]:
    """The counters, once so many blocks were saved; background saves are reported with the next step."""
    deadline = time.monotonic() + timeout_s
    while True:
        host.generate([[7, 8, 9]], max_tokens=2)
        metrics = host.metrics()
        if metrics.get("saved_blocks", 0) >= blocks or time.monotonic() > deadline:
            return metrics
        time.sleep(0.1)


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("save", ["async", "sync"])
def test_a_fresh_engine_loads_what_another_saved(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], load: str, save: str
) -> None:
    """A second engine answers with the same greedy tokens and computes only what is not a whole block."""
    extra: dict[str, Any] = {"load": load, "save": save}
    host.start(daemon.socket, extra=extra)
    first = host.generate([PROMPT])
    metrics = saved(host, FULL_TOKENS // BLOCK_TOKENS)
    assert (first.tokens, first.cached) == ([expected[0]], [0])
    assert metrics["saved_blocks"] == FULL_TOKENS // BLOCK_TOKENS
    host.start(daemon.socket, extra=extra)
    second = host.generate([PROMPT])
    assert (second.tokens, second.cached) == ([expected[0]], [FULL_TOKENS])
    metrics = host.metrics()
    assert metrics["loaded_blocks"] == FULL_TOKENS // BLOCK_TOKENS
    assert metrics["hit_tokens"] == FULL_TOKENS
    assert metrics.get("hook_errors", 0) == 0 and metrics.get("failed_blocks", 0) == 0
