"""Kinds of models and of engines, for real: what a second engine finds in the store, and what is declined."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.running import Daemon
from tests.vllm import models
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost, Generated

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

REFERENCE = {"attention_backend": "CPU_MLA"}  # of latent attention: where a CPU has AMX, vLLM prefers another
PROMPTS = [prompt(70, 330), prompt(71, 192), prompt(70, 200) + prompt(72, 60)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def latent(model: Path, directory: Path) -> Path:
    return models.mla_model(model, directory)


@pytest.fixture(scope="module")
def mended(model: Path, directory: Path) -> Iterator[EngineHost]:
    """Engines whose gaps are filled (see `cpu_gaps`)."""
    pytest.importorskip("vllm")
    process = EngineHost(model, directory)
    process.fill_gap("rotate_in_torch")
    process.fill_gap("read_latent_prefixes")
    yield process
    process.kill()


def pass_on(engine: EngineHost, daemon: Daemon, cached: list[int], **options: Any) -> None:
    """An engine computes and saves, the next one loads: both answer the same."""
    engine.start(daemon.socket, **options)
    expected = engine.generate(PROMPTS)
    assert engine.metrics().get("loaded_blocks", 0) == 0
    engine.finish_saves()
    engine.start(daemon.socket, **options)
    again = engine.generate(PROMPTS)
    assert (again.tokens, again.cached) == (expected.tokens, cached)
    assert engine.metrics().get("hook_errors", 0) == 0


def test_latent_attention_is_declined_where_vllm_forbids_reuse(
    host: EngineHost, daemon: Daemon, latent: Path
) -> None:
    """On a CPU without AMX vLLM computes such prompts in one piece; the connector says so once, and stores nothing."""
    host.start(None, model=str(latent), **REFERENCE)
    expected = host.generate(PROMPTS)
    host.start(daemon.socket, model=str(latent), **REFERENCE)
    for _ in range(2):
        got = host.generate(PROMPTS)
        assert (got.tokens, got.cached) == (expected.tokens, [0, 0, 0])
    assert host.metrics().get("saved_blocks", 0) == 0
    assert host.log().count("this model's KV is not stored: vLLM computes its prompts in one piece here") == 1


def test_latent_attention(mended: EngineHost, daemon: Daemon, latent: Path) -> None:
    """Where latent attention can start in the middle of a prompt, a second engine loads what the first computed."""
    pass_on(mended, daemon, [320, 192, 256], model=str(latent), block_size=16, **REFERENCE)


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="needs a CPU with AMX")
def test_latent_attention_with_amx(host: EngineHost, daemon: Daemon, latent: Path) -> None:
    """The same where vLLM's build lacks nothing. Its answers depend on where a prompt is cut: a load is compared
    with a hit of the engine's own."""
    host.start(daemon.socket, model=str(latent), dtype="bfloat16", block_size=32)
    prompts = [PROMPTS[0], PROMPTS[2]]
    for each in prompts:
        host.generate([each])
    own = [host.generate([each]) for each in prompts]
    host.finish_saves()
    host.reset_prefix()
    again = [host.generate([each]) for each in prompts]
    assert [got.tokens for got in again] == [got.tokens for got in own]
    assert [got.cached for got in again] == [got.cached for got in own] == [[320], [256]]
    assert host.metrics()["loaded_blocks"] == 10 + 2  # the second prompt begins as the first


def test_recurrent_states(mended: EngineHost, daemon: Daemon, model: Path, directory: Path) -> None:
    """Attention beside short convolutions: blocks and the last state are loaded, and a token is left to compute."""
    pass_on(mended, daemon, [320, 160, 256], model=str(models.hybrid_model(model, directory)))


@pytest.fixture(scope="module")
def expected(host: EngineHost) -> Generated:
    """What the demo's model says, without a connector, drafts, stages or replicas."""
    host.start(None)
    return host.generate(PROMPTS)


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_speculation(
    hosts: Callable[..., EngineHost],
    daemon: Daemon,
    model: Path,
    directory: Path,
    expected: Generated,
    kind: str,
) -> None:
    """An engine that drafts, by n-grams or with a model, stores and loads; after a load as many drafts are accepted."""
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    if kind == "draft":
        drafter = str(models.draft_model(model, directory))
        config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    engine = hosts()  # a second engine that drafts fails to start in the same process
    engine.start(daemon.socket, speculative_config=config)
    assert engine.generate(PROMPTS).tokens == expected.tokens
    accepted = engine.metrics().get("spec_decode_num_accepted_tokens", 0)
    assert kind == "ngram" or accepted > 0
    engine.finish_saves()
    engine.reset_prefix()
    before = engine.metrics().get("spec_decode_num_accepted_tokens", 0)
    again = engine.generate(PROMPTS)
    assert (again.tokens, again.cached) == (expected.tokens, [320, 192, 256])
    assert engine.metrics().get("spec_decode_num_accepted_tokens", 0) - before == accepted


def test_pipeline_stages(hosts: Callable[..., EngineHost], daemon: Daemon, expected: Generated) -> None:
    """Two pipeline stages fill the two columns of a record, and load them again."""
    engine = hosts()
    engine.start(
        daemon.socket,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="tests.vllm.cpu_gaps.StageWorker",
    )
    engine.call_workers("make_stage_inputs")
    assert engine.generate(PROMPTS, timeout_s=600).tokens == expected.tokens
    deadline = time.monotonic() + 60
    while engine.metrics().get("saved_blocks", 0) < 10 + 6 + 2:
        assert time.monotonic() < deadline, engine.metrics()
        engine.generate([[1, 2, 3]], max_tokens=2)
    with Client(daemon.socket, timeout_s=10, attach=False) as tool:
        (space,) = tool.list_namespaces()
        assert space["columns"] == 2 and tool.check() == []
    engine.reset_prefix()
    again = engine.generate(PROMPTS, timeout_s=600)
    assert (again.tokens, again.cached) == (expected.tokens, [320, 192, 256])
    assert engine.metrics().get("hook_errors", 0) == 0
