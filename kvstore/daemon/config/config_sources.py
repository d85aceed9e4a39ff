"""Where settings come from: file, environment, flags; and what is said when one is wrong.

    /etc/kvstore/kvstore.toml    [dram] capacity_bytes = "64GiB"
    environment                  KVSTORE_DRAM__CAPACITY_BYTES=64GiB      wins over the file
    command line                 --set dram.capacity_bytes=64GiB         wins over both

Each layer becomes a flat {"section.key": Given(value, where)}; later layers replace
earlier ones, and `where` ("/etc/kvstore/kvstore.toml:12", "KVSTORE_DATA_DIR", "--set")
travels along, so that every message and `kvstore config show` can name it.

Unknown names are refused in all three, with the nearest valid one: a mistyped variable
that is silently ignored costs an evening.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from kvstore.constants import CONFIG_FILE_BYTES_MAX, CONFIG_SHOWN_CHARS_MAX
from kvstore.daemon.config.config import DEFAULT_FILE, Config, keys, misfits, sections, value_of
from kvstore.errors import ConfigError
from kvstore.units import printable
from tiers.reading import Unreadable, as_toml, read_text

NEAREST_NAME_CUTOFF = 0.6  # difflib similarity from which a mistyped key gets a suggestion

ENV_PREFIX = "KVSTORE_"
# The file, and what commands take for --node: no settings.
ENV_FILE = "KVSTORE_CONFIG"
ENV_OTHERS = (ENV_FILE, *(f"KVSTORE_NODE_{name}" for name in ("CA", "CERT", "KEY", "TOKEN_FILE")))
# Kubernetes sets these in every pod beside a Service called "kvstore" or "kvstore-…"; they are not ours.
ENV_KUBERNETES = re.compile(
    r"KVSTORE_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)

Source = Literal["default", "file", "env", "flag", "set"]


@dataclass(slots=True, frozen=True)
class Given:
    """One value as somebody wrote it. where: file and line, variable, or flag."""

    value: Any
    source: Source
    where: str


@dataclass(slots=True, frozen=True)
class Loaded:
    """A valid configuration, with what was given for the keys that are not at their default."""

    config: Config
    given: Mapping[str, Given]
    file: Path | None


def load(
    file: Path | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, str]] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Loaded:
    """Read all layers. `flags`: key -> (flag, value) of the dedicated flags, e.g. --data-dir.

    A file that is named must exist; the default one need not. Raises ConfigError with
    every problem found, not only the first.
    """
    path, required = chosen_file(file, environment)
    problems: list[str] = []
    given: dict[str, Given] = {}
    text = _read(path, required)
    if text is not None:
        given.update(_from_file(path, text, problems))
    given.update(_from_environment(environment, problems))
    given.update(_from_sets(sets, problems))
    for key, (flag, value) in (flags or {}).items():
        given[key] = Given(value, "flag", flag)
    config = _validated(given, problems)
    return Loaded(config, given, path if text is not None else None)


def parse_one(key: str, text: str) -> Any:
    """The value of one known key, written as in `--set`. Raises ConfigError."""
    return value_of(_validated({key: Given(text, "set", "kvstore config set")}, [], alone=True), key)


def chosen_file(file: Path | None, environment: Mapping[str, str]) -> tuple[Path, bool]:
    """The file to read, and whether it must exist."""
    if file is not None:
        return file.absolute(), True
    if environment.get(ENV_FILE):
        return Path(environment[ENV_FILE]).absolute(), True
    return DEFAULT_FILE, False


def nearest(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" or the list of what there is: of its section, else of sections."""
    close = difflib.get_close_matches(name, known, 1, NEAREST_NAME_CUTOFF)
    if close:
        return f"did you mean {close[0]}?"
    point = "__" if name.startswith(ENV_PREFIX) else "."
    section = name.partition(point)[0] + point
    there = [one for one in known if one.startswith(section)]
    return f"known are {', '.join(sorted(there or {_head(one, point) for one in known}))}"


def _head(key: str, point: str) -> str:
    """A key at the top, or its section."""
    head, found, _ = key.partition(point)
    return f"{head}{found}…" if found else key


# -- file --


def _read(path: Path, required: bool) -> str | None:
    try:
        return read_text(path, CONFIG_FILE_BYTES_MAX)
    except Unreadable as error:
        if error.is_missing and not required:
            return None
        if error.is_missing:
            raise ConfigError([f"{path}: no such configuration file"], missing_file=True) from error
        raise ConfigError([printable(f"{path}: cannot read the configuration: {error.why}")]) from error


