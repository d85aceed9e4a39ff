"""Prefill and decode with NIXL between them, and our store beside it: on both workers, as its first or its second child.

NIXL carries a prompt's blocks from the prefill worker to the decode worker (UCX over loopback, into memory of the CPU);
ours gives the prefill worker what it has seen before, and keeps what both compute. `make test-nixl` installs NIXL.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl", reason="needs NIXL: make test-nixl")

from tests.running import Daemon
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost, ours
from tests.vllm.servers import HOST, PROXY, Server, api_server, proxy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not PROXY.exists(), reason="needs vLLM's source: make vllm-source"),
]

ANSWER_TOKENS = 8
PROMPTS = [
    prompt(2000 + number % 12, 120 + 8 * (number % 12)) + prompt(number, 40 + number) for number in range(60)
]
AT_ONCE = 4
NIXL: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"backends": ["UCX"]},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def running() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in reversed(servers):
        server.stop()


@pytest.mark.parametrize("ours_at", [0, 1], ids=["ours first", "ours second"])
def test_nixl_between_workers_and_ours_on_both(
    host: EngineHost,
    daemon: Daemon,
    model: Path,
    tmp_path: Path,
    running: list[Server],
    ours_at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """60 prompts are answered as by an engine alone, twice; NIXL carries them, and the second time the prefill worker
    loads what ours kept. A fresh engine with ours alone then answers the same from what was stored."""
    host.start(None)
    alone = host.generate(PROMPTS, ANSWER_TOKENS).tokens
    host.stop()
    children = [NIXL, ours(daemon.socket, extra={"cache_dir": str(tmp_path / "cache")})]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children[::-1] if ours_at == 0 else children},
    }
    for name in ("prefill", "decode"):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", HOST)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        words = ("--max-model-len", "2048", "--no-enable-prefix-caching")
        running.append(api_server(name, tmp_path, model, transfer, words=words))
    prefill, decode = running
    for server in (prefill, decode):
        server.wait()
    running.append(proxy("proxy", tmp_path, prefill, decode))
    running[-1].wait()
    for _ in range(2):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda tokens: running[-1].ask(tokens, ANSWER_TOKENS).tokens, PROMPTS))
        assert answers == alone
    carried = decode.counters("vllm:nixl_")
    found = prefill.counters("vllm:kvstore_")
    assert not carried["num_failed_transfers"] and not carried["num_kv_expired_reqs"]
    if ours_at:  # else the decode worker finds in our store what NIXL would bring
        assert carried["xfer_time_seconds_count"] == 2 * len(PROMPTS)
    assert found["hit_tokens"] >= sum(len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS)
    assert not found["hook_errors"] and not decode.counters("vllm:kvstore_")["hook_errors"]
    assert "kvstore" in prefill.transfer_params(PROMPTS[0], kv_transfer_params={"do_remote_decode": True})
    for server in reversed(running):
        server.stop()
    host.start(daemon.socket)
    answer = host.generate(PROMPTS, ANSWER_TOKENS)
    assert answer.tokens == alone
    assert sum(answer.cached) >= 0.9 * sum(len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS)
