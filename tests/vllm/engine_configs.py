"""Configurations as real engines have them, and what they are in a namespace: no engine is started."""

from __future__ import annotations

import copy
import enum
import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from connectors.vllm.identity.namespace import configured_fields


def config_of(model: Path | str, **arguments: Any) -> Any:
    """What `vllm serve` makes of these arguments."""
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def digest_of(config: Any) -> str:
    return configured_fields(config)["configuration"]


def model_with(model: Path, directory: Path, **settings: Any) -> Path:
    """A copy of a model, of whose config.json some keys are others; None takes one away."""
    target = directory / model.name
    shutil.copytree(model, target)
    known = json.loads((target / "config.json").read_text())
    known = {name: value for name, value in {**known, **settings}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(known))
    return target


def objects_of(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each of vLLM's configuration objects in this one, with where it is."""
    yield path, config
    for field in fields(config):
        inner = getattr(config, field.name, None)
        if is_dataclass(inner) and type(inner).__module__.startswith("vllm.config"):
            yield from objects_of(inner, f"{path}.{field.name}".lstrip("."))


def changed(config: Any, path: str, name: str) -> Any:
    """The same configuration with one field that is another."""
    other = copy.copy(config)
    owner = other
    for step in filter(None, path.split(".")):
        inner = copy.copy(getattr(owner, step))
        object.__setattr__(owner, step, inner)
        owner = inner
    object.__setattr__(owner, name, _another(getattr(owner, name, None)))
    return other


def _another(value: Any) -> Any:
    match value:
        case enum.Enum():
            return next((each for each in type(value) if each is not value), "another")
        case bool():
            return not value
        case int() | float():
            return value + 7
        case list():
            return [*value, 7]
        case dict():
            return {**value, "another": 7}
    return "another"
