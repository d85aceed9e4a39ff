"""Tiny models of further kinds, made on the spot: seeded random weights, the tokenizer of `examples.demo.model`.

    hybrid   short convolutions with a recurrent state beside full attention (LFM2)
    mla      latent attention (DeepSeek-V2), as few and as small layers as vLLM's CPU kernel takes
    draft    the demo's Llama, a little off: some of what it drafts is accepted, some is not
    expert   the demo's Llama with experts (Mixtral)
    shallow  the demo's Llama, its first layer alone
    eagle    a head of EAGLE for it, and mtp, the same as an MTP layer (MiMo): copies of that layer, so that some of
             what they draft is accepted, and what depends on what their own KV holds
    vision   the demo's Llama with eyes (Idefics3, which needs no torchvision)
    lora     adapters of the demo's Llama

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

from examples.demo.model import ATTENTION_SCALE, SEED, VOCABULARY

Array = np.ndarray[Any, Any]
HIDDEN = 128
HEADS = 2
INTERMEDIATE = 256
EXPERTS = 4
LATENT, ROPE, NOPE = 512, 64, 64  # of MLA; the CPU kernel knows no other latent and rope
IMAGE_TOKEN = VOCABULARY  # in prompts of `vision_model`: an image goes here
IMAGE_SIDE, PATCH_SIDE, SHUFFLE = 128, 8, 2
IMAGE_TOKENS = (IMAGE_SIDE // PATCH_SIDE // SHUFFLE) ** 2
WIDTH = 64  # of what sees
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


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


def expert_model(base: Path, directory: Path) -> Path:
    """The model at `base` as a Mixtral: experts of random weights, of which two answer for each token."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    matrix, tensors = _matrices(SEED + 5), dict[str, Array]()
    for name, tensor in load_file(base / "model.safetensors").items():
        layer, is_dense, part = name.partition("mlp.")
        if not is_dense:
            tensors[name] = tensor
            continue
        part = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[part]
        head = layer + "block_sparse_moe."
        for expert in range(EXPERTS):
            tensors[f"{head}experts.{expert}.{part}.weight"] = matrix(*tensor.shape)
        tensors.setdefault(head + "gate.weight", matrix(EXPERTS, config["hidden_size"]))
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    return _write(base, directory / "tiny-experts", config, tensors)


def shallow_model(base: Path, directory: Path) -> Path:
    """The first layer of the model at `base`: what `eagle_head` and `mtp_model` can guess the tokens of."""
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    return _write(base, directory / "tiny-shallow", {**config, "num_hidden_layers": 1}, _first_layer(base))


def eagle_head(base: Path, directory: Path) -> Path:
    """EAGLE for `shallow_model`: its layer again, over the token drafted last and a little of the hidden state."""
    layer = {
        name.removeprefix("model."): tensor
        for name, tensor in _first_layer(base).items()
        if name.startswith("model.layers.0.") and "input_layernorm" not in name
    }
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden = config["hidden_size"]
    tensors = {**layer, "fc.weight": _halves(hidden, ahead=0.2, behind=1.0)}
    head = {**config, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    return _write(base, directory / "tiny-eagle", head, tensors)


def mtp_model(base: Path, directory: Path) -> Path:
    """`shallow_model` as a MiMo with one MTP layer, which is its layer again, as in `eagle_head`."""
    tensors = _first_layer(base)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, dim = config["hidden_size"], config["head_dim"]
    for name, heads in (
        ("q", "num_attention_heads"),
        ("k", "num_key_value_heads"),
        ("v", "num_key_value_heads"),
    ):
        bias = np.zeros(config[heads] * dim, np.float32)
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = bias
    mtp = "model.mtp_layers.0."
    for name in [name for name in tensors if name.startswith("model.layers.0.")]:
        tensors[name.replace("model.layers.0.", mtp)] = tensors[name].copy()
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{mtp}{norm}.weight"] = np.ones(hidden, np.float32)
    tensors[mtp + "input_proj.weight"] = _halves(hidden, ahead=1.0, behind=0.2)
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    return _write(base, directory / "tiny-mimo", {**config, "num_hidden_layers": 1, **mimo}, tensors)


def lora_adapter(base: Path, directory: Path, name: str, seed: int, rank: int = 8) -> Path:
    """An adapter in PEFT's format for queries, keys and values of the model at `base`."""
    matrix = _matrices(seed)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, dim = config["hidden_size"], config["head_dim"]
    modules = {
        "q_proj": "num_attention_heads",
        "k_proj": "num_key_value_heads",
        "v_proj": "num_key_value_heads",
    }
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, heads in modules.items():
            head = f"base_model.model.model.layers.{layer}.self_attn.{module}."
            tensors[head + "lora_A.weight"] = matrix(rank, hidden)
            tensors[head + "lora_B.weight"] = matrix(config[heads] * dim, rank)
    target = directory / name
    target.mkdir(parents=True)
    peft = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(peft, indent=1) + "\n", encoding="utf-8")
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    return target


