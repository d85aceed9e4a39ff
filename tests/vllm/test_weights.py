"""The digest of a model's weight files: of what the loader reads, by content, and remembered only as long as that is true."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from vllm.config.load import LoadConfig

from connectors.transfer import weights
from connectors.transfer.weights import (
    WEIGHTS_SETTLED_S,
    DigestInBackground,
    Held,
    WeightsUnknown,
    known_as,
    weights_digest,
)
from connectors.vllm.identity.model_files import elsewhere, foreign_code, weight_files
from connectors.vllm.spaces import Spaces

pytestmark = pytest.mark.vllm

Tensors = dict[str, Any]


def tensors(seed: int = 0, count: int = 6) -> Tensors:
    rng = np.random.default_rng(seed)
    return {f"layer.{n}": rng.standard_normal((n + 1, 64)).astype(np.float32) for n in range(count)}


def write(directory: Path, *files: Tensors, index: bool = False) -> Path:
    """A checkpoint of safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    for name, held in zip(names, files, strict=True):
        save_file(held, directory / name, metadata={"format": "pt"})
    if index:
        weight_map = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def files_of(directory: Path | str, load_format: str = "auto", **config: Any) -> list[Any]:
    model = SimpleNamespace(model=str(directory), revision=None, quantization=None, hf_overrides={}, **config)
    return weight_files(model, LoadConfig(load_format=load_format))


def digest(directory: Path, cache: Path | None = None) -> str:
    return weights_digest(
        files_of(directory), cache or directory.parent / f"cache-{directory.name}", threading.Event()
    )


# ---- content, and nothing else ------------------------------------------------------------


