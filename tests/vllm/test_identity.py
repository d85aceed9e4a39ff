"""What decides the bytes of KV is in the namespace, and nothing else is: every field of vLLM's configuration is judged.

Under 0.32 and 0.33. No engine runs here; `test_identity_engines.py` compares tokens.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from connectors.vllm.identity import allowed
from connectors.vllm.identity.canonical import Unknowable, canonical, text_of
from connectors.vllm.identity.configuration import PATHS, configuration
from connectors.vllm.identity.model_sources import SHARED, ModelSources
from examples.demo.model import make_model
from tests.vllm import models
from tests.vllm.engine_configs import changed, config_of, digest_of, model_with, objects_of
from tests.vllm.judged import COUNTED, LEFT_OUT, OF_NO_ENGINE
from tiers.packs.packs import FIELD_CHARS_MAX, FIELDS_MAX

pytestmark = pytest.mark.vllm


# ---- every field is judged -----------------------------------------------------------------


def classes() -> Iterator[type]:
    """Every class of vLLM's configuration."""
    import vllm.config

    for module in pkgutil.walk_packages(vllm.config.__path__, "vllm.config."):
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.name:
                yield kind


@pytest.mark.parametrize("kind", list(classes()), ids=lambda kind: kind.__name__)
def test_every_field_is_judged(kind: type) -> None:
    """A field counts or is allowed to differ; one that nobody has judged is neither, and this fails."""
    name = kind.__name__
    if name in OF_NO_ENGINE:
        return
    counted = set(COUNTED.get(name, LEFT_OUT.get(name, "")).split())
    left_out = set(allowed.FIELD_REASONS.get(name, {}))
    assert not counted & left_out
    assert {field.name for field in fields(kind)} - counted - left_out == set(), f"not judged, of {name}"


def test_what_is_left_out_whole_is_allowed() -> None:
    """Objects that are left out with all their fields stand in the allow-list themselves."""
    import vllm.config

    allowed_fields = {name for table in allowed.FIELD_REASONS.values() for name in table}
    for name in LEFT_OUT.keys() & vars(vllm.config).keys():
        words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
        own = {"k_v_transfer_config": "kv_transfer_config", "k_v_events_config": "kv_events_config"}
        assert own.get(words, words) in allowed_fields


# ---- each field does what it was judged to -------------------------------------------------


@cache
def an_engine(kind: str, base: Path) -> Any:
    model = make_model(base / kind)
    arguments: dict[str, Any] = {}
    if kind == "adapters and a draft":
        head = models.eagle_head(model, base / kind)
        speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
        arguments = {"enable_lora": True, "speculative_config": speculation}
    if kind == "images":
        model = models.vision_model(model, base / kind)
        arguments = {"limit_mm_per_prompt": {"image": 2}}
    return config_of(model, **arguments)


KINDS = ("text", "adapters and a draft", "images")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_does_what_it_was_judged_to(kind: str, base: Path) -> None:
    """Of real configurations: another value of a field that counts is another namespace, and of one that does not, the
    same."""
    config = an_engine(kind, base)
    before = digest_of(config)
    wrong: list[str] = []
    for path, inner in objects_of(config):
        name = type(inner).__name__
        if name in LEFT_OUT or path.startswith(
            ("speculative_config.target", "speculative_config.draft_load")
        ):
            continue
        for field in fields(inner):
            value = getattr(inner, field.name, None)
            if hasattr(value, "__dataclass_fields__") or field.name in (
                "hf_config",
                "hf_text_config",
                "method",
                *PATHS,
            ):
                continue  # looked at by themselves
            told = digest_of(changed(config, path, field.name)) != before
            counts = field.name not in allowed.FIELD_REASONS.get(name, {})
            if name in allowed.ASKED and not counts:
                model = config.model_config if not path.startswith("speculative") else inner
                counts = ModelSources(model).read_field(field.name)
            if field.name in ("compile_ranges_endpoints", "max_num_batched_tokens"):
                continue  # they are told of each other
            if told != counts:
                wrong.append(f"{path}.{field.name}: {'told' if told else 'not told'}")
    assert not wrong


def test_a_field_of_the_next_release_counts(base: Path) -> None:
    """One that no list names separates engines: cold, never wrong."""
    config = an_engine("text", base)
    before = digest_of(config)
    object.__setattr__(config.cache_config, "invented_next_year", 1)
    try:
        assert digest_of(config) != before
    finally:
        del config.cache_config.invented_next_year


# ---- members of the kind -------------------------------------------------------------------

LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 2048,
        "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    },
    "original_max_position_embeddings": 2048,
}  # fmt: skip


def test_long_factors_count(base: Path, tmp_path: Path) -> None:
    """LongRoPE takes other factors where `max_model_len` is over the original length; which side of it counts, and no
    more."""
    model = model_with(make_model(tmp_path / "plain"), tmp_path, **LONG_ROPE)
    told = {length: digest_of(config_of(model, max_model_len=length)) for length in (1024, 2048, 2049, 4096)}
    assert told[1024] == told[2048] != told[2049] == told[4096]


