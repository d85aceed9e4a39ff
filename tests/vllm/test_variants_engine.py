"""Adapters, KV in 8 bits, heads that draft, images: real engines, what one saved and the next one may load of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon
from tests.vllm import models
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPTS = [prompt(70, 330), prompt(71, 192), prompt(72, 260)]
ALL, NOTHING = [320, 192, 256], [0, 0, 0]  # of PROMPTS, in tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


def test_adapters(host: EngineHost, daemon: Daemon, model: Path, directory: Path) -> None:
    """Each adapter of LoRA, and none, finds its own blocks in a fresh engine, and never those of another."""
    paths = [str(models.lora_adapter(model, directory, f"adapter-{seed}", seed)) for seed in (1, 2)]
    first, second = ("first", 1, paths[0]), ("second", 2, paths[1])
    kinds = [first, second, None]
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}
    only = [prompt(73, 200)]
    host.start(None, **options)
    expected = [host.generate(PROMPTS, adapter=kind).tokens for kind in kinds]
    expected_only = [host.generate(only, adapter=kind).tokens for kind in kinds]
    for answers in (expected, expected_only):
        assert answers[0] != answers[1] != answers[2] != answers[0]
    host.start(daemon.socket, **options)
    for kind, tokens in zip(kinds, expected, strict=True):
        got = host.generate(PROMPTS, adapter=kind)
        assert (got.tokens, got.cached) == (tokens, NOTHING)
    assert host.generate(only, adapter=first).tokens == expected_only[0]
    host.finish_saves()
    host.start(daemon.socket, **options)
    for kind, tokens in zip(kinds, expected, strict=True):
        got = host.generate(PROMPTS, adapter=kind)
        assert (got.tokens, got.cached) == (tokens, ALL)
    for kind, tokens in zip(kinds[1:], expected_only[1:], strict=True):
        got = host.generate(only, adapter=kind)
        assert (got.tokens, got.cached) == (tokens, [0])
    moved = host.generate(only, adapter=("first", 3, paths[1]))  # the name of one, the weights of the other
    assert (moved.tokens, moved.cached) == (expected_only[1], [0])
    got = host.generate(only, adapter=first)
    assert (got.tokens, got.cached) == (expected_only[0], [192])
    assert host.metrics().get("hook_errors", 0) == 0


@pytest.mark.skipif(
    "avx512" not in Path("/proc/cpuinfo").read_text(), reason="vLLM has it for CPUs with AVX-512 or AMX"
)
def test_kv_in_8_bits(host: EngineHost, daemon: Daemon) -> None:
    """KV of either 8-bit type is loaded by a fresh engine of that type; that of one type is nothing to the others."""
    kinds = ["fp8", "fp8_e5m2"]
    expected = []
    for kind in kinds:
        host.start(None, kv_cache_dtype=kind)
        expected.append(host.generate(PROMPTS).tokens)
    assert expected[0] != expected[1]
    for cached in (NOTHING, ALL):
        for kind, tokens in zip(kinds, expected, strict=True):
            host.start(daemon.socket, kv_cache_dtype=kind)
            got = host.generate(PROMPTS)
            assert (got.tokens, got.cached) == (tokens, cached), kind
            host.finish_saves()
    host.start(daemon.socket)
    got = host.generate(PROMPTS)
    assert got.tokens not in expected and got.cached == NOTHING


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_heads_that_draft(
    host: EngineHost, daemon: Daemon, model: Path, directory: Path, method: str
) -> None:
    """The KV of a head goes with that of its model: a fresh engine answers the same, and accepts as many drafts."""
    if method == "mtp":
        target = models.mtp_model(model, directory)
        speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
    else:
        target = models.shallow_model(model, directory)
        head = str(models.eagle_head(model, directory))
        speculation = {"method": "eagle", "model": head, "num_speculative_tokens": 3}
    options: dict[str, Any] = {"model": str(target), "speculative_config": speculation}
    host.start(None, **options)
    expected = host.generate(PROMPTS, max_tokens=100).tokens
    accepted = host.metrics()["spec_decode_num_accepted_tokens"]
    talk = PROMPTS[0] + expected[0] + prompt(74, 30)
    expected_turn = host.generate([talk]).tokens
    assert accepted > 20
    host.start(daemon.socket, **options)
    got = host.generate(PROMPTS, max_tokens=100)
    assert (got.tokens, got.cached) == (expected, NOTHING)
    host.finish_saves()
    host.start(daemon.socket, **options)
    got = host.generate(PROMPTS, max_tokens=100)
    assert (got.tokens, got.cached) == (expected, ALL)
    assert host.metrics()["spec_decode_num_accepted_tokens"] == accepted
    host.start(daemon.socket, **options)
    turn = host.generate([talk])
    assert turn.tokens == expected_turn and turn.cached[0] >= 320 + 64
    assert host.metrics().get("hook_errors", 0) == 0


def test_images(host: EngineHost, daemon: Daemon, model: Path, directory: Path) -> None:
    """The same text is found with the same image; with another one, only what stands before the image."""
    options: dict[str, Any] = {"model": str(models.vision_model(model, directory))}
    text = [*prompt(75, 40), models.IMAGE_TOKEN, *prompt(76, 60)]
    images = [1, 2, 3]
    host.start(None, **options)
    expected = [host.generate([text], images=[image]).tokens for image in images]
    assert expected[0] != expected[1] != expected[2] != expected[0]
    host.start(daemon.socket, **options)
    for image in images[:2]:
        host.generate([text], images=[image])
    host.finish_saves()
    host.start(daemon.socket, **options)
    whole = (40 + models.IMAGE_TOKENS + 60) // 32 * 32
    for image, tokens, cached in zip(images, expected, [whole, whole, 32], strict=True):
        got = host.generate([text], images=[image])
        assert (got.tokens, got.cached) == (tokens, [cached])
    metrics = host.metrics()
    assert metrics.get("hook_errors", 0) == 0, metrics
