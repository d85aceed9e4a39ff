"""A value of the engine's configuration as text that is equal where the value is, in every process and on every machine.

    None, numbers, text, lists, mappings ──▶ as JSON has them
    sets, enums, dtypes, paths, classes  ──▶ sorted, by name
    objects that hold nothing but such   ──▶ class and attributes
    everything else                      ──▶ Unknowable: tensors, locks, functions made on the spot

What has no such form is never guessed at: a `repr` may leave things out, or hold an address.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Skip = Callable[[Any, str], bool]  # an object and one of its attributes: whether it is left out


class Unknowable(Exception):
    """This value has no form that would be equal elsewhere; the message says what it is."""


def canonical(value: Any, skip: Skip) -> Any:
    """Something that JSON can hold, equal for equal values. Raises Unknowable, and RecursionError for values within values
    without end."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if (name := _name(value)) is not None:
        return name
    inner = functools.partial(canonical, skip=skip)
    if isinstance(value, Mapping):
        return {_key(key): inner(each) for key, each in value.items()}
    if isinstance(value, Set):
        return sorted((inner(each) for each in value), key=text_of)
    if isinstance(value, Sequence):
        return [inner(each) for each in value]
    return {
        "": _class_name(type(value)),
        **{name: inner(each) for name, each in attributes(value).items() if not skip(value, name)},
    }


def text_of(form: Any) -> str:
    """A canonical form as text."""
    return json.dumps(form, sort_keys=True, separators=(",", ":"))


def attributes(value: Any) -> dict[str, Any]:
    """All that an object holds: the fields of its class and what it was given besides. Raises Unknowable where part of
    it is not in Python's hands."""
    kind = type(value)
    if isinstance(value, torch.Tensor | torch.nn.Module) or not _is_plain(kind):
        raise Unknowable(f"an object of {_class_name(kind)}")
    found = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        found |= {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    slots = (name for each in kind.__mro__ for name in _slots(each))
    return found | {name: getattr(value, name) for name in slots if hasattr(value, name)}


def _name(value: Any) -> str | None:
    """Of what is known by its name alone."""
    match value:
        case enum.Enum():
            return f"{_class_name(type(value))}.{value.name}"
        case torch.dtype() | torch.device() | pathlib.PurePath():
            return str(value)
        case bytes() | bytearray():
            return value.hex()
        case re.Pattern():
            return str(value.pattern)
        case type():
            return _class_name(value)
        case types.FunctionType() | types.BuiltinFunctionType():
            return _function_name(value)
    return None


def _function_name(function: Any) -> str:
    """A function of a module goes by its name; one that was made on the spot holds what cannot be seen."""
    name = f"{function.__module__}.{function.__qualname__}"
    if "<" in name or function.__module__ in (None, "__main__"):
        raise Unknowable(f"a function made on the spot ({name})")
    return name


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _key(key: Any) -> str:
    return key if isinstance(key, str) else text_of(canonical(key, lambda *_: False))


def _is_plain(kind: type) -> bool:
    """Whether its instances have no more memory than the attributes of Python take."""
    slots = sum(len(_slots(each)) for each in kind.__mro__)
    words = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + slots
    most = object.__basicsize__ + words * object.__basicsize__ // 2
    return kind.__basicsize__ <= most and not kind.__itemsize__


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
