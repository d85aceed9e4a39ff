"""The engine's configuration as it decides what KV is: all of it, less what is known not to matter.

    VllmConfig ─▶ every object in it, every field of each ─▶ less connectors/vllm/identity/allowed.py ─▶ name: text
    config.json as the engine uses it ───────────────────────────────┘
    vLLM's variables of the environment ─────────────────────────────┘

Found by reflection: a field that vLLM adds is in. What has no text that would be equal elsewhere raises `Unknowable`,
and the connector declines.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from connectors.transfer.weights import WeightsUnknown
from connectors.vllm.identity import allowed
from connectors.vllm.identity.canonical import Unknowable, attributes, canonical, text_of
from connectors.vllm.identity.model_files import directory_of
from connectors.vllm.identity.model_sources import ModelSources
from connectors.vllm_plugin import LOAD_FORMAT

LONG_ROPES = frozenset({"longrope", "su"})
PATHS = frozenset({"mm_encoder_fp8_scale_path"})  # fields that name a file: its content counts


def configuration(vllm_config: Any) -> tuple[dict[str, str], set[str]]:
    """Every setting that counts, by name, and which of them are not vLLM's own defaults. Raises Unknowable."""
    walk = _Walk()
    walk.object("", vllm_config)
    walk.environment()
    return walk.settings, walk.unusual


class _Walk:
    """sources: of the model whose configuration is looked at."""

    def __init__(self) -> None:
        self.settings: dict[str, str] = {}
        self.unusual: set[str] = set()
        self._sources: Any = None  # none outside of a model's configuration

    def object(self, path: str, value: Any) -> None:
        """One of vLLM's configuration objects, and those within it."""
        outer = self._sources
        if _is_a(value, "ModelConfig"):
            self._sources = ModelSources(value)
            self._model(path, value)
        defaults = _defaults(type(value))
        for name, inner in sorted(attributes(value).items()):
            if self.skips(value, name) or _is_memory(type(value), name):
                continue
            usual = name not in defaults or inner == defaults[name]
            self._field(f"{path}{name}", inner, value, usual)
        if _is_a(value, "VllmConfig"):
            self._compile_ranges(value)
        self._sources = outer

    def _field(self, path: str, value: Any, owner: Any, usual: bool) -> None:
        """What one attribute of a configuration object holds."""
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            self._hf_config(f"{path}.", value, owner)
        elif _is_a(value, "SpeculativeConfig") and value.method in allowed.DRAFTLESS:
            self._add(path, None, unusual=False)
        elif is_dataclass(value) and not isinstance(value, type) and _is_vllms(type(value)):
            self.object(f"{path}.", value)
        elif _is_a(owner, "LoadConfig") and owner.load_format == LOAD_FORMAT and isinstance(value, dict):
            others = _without_ours(value)
            self._add(path, others, unusual=bool(others))
        elif path.rpartition(".")[2] in PATHS and value:
            self._add(path, _content(value), unusual=True)
        else:
            self._add(path, value, not usual)

    def skips(self, value: Any, name: str) -> bool:
        """Whether an attribute is allowed to differ."""
        for kind in type(value).__mro__:
            if _is_vllms(kind) and name in allowed.FIELD_REASONS.get(kind.__name__, {}):
                asked = kind.__name__ in allowed.ASKED and self._sources is not None
                return not (asked and self._sources.read_field(name))
        return False

    def environment(self) -> None:
        """vLLM's own variables, as it takes them, and what was installed to change vLLM."""
        from vllm import envs

        for name in sorted(envs.environment_variables.keys() - allowed.VARIABLE_REASONS.keys()):
            try:
                value = envs.environment_variables[name]()
            except Exception as error:  # noqa: BLE001 - a variable that vLLM cannot read is no reason to fail here
                value = type(error).__name__
            self._add(f"environment.{name}", value, name in os.environ)
        self._add("plugins", sorted(_plugins()), unusual=False)

    def _add(self, path: str, value: Any, unusual: bool) -> None:
        try:
            self.settings[path] = text_of(canonical(value, self.skips))
        except Unknowable as reason:
            raise Unknowable(f"{path} is {reason}") from reason
        if unusual:
            self.unusual.add(path)

    # ---- models --------------------------------------------------------------------------

    def _model(self, path: str, model: Any) -> None:
        """What follows from fields that do not count themselves."""
        settings = model.hf_config.to_dict()
        if any(rope in LONG_ROPES for rope in _values(settings, ("rope_type", "type"))):
            edges = set(_values(settings, ("original_max_position_embeddings",)))
            longer = {str(edge): isinstance(edge, int) and model.max_model_len > edge for edge in edges}
            self._add(f"{path}long rope", longer or model.max_model_len, unusual=True)
        if model.trust_remote_code and (code := _code_of(model, settings)):
            self._add(f"{path}code", code, unusual=False)
        if self._sources.read_field("generation_config"):
            self._add(f"{path}generation config", model.try_get_generation_config(), unusual=True)

    def _hf_config(self, path: str, config: Any, owner: Any) -> None:
        """A model's config.json. The one for text is most often a part of the one for all, or the same."""
        whole = getattr(owner, "hf_config", None)
        if path.endswith("hf_text_config.") and any(
            config is each for each in (whole, *vars(whole).values())
        ):
            return
        settings = {name: value for name, value in config.to_dict().items() if not self._unread(name)}
        strange = {name for name in settings if not _knows(type(config), name)}
        for name in sorted(settings.keys() - self._sources.unread_keys(strange)):
            usual = getattr(type(config), name, MISSING)
            self._add_part(f"{path}{name}", settings[name], settings[name] != usual)

    def _unread(self, key: str) -> bool:
        return key in allowed.KEY_REASONS and not self._sources.read_key(key)

    def _add_part(self, path: str, value: Any, unusual: bool) -> None:
        """One key; a configuration within another one by each of its own."""
        if not isinstance(value, Mapping) or not value:
            self._add(path, value, unusual)
            return
        for key, each in value.items():
            if not self._unread(str(key)):
                self._add_part(f"{path}.{key}", each, unusual and each is not None)

    def _compile_ranges(self, config: Any) -> None:
        """Where compiled code changes with the number of tokens; the end of the last range is the largest batch."""
        ends = config.compilation_config.compile_ranges_endpoints or ()
        largest = config.scheduler_config.max_num_batched_tokens
        self._add("compile ranges", [end for end in ends if end < largest], unusual=False)


