"""Pairs of engines: what tells them apart decides what KV is (they must not share), or does not (they must).

    what a pair of DIFFER changes   content of files at the same path, an argument, the engine's surroundings
    what a pair of SAME changes     names, places, files that are not loaded, what only decides how fast or what is sampled

A pair is made from a `Kit`, which hands out copies of the tiny models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.vllm import models
from tests.vllm.conftest import Tokens, prompt
from tests.vllm.engines import Adapter

BLOCK = 32
TEXT: list[Tokens] = [prompt(70, 330), prompt(71, 200)]
SEEN: list[Tokens] = [[*prompt(75, 20), models.IMAGE_TOKEN, *prompt(76, 60)]]  # a picture in its middle
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MEAN = [0.1, 0.2, 0.9]  # of colours, which are 0.5 in the processor's own settings


@dataclass
class Engine:
    """An engine, and what it is asked. prepare: what happens before it starts. options, extra: of the engine, and of our
    connector. images: the seed of a picture for each prompt."""

    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[], object] = lambda: None
    extra: dict[str, Any] = field(default_factory=dict)
    prompts: list[Tokens] = field(default_factory=lambda: TEXT)
    salt: str = ""
    adapter: Adapter | None = None
    images: list[int] | None = None

    @property
    def blocks(self) -> list[int]:
        """Tokens in whole blocks, by prompt."""
        more = models.IMAGE_TOKENS - 1 if self.images else 0
        return [(len(tokens) + more) // BLOCK * BLOCK for tokens in self.prompts]


class Kit:
    """Models to change; each copy lies in a directory of its own. hub: where the engines' process looks for models by
    name."""

    def __init__(self, base: Path, directory: Path, hub: Path) -> None:
        self.base, self.directory, self.hub = base, directory, hub
        self._made: dict[str, Path] = {}
        self._copies = 0

    def place(self) -> Path:
        self._copies += 1
        where = self.directory / f"place-{self._copies}"
        where.mkdir(parents=True)
        return where

    def copy(self, of: Path | None = None, **config: Any) -> Path:
        of = of or self.base
        return edited(Path(shutil.copytree(of, self.place() / of.name)), **config)

    def made(self, make: Callable[[Path, Path], Path]) -> Path:
        """A model of `tests.vllm.models`, made once."""
        if make.__name__ not in self._made:
            self._made[make.__name__] = make(self.base, self.place())
        return self._made[make.__name__]


Pair = tuple[Engine, Engine]
Maker = Callable[[Kit], Pair]


# ---- changing files --------------------------------------------------------------------------


def edited(model: Path, name: str = "config.json", **changes: Any) -> Path:
    """None takes a key away."""
    file = model / name
    known = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(
        json.dumps({key: value for key, value in known.items() if value is not None}), encoding="utf-8"
    )
    return model


def other_keys(file: Path, to: Path) -> Path:
    """The weights of `file` with other keys of attention."""
    tensors = load_file(file)
    save_file(
        {name: t * np.float32(1.25) if "k_proj" in name else t for name, t in tensors.items()},
        to,
        {"format": "pt"},
    )
    return to


def replace_unseen(file: Path) -> None:
    """Other weights in the same file: of its size, its inode and its time of modification."""
    before = file.stat()
    content = other_keys(file, file.with_name("new")).read_bytes()
    file.with_name("new").unlink()
    with file.open("r+b") as open_file:
        open_file.write(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_ino, after.st_mtime_ns) == (
        before.st_size,
        before.st_ino,
        before.st_mtime_ns,
    )


def torch_file(file: Path, to: Path) -> Path:
    """The weights of a file of safetensors, otherwise packed."""
    import torch

    torch.save({name: torch.from_numpy(tensor) for name, tensor in load_file(file).items()}, to)
    return to


# ---- pairs that must not share -----------------------------------------------------------------


def of_model(model: Path, change: Callable[[Path], object], **options: Any) -> Pair:
    """The same engine before and after a change of the model's files."""
    options = {"model": str(model), **options}
    return Engine(options), Engine(options, prepare=once(lambda: change(model)))


def once(change: Callable[[], object]) -> Callable[[], object]:
    done: list[object] = []
    return lambda: done or done.append(change())