def beside(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(name.encode() * 100)
    return directory


def halves(held: Tensors, at: int) -> list[Tensors]:
    names = list(held)
    return [{name: held[name] for name in names[:at]}, {name: held[name] for name in names[at:]}]


SAME: dict[str, Callable[[Path], Path]] = {
    "another name": lambda at: write(at / "elsewhere", tensors()),
    "another order": lambda at: write(at / "m", dict(reversed(tensors().items()))),
    "two files": lambda at: write(at / "m", *halves(tensors(), 2)),
    "two files and an index": lambda at: write(at / "m", *halves(tensors(), 3), index=True),
    "a pickle beside": lambda at: beside(write(at / "m", tensors()), "pytorch_model.bin"),
    "what training left": lambda at: beside(
        write(at / "m", tensors()), "training_args.bin", "optimizer.pt", "scheduler.pt"
    ),
    "the original": lambda at: beside(
        write(at / "m", tensors()), "original/consolidated.00.pth", "onnx/model.bin"
    ),
    "a file that the index leaves out": lambda at: beside(
        write(at / "m", *halves(tensors(), 2), index=True), "extra.safetensors"
    ),
    "a template and a licence": lambda at: beside(
        write(at / "m", tensors()), "LICENSE", "chat_template.jinja"
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_weights_have_the_same_digest(kind: str, tmp_path: Path) -> None:
    """However the same tensors lie in files, and whatever lies beside them that the loader does not read."""
    assert digest(SAME[kind](tmp_path)) == digest(write(tmp_path / "first" / "m", tensors()))


def test_files_in_memory_have_the_same_digest(tmp_path: Path) -> None:
    """Sharded, a pickle among them; remembered by their content, so that they are read once, wherever they lie then."""
    directory = beside(write(tmp_path / "m", *halves(tensors(), 2)), "adapter.bin")
    paths = [*files_of(directory), directory / "adapter.bin"]
    held = [Held(path, memoryview(path.read_bytes()), "tiny@r1 12ab") for path in paths]
    stop, cache = threading.Event(), tmp_path / "cache"
    expected = weights_digest(paths, tmp_path / "other", stop)
    assert weights_digest(held, cache, stop) == expected
    emptied = [file._replace(view=memoryview(bytes(len(file.view)))) for file in held]
    assert weights_digest(emptied, cache, stop) == expected
    assert (
        weights_digest([file._replace(content="tiny@r2 34cd") for file in emptied], cache, stop) != expected
    )


def one_bit(held: Tensors) -> Tensors:
    held["layer.5"].view(np.uint32)[3, 7] ^= 1
    return held


def renamed(held: Tensors) -> Tensors:
    held["layer.x"] = held.pop("layer.0")
    return held


def exchanged(held: Tensors) -> Tensors:
    first, second = held["layer.3"][:2].copy(), held["layer.1"].copy()
    held["layer.3"][:2], held["layer.1"] = second, first
    return held


OTHER: dict[str, Callable[[Tensors], Tensors]] = {
    "one bit": one_bit,
    "a name": renamed,
    "two tensors exchanged": exchanged,
    "a shape": lambda held: held | {"layer.5": held["layer.5"].reshape(3, 128)},
    "a dtype": lambda held: held | {"layer.5": held["layer.5"].view(np.int32)},
    "a tensor more": lambda held: held | {"layer.6": np.zeros((0, 64), np.float32)},
    "a tensor less": lambda held: {name: held[name] for name in list(held)[:-1]},
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_weights_have_another_digest(kind: str, tmp_path: Path) -> None:
    """Whatever differs of names, dtypes, shapes and bytes."""
    assert digest(write(tmp_path / "a", OTHER[kind](tensors()))) != digest(write(tmp_path / "b", tensors()))


def test_pickles_count_whole_where_they_are_read(tmp_path: Path) -> None:
    """Without safetensors the loader reads `pytorch_model.bin`; what it says decides, and training files do not."""
    made = {}
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pytorch_model.bin").write_bytes(content * 100)
        beside(tmp_path / name, f"{name}/ignored.bin", "training_args.bin")
        made[name] = digest(tmp_path / name)
    assert made["a"] == made["b"] != made["c"]


def test_a_mistral_checkpoint_is_what_is_read_where_there_is_one(tmp_path: Path) -> None:
    """vLLM prefers `consolidated*.safetensors`: these decide then, and the others do not."""
    both = write(tmp_path / "both", tensors(1))
    save_file(tensors(2), both / "consolidated.safetensors")
    assert digest(both) == digest(write(tmp_path / "only", tensors(2)))
    assert [path.name for path in files_of(both, "hf")] == ["consolidated.safetensors", "model.safetensors"]


def test_metadata_counts_where_it_says_something(tmp_path: Path) -> None:
    """Some loaders go by the metadata of a file."""
    made = set()
    for number, said in enumerate(({}, {"format": "pt"}, {"format": "np"}, {"quant": "a"}, {"quant": "b"})):
        directory = write(tmp_path / str(number), {})
        save_file(tensors(), directory / "model.safetensors", metadata=said)
        made.add(digest(directory))
    assert len(made) == 3


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, (2).to_bytes(8, "little") + b"{}rest"])
def test_what_is_no_safetensors_counts_whole(content: bytes, tmp_path: Path) -> None:
    """A file that says of itself what it is not has a digest of all its bytes, and a flipped one another."""
    directory = write(tmp_path / "m", {})
    (directory / "model.safetensors").write_bytes(content)
    first = digest(directory)
    (directory / "model.safetensors").write_bytes(content + b"x")
    assert digest(directory) != first


def test_two_files_that_contradict_each_other_have_no_digest(tmp_path: Path) -> None:
    """Which of two tensors of one name counts is the loader's to say; the same twice is one."""
    twice = write(tmp_path / "twice", tensors(), tensors())
    assert digest(twice) == digest(write(tmp_path / "once", tensors()))
    with pytest.raises(WeightsUnknown, match=r"layer\.0 is in two files"):
        digest(write(tmp_path / "both", tensors(1), tensors(2)))


UNKNOWN = ["dummy", "npcache", "sharded_state", "tensorizer", "runai_streamer", "ipc_cache", "modelexpress"]


@pytest.mark.parametrize("load_format", UNKNOWN)
def test_loaders_that_are_not_followed(load_format: str, tmp_path: Path) -> None:
    """What another loader than vLLM's default one reads is not guessed."""
    with pytest.raises(WeightsUnknown, match=load_format):
        files_of(write(tmp_path / "m", tensors()), load_format)


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "fastsafetensors", "instanttensor"])
def test_formats_that_read_the_same_files(load_format: str, tmp_path: Path) -> None:
    """How fast files are read does not matter."""
    directory = beside(write(tmp_path / "m", tensors()), "pytorch_model.bin")
    assert files_of(directory, load_format) == [directory / "model.safetensors"]


