"""Tiny models of further kinds, made on the spot: seeded random weights, the tokenizer of `kvstore.demo.model`.

    hybrid   short convolutions with a recurrent state beside full attention (LFM2)
    mla      latent attention (DeepSeek-V2), as few and as small layers as vLLM's CPU kernel takes
    draft    the demo's Llama, a little off: some of what it drafts is accepted, some is not

As in the demo's model, weights are scaled so that the output depends on what attention and states hold.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from kvstore.demo.model import ATTENTION_SCALE, SEED, VOCABULARY

Array = np.ndarray[Any, Any]
HIDDEN = 128
HEADS = 2
INTERMEDIATE = 256
LATENT, ROPE, NOPE = 512, 64, 64  # of MLA; the CPU kernel knows no other latent and rope


def hybrid_model(base: Path, directory: Path) -> Path:
    """Three layers: convolution, attention, convolution."""
    matrix = _matrices(SEED + 1)
    kinds = ["conv", "full_attention", "conv"]
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.embedding_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer, kind in enumerate(kinds):
        head = f"model.layers.{layer}."
        for norm in ("operator_norm", "ffn_norm"):
            tensors[f"{head}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        if kind == "conv":
            tensors[head + "conv.conv.weight"] = matrix(HIDDEN, 3, 2.0).reshape(HIDDEN, 1, 3)
            tensors[head + "conv.in_proj.weight"] = matrix(3 * HIDDEN, HIDDEN, ATTENTION_SCALE)
            tensors[head + "conv.out_proj.weight"] = matrix(HIDDEN, HIDDEN)
        else:
            for name, scale in (("q", ATTENTION_SCALE), ("k", 1.0), ("v", ATTENTION_SCALE)):
                tensors[f"{head}self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN, scale)
            tensors[head + "self_attn.out_proj.weight"] = matrix(HIDDEN, HIDDEN)
            for name in ("q_layernorm", "k_layernorm"):
                tensors[f"{head}self_attn.{name}.weight"] = np.full(HIDDEN // HEADS, 2.0, np.float32)
        for name in ("w1", "w3"):
            tensors[f"{head}feed_forward.{name}.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[head + "feed_forward.w2.weight"] = matrix(HIDDEN, INTERMEDIATE)
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_multiple_of": 1,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    return _write(base, directory / "tiny-hybrid", config, tensors)


def mla_model(base: Path, directory: Path) -> Path:
    """Two dense layers with latent attention."""
    matrix = _matrices(SEED + 2)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 4.0),
    }
    for layer in range(2):
        head = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{head}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        attention = head + "self_attn."
        tensors[attention + "q_proj.weight"] = matrix(HEADS * (NOPE + ROPE), HIDDEN, ATTENTION_SCALE)
        tensors[attention + "kv_a_proj_with_mqa.weight"] = matrix(LATENT + ROPE, HIDDEN)
        tensors[attention + "kv_a_layernorm.weight"] = np.ones(LATENT, np.float32)
        tensors[attention + "kv_b_proj.weight"] = matrix(HEADS * 2 * NOPE, LATENT, ATTENTION_SCALE)
        tensors[attention + "o_proj.weight"] = matrix(HIDDEN, HEADS * NOPE)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{head}mlp.{name}.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[head + "mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": NOPE,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return _write(base, directory / "tiny-mla", config, tensors)


def draft_model(base: Path, directory: Path) -> Path:
    """The model at `base` with a little noise on its output head."""
    matrix = _matrices(SEED + 3)
    tensors = load_file(base / "model.safetensors")
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head + matrix(*head.shape, 1.0)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    return _write(base, directory / "tiny-draft", config, tensors)


def _matrices(seed: int) -> Callable[..., Array]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
        values: Array = rng.standard_normal((rows, columns)) * (scale / columns**0.5)
        return values.astype(np.float32)

    return matrix


def _write(base: Path, target: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    """A model directory; the tokenizer is that of `base`."""
    target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(base / name, target)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "torch_dtype": "float32",
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    (target / "config.json").write_text(json.dumps({**common, **config}, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