def by(of: Path | None = None, first: dict[str, Any] | None = None, /, **second: Any) -> Pair:
    """Two engines of one model, with other arguments."""
    common = {"model": str(of)} if of is not None else {}
    return Engine({**common, **(first or {})}), Engine({**common, **second})


def weights_of_equal_stat(kit: Kit) -> Pair:
    return of_model(kit.copy(), lambda model: replace_unseen(model / "model.safetensors"))


def weights_behind_a_link(kit: Kit) -> Pair:
    """The model's directory is a link that leads elsewhere now."""
    other = kit.copy()
    other_keys(kit.base / "model.safetensors", other / "model.safetensors")
    link = kit.place() / "current"
    link.symlink_to(kit.base)

    def turn(_: Path) -> None:
        link.unlink()
        link.symlink_to(other)

    return of_model(link, turn)


def weights_by_index(kit: Kit) -> Pair:
    """The index names another one of two files that lie side by side."""
    model = kit.copy()
    names = list(load_file(model / "model.safetensors"))
    os.rename(model / "model.safetensors", model / "one.safetensors")
    other_keys(model / "one.safetensors", model / "two.safetensors")

    def name(file: str) -> None:
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, file)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    name("one.safetensors")
    return of_model(model, lambda _: name("two.safetensors"))


def weights_by_format(kit: Kit) -> Pair:
    """Two files for two formats in one directory."""
    model = kit.copy()
    torch_file(other_keys(model / "model.safetensors", kit.place() / "other"), model / "weights.pt")
    return by(model, load_format="pt")


def weights_of_torch(kit: Kit) -> Pair:
    """`pytorch_model.bin` alone, replaced."""
    model = kit.copy()
    one = model / "model.safetensors"
    two = other_keys(one, kit.place() / "other")
    torch_file(one, model / "pytorch_model.bin")
    one.unlink()
    return of_model(model, lambda _: torch_file(two, model / "pytorch_model.bin"))


def weights_without_files(kit: Kit) -> Pair:
    return by(load_format="dummy")


