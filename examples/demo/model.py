"""A tiny language model, made on the spot: real enough for vLLM, the same bytes on every machine.

A Llama of 4 layers with 2 KV heads of 64, 2.6 million seeded random parameters, and a
byte-level BPE tokenizer trained here on a page of text. It says nothing sensible, and that
does not matter: what matters is that its greedy output depends on every token before it, so
that one wrong KV block changes the output.

Two things make it so, and plain small random weights have neither:

* the embedding and the output head are separate, else the model repeats its last token;
* the attention weights are scaled up, so that scores differ between tokens and what
  attention reads outweighs the residual stream it is added to.

Weights are float32. In a 16-bit type the rounding of a prefill that starts at a cached
prefix could flip a near-tie of two logits, and the demo would blame the cache for it.
Written with numpy, safetensors and tokenizers alone: importing transformers takes longer than
making the model.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

SEED = 20_260_101
VOCABULARY = 512
HEAD_DIM = 64
POSITIONS_MAX = 4096
ATTENTION_SCALE = 3.0  # times 1/sqrt(fan-in): scores spread over several units, softmax is peaked


class Shape(NamedTuple):
    """Of the layers, and how many there are."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int


LAYERS = 4
TINY = Shape(LAYERS, 256, 4, 2, 512)
WIDE = Shape(LAYERS, 1024, 16, 4, 4096)  # its larger tensors have 16 MiB
END_OF_TEXT = "<|end|>"

TRAINING_TEXT = """
A cache keeps what was paid for once, so that it need not be paid for again. The engine reads a
prompt, and for every token it works out a key and a value in every layer. When the next request
begins with the same words, the same keys and values would come out: so they are kept, in blocks,
and each block is named by everything that stands before it. A block that is found is a block that
need not be computed. A block that is wrong is worse than a block that is missing, and therefore
each carries a checksum, and what fails its checksum is a miss and is counted.

Memory is fast and small, disks are slower and larger, and the store of another region is slow and
has no end. What was read often stays near; what was not read for long moves away, leaves before
their parents, so that no prefix is broken. When the machine is stopped in the middle of a write,
nothing half-written is ever seen: a row is ready or it is free. The next morning the daemon starts,
adopts the memory that was left behind, looks at every row, and is warm before the first question
comes. You are a careful assistant. Answer the question with the numbers from the table, name the
line you took them from, and say so when the table does not tell. Question: which tier held the most
blocks on Monday, and how many of 0 1 2 3 4 5 6 7 8 9 were read again? Answer:
"""


def make_model(directory: Path, shape: Shape = TINY, shard_bytes: int = 1 << 30) -> Path:
    """A new directory under `directory` with the model. shard_bytes: of each file of weights, about. Blocks for about a second,
    and four more for each GB. Raises OSError."""
    target = directory / "tiny-llama"
    target.mkdir(parents=True)
    _write_tokenizer(target)
    _write_weights(target, shape, shard_bytes)
    _write_config(target, shape)
    return target


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": POSITIONS_MAX,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_weights(directory: Path, shape: Shape, shard_bytes: int) -> None:
    """Shard after shard: memory has one of them."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    held: dict[str, Any] = {}
    left = _tensors(shape)
    while held or not shards:
        for name, tensor in left:
            held[name] = tensor
            if sum(each.nbytes for each in held.values()) >= shard_bytes:
                break
        shards.append(list(held))
        save_file(held, str(directory / f"model-{len(shards):05}.safetensors"), metadata={"format": "pt"})
        held = dict(islice(left, 1))
    if len(shards) == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
        return
    places = {name: f"model-{n:05}.safetensors" for n, names in enumerate(shards, 1) for name in names}
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def _tensors(shape: Shape) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    import numpy as np

    rng = np.random.default_rng(SEED)
    hidden, queries, keys = shape.hidden, shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = rng.standard_normal((rows, columns)) * (scale / columns**0.5)
        return values.astype(np.float32)

    yield "model.embed_tokens.weight", matrix(VOCABULARY, hidden, hidden**0.5)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    yield "lm_head.weight", matrix(VOCABULARY, hidden, 4.0)
    for layer in range(shape.layers):
        head = f"model.layers.{layer}."
        yield head + "input_layernorm.weight", np.ones(hidden, np.float32)
        yield head + "post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield head + "self_attn.q_proj.weight", matrix(queries, hidden, ATTENTION_SCALE)
        yield head + "self_attn.k_proj.weight", matrix(keys, hidden)
        yield head + "self_attn.v_proj.weight", matrix(keys, hidden, ATTENTION_SCALE)
        yield head + "self_attn.o_proj.weight", matrix(hidden, queries)
        yield head + "mlp.gate_proj.weight", matrix(shape.intermediate, hidden)
        yield head + "mlp.up_proj.weight", matrix(shape.intermediate, hidden)
        yield head + "mlp.down_proj.weight", matrix(hidden, shape.intermediate)


def _write_config(directory: Path, shape: Shape) -> None:
    _write_json(directory / "generation_config.json", {"eos_token_id": 0})
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": POSITIONS_MAX,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "eos_token_id": 0,
        },
    )


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
