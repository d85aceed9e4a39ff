"""Who may share KV with whom: namespaces differ when anything differs, and weights are told apart by content."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm._custom_ops import cpu_attn_reshape_and_cache
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from connectors.device import Blocks, Run
from connectors.vllm.identity.namespace import (
    configured_fields,
    identity_fields,
    joined_facts,
    model_name,
    rank_facts,
    release_of,
    space_spec,
)
from connectors.vllm.messages import GroupFacts
from connectors.vllm.worker import WorkerHalf
from tests.vllm.engine_configs import config_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    config = config_of(model)
    config.cache_config.kv_cache_layout = "BLHNC"
    return config


def digest(config: Any, **changes: Any) -> bytes:
    """The namespace of an engine, of which some facts are changed."""
    own = {
        "tenant": "", "weights": "w", "seed": b"seed", "epoch": "", "group": 0, "spec": "full(16)", "layers": ["a", "b"],
        "runs": (Run(0, 0, 64, 128),), "backends": ["FLASH_ATTN"], "shards": [0], "block_tokens": 16,
    }  # fmt: skip
    fact = {name: changes.pop(name, value) for name, value in own.items()}
    for path, value in changes.items():
        config = copy.deepcopy(config)
        *steps, last = path.split(".")
        setattr(functools.reduce(getattr, steps, config), last, value)
    blocks = Blocks((torch.zeros(1024, dtype=torch.uint8),), fact["runs"], 8)
    identity = identity_fields(
        config, fact["tenant"], fact["weights"], fact["seed"], fact["epoch"], configured_fields(config)
    )
    facts = rank_facts(config, fact["group"], fact["spec"], fact["layers"], blocks, fact["backends"])
    other = GroupFacts(64, dict.fromkeys(facts.fields, "x"))
    columns = {shard: facts if shard == fact["shards"][0] else other for shard in fact["shards"]}
    sizes = [column.record_bytes for column in columns.values()]
    return space_spec({**identity, **joined_facts(columns)}, sizes, fact["block_tokens"])[0]


CHANGES: dict[str, Any] = {
    "weights": "x", "seed": b"other", "model_config.dtype": torch.float16, "model_config.quantization": "fp8",
    "model_config.hf_config.rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
    "cache_config.cache_dtype": "fp8", "cache_config.prefix_caching_hash_algo": "sha256_cbor",
    "cache_config.kv_cache_layout": "LBHNC", "parallel_config.tensor_parallel_size": 4,
    "parallel_config.pipeline_parallel_size": 2, "parallel_config.decode_context_parallel_size": 2,
    "parallel_config.cp_kv_cache_interleave_size": 8, "backends": ["CPU_ATTN"], "group": 1, "spec": "window(16)",
    "layers": ["b", "a"], "runs": (Run(0, 0, 32, 128), Run(0, 64, 32, 128)), "shards": [1], "tenant": "acme",
    "epoch": "1", "block_tokens": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_counts(name: str, engine: Any) -> None:
    """An engine that differs in one thing has a namespace of its own."""
    assert digest(engine, **{name: CHANGES[name]}) != digest(engine)


def test_what_every_shard_says_counts(engine: Any) -> None:
    """One shard's layers differ, or there is one shard more."""
    two = {"shards": [0, 1]}
    told = {digest(engine), digest(engine, **two), digest(engine, **two, layers=["b", "a"])}
    assert len(told | {digest(engine, shards=[0, 2])}) == 4


class Layer(AttentionLayerBase):
    """Of a CPU's attention, whose kernels are those for `isa`."""

    def __init__(self, isa: str) -> None:
        self.isa = isa

    def get_attn_backend(self) -> Any:
        return CPUAttentionBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None


def backends(isa: str = "vec", dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What a rank says of a layer."""
    compiled = SimpleNamespace(static_forward_context={"a": Layer(isa)})
    half: Any = SimpleNamespace(_config=SimpleNamespace(compilation_config=compiled))
    return WorkerHalf._backends(half, {"a": torch.zeros(1, dtype=dtype)})


def test_the_order_of_a_cpus_kernels_counts() -> None:
    """vLLM's backend for CPUs has one name, and lays K as the machine's matrix units want it."""
    assert backends("vec") == backends("vec16") == ["CPU_ATTN"]
    assert backends("amx") == ["CPU_ATTN", "amx"] and backends("neon") == ["CPU_ATTN", "neon"]


def test_kernels_lay_k_as_they_are_told_apart() -> None:
    """Those that count as one write the same bytes, and the other one does not."""
    current_platform.import_kernels()
    write = getattr(torch.ops._C, "cpu_attn_reshape_and_cache", None)
    if write is None:
        pytest.skip("vLLM without its kernels")
    tokens = torch.arange(32 * 64, dtype=torch.bfloat16).view(32, 1, 64)
    written = {}
    for isa in ("vec", "vec16", "amx"):
        keys, values = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16).chunk(2, dim=2)
        cpu_attn_reshape_and_cache(tokens, tokens, keys, values, torch.arange(32), isa)
        written[isa] = keys.flatten().tolist()
    assert written["vec"] == written["vec16"] != written["amx"]


def test_the_format_of_8_bits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV in fp8 is of another format on MI300, by the same kernels; what has more bits is not."""
    eight, sixteen = torch.uint8, torch.bfloat16
    told = {eight: backends(dtype=eight), sixteen: backends(dtype=sixteen)}
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    assert backends(dtype=eight) != told[eight] and backends(dtype=sixteen) == told[sixteen]


def test_layer_partition_counts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """How layers are dealt to pipeline stages can be set by environment, and then names other bytes; where caches are
    does not matter."""
    before = digest(engine)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/elsewhere")
    assert digest(engine) == before
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert digest(engine) != before


def test_vllm_release_counts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another minor release is another namespace; a patch release is not."""
    import vllm

    before = digest(engine)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    other = digest(engine)
    monkeypatch.setattr(vllm, "__version__", "0.99.3")
    assert before != other == digest(engine)
    assert release_of("0.32.1+cpu") == release_of("0.32") == release_of("0.32.0.post1") == "0.32"
    for build in ("0.32.1.dev3+cpu", "0.33.0rc1", "0.33.1.dev190+g1a2b3c", "nightly"):
        assert release_of(build) == build


def test_names_are_labels(engine: Any) -> None:
    """What a model is called, and by which revision, is said and does not separate engines."""
    named = {"model_config.model": "org/another", "model_config.revision": "v2"}
    assert digest(engine, **named) == digest(engine)
    assert identity_fields(engine, "", "w", b"seed", "", {})["model"] == "tiny-llama"
    assert model_name("org/name") == "org/name"


def test_a_local_model_goes_by_its_last_name(tmp_path: Path) -> None:
    """Where a model directory is mounted does not matter; its contents are digested."""
    for mount in ("a", "b"):
        (tmp_path / mount / "model").mkdir(parents=True)
    assert model_name(str(tmp_path / "a/model")) == model_name(str(tmp_path / "b/model")) == "model"