def _from_file(path: Path, text: str, problems: list[str]) -> dict[str, Given]:
    try:
        content = as_toml(path, text)
    except Unreadable as error:
        raise ConfigError([str(error)]) from error
    lines = key_lines(text)
    known, given = list(keys()), {}
    for key, value in _flat(content):
        where = f"{path}:{lines[key]}" if key in lines else str(path)
        if key in known:
            given[key] = Given(value, "file", where)
        elif key in sections():
            problems.append(f"{where}: {key} is a table: write [{key}]")
        else:
            problems.append(f"{where}: unknown key {key}: {nearest(key, known)}")
    return given


def _flat(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and (value or name in sections()):
            yield from ((f"{name}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield name, value


def key_lines(text: str) -> dict[str, int]:
    """The line on which each "section.key" is given, for plain `[section]` and `key =` lines."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            section = header.group(1) + "."
            found.setdefault(header.group(1), number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            found.setdefault(section + key.group(1), number)
    return found


# -- environment and flags --


def variable(key: str) -> str:
    """The environment variable of a key: dram.capacity_bytes -> KVSTORE_DRAM__CAPACITY_BYTES."""
    return ENV_PREFIX + key.upper().replace(".", "__")


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, Given]:
    by_variable = {variable(key): key for key in keys()}
    given = {}
    for name in sorted(environment):
        if name in by_variable:
            given[by_variable[name]] = Given(environment[name], "env", name)
        elif name.startswith(ENV_PREFIX) and name not in ENV_OTHERS and not ENV_KUBERNETES.fullmatch(name):
            problems.append(f"environment: unknown variable {name}: {nearest(name, list(by_variable))}")
    return given


def _from_sets(sets: Sequence[str], problems: list[str]) -> dict[str, Given]:
    known, given = list(keys()), {}
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            problems.append(
                f"--set {text}: allowed is KEY=VALUE, for example --set dram.capacity_bytes=64GiB"
            )
        elif key not in known:
            problems.append(f"--set {text}: unknown key {key}: {nearest(key, known)}")
        else:
            given[key] = Given(value.strip(), "flag", "--set")
    return given


# -- together --


def written(value: Any) -> str:
    """A value as it would stand in a TOML file (sizes stay plain numbers)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _shown(value: Any) -> str:
    """A wrong value as it would stand in a TOML file, as far as it fits a line."""
    try:
        text = written(value)
    except (RecursionError, ValueError):  # a deep table, a number of thousands of digits
        return "…"
    return text if len(text) <= CONFIG_SHOWN_CHARS_MAX else f"{text[:CONFIG_SHOWN_CHARS_MAX]}…"


def _validated(given: Mapping[str, Given], problems: list[str], alone: bool = False) -> Config:
    """alone: whether it fits other settings is for somebody else to say."""
    nested: dict[str, Any] = {}
    for key, entry in given.items():
        section, _, name = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = entry.value
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        problems.extend(_explained(error, given))
        raise ConfigError(problems) from error
    for key, message in () if alone else misfits(config):
        entry = given.get(key) or Given(value_of(config, key), "default", "default")
        problems.append(f"{entry.where}: {key} = {_shown(entry.value)}: {message}")
    if problems:
        raise ConfigError(problems)
    return config


# In place of those that only make sense to who knows pydantic.
_MESSAGES = {
    "string_pattern_mismatch": "allowed are letters, digits and . _ -",
    "string_too_short": "it may not be empty",
    "path_type": "allowed is text: an absolute path",
    "tuple_type": "allowed is a list",
}


def _explained(error: ValidationError, given: Mapping[str, Given]) -> list[str]:
    """One line per key: where it stands, its value, what is allowed."""
    said: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        key = _key_of(detail["loc"])
        entry = given.get(key)
        value = entry.value if entry is not None else detail["input"]
        message = str(detail.get("ctx", {}).get("error") or detail["msg"]).replace("Input should", "should")
        if detail["type"] in _MESSAGES:
            message = _MESSAGES[detail["type"]]
        if key not in said:
            said[key] = f"{entry.where if entry else 'default'}: {key} = {_shown(value)}: {message}"
    return list(said.values())


def _key_of(location: tuple[int | str, ...]) -> str:
    """The longest head of a pydantic location that is a key: it goes on into lists and unions."""
    parts = [str(part) for part in location]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in keys():
            return ".".join(parts[:length])
    return ".".join(parts)
