"""Several processes on one node: tensor parallel ranks, and prefill and decode engines that share through the daemon."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvstore.client import Client
from tests.running import Daemon
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = prompt(60, 330)
BLOCKS = 330 // BLOCK_TOKENS


def test_prefill_and_decode_share_through_the_daemon(
    hosts: Callable[..., EngineHost], host: EngineHost, daemon: Daemon
) -> None:
    """A prefill engine and a decode engine, two processes, two roles: the decoder computes only the last tokens."""
    host.start(None)
    expected = host.generate([PROMPT], max_tokens=24).tokens
    prefill = hosts()
    prefill.start(daemon.socket, role="kv_producer")
    host.start(daemon.socket, role="kv_consumer")
    prefill.generate([PROMPT], max_tokens=1)
    decoded = host.generate([PROMPT], max_tokens=24)
    assert (decoded.tokens, decoded.cached) == (expected, [BLOCKS * BLOCK_TOKENS])


def test_two_tensor_parallel_ranks(
    hosts: Callable[..., EngineHost], host: EngineHost, daemon: Daemon
) -> None:
    """Each rank stores its own column of one record for both; a second engine of two ranks loads both, one of a
    single rank loads neither."""
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    ranks = hosts()
    ranks.start(daemon.socket, **options)
    first = ranks.generate([PROMPT], timeout_s=600)
    deadline = time.monotonic() + 30
    while ranks.metrics().get("saved_blocks", 0) < BLOCKS:
        assert time.monotonic() < deadline, ranks.metrics()
        ranks.generate([[1, 2, 3]], max_tokens=2)
    with Client(daemon.socket, timeout_s=10, attach=False) as tool:
        (space,) = tool.list_namespaces()
        assert space["columns"] == 2 and space["blocks"] >= BLOCKS
        assert tool.check() == []
    ranks.start(daemon.socket, **options)  # two processes that know nothing of the first two
    again = ranks.generate([PROMPT], timeout_s=600)
    assert (again.tokens, again.cached) == (first.tokens, [BLOCKS * BLOCK_TOKENS])
    metrics = ranks.metrics()
    assert metrics["loaded_blocks"] == BLOCKS and metrics.get("hook_errors", 0) == 0
    ranks.kill()
    host.start(daemon.socket)
    alone = host.generate([PROMPT])
    assert alone.cached == [0] and alone.tokens == first.tokens