def test_no_weights_is_an_answer(tmp_path: Path) -> None:
    """A directory without weight files, or a model that is not there, is said to be unknown."""
    (tmp_path / "config.json").write_text("{}")
    for model in (str(tmp_path), "nobody/such-model"):
        with pytest.raises(WeightsUnknown):
            files_of(model)


def test_quantisation_files_count(tmp_path: Path) -> None:
    """What says beside the weights how they are quantised decides, where the model is quantised."""
    directory = write(tmp_path / "m", tensors())
    (directory / "quantize_config.json").write_text('{"bits": 4}')
    model = SimpleNamespace(model=str(directory), revision=None, quantization="gptq_marlin", hf_overrides={})
    made = set()
    for text in ('{"bits": 4}', '{"bits": 8}'):
        (directory / "quantize_config.json").write_text(text)
        for quantization in ("auto_gptq", None):
            model.quantization = quantization
            made.add(weights_digest(weight_files(model, LoadConfig()), tmp_path / "cache", threading.Event()))
    assert len(made) == 3


def in_the_hub(hub: Path, **weights: Path) -> dict[str, Path]:
    """A repository `org/name` with a snapshot of links to blobs for each of these revisions, by revision."""
    repository, snapshots = hub / "models--org--name", {}
    for number, (revision, directory) in enumerate(weights.items()):
        snapshots[revision] = snapshot = repository / "snapshots" / f"{number:040x}"
        for folder in (repository / "blobs", repository / "refs", snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(snapshot.name)
        shutil.move(directory / "model.safetensors", repository / "blobs" / f"abc{number}")
        (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / f"abc{number}")
    return snapshots


def test_a_hub_model_is_its_snapshot(tmp_path: Path) -> None:
    """A repository's name, whatever its revision, and its snapshot's path are the same weights, of links to blobs."""
    snapshot = in_the_hub(tmp_path, main=write(tmp_path / "m", tensors()))["main"]
    load = LoadConfig(download_dir=str(tmp_path))
    found = []
    for model, revision in (
        ("org/name", None),
        ("org/name", "main"),
        ("org/name", snapshot.name),
        (str(snapshot), None),
    ):
        config = SimpleNamespace(model=model, revision=revision, quantization=None, hf_overrides={})
        found.append(weights_digest(weight_files(config, load), tmp_path / "cache", threading.Event()))
    assert len(set(found)) == 1 and found[0] == digest(write(tmp_path / "plain", tensors()))


def test_a_draft_of_another_revision_counts(tmp_path: Path) -> None:
    """Of the model's own repository, too; one that has the model's own files adds nothing."""
    in_the_hub(
        tmp_path, main=write(tmp_path / "m", tensors()), other=write(tmp_path / "n", one_bit(tensors()))
    )
    load = LoadConfig(download_dir=str(tmp_path))

    def named(draft: str | None, drafting: LoadConfig | None = None) -> str:
        model, of_draft = (
            SimpleNamespace(model="org/name", revision=revision, quantization=None, hf_overrides={})
            for revision in (None, draft)
        )
        speculation = SimpleNamespace(draft_model_config=of_draft, draft_load_config=drafting)
        engine = SimpleNamespace(
            _settings=SimpleNamespace(model_digest="", kvstore_socket=""),
            _config=SimpleNamespace(model_config=model, load_config=load, speculative_config=speculation),
            cache_dir=tmp_path / "cache",
        )
        return Spaces._digest_weights(engine, threading.Event())  # type: ignore[arg-type]

    assert named(None) == named("main") == named(None, load)
    assert named("other").split()[0] == named(None) != named("other")
    with pytest.raises(WeightsUnknown):
        named(None, LoadConfig(load_format="dummy"))


# ---- what only the ranks know --------------------------------------------------------------


def test_a_model_that_loads_from_elsewhere_says_so() -> None:
    """Second sources and patterns of its own; models that have neither are trusted."""
    plain, second, pattern = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    plain.secondary_weights, second.secondary_weights = [], ["other"]  # type: ignore[assignment]
    pattern.allow_patterns_overrides = ["*.gguf"]  # type: ignore[assignment]
    assert elsewhere([plain]) == ""
    assert "several places" in elsewhere([plain, second])
    assert "chooses its files" in elsewhere([pattern])


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("llama", False),
        ("idefics3", False),
        ("adapters", False),
        ("mimo_audio", True),
        ("qwen3_dflash", True),
    ],
)
def test_models_that_read_files_themselves(name: str, reads: bool) -> None:
    """What the loader does not read is not digested: models of vLLM whose code opens files say so."""
    module = __import__(f"vllm.model_executor.models.{name}", fromlist=["_"])
    made = type("Layer", (torch.nn.Module,), {"__module__": module.__name__})
    assert ("reads files itself" in elsewhere([torch.nn.Sequential(made())])) == reads


