"""Who may share KV with whom: namespaces differ when anything differs, and weights are told apart by content."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from connectors.device import Blocks, Run
from connectors.transfer.weights import DigestInBackground, WeightsUnknown, weight_files, weights_digest
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


# ---- weights -------------------------------------------------------------------------------


def checkpoint(directory: Path, **tensors: bytes) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in tensors.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    return weight_files(str(directory), None)


def digest_of(files: list[Path], cache: Path) -> str:
    return weights_digest(files, cache, threading.Event())


def test_equal_weights_in_two_places_are_equal(tmp_path: Path) -> None:
    """A copy of a checkpoint has the same digest, wherever it lies."""
    one = checkpoint(tmp_path / "one", a=b"x" * 5000, b=b"y" * 5000)
    two = checkpoint(tmp_path / "two", a=b"x" * 5000, b=b"y" * 5000)
    assert digest_of(one, tmp_path / "cache") == digest_of(two, tmp_path / "cache")


def test_one_changed_byte_is_another_model(tmp_path: Path) -> None:
    """Same names, same sizes, one different byte in the middle of a large file: another digest."""
    content = bytearray(os.urandom(3 << 20))
    one = checkpoint(tmp_path / "one", a=bytes(content))
    content[len(content) // 2] ^= 1
    two = checkpoint(tmp_path / "two", a=bytes(content))
    assert digest_of(one, tmp_path / "cache") != digest_of(two, tmp_path / "cache")


def test_the_digest_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start reads no weights; a changed file is read again."""
    from connectors.transfer import weights

    read: list[Path] = []
    true_read = weights._read_through
    monkeypatch.setattr(
        weights, "_read_through", lambda path, stop: read.append(path) or true_read(path, stop)
    )
    files = checkpoint(tmp_path / "one", a=b"x" * 100)
    first = digest_of(files, tmp_path / "cache")
    assert digest_of(files, tmp_path / "cache") == first and len(read) == 1
    files[0].write_bytes(b"z" * 100)
    os.utime(files[0], ns=(1, 1))
    assert digest_of(files, tmp_path / "cache") != first and len(read) == 2


def test_a_damaged_note_costs_a_reading(tmp_path: Path) -> None:
    """What stands in the cache directory is believed only if it is whole and about this file."""
    files = checkpoint(tmp_path / "one", a=b"x" * 100)
    first = digest_of(files, tmp_path / "cache")
    for note in (tmp_path / "cache").rglob("*.json"):
        note.write_text("{")
    assert digest_of(files, tmp_path / "cache") == first


def test_no_weights_is_an_answer(tmp_path: Path) -> None:
    """A directory without weight files, or a model that is not there, is said to be unknown."""
    (tmp_path / "config.json").write_text("{}")
    for model in (str(tmp_path), "nobody/such-model"):
        with pytest.raises(WeightsUnknown):
            weight_files(model, None)


def test_the_background_digest_can_be_stopped(tmp_path: Path) -> None:
    """Shutting down does not wait until all weights are read."""
    entered = threading.Event()

    def work(stop: threading.Event) -> str:
        entered.set()
        assert stop.wait(10)
        raise WeightsUnknown("stopped")

    errors: list[Exception] = []
    background = DigestInBackground(work, errors.append)
    assert entered.wait(10) and background.wait(0.01) is None
    background.close()
    assert background.result is None and not errors