def weights_of_what_sees(kit: Kit) -> Pair:
    """The text is computed as before; what stands in the place of a picture is not."""
    model = kit.copy(kit.made(models.vision_model))

    def change(_: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        name = "model.connector.modality_projection.proj.weight"
        save_file({**tensors, name: -tensors[name]}, model / "model.safetensors", {"format": "pt"})

    pair = of_model(model, change)
    for engine in pair:
        engine.prompts, engine.images = SEEN, [1]
    return pair


def config_elsewhere(kit: Kit) -> Pair:
    return by(kit.base, hf_config_path=str(kit.copy(rms_norm_eps=0.1)))


def config_file(**changes: Any) -> Maker:
    return lambda kit: of_model(kit.copy(), lambda model: edited(model, **changes))


def overrides(**changes: Any) -> Maker:
    return lambda kit: by(hf_overrides=changes)


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


def long_rope(kit: Kit) -> Path:
    factors = {
        f"{name}_factor": [1.0 + slope * at / 32 for at in range(32)]
        for name, slope in (("short", 1), ("long", 4))
    }
    return kit.copy(rope_theta=None, **rope("longrope", original_max_position_embeddings=1024, **factors))


def windowed(kit: Kit) -> Path:
    return kit.copy(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)


def windows(**second: Any) -> Maker:
    return lambda kit: by(windowed(kit), hf_overrides=second)


def quantised(kit: Kit) -> Pair:
    """The same quantisation, but for the layers that it leaves out."""
    common = {"quantization": "fp8_per_block", "dtype": "bfloat16"}
    return by(None, common, **common, quantization_config={"ignore": ["*layers.1.*"]})


def code_of_the_model(kit: Kit) -> Pair:
    """A model that brings its own code, which is edited."""
    maps = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    model = kit.copy(
        architectures=["ForCausalLM"],
        model_type="own_llama",
        auto_map={auto: f"own_code.{name}" for auto, name in maps.items()},
    )
    (model / "own_code.py").write_text(OWN_CODE, encoding="utf-8")
    return of_model(
        model,
        lambda _: (model / "own_code.py").write_text(
            OWN_CODE.replace("SCALE = 1.0", "SCALE = 0.3"), encoding="utf-8"
        ),
        trust_remote_code=True,
    )


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

SCALE = 1.0


class Config(LlamaConfig):
    model_type = "own_llama"


class Model(LlamaModel):
    config_class = Config

    def forward(self, input_ids=None, position_ids=None, inputs_embeds=None, **rest):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return super().forward(position_ids=position_ids, inputs_embeds=inputs_embeds * SCALE, **rest)


class ForCausalLM(LlamaForCausalLM):
    config_class = Config
"""


def seeing(first: dict[str, Any] | None = None, **second: Any) -> Maker:
    """Engines with pictures."""

    def make(kit: Kit) -> Pair:
        common = {"model": str(kit.made(models.vision_model))}
        return (
            Engine({**common, **(first or {})}, prompts=SEEN, images=[1]),
            Engine({**common, **second}, prompts=SEEN, images=[1]),
        )

    return make


def processor_file(kit: Kit) -> Pair:
    pair = of_model(
        kit.copy(kit.made(models.vision_model)),
        lambda model: edited(model, "preprocessor_config.json", image_mean=MEAN),
    )
    for engine in pair:
        engine.prompts, engine.images = SEEN, [1]
    return pair


def adapted(change: Callable[[Path], object]) -> Maker:
    """The files of an adapter are changed, and it keeps its name and path."""

    def make(kit: Kit) -> Pair:
        path = models.lora_adapter(kit.base, kit.place(), "adapter", 1)
        adapter = ("adapter", 1, str(path))
        return Engine(LORA, adapter=adapter), Engine(
            LORA, adapter=adapter, prepare=once(lambda: change(path))
        )

    return make


def other_adapter(path: Path) -> None:
    """Other weights; what `stat` says stays the same."""
    file = path / "adapter_model.safetensors"
    before = file.stat()
    tensors = {name: tensor[::-1].copy() for name, tensor in load_file(file).items()}
    new = path / "new"
    save_file(tensors, new, {"format": "pt"})
    with file.open("r+b") as open_file:
        open_file.write(new.read_bytes())
    new.unlink()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def head_that_drafts(kit: Kit) -> Pair:
    """EAGLE's head, whose KV is stored with that of its model, gets other weights."""
    head = kit.copy(kit.made(models.eagle_head))
    speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    options = {"model": str(kit.made(models.shallow_model)), "speculative_config": speculation}
    file = head / "model.safetensors"

    def change() -> None:
        tensors = load_file(file)
        name = next(name for name in tensors if "k_proj" in name)
        save_file({**tensors, name: -tensors[name]}, file, {"format": "pt"})

    return Engine(options), Engine(options, prepare=once(change))


def model_that_drafts(kit: Kit) -> Pair:
    drafter = kit.copy(kit.made(models.draft_model))
    speculation = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 3}
    options = {"speculative_config": speculation}
    return Engine(options), Engine(
        options, prepare=once(lambda: replace_unseen(drafter / "model.safetensors"))
    )


def tenants(kit: Kit) -> Pair:
    return Engine(extra={"tenant": "acme"}), Engine(extra={"tenant": "other"})


def salts(kit: Kit) -> Pair:
    return Engine(salt="alice"), Engine(salt="bob")