APART: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float16"},
    "KV dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "overridden config": {"hf_overrides": {"rms_norm_eps": 1e-3}},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}},
    "no window": {"disable_sliding_window": True},
    "eager": {"enforce_eager": True},
    "adapters": {"enable_lora": True},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "graphs": {"compilation_config": {"mode": 0}},
    "additional": {"additional_config": {"anything": 1}},
}

TOGETHER: dict[str, dict[str, Any]] = {
    "n-gram speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    },
    "length": {"max_model_len": 1024},
    "batches": {"max_num_batched_tokens": 512, "max_num_seqs": 3},
    "memory": {"gpu_memory_utilization": 0.5, "num_gpu_blocks_override": 100},
    "name": {"served_model_name": "another"},
    "revision": {"revision": "main"},
    "seed": {"seed": 7},
    "scheduling": {"scheduling_policy": "priority"},
    "logs": {"disable_log_stats": True, "max_logprobs": 5},
    "sampling": {"override_generation_config": {"temperature": 0.1}},
    "loading": {"load_format": "safetensors"},
    "tokenizer": {"tokenizer_mode": "slow"},
}


@pytest.mark.parametrize("name", APART)
def test_engines_that_must_not_share(name: str, base: Path) -> None:
    """What changes KV makes another namespace."""
    model = Path(an_engine("text", base).model_config.model)
    assert digest_of(config_of(model, **APART[name])) != digest_of(an_engine("text", base))


@pytest.mark.parametrize("name", TOGETHER)
def test_engines_that_share(name: str, base: Path) -> None:
    """What does not change KV makes none."""
    model = Path(an_engine("text", base).model_config.model)
    assert digest_of(config_of(model, **TOGETHER[name])) == digest_of(an_engine("text", base))


@pytest.mark.parametrize(
    "asked",
    [{"mm_processor_kwargs": {"image_mean": [0.1] * 3}}, {"media_io_kwargs": {"video": {"num_frames": 4}}}],
)
def test_how_images_are_prepared_counts(asked: dict[str, Any], base: Path) -> None:
    """Arguments of the engine for its processor; a request's are in the block hash."""
    images = an_engine("images", base)
    model = images.model_config.model
    assert digest_of(config_of(model, limit_mm_per_prompt={"image": 2}, **asked)) != digest_of(images)


