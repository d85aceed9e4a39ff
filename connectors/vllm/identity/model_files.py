"""Which files decide what an engine's weights are: those that vLLM's loader reads, and no others.

vLLM's default loader is asked itself: it prefers safetensors to pickles, knows files that only training needs, goes
by an index where there is one. What other loaders read (tensorizer, streamers, sharded states, caches of a plugin) is
not followed: such weights have no digest by files. Files with the weights that say how they are quantised count too.
Names count only where the loader goes by them: not those of the directory, the revision or the repository.

What a model loads from elsewhere, besides its own directory, only its ranks can say (`elsewhere`), and which code they
run that does not come with vLLM (`foreign_code`): a plugin's, that of transformers, or of the model's own directory.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from coldstart.errors import ModelError
from coldstart.loading.start_dir import open_revision
from connectors.transfer.weights import Held, WeightsUnknown
from connectors.vllm_plugin import LOAD_FORMAT

WHOLE_LOOK_S = 0.5  # between looks whether a revision under way is whole


def weight_files(
    model_config: Any, load_config: Any, stop: threading.Event | None = None, socket: str | None = None
) -> list[Path | Held]:
    """In the order of their names; of a start directory, those of the revision that it stands for, once that is whole, or as the
    node has them in DRAM. socket: of its daemon. Raises WeightsUnknown, also when `stop` is set meanwhile. Never asks the network."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from connectors.vllm.loader import KVStoreModelLoader

    load_format = load_config.load_format
    if load_format == "dummy":
        raise WeightsUnknown("they are not those of its files: load_format is dummy")
    try:
        loader = get_model_loader(load_config)
    except Exception as error:
        raise WeightsUnknown(f"load_format {load_format}: {error}") from error
    if type(loader) not in (DefaultModelLoader, KVStoreModelLoader) or load_format == "npcache":
        raise WeightsUnknown(f"which files load_format {load_format} reads is not known")

    def chosen(directory: Path) -> list[Path]:
        try:
            _, found, _, _ = loader._prepare_weights(str(directory), None, model_config.revision, True, None)
        except Exception as error:
            raise WeightsUnknown(f"no weight files under {directory}: {error}") from error
        return [Path(path) for path in found]

    directory = directory_of(model_config.model, model_config.revision, load_config.download_dir)
    held: list[Held] = []
    if load_format == LOAD_FORMAT:
        directory, held = _come(directory, chosen, stop or threading.Event(), socket)
    files: list[Path | Held] = [*(held or chosen(directory)), *_quantisation_files(model_config, directory)]
    multimodal = getattr(model_config, "multimodal_config", None)
    if scales := getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        files.append(Path(scales))
    by_path = {file.path if isinstance(file, Held) else file: file for file in files}
    return [by_path[path] for path in sorted(by_path)]


def directory_of(model: str, revision: str | None, download_dir: str | None = None) -> Path:
    """A model's files: a local directory, or what the local cache has of a repository. Raises WeightsUnknown."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
        )
    except Exception as error:
        raise WeightsUnknown(f"{model} is neither a directory nor in the local model cache") from error


def _come(
    directory: Path, chosen: Callable[[Path], list[Path]], stop: threading.Event, socket: str | None
) -> tuple[Path, list[Held]]:
    """Where the weights lie that a directory stands for, when they are there; where its disk does not have them and DRAM does, the
    chosen ones out of there. Raises WeightsUnknown."""
    from connectors.vllm.loader import in_dram

    try:
        revision = open_revision(directory)
    except ModelError as error:
        raise WeightsUnknown(str(error)) from error
    while revision is not None and not revision.is_whole():
        resident = in_dram(revision, paths := chosen(directory), socket)
        if resident is not None:
            content = f"{revision.name} {revision.manifest.content.hex()}"
            held = [Held(path, resident.file(path), content) for path in paths]
            resident.close()
            return directory, held
        if stop.wait(WHOLE_LOOK_S):
            raise WeightsUnknown(f"{revision.name} is not whole yet")
    return directory if revision is None else revision.place, []


def _quantisation_files(model_config: Any, directory: Path) -> list[Path]:
    """Files that say how weights are quantised, where config.json does not."""
    if not model_config.quantization:
        return []
    from vllm.model_executor.layers.quantization import get_quantization_config

    names = get_quantization_config(model_config.quantization).get_config_filenames()
    files = [directory / name for name in names]
    overrides = getattr(model_config, "hf_overrides", None)
    if isinstance(overrides, dict) and isinstance(named := overrides.get("quantization_config_file"), str):
        files.append(Path(named))
    return [path for path in files if path.is_file()]


def elsewhere(models: Iterable[Any]) -> str:
    """Why the files of an engine's model do not decide what these models, as a rank has them, compute with; or empty.
    Raises OSError."""
    for model in models:
        if getattr(model, "secondary_weights", ()):
            return f"{type(model).__name__} loads weights from several places"
        if getattr(model, "allow_patterns_overrides", None) is not None:
            return f"{type(model).__name__} chooses its files itself"
    for name in sorted(_modules(models)):
        if name.startswith(_MODELS) and name != _POOLERS and _READING.search(_source(name)):
            return f"the code of its model, {name}, reads files itself"
    return ""


def _modules(models: Iterable[Any]) -> set[str]:
    """Of Python, in which the layers of these models and their bases are defined."""
    return {base.__module__ for model in models for part in model.modules() for base in type(part).__mro__}


def _source(name: str) -> str:
    path = getattr(sys.modules.get(name), "__file__", None)
    return Path(path).read_text(encoding="utf-8", errors="replace") if path else name


def foreign_code(models: Iterable[Any]) -> str:
    """A digest of the source files that these models' layers are defined in, and of the versions of their packages: a layer calls
    what stands elsewhere there. Those of vLLM and torch left out: a release of vLLM names both. Empty where there are no others.
    Raises OSError."""
    foreign = {name for name in _modules(models) if name.partition(".")[0] not in _KNOWN_CODE}
    sources = {hashlib.sha256(_source(name).encode()).hexdigest() for name in foreign}
    for package in {name.partition(".")[0] for name in foreign}:
        if version := getattr(sys.modules.get(package), "__version__", ""):
            sources.add(f"{package} {version}")
    return hashlib.sha256("".join(sorted(sources)).encode()).hexdigest()[:32] if sources else ""


_KNOWN_CODE = frozenset({"vllm", "torch", "builtins", "typing", "abc", "collections"})
_MODELS = ("vllm.model_executor.models.", "vllm.models.", "transformers_modules.")
# It reads what is computed with behind the last layer that has KV.
_POOLERS = "vllm.model_executor.models.adapters"
_READING = re.compile(
    r"(torch\.load|load_file|safe_open|weights_iterator|hf_hub_download|snapshot_download|get_hf_file_bytes"
    r"|get_hf_file_to_dict|try_get_local_file|(?<![.\w])open)\("
)