def test_files_beside_the_model_count(tmp_path: Path) -> None:
    """Scales of an encoder in 8 bits, which a flag names."""
    directory, scales = write(tmp_path / "m", tensors()), tmp_path / "scales.json"
    multimodal = SimpleNamespace(mm_encoder_fp8_scale_path=str(scales))
    made = set()
    for text in ("1", "2"):
        scales.write_text(text)
        files = files_of(directory, multimodal_config=multimodal)
        made.add(weights_digest(files, tmp_path / "cache", threading.Event()))
    assert len(made) == 2 and digest(directory) not in made


def test_code_that_is_not_vllms_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose code is edited in place is another one; vLLM's own code is named by its release."""
    assert foreign_code([torch.nn.Linear(1, 1)]) == ""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = set()
    for name, scale in (("plugin_a", 1), ("plugin_b", 1), ("plugin_c", 2)):
        text = f"import torch\nclass Layer(torch.nn.Module):\n    def forward(self, x): return x * {scale}\n"
        (tmp_path / f"{name}.py").write_text(text)
        module = __import__(name)
        made.add(foreign_code([torch.nn.Sequential(module.Layer())]))
    assert len(made) == 2 and "" not in made


def test_the_release_of_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of transformers call what stands in other files of it, as those that make rotations do."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    layer = LlamaRotaryEmbedding(transformers.LlamaConfig(hidden_size=64, num_attention_heads=2))
    before = foreign_code([layer])
    monkeypatch.setattr(transformers, "__version__", "99.0")
    assert foreign_code([layer]) != before


# ---- remembered ----------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that are read through."""
    seen: list[Path] = []
    true_read = weights._read_through

    def note(path: Path, stop: threading.Event) -> list[weights.Part]:
        seen.append(path)
        return true_read(path, stop)

    monkeypatch.setattr(weights, "_read_through", note)
    return seen


def test_a_second_start_reads_nothing(tmp_path: Path, read: list[Path]) -> None:
    """Sixteen files are read once, also for another engine that finds them under a link."""
    directory = write(tmp_path / "m", *({f"t.{n}": np.full(9, n)} for n in range(16)))
    first = digest(directory, tmp_path / "cache")
    assert len(read) == 16
    (tmp_path / "link").symlink_to(directory)
    for again in (directory, tmp_path / "link"):
        assert digest(again, tmp_path / "cache") == first and len(read) == 16


def in_place(path: Path, content: bytes) -> None:
    stat = path.stat()
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def by_rename(path: Path, content: bytes) -> None:
    stat = path.stat()
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.rename(path)


def same_inode(path: Path, content: bytes) -> None:
    """A file system may give a new file the number of the one that went; here it always does."""
    in_place(path, content)


@pytest.mark.parametrize("replace", [in_place, by_rename, same_inode], ids=lambda way: str(way.__name__))
def test_replaced_with_its_dates_kept(
    replace: Callable[[Path, bytes], None], tmp_path: Path, read: list[Path]
) -> None:
    """Equal size and modification time, as from `tar --mtime=@0` or `cp -p`: read again, and another digest."""
    directory = write(tmp_path / "m", tensors())
    path = directory / "model.safetensors"
    os.utime(path, ns=(0, 0))
    first = digest(directory, tmp_path / "cache")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    replace(path, bytes(content))
    os.utime(path, ns=(0, 0))
    assert digest(directory, tmp_path / "cache") != first and len(read) == 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), forged=st.booleans())