DIFFER: dict[str, Maker] = {
    "weights of equal size, inode and time": weights_of_equal_stat,
    "weights behind a link": weights_behind_a_link,
    "weights by their index": weights_by_index,
    "weights by load format": weights_by_format,
    "weights of torch": weights_of_torch,
    "weights without files": weights_without_files,
    "weights of what sees": weights_of_what_sees,
    "config elsewhere": config_elsewhere,
    "dtype of config.json": lambda kit: of_model(
        kit.copy(torch_dtype="bfloat16"), lambda model: edited(model, torch_dtype="float16"), dtype="auto"
    ),
    "config.json: rms_norm_eps": config_file(rms_norm_eps=0.1),
    "config.json: rope": config_file(rope_theta=50_000.0),
    "hf_overrides: rms_norm_eps": overrides(rms_norm_eps=0.1),
    "hf_overrides: rope_theta": overrides(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0}),
    "hf_overrides: linear rope": overrides(**rope("linear", factor=2.0)),
    "hf_overrides: yarn": overrides(**rope("yarn", factor=4.0, original_max_position_embeddings=1024)),
    "hf_overrides: experts per token": lambda kit: by(
        kit.made(models.expert_model), hf_overrides={"num_experts_per_tok": 1}
    ),
    "LongRoPE by max_model_len": lambda kit: by(long_rope(kit), {"max_model_len": 1024}, max_model_len=2048),
    "window of another length": windows(sliding_window=96),
    "window or none": windows(sliding_window=None),
    "dtype": lambda kit: by(None, {"dtype": "bfloat16"}, dtype="float16"),
    "KV dtype": lambda kit: by(None, {"kv_cache_dtype": "fp8"}, kv_cache_dtype="fp8_e5m2"),
    "KV dtype of some layers": lambda kit: by(
        None, {"kv_cache_dtype": "fp8"}, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=["0"]
    ),
    "quantisation's arguments": quantised,
    "the model's code": code_of_the_model,
    "processor's arguments": seeing(mm_processor_kwargs={"image_mean": MEAN}),
    "processor's nested arguments": seeing(mm_processor_kwargs={"images_kwargs": {"image_mean": MEAN}}),
    "processor's file": processor_file,
    "adapter's weights": adapted(other_adapter),
    "adapter's scale": adapted(lambda path: edited(path, "adapter_config.json", lora_alpha=64)),
    "head that drafts": head_that_drafts,
    "model that drafts": model_that_drafts,
    "tenants": tenants,
    "salts": salts,
}

# Walls that somebody put up: what is behind them is the same.
WALLS = frozenset({"tenants", "salts", "head that drafts", "model that drafts"})
# What is not stored at all: no engine finds anything.
UNKNOWN = frozenset({"weights without files"})
# Computed in 8 or 16 bits: another split of a prompt may round another token.
ROUNDED = frozenset(
    {"dtype", "dtype of config.json", "quantisation's arguments", "KV dtype", "KV dtype of some layers"}
)
# Flags of /proc/cpuinfo without which vLLM has no kernel for it.
NEEDS = {"KV dtype": "avx512", "KV dtype of some layers": "avx512"}


# ---- pairs that must share -----------------------------------------------------------------------


def with_files(**files: str) -> Maker:
    """Files that no engine loads lie beside the others. Names with __ are in a folder."""

    def make(kit: Kit) -> Pair:
        model = kit.copy()
        for name, content in files.items():
            path = model / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return by(kit.base, model=str(model))

    return make


def torch_beside(kit: Kit) -> Pair:
    """Other weights in a file that the engine does not load."""
    model = kit.copy()
    torch_file(other_keys(model / "model.safetensors", kit.place() / "x"), model / "pytorch_model.bin")
    return by(kit.base, model=str(model))


def renamed(kit: Kit) -> Pair:
    model = kit.copy()
    other = model.parent / "another-name"
    return Engine({"model": str(model)}), Engine(
        {"model": str(other)}, prepare=once(lambda: os.rename(model, other))
    )


def linked(kit: Kit) -> Pair:
    link = kit.place() / "linked"
    link.symlink_to(kit.base)
    return by(kit.base, model=str(link))


def in_the_hub(kit: Kit) -> tuple[str, Path]:
    """The name of a model, and its snapshot as the hub's client lays it out: links to blobs."""
    name = f"of-{kit.place().name}"
    root = kit.hub / f"models--tiny--{name}"
    snapshot = root / "snapshots" / COMMIT
    for folder in (snapshot, root / "blobs", root / "refs"):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    for number, file in enumerate(sorted(kit.base.iterdir())):
        blob = root / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return f"tiny/{name}", snapshot


def revisions(first: str | None, second: str | None) -> Maker:
    def make(kit: Kit) -> Pair:
        name, _ = in_the_hub(kit)
        return by(None, {"model": name, "revision": first}, model=name, revision=second)

    return make


def hub_or_path(kit: Kit) -> Pair:
    name, snapshot = in_the_hub(kit)
    return by(None, {"model": name}, model=str(snapshot))


def hub_or_copy(kit: Kit) -> Pair:
    name, _ = in_the_hub(kit)
    return by(None, {"model": name}, model=str(kit.copy()))


