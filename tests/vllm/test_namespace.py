"""Who may share KV with whom: namespaces differ when anything differs, and weights are told apart by content."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from connectors.device import Blocks, Run
from connectors.vllm.messages import GroupFacts
from connectors.vllm.namespace import (
    identity_fields,
    joined_facts,
    model_name,
    rank_facts,
    release_of,
    space_spec,
)

pytestmark = pytest.mark.vllm


class Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def engine(**changes: Any) -> Any:
    """A VllmConfig as far as namespaces look at it."""
    value = {
        "model": "org/name", "revision": "main", "dtype": "torch.bfloat16", "quantization": None, "rope": 1,
        "cache_dtype": "auto", "algo": "sha256", "tp": 2, "pp": 1, "dcp": 1, "interleave": 1, "layout": "BLHNC", "draft": None,
        **changes,
    }  # fmt: skip
    hf = Config(rope_theta=value["rope"], transformers_version=value.get("transformers", "5"))
    draft = value["draft"] and SimpleNamespace(
        method="eagle", draft_model_config=SimpleNamespace(model=value["draft"], hf_config=hf)
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=value["model"], revision=value["revision"], hf_config=hf, dtype=value["dtype"], quantization=value["quantization"]
        ),
        cache_config=SimpleNamespace(
            cache_dtype=value["cache_dtype"], prefix_caching_hash_algo=value["algo"], kv_cache_layout=value["layout"]
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=value["tp"], pipeline_parallel_size=value["pp"],
            decode_context_parallel_size=value["dcp"], cp_kv_cache_interleave_size=value["interleave"],
        ),
        speculative_config=draft,
    )  # fmt: skip


def digest(**changes: Any) -> bytes:
    """The namespace of an engine, of which some facts are changed."""
    own = {
        "tenant": "", "weights": "w", "seed": b"seed", "epoch": "", "group": 0, "spec": "full(16)", "layers": ["a", "b"],
        "runs": (Run(0, 0, 64, 128),), "backends": ["FLASH_ATTN"], "shards": [0], "block_tokens": 16,
    }  # fmt: skip
    fact = {name: changes.pop(name, value) for name, value in own.items()}
    config = engine(**changes)
    blocks = Blocks((torch.zeros(1024, dtype=torch.uint8),), fact["runs"], 8)
    identity = identity_fields(config, fact["tenant"], fact["weights"], fact["seed"], fact["epoch"])
    facts = rank_facts(config, fact["group"], fact["spec"], fact["layers"], blocks, fact["backends"])
    other = GroupFacts(64, dict.fromkeys(facts.fields, "x"))
    columns = {shard: facts if shard == fact["shards"][0] else other for shard in fact["shards"]}
    sizes = [column.record_bytes for column in columns.values()]
    return space_spec({**identity, **joined_facts(columns)}, sizes, fact["block_tokens"])[0]


CHANGES: dict[str, Any] = {
    "model": "org/other", "revision": "v2", "weights": "x", "rope": 2, "dtype": "torch.float16", "quantization": "fp8",
    "cache_dtype": "fp8", "algo": "sha256_cbor", "seed": b"other", "tp": 4, "pp": 2, "dcp": 2, "interleave": 8,
    "layout": "LBHNC", "backends": ["CPU_ATTN"], "group": 1, "spec": "window(16)", "layers": ["b", "a"],
    "runs": (Run(0, 0, 32, 128), Run(0, 64, 32, 128)), "shards": [1], "tenant": "acme", "epoch": "1", "draft": "org/draft", "block_tokens": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_counts(name: str) -> None:
    """An engine that differs in one thing has a namespace of its own."""
    assert digest(**{name: CHANGES[name]}) != digest()


def test_what_every_shard_says_counts() -> None:
    """One shard's layers differ, or there is one shard more."""
    two = {"shards": [0, 1]}
    assert len({digest(), digest(**two), digest(**two, layers=["b", "a"]), digest(shards=[0, 2])}) == 4


def test_layer_partition_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How layers are dealt to pipeline stages can be set by environment, and then names other bytes."""
    before = digest()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    assert digest() != before


def test_vllm_release_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another minor release is another namespace; a patch release is not."""
    import vllm

    before = digest()
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    other = digest()
    monkeypatch.setattr(vllm, "__version__", "0.99.3")
    assert before != other == digest()
    assert release_of("0.32.1.dev3+cpu") == "0.32"


def test_what_does_not_matter_does_not_count() -> None:
    """The transformers version and the place of the model directory do not separate engines."""
    assert digest(transformers="6") == digest()
    assert model_name("org/name") == "org/name"


def test_a_local_model_goes_by_its_last_name(tmp_path: Path) -> None:
    """Where a model directory is mounted does not matter; its contents are digested."""
    for mount in ("a", "b"):
        (tmp_path / mount / "model").mkdir(parents=True)
    assert model_name(str(tmp_path / "a/model")) == model_name(str(tmp_path / "b/model")) == "model"
