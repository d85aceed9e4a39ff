"""Models whose layers do not all need a whole prompt, on a node that starts with nothing: what the bucket of their region brings."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.region.regions import init, regions_file, status, until
from tests.running import Daemon
from tests.vllm.conftest import prompt, totals
from tests.vllm.engines import BLOCK_TOKENS, EngineHost
from tests.vllm.test_region import DURABLE_TOKENS, node

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = prompt(1, 530)
WINDOW = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}


def test_a_fresh_node_hits_a_model_with_a_window(
    host: EngineHost, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Both groups are durable after one prompt; a node with empty tiers has 512 of 530 tokens from the bucket, and of the window
    no more than its last blocks. The same greedy tokens come out."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    first = node(tmp_path / "first", file, serve)
    host.start(first.socket, hf_overrides=WINDOW)
    expected = host.generate([PROMPT])
    assert expected.cached == [0]
    with Client(str(first.socket), timeout_s=5.0) as client:
        until(lambda: status(client)["blocks"] == 2 * DURABLE_TOKENS // BLOCK_TOKENS)
    first.stop(signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    second = node(tmp_path / "second", file, serve)
    with Client(str(second.socket), timeout_s=5.0) as client:
        until(lambda: status(client).get("blocks") == 2 * DURABLE_TOKENS // BLOCK_TOKENS)
    host.start(second.socket, hf_overrides=WINDOW)
    again = host.generate([PROMPT])
    assert (again.tokens, again.cached) == (expected.tokens, [DURABLE_TOKENS])
    assert totals(second)["shared"] == DURABLE_TOKENS
    metrics = host.metrics()
    assert metrics["loaded_blocks"] == DURABLE_TOKENS // BLOCK_TOKENS + 64 // BLOCK_TOKENS
    assert metrics.get("hook_errors", 0) == 0
