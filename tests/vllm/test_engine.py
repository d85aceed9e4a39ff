"""Real vLLM engines and a real daemon: what one engine computed, another does not compute again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon
from tests.vllm.conftest import prompt, totals
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
def test_a_fresh_engine_loads_what_another_saved(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], load: str
) -> None:
    """A second engine answers with the same greedy tokens and computes only what is not a whole block."""
    extra: dict[str, Any] = {"load": load}
    host.start(daemon.socket, extra=extra)
    first = host.generate([PROMPT])
    metrics = saved(host, FULL_TOKENS // BLOCK_TOKENS)
    assert (first.tokens, first.cached) == ([expected[0]], [0])
    assert metrics["saved_blocks"] == FULL_TOKENS // BLOCK_TOKENS
    host.start(daemon.socket, extra=extra)
    second = host.generate([PROMPT])
    metrics = host.metrics()
    assert (second.tokens, second.cached) == ([expected[0]], [FULL_TOKENS]), metrics
    assert metrics["loaded_blocks"] == FULL_TOKENS // BLOCK_TOKENS
    assert metrics["hit_tokens"] == FULL_TOKENS
    assert metrics.get("hook_errors", 0) == 0 and metrics.get("failed_blocks", 0) == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_every_token_of_a_prompt_has_its_outcome(host: EngineHost, daemon: Daemon, load: str) -> None:
    """Cold, then from the engine's own cache, then from the daemon in another engine: told as what it was."""
    tail = len(PROMPT) - FULL_TOKENS
    host.start(daemon.socket, extra={"load": load})
    host.generate([PROMPT])
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    told = {"never_seen": FULL_TOKENS, "partial_block": tail}
    assert totals(daemon) == told
    host.generate([PROMPT])
    told["engine"] = FULL_TOKENS
    told["partial_block"] += tail
    assert totals(daemon) == told
    host.start(daemon.socket, extra={"load": load})
    host.generate([PROMPT])
    told["dram"] = FULL_TOKENS
    told["partial_block"] += tail
    assert totals(daemon) == told


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_hit_that_did_not_come_is_a_miss_in_the_accounts(
    host: EngineHost, daemon: Daemon, load: str
) -> None:
    """A load that ends at its sixth block: five blocks were hits, the others were not."""
    host.start(daemon.socket)
    host.generate([PROMPT])
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    host.start(daemon.socket, extra={"load": load}, enable_prefix_caching=False)
    before = totals(daemon)
    host.break_loads(5)
    try:
        host.generate([PROMPT])
    finally:
        host.mend()
    told = {name: count - before.get(name, 0) for name, count in totals(daemon).items()}
    assert (told["dram"], told["unavailable"]) == (5 * BLOCK_TOKENS, FULL_TOKENS - 5 * BLOCK_TOKENS)


@pytest.mark.parametrize("load", ["async", "sync"])
def test_what_was_stored_is_what_is_used(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], load: str
) -> None:
    """Noise in the place of stored KV, its checksum made good, changes the tokens: so KV is really used."""
    host.start(daemon.socket)
    host.generate([PROMPT])
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    host.start(daemon.socket, extra={"load": load})
    host.spoil()
    try:
        assert host.generate([PROMPT]).tokens != [expected[0]]
    finally:
        host.mend()


