"""NVMe hangs under a real engine: one request waits, once; those after it are refused and computed.

`python -m benchmarks.hanging_tier` measures how near they come to an engine without a cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.kill.test_sick_disk import compiled
from tests.running import Daemon, Place
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(seed, 330) for seed in range(200, 208)]
OTHERS = [prompt(seed, 330) for seed in range(300, 320)]  # more than DRAM holds
BLOCKS = 330 // BLOCK_TOKENS
ROUNDS = 3
STALL_S = 1.0  # nvme.stall_s
WITHOUT = {"enable_prefix_caching": False}
PATIENT = {"lookup_timeout_s": 0.5, "load_timeout_s": 20, "save_timeout_s": 5}


def settle(tool: Client, blocks: int) -> None:
    """Until so many blocks were stored, and all of them are on NVMe."""
    deadline = time.monotonic() + 60
    while True:
        told = tool.status()
        if told["counters"]["committed"] >= blocks and not told["demoting_blocks"]:
            return
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


def seconds(host: EngineHost, prompts: list[list[int]]) -> list[float]:
    """From each request to its only token."""
    return [host.generate([tokens], max_tokens=1).seconds for tokens in prompts]


def test_a_hanging_nvme_costs_one_timeout_and_then_nothing(
    host: EngineHost, place: Place, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """One load waits for a stall, and no request after it; answers are those of an engine without a cache."""
    host.start(None, **WITHOUT)
    expected = host.generate(PROMPTS, max_tokens=1).tokens
    switch = tmp_path / "sick"
    daemon = serve(place, *place.with_nvme(), LD_PRELOAD=str(compiled(tmp_path)), SICK_DISK=str(switch))
    with Client(daemon.socket, timeout_s=20, label="test", attach=False) as tool:
        host.start(daemon.socket, extra=PATIENT, **WITHOUT)
        for number, tokens in enumerate(PROMPTS + OTHERS, start=1):
            host.generate([tokens], max_tokens=1)
            settle(tool, BLOCKS * number)
        switch.write_text("d")
        (first_s,) = seconds(host, PROMPTS[:1])
        assert STALL_S <= first_s < PATIENT["load_timeout_s"]
        later_s = seconds(host, PROMPTS * ROUNDS)
        told: dict[str, Any] = tool.status()
        metrics = host.metrics()
        answers = host.generate(PROMPTS, max_tokens=1)
        switch.unlink()
    assert (answers.tokens, sum(answers.cached)) == (expected, 0)
    trips = [breaker["trips"] for breaker in told["breakers"] if breaker["name"].endswith(" loads")]
    assert max(trips) == 1, "each device has a breaker, and the request that waited may have asked both"
    assert metrics["load_failures"] == 1 and metrics.get("hook_errors", 0) == 0  # the one that waited
    assert told["counters"]["refused_unavailable"] == len(later_s)
    assert statistics.median(later_s) < STALL_S / 2