def packed_otherwise(kit: Kit) -> Pair:
    """The same weights in two files."""
    model = kit.copy()
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, where = list(tensors), dict[str, str]()
    for at, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{at + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, model / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (model / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return by(kit.base, model=str(model))


def other_tokenizer(kit: Kit) -> Pair:
    """Prompts are token ids: whoever made them."""
    other = kit.copy()
    edited(other, "tokenizer_config.json", model_max_length=77)
    return by(kit.base, tokenizer=str(other))


def configured(**changes: Any) -> Maker:
    """The same model with other keys in its config.json."""
    return lambda kit: by(kit.base, model=str(kit.copy(**changes)))


def argued(**given: Any) -> Maker:
    return lambda kit: by(**given)


# What an engine may be told that decides neither what KV is nor how it lies.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "what config.json says, said again": {"hf_overrides": {"rms_norm_eps": 1e-5}},
    "trust in code that is not there": {"trust_remote_code": True},
    "max_model_len": {"max_model_len": 1024},
    "max_num_seqs": {"max_num_seqs": 2},
    "memory": {"kv_cache_memory_bytes": 16 << 20},
    "chunks": {"max_num_batched_tokens": 128, "max_num_seqs": 4},
    "prefix caching": {"enable_prefix_caching": False},
    "asynchronous scheduling": {"async_scheduling": False},
    "policy of the scheduler": {"scheduling_policy": "priority"},
    "names of the API": {"served_model_name": "a-name"},
    "seed": {"seed": 7},
    "load format": {"load_format": "safetensors"},
    "logprobs": {"max_logprobs": 5},
    "hybrid blocks": {"disable_hybrid_kv_cache_manager": True},
}
# Keys of config.json that no model reads.
KEYS: dict[str, dict[str, Any]] = {
    "eos_token_id": {"eos_token_id": 5},
    "pad_token_id": {"pad_token_id": 3},
    "use_cache": {"use_cache": False},
    "an unknown key": {"my_own_note": [1, 2]},
    "version of transformers": {"transformers_version": "4.40.0"},
}
BESIDE = {
    "training_args_DOT_bin": "x",
    "original__consolidated_DOT_pth": "x",
    "README_DOT_md": "# x",
    "optimizer_DOT_pt": "x",
}


def all_at_once(kit: Kit) -> Pair:
    """Each argument, each key and each file that decides nothing, in one engine: if it shares, each of them does."""
    _, second = with_files(**BESIDE)(kit)
    model = Path(second.options["model"])
    torch_file(other_keys(model / "model.safetensors", kit.place() / "x"), model / "pytorch_model.bin")
    edited(model, "generation_config.json", temperature=0.3)
    for change in KEYS.values():
        edited(model, **change)
    arguments = {name: value for given in ARGUMENTS.values() for name, value in given.items()}
    return by(None, {"async_scheduling": True}, model=str(model), **arguments)


SAME: dict[str, Maker] = {
    "all at once": all_at_once,
    "renamed": renamed,
    "a link": linked,
    "revision none or main": revisions(None, "main"),
    "revision main or commit": revisions("main", COMMIT),
    "name of the hub or path": hub_or_path,
    "name of the hub or copy": hub_or_copy,
    "weights packed otherwise": packed_otherwise,
    "tokenizer": other_tokenizer,
    "our own settings": lambda kit: (Engine(extra={"load_threads": 1}), Engine(extra={"load": "sync"})),
    "pictures, their cache off": seeing(mm_processor_cache_gb=0),
    "the same adapter": adapted(lambda path: None),
}
# What SAME has at once, one by one; and what the pairs of SAME have seen in another way.
SAME_APART: dict[str, Maker] = {
    "the same": lambda kit: by(kit.base),
    "copied": lambda kit: by(kit.base, model=str(kit.copy())),
    "files that are not loaded": with_files(**BESIDE),
    "pytorch_model.bin beside safetensors": torch_beside,
    "generation_config.json": lambda kit: by(
        kit.base, model=str(edited(kit.copy(), "generation_config.json", temperature=0.3))
    ),
    "no tokenizer": lambda kit: by(skip_tokenizer_init=True),
    "n-grams": lambda kit: by(speculative_config=NGRAM),
    "pictures, prefix caching off": seeing(enable_prefix_caching=False),
    **{name: configured(**change) for name, change in KEYS.items()},
    **{name: argued(**given) for name, given in ARGUMENTS.items()},
}