@pytest.mark.parametrize("load", ["async", "sync"])
def test_blocks_that_do_not_come_are_computed(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], load: str
) -> None:
    """A load that fails at its first, a middle or its last block changes no token."""
    host.start(daemon.socket)
    host.generate([PROMPT])
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    host.start(daemon.socket, extra={"load": load}, enable_prefix_caching=False)
    for at in (0, 5, FULL_TOKENS // BLOCK_TOKENS - 1):
        host.break_loads(at)
        try:
            result = host.generate([PROMPT, prompt(2, 300)])
        finally:
            host.mend()
        assert result.tokens == expected[:2]
        assert result.ends == ["length", "length"]
    metrics = host.metrics()
    assert metrics["load_failures"] >= 3 and metrics.get("hook_errors", 0) == 0


def test_without_prefix_caching_the_store_is_the_cache(
    host: EngineHost, daemon: Daemon, expected: list[list[int]]
) -> None:
    """An engine that caches no prefixes itself loads them, in the same run."""
    host.start(daemon.socket, enable_prefix_caching=False)
    assert host.generate([PROMPT]).cached == [0]
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    again = host.generate([PROMPT])
    assert (again.tokens, again.cached) == ([expected[0]], [FULL_TOKENS])


def test_chunked_prefill_and_decoded_blocks(host: EngineHost, daemon: Daemon) -> None:
    """A prompt computed in chunks, and the blocks decoding fills, are loaded by the next turn of the talk."""
    host.start(None)
    answer = host.generate([PROMPT], max_tokens=100).tokens[0]
    talk = PROMPT + answer + prompt(5, 40)
    expected_turn = host.generate([talk]).tokens
    host.start(daemon.socket, max_num_batched_tokens=128, max_num_seqs=4)
    assert host.generate([PROMPT], max_tokens=100).tokens == [answer]
    blocks = (len(PROMPT) + len(answer) - 1) // BLOCK_TOKENS
    saved(host, blocks)
    host.start(daemon.socket, max_num_batched_tokens=128, max_num_seqs=4)
    turn = host.generate([talk])
    assert (turn.tokens, turn.cached) == (expected_turn, [blocks * BLOCK_TOKENS])


def test_preemption_with_a_tiny_cache(host: EngineHost, daemon: Daemon) -> None:
    """Requests that push each other out of a tiny KV cache, saving and loading all the while, answer as they would alone."""
    prompts = [prompt(20 + number, 200) for number in range(6)]
    host.start(None)
    alone = host.generate(prompts, max_tokens=120).tokens
    tiny = {
        "kv_cache_memory_bytes": 3 << 20,
        "max_model_len": 512,
        "enable_prefix_caching": False,
    }  # 24 blocks
    host.start(daemon.socket, **tiny)
    assert host.generate(prompts, max_tokens=120).tokens == alone
    metrics = host.metrics()
    assert metrics["num_preemptions"] > 0 and metrics.get("hook_errors", 0) == 0
    host.start(daemon.socket)
    again = host.generate(prompts, max_tokens=120)
    assert again.tokens == alone and sum(again.cached) > 0


def test_salts_and_tenants_are_walls(host: EngineHost, daemon: Daemon, expected: list[list[int]]) -> None:
    """The same prompt under another cache_salt, or from another tenant's engine, finds nothing."""
    host.start(daemon.socket, extra={"tenant": "acme"})
    host.generate([PROMPT], salt="alice")
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    host.reset_prefix()
    assert host.generate([PROMPT], salt="bob").cached == [0]
    assert host.generate([PROMPT]).cached == [0]
    host.start(daemon.socket, extra={"tenant": "other"})
    assert host.generate([PROMPT], salt="alice").cached == [0]
    host.start(daemon.socket, extra={"tenant": "acme"})
    again = host.generate([PROMPT], salt="alice")
    assert (again.tokens, again.cached) == ([expected[0]], [FULL_TOKENS])


def test_roles_decide_what_is_saved_and_loaded(
    host: EngineHost, daemon: Daemon, expected: list[list[int]]
) -> None:
    """A consumer saves nothing; a producer loads nothing; what the producer saved the consumer loads."""
    host.start(daemon.socket, role="kv_consumer")
    host.generate([PROMPT])
    host.start(daemon.socket, role="kv_producer")
    assert host.generate([PROMPT]).cached == [0]
    assert saved(host, FULL_TOKENS // BLOCK_TOKENS)["saved_blocks"] == FULL_TOKENS // BLOCK_TOKENS
    host.start(daemon.socket, role="kv_producer")
    assert host.generate([PROMPT]).cached == [0]
    host.start(daemon.socket, role="kv_consumer")
    again = host.generate([PROMPT])
    assert (again.tokens, again.cached) == ([expected[0]], [FULL_TOKENS])


def test_other_weights_find_nothing(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], tmp_path: Path
) -> None:
    """A model of the same name and shape with one changed weight shares no block."""
    import shutil

    import numpy as np
    from safetensors.numpy import load_file, save_file

    host.start(daemon.socket)
    host.generate([PROMPT])
    saved(host, FULL_TOKENS // BLOCK_TOKENS)
    tuned = tmp_path / "tuned" / host.model.name
    shutil.copytree(host.model, tuned)
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += np.float32(0.5)
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    host.start(daemon.socket, model=str(tuned))
    assert host.generate([PROMPT]).cached == [0]
    host.start(daemon.socket)
    assert host.generate([PROMPT]).cached == [FULL_TOKENS]