def test_numbers_of_a_file_are_not_all_that_is_believed(
    place: float, forged: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file of which every number is the same (another mount under the path, a clock set back) is found out by its
    sample: here one that is covered whole. Any difference anywhere, and none."""
    directory = write(tmp_path_factory.mktemp("forged") / "m", tensors())
    path, true_facts = directory / "model.safetensors", weights.file_facts
    try:
        weights.file_facts = lambda path: [str(path)]
        first = digest(directory)
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= forged
        path.write_bytes(bytes(content))
        assert (digest(directory) == first) is not forged
    finally:
        weights.file_facts = true_facts


def test_another_checkpoint_with_the_same_numbers_is_found_out(tmp_path: Path) -> None:
    """Where the sample is a small part of the file: a fine-tune of all tensors changes pages all over it."""
    held = {"w": np.zeros((2048, 1024), np.float32)}
    directory = write(tmp_path / "m", held)
    true_facts = weights.file_facts
    try:
        weights.file_facts = lambda path: [str(path)]
        first = digest(directory)
        write(directory, {"w": held["w"] + 1e-6})
        assert digest(directory) != first
    finally:
        weights.file_facts = true_facts


def test_a_file_that_changes_while_it_is_read_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read again, and given up when it changes each time; nothing is remembered of what was half of each."""
    directory = write(tmp_path / "m", tensors())
    path, true_read, changes = directory / "model.safetensors", weights._read_through, [1, 1, 1]

    def changing(where: Path, stop: threading.Event) -> list[weights.Part]:
        found = true_read(where, stop)
        if changes and changes.pop():
            os.utime(path)
        return found

    monkeypatch.setattr(weights, "_read_through", changing)
    with pytest.raises(WeightsUnknown, match="changed while it was read"):
        digest(directory)
    assert not list((tmp_path / "cache-m").rglob("*.json"))
    changes[:] = [1]
    assert digest(directory) == digest(write(tmp_path / "copy", tensors()))


def test_a_file_written_just_now_is_not_believed_by_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change times come from a clock that ticks: a file is let settle, so that a later change shows."""
    slept: list[float] = []
    monkeypatch.setattr(weights.time, "sleep", slept.append)
    directory = write(tmp_path / "m", tensors())
    stamp = (directory / "model.safetensors").stat().st_ctime
    for age in (0.0, WEIGHTS_SETTLED_S / 2, WEIGHTS_SETTLED_S * 1.1, -3.0):
        monkeypatch.setattr(weights.time, "clock_gettime", lambda _, age=age: stamp + age)
        weights._let_settle(directory / "model.safetensors")
    assert slept == pytest.approx([WEIGHTS_SETTLED_S, WEIGHTS_SETTLED_S / 2], abs=1e-6)


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"facts": 1}', '{"facts": [], "sample": "", "parts": 3}', "[" * 9000]
)
def test_a_damaged_note_costs_a_reading(text: str, tmp_path: Path) -> None:
    """What stands in the cache directory is believed only if it is whole and about this file."""
    directory = write(tmp_path / "m", tensors())
    first = digest(directory)
    for note in (tmp_path / "cache-m").rglob("*.json"):
        note.write_text(text)
    assert digest(directory) == first


def test_weights_keep_the_name_that_they_got_first(tmp_path: Path) -> None:
    """Started with them or given them later: engines of one cache directory call them the same. A damaged note is written
    again."""
    assert known_as(tmp_path, "a", "files") == known_as(tmp_path, "a", "live a") == "files"
    assert known_as(tmp_path, "b", "live b") == known_as(tmp_path, "b", "other files") == "live b"
    for number, text in enumerate(("{", "[]", '{"name": 1}', '{"name": ""}', "[" * 9000)):
        (tmp_path / "weights" / "live-a.json").write_text(text)
        for name in (f"name {number}", "another"):
            assert known_as(tmp_path, "a", name) == f"name {number}"


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