KEYS: dict[str, tuple[Any, bool]] = {
    "eos_token_id": (3, False),
    "pad_token_id": (5, False),
    "bos_token_id": (4, False),
    "use_cache": (False, False),
    "a_note_of_ours": ("1", False),
    "transformers_version": ("4.0", False),
    "rms_norm_eps": (1e-3, True),
    "attention_bias": (True, True),
    "logits_soft_cap": (1.0, True),  # of other models; vLLM's code reads it somewhere
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_a_config(key: str, base: Path, tmp_path: Path) -> None:
    """A key of config.json counts where vLLM may read it for this model, and only there."""
    value, counts = KEYS[key]
    model = model_with(Path(an_engine("text", base).model_config.model), tmp_path, **{key: value})
    assert (digest_of(config_of(model)) != digest_of(an_engine("text", base))) == counts


def test_a_directory_goes_by_no_name(base: Path, tmp_path: Path) -> None:
    """The same files under another path, with another last name."""
    before = an_engine("text", base)
    moved = model_with(Path(before.model_config.model), tmp_path).rename(tmp_path / "renamed")
    assert digest_of(config_of(moved)) == digest_of(before)


def test_plugins_count(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was installed to change vLLM, by its name and version, whatever it is called; vLLM's own and ours are no such."""
    config = an_engine("text", base)
    told = [digest_of(config)]
    monkeypatch.syspath_prepend(str(tmp_path))
    for package, version, module in (
        ("kvstore-llm", "1", "connectors.vllm_plugin"),
        ("vllm-of-next-year", "1", "vllm.plugins.any"),
        ("vllm-better-attention", "1", "better_attention"),
        ("vllm-better-attention", "2", "better_attention"),
    ):
        installed = tmp_path / f"{package.replace('-', '_')}-1.dist-info"
        installed.mkdir(exist_ok=True)
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (installed / "entry_points.txt").write_text(f"[vllm.general_plugins]\nany = {module}:register\n")
        importlib.invalidate_caches()
        told.append(digest_of(config))
    assert told[0] == told[1] == told[2] and len(set(told[2:])) == 3


def test_code_that_a_model_brings_counts(base: Path, tmp_path: Path) -> None:
    """Its files by content, where vLLM is allowed to run them."""
    model = model_with(Path(an_engine("text", base).model_config.model), tmp_path)
    (model / "modeling.py").write_text("a = 1")
    before = digest_of(config_of(model, trust_remote_code=True))
    (model / "modeling.py").write_text("a = 2")
    assert digest_of(config_of(model, trust_remote_code=True)) != before


# ---- what the model's own code reads -------------------------------------------------------


def sources_of(architecture: str) -> ModelSources:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"architectures": [architecture]}

    Config.__module__ = "transformers.models.any"

    class Model:
        hf_config = Config()
        hf_text_config = hf_config

        def using_transformers_backend(self) -> bool:
            return False

    Model.architecture = architecture  # type: ignore[attr-defined]
    return ModelSources(Model())


def test_a_model_whose_code_reads_a_setting_is_asked() -> None:
    """Llama 4 scales attention by `max_model_len` and by overrides of generation; Roberta counts positions from the
    padding token; n-gram embeddings begin anew at the end of a text. Llama reads none of them."""
    assert sources_of("Llama4ForCausalLM").read_field("max_model_len")
    assert sources_of("Llama4ForCausalLM").read_field("override_generation_config")
    assert sources_of("RobertaModel").read_key("pad_token_id")
    assert sources_of("LongcatFlashNgramForCausalLM").read_key("eos_token_id")
    llama = sources_of("LlamaForCausalLM")
    assert not llama.opaque
    assert not any(map(llama.read_field, allowed.FIELD_REASONS["ModelConfig"]))
    assert not any(map(llama.read_key, allowed.KEY_REASONS))


@pytest.mark.parametrize("architecture", ["NobodysForCausalLM", "TransformersForCausalLM"])
def test_code_that_is_not_vllms_own_reads_everything(architecture: str) -> None:
    """Models of others, and those of the transformers library."""
    sources = sources_of(architecture)
    assert sources.opaque and sources.read_key("use_cache") and sources.read_field("model")
    assert sources.unread_keys(["a_note_of_ours"]) == set()


def test_shared_code_was_read_by_hand() -> None:
    """What all models import is not searched: nothing in it reads an allowed key of config.json, but for the labels of
    classifiers."""
    import vllm

    root = Path(vllm.__file__).parent / "model_executor/models"
    for name in SHARED:
        words = set(re.findall(r"\w+", (root / f"{name}.py").read_text()))
        assert words & allowed.KEY_REASONS.keys() <= {"id2label"}


def test_who_else_reads_the_length() -> None:
    """`max_model_len` is read by shared layers for the sizes of buffers, and by LongRoPE: a new reader is to be judged."""
    import vllm

    layers = Path(vllm.__file__).parent / "model_executor/layers/rotary_embedding"
    readers = {path.name for path in layers.rglob("*.py") if "max_model_len" in path.read_text()}
    assert readers == {"phi3_long_rope_scaled_rope.py"}


# ---- canonical forms -----------------------------------------------------------------------


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        lambda: 0,
        torch.zeros(2),
        Holder([threading.Lock()]),
        torch.nn.Linear(1, 1),
        iter([1]),
    ],
    ids=["lock", "lambda", "tensor", "lock within", "module", "iterator"],
)
def test_what_has_no_form_is_not_guessed(value: Any, base: Path) -> None:
    """A value whose text would differ elsewhere, or would leave something out, makes the connector decline."""
    config = changed(an_engine("text", base), "", "additional_config")
    object.__setattr__(config, "additional_config", {"own": value})
    with pytest.raises(Unknowable, match="additional_config is "):
        configuration(config)


def test_forms_are_equal_where_values_are() -> None:
    """Order, identity and the kind of a container do not matter; what an object holds does."""

    def form(value: Any) -> str:
        return text_of(canonical(value, lambda *_: False))

    assert form({"b": {3, 1}, "a": (1, 2)}) == form({"a": [1, 2], "b": {1, 3}})
    assert form(Holder(torch.float16)) == form(Holder(torch.float16)) != form(Holder(torch.float32))
    assert form(Path("/a")) == form("/a") and form(1) != form("1") != form(True)


def test_what_is_written_out_is_bounded(base: Path) -> None:
    """Settings beyond the room are in the digest alone."""
    from connectors.vllm.identity.namespace import FIELD_CHARS_MAX as WRITTEN_MAX
    from connectors.vllm.identity.namespace import SETTINGS_CHARS_MAX, configured_fields

    config = changed(an_engine("text", base), "", "additional_config")
    for number in range(400):
        setattr(config.cache_config, f"another_{number}", "x" * number)
    try:
        written = configured_fields(config)
    finally:
        for number in range(400):
            delattr(config.cache_config, f"another_{number}")
    assert sum(len(name) + len(value) for name, value in written.items()) < SETTINGS_CHARS_MAX + 300
    assert len(written) + 30 < FIELDS_MAX and max(map(len, written.values())) <= WRITTEN_MAX < FIELD_CHARS_MAX
