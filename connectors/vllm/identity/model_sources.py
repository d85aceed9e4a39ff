"""What the code of a model reads of its configuration: the proof that a setting does not matter to this model.

    architectures ─▶ vLLM's registry ─▶ the model's module ─▶ the modules of models that it imports
                                        a word that stands in none of them is not read by them

Shared code (layers, attention, the runner) is judged by hand in `connectors/vllm/identity/allowed.py`; models are too many, and
some read what others have no use for: Llama 4 scales attention where `max_model_len` is over 32,768, and n-gram
embeddings begin anew after `eos_token_id`. Where the code is not vLLM's own, or reads settings by names that it makes
up, everything counts as read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

FILES_MAX = 400
# Modules of all models: nothing in them reads what may be left out.
SHARED = frozenset({"registry", "config", "interfaces", "interfaces_base", "utils", "adapters", "vision"})

_IMPORT = re.compile(r"^\s*from\s+(\.*)([\w.]*)\s+import\s+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_MADE_UP = re.compile(
    r"""getattr\(\s*[\w.]*(?:config|cfg)\w*\s*,(?!\s*["'])  # by a name that is made up
      | \.to_dict\(\) | \bvars\( | \.__dict__\b           # all of them
      | \bAuto\w*\.from_\w+ | import_module""",
    re.VERBOSE,
)
_SHORT = frozenset({"model", "seed", "revision", "tokenizer"})  # words that stand for much else


class ModelSources:
    """Of the model of this ModelConfig. opaque: what it reads is not known."""

    def __init__(self, model_config: Any) -> None:
        self._config = model_config
        try:
            self._text = "\n".join(self._texts())
        except _Foreign:
            self._text = ""
        self.opaque = not self._text or _MADE_UP.search(self._text) is not None

    def read_field(self, name: str) -> bool:
        """Whether the model reads this field of its ModelConfig, or of the one for its media."""
        short = rf"(?:model_config|model_cfg|\bmc)\.{name}\b|getattr\([^()]*, *[\"']{name}[\"']"
        return self._finds(name, short if name in _SHORT else "")

    def read_key(self, name: str) -> bool:
        """Whether the model reads this key of its config.json."""
        return self._finds(name, _read_as(name))

    def unread_keys(self, names: Iterable[str]) -> frozenset[str]:
        """Those that no code of vLLM reads."""
        return frozenset() if self.opaque else _unread_keys(frozenset(names))

    def _finds(self, name: str, shape: str) -> bool:
        """Whether this word is there, in such a shape."""
        return self.opaque or (name in self._words and re.search(shape, self._text) is not None)

    @cached_property
    def _words(self) -> set[str]:
        """Of the model's code; what is got by a function is read as well."""
        words = set(re.findall(r"\w+", self._text))
        return words | {word.partition("get_")[2] for word in words}

    # ---- the files of the model ----------------------------------------------------------

    def _texts(self) -> Iterator[str]:
        """Of all that the model is made of. Raises _Foreign."""
        waiting = list(self._modules())
        seen: set[Path] = set()
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            if len(seen) > FILES_MAX:
                raise _Foreign
            text = path.read_text(encoding="utf-8", errors="replace")
            waiting += _imported(path, text)
            if "init_vllm_registered_model" in text:  # a model within it, by the name of its architecture
                waiting += [_module_of(name) for name in _named_models(text)]
            yield text

    def _modules(self) -> Iterator[Path]:
        config = self._config
        known = type(config.hf_config).__module__.startswith(("transformers.", "vllm."))
        if not known or config.using_transformers_backend():
            raise _Foreign
        for name in {config.architecture, *_architectures(config.hf_config.to_dict())}:
            yield _module_of(name)


class _Foreign(Exception):
    """This model's code is not vLLM's own."""


@lru_cache(maxsize=64)
def _unread_keys(names: frozenset[str]) -> frozenset[str]:
    """Those that stand nowhere in vLLM as code that reads a key."""
    left = {name.encode(): re.compile(_read_as(name).encode()) for name in names}
    for path in _root().rglob("*.py") if left else ():
        text = path.read_bytes()
        left = {name: shape for name, shape in left.items() if name not in text or not shape.search(text)}
    return frozenset(name.decode() for name in left)


def _read_as(name: str) -> str:
    """How code that reads a key looks: `config.key`, "key" or a parameter `key`."""
    return rf"""\.{name}\b|["']{name}["']|\b{name}\s*[:=,)]""" if name.isidentifier() else re.escape(name)


def _root() -> Path:
    import vllm

    return Path(vllm.__file__).parent


def _architectures(settings: Any) -> Iterator[str]:
    """Those that a configuration and the ones within it name."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key == "architectures" and isinstance(value, list):
                yield from (name for name in value if isinstance(name, str))
            else:
                yield from _architectures(value)


def _named_models(text: str) -> set[str]:
    from vllm.model_executor.models import ModelRegistry

    return ModelRegistry.models.keys() & re.findall(r"[\"'](\w+)[\"']", text)  # type: ignore[no-any-return]


def _module_of(architecture: str) -> Path:
    """Where a model's class is. Raises _Foreign."""
    from vllm.model_executor.models import ModelRegistry

    name = getattr(ModelRegistry.models.get(architecture), "module_name", "")
    path = _path_of(name.split(".")[1:]) if name.startswith("vllm.") else None
    if path is None:
        raise _Foreign
    return path


def _path_of(parts: list[str]) -> Path | None:
    base = _root().joinpath(*parts)
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imported(path: Path, text: str) -> Iterator[Path]:
    """The modules of models that this one takes something from."""
    root = _root()
    here = path.relative_to(root).parts[:-1]
    if here[0] == "models":  # a model in a package of its own: all of it
        yield from root.joinpath(*here[:2]).rglob("*.py")
    for dots, module, names in _IMPORT.findall(text):
        if dots:
            base = [*here[: len(here) - len(dots) + 1], *filter(None, module.split("."))]
        elif module.startswith("vllm."):
            base = module.split(".")[1:]
        else:
            continue
        for parts in (base, *([*base, name] for name in re.findall(r"\w+", names))):
            if parts[:1] == ["models"] or parts[:2] == ["model_executor", "models"]:
                found = _path_of(parts)
                if found is not None and found.stem not in SHARED and len(found.relative_to(root).parts) > 2:
                    yield found
