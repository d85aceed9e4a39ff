"""Prefill and decode over our daemon alone, behind a proxy of vLLM's own: nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvstore.client import Client
from tests.running import ROOT, Daemon
from tests.vllm.conftest import prompt, totals
from tests.vllm.engines import BLOCK_TOKENS, PATIENT, EngineHost
from tests.vllm.servers import PROXY, Server, api_server, proxy

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PROXY.exists(), reason="needs vLLM's source: make vllm-source"),
]

ANSWER_TOKENS = 8
PROMPTS = [prompt(1000 + number, 300 + 5 * number) for number in range(40)]
WHOLE = sum(len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in PROMPTS)
AT_ONCE = 4


@pytest.fixture
def started(model: Path, tmp_path: Path, daemon: Daemon) -> Iterator[Callable[..., tuple[Server, ...]]]:
    """A prefill worker, a decode worker, and the proxy."""
    running: list[Server] = []

    def start(prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Server, ...]:
        for name, extra in (("prefill", prefill), ("decode", decode)):
            transfer = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "kvstore_socket": str(daemon.socket),
                    "cache_dir": str(tmp_path / "cache"),
                    **PATIENT,
                    **extra,
                },
            }
            running.append(api_server(name, tmp_path, model, transfer, words=("--max-model-len", "2048")))
        for server in running:
            server.wait()
        running.append(proxy("proxy", tmp_path, *running))
        running[-1].wait()
        return tuple(running)

    yield start
    for server in reversed(running):
        server.stop()


def example_proxy(scratch: Path, prefill: Server, decode: Server) -> Server:
    """The proxy of examples/vllm_pd before the two servers, ready."""
    urls = [f"http://127.0.0.1:{server.port}" for server in (prefill, decode)]
    words = [str(ROOT / "examples/vllm_pd/proxy.py"), "--prefill", urls[0], "--decode", urls[1]]
    made = Server("example-proxy", scratch, words, "/healthcheck")
    made.wait()
    return made


def asked_at_once(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda tokens: server.ask(tokens, ANSWER_TOKENS).tokens, PROMPTS))


def test_the_decode_worker_finds_what_the_prefill_worker_is_storing(
    host: EngineHost, daemon: Daemon, started: Callable[..., tuple[Server, ...]], tmp_path: Path
) -> None:
    """Of 40 prompts the decode worker loads 99 % of the tokens of whole blocks, and says what an
    engine alone says; behind the proxy of examples/ it does the same."""
    host.start(None)
    alone = host.generate(PROMPTS, ANSWER_TOKENS).tokens
    host.stop()
    prefill, decode, front = started({}, {"still_writing_wait_s": 30})
    with Client(daemon.socket, timeout_s=10, attach=False) as recorder:
        recorder.record()
        assert asked_at_once(front) == alone
        recorded = [asked.tokens for asked in recorder.record().requests]
    assert sorted(recorded) == sorted(map(len, PROMPTS)), "both halves of a request are one"
    found = decode.counters("vllm:kvstore_")
    print({name: found[name] for name in ("hit_tokens", "lookups", "waits", "wait_seconds")}, f"of {WHOLE}")
    assert found["hit_tokens"] >= 0.99 * WHOLE
    assert found["lookups"] == len(PROMPTS)
    assert not found["load_failures"] and not found["hook_errors"]
    assert not prefill.counters("vllm:kvstore_")["hook_errors"]
    told = front.transfer_params(PROMPTS[0])["kvstore"]
    assert told["tokens"] == len(PROMPTS[0]) // BLOCK_TOKENS * BLOCK_TOKENS, (
        "the decode worker saw the prefill's"
    )
    assert prefill.transfer_params(PROMPTS[0], kv_transfer_params={"kvstore": 7})["kvstore"] == told
    example = example_proxy(tmp_path, prefill, decode)
    try:
        fresh = prompt(999, 400)
        loaded = decode.counters("vllm:kvstore_")["hit_tokens"]
        answered = example.ask(fresh, ANSWER_TOKENS).tokens
        loaded = decode.counters("vllm:kvstore_")["hit_tokens"] - loaded
        assert loaded == len(fresh) // BLOCK_TOKENS * BLOCK_TOKENS
        assert answered == prefill.ask(fresh, ANSWER_TOKENS).tokens
    finally:
        example.stop()
    assert totals(daemon)["dram"] >= found["hit_tokens"]