def _is_vllms(kind: type) -> bool:
    return kind.__module__.startswith("vllm.")


def _is_a(value: Any, name: str) -> bool:
    return type(value).__name__ == name and _is_vllms(type(value))


def _without_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a loader, less those that say how our own one reads."""
    from connectors.vllm.loader import OWN_KEYS

    return {key: settings[key] for key in settings if key not in OWN_KEYS}


def _is_memory(kind: type, name: str) -> bool:
    """Whether an attribute was worked out from the others."""
    declared = any(name in getattr(each, "__dataclass_fields__", {}) for each in kind.__mro__)
    return not declared and (name.startswith("_") or isinstance(getattr(kind, name, None), cached_property))


def _defaults(kind: type) -> dict[str, Any]:
    """The fields of a class that have a default, and the default."""
    found: dict[str, Any] = {}
    described = getattr(kind, "__pydantic_fields__", {})
    for field in fields(kind):
        known = described.get(field.name)
        if known is not None and not known.is_required():
            found[field.name] = known.get_default(call_default_factory=True)
        elif field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return found


def _knows(kind: type, key: str) -> bool:
    """Whether a class of configurations has heard of this key."""
    return any(key in vars(each) or key in getattr(each, "__annotations__", {}) for each in kind.__mro__)


def _values(settings: Any, names: tuple[str, ...]) -> Iterator[Any]:
    """Of these keys, wherever they are."""
    inner = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
    for key, value in inner:
        if isinstance(value, Mapping | list):
            yield from _values(value, names)
        elif key in names:
            yield value


def _plugins() -> Iterator[str]:
    """Packages that may change anything of vLLM when it starts."""
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for point in entry_points(group=group):
            package = point.dist
            if package is not None and point.module.partition(".")[0] not in ("vllm", "connectors"):
                yield f"{point.name} {package.name} {package.version}"


def _code_of(model: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """The digests of the code that a model brings. Raises Unknowable."""
    maps = settings.get("auto_map") or {}
    if any("--" in str(each) for each in _values(maps, tuple(maps))):
        raise Unknowable("the model's code is of another repository")
    try:
        root = directory_of(model.model, model.revision)
    except WeightsUnknown as error:
        raise Unknowable(f"the code of {model.model} is not found") from error
    return {path.relative_to(root).as_posix(): _content(str(path)) for path in sorted(root.rglob("*.py"))}


def _content(path: str) -> str:
    """Of a file that decides. Raises Unknowable."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise Unknowable(f"{path}: {error.strerror}") from error