def vision_model(base: Path, directory: Path) -> Path:
    """The model at `base` with eyes (Idefics3): one layer that sees, and a projection."""
    text = json.loads((base / "config.json").read_text(encoding="utf-8")) | {"vocab_size": VOCABULARY + 64}
    tensors = _seeing(_matrices(SEED + 4), text["hidden_size"])
    known = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        known[name] = np.pad(known[name], ((0, 64), (0, 0)))  # for the marks of images
    tensors |= {name.replace("model.", "model.text_model.", 1): tensor for name, tensor in known.items()}
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": text,
        "vision_config": {
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": IMAGE_SIDE,
            "patch_size": PATCH_SIDE,
        },
        "scale_factor": SHUFFLE,
        "image_token_id": IMAGE_TOKEN,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    target = _write(base, directory / "tiny-vision", config, tensors)
    _write_processor(target)
    return target


def picture(seed: int) -> Any:
    """An image for `vision_model`."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _first_layer(base: Path) -> dict[str, Array]:
    tensors = load_file(base / "model.safetensors")
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }


def _halves(hidden: int, ahead: float, behind: float) -> Array:
    """A projection of two joined vectors: `behind` times the first, `ahead` times the second."""
    one = np.eye(hidden, dtype=np.float32)
    joined: Array = np.concatenate([behind * one, ahead * one], axis=1)
    return joined.astype(np.float32)


def _seeing(matrix: Callable[..., Array], hidden: int) -> dict[str, Array]:
    """Weights from pixels to what stands in the place of tokens."""
    tower, patches = "model.vision_model.", (IMAGE_SIDE // PATCH_SIDE) ** 2
    layer, pixels = tower + "encoder.layers.0.", 3 * PATCH_SIDE**2
    patch = matrix(WIDTH, pixels).reshape(WIDTH, 3, PATCH_SIDE, PATCH_SIDE)
    tensors = {
        tower + "embeddings.patch_embedding.weight": patch,
        tower + "embeddings.patch_embedding.bias": np.zeros(WIDTH, np.float32),
        tower + "embeddings.position_embedding.weight": matrix(patches, WIDTH),
        "model.connector.modality_projection.proj.weight": matrix(hidden, WIDTH * SHUFFLE**2),
    }
    for norm in (layer + "layer_norm1", layer + "layer_norm2", tower + "post_layernorm"):
        tensors[norm + ".weight"], tensors[norm + ".bias"] = (
            np.ones(WIDTH, np.float32),
            np.zeros(WIDTH, np.float32),
        )
    linear = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    linear |= {"mlp.fc1": (2 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 2 * WIDTH)}
    for name, (rows, columns) in linear.items():
        tensors[f"{layer}{name}.weight"] = matrix(rows, columns)
        tensors[f"{layer}{name}.bias"] = np.zeros(rows, np.float32)
    return tensors


def _write_processor(target: Path) -> None:
    """What turns images into pixels (Pillow, not torchvision), and the marks of images in the tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(target / "tokenizer.json"))
    side = {"longest_edge": IMAGE_SIDE}
    pixels = {
        "image_processor_type": "Idefics3ImageProcessorPil",
        "do_image_splitting": False,
        "size": side,
        "max_image_size": side,
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS}
    for name, document in (("preprocessor_config.json", pixels), ("processor_config.json", processor)):
        (target / name).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


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
